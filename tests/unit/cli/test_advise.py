"""``advise``: a table of ways and a sentence on top, as a file too."""

from __future__ import annotations

import json

import msgspec
import pytest
from meshwright.cli.render.advice import advice_sentence
from meshwright.planner.explain.advice import Advice, Way
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save

from .conftest import cluster_of


def test_the_ways_are_a_table_a_sentence_and_a_file(
    meshwright, profile_file, cluster_file, tmp_path
):
    base = (profile_file, "-c", cluster_file, "--batch", 256)
    path = tmp_path / "advice.json"
    done = meshwright("advise", *base, "-o", path)
    assert done.code == 0, done.err
    words = " ".join(done.out.split())
    assert "Your network binds: a step of data parallelism would communicate" in words
    assert "times as fast as data parallelism and changes nothing" in words
    assert "rounding of gradients" in words
    found = json.loads(path.read_text())
    names = [way["name"] for way in found["ways"]]
    assert "data parallel (DDP)" in names
    rounded = next(way for way in found["ways"] if way["changes"] == "rounding")
    plan = tmp_path / "plan.json"
    assert meshwright("plan", *base, *rounded["options"], "-o", plan).code == 0
    assert load(Plan, plan).prediction.step_s == rounded["step_s"]


@pytest.mark.slow
def test_a_fast_network_is_not_what_binds(meshwright, profile_file, tmp_path):
    fast = tmp_path / "fast.json"
    save(cluster_of(2, gbit_s=10_000), fast)
    done = meshwright("advise", profile_file, "-c", fast, "--batch", 4096, "--json")
    assert done.code == 3, done.err  # so large a batch fits nowhere
    assert json.loads(done.out)["ways"][0]["ranks"] == 2
    words = " ".join(meshwright("advise", profile_file, "-c", fast, "--batch", 4096).out.split())
    assert "Computing binds" in words
    assert "No way fits that changes nothing: " in words


def test_data_parallelism_is_not_compared_with_itself():
    plain = Way(
        name="data parallel (DDP)", changes="nothing", ranks=2, batch=8, step_s=1.0,
        samples_per_s=8.0, gain=1.0,
    )  # fmt: skip
    alone = msgspec.structs.replace(plain, name="one device", ranks=1, gain=0.5)
    found = Advice(target="x", batch=8, ranks=2, compute_s=1.0, exchange_s=0.1, ways=(plain, alone))
    assert advice_sentence(found).endswith(
        "Data parallelism as DDP does it is the quickest way that changes nothing."
    )
    found = msgspec.structs.replace(found, ways=(alone,))
    assert "One device by itself is 0.50 times as fast as data" in advice_sentence(found)


def test_what_waits_is_said_in_words():
    way = Way(
        name="plan with gradients in part", changes="waiting", ranks=2, batch=8, step_s=0.5,
        samples_per_s=16.0, gain=2.0,
    )  # fmt: skip
    exact = msgspec.structs.replace(way, name="exact plan", changes="nothing", gain=1.5)
    found = Advice(target="x", batch=8, ranks=2, compute_s=1.0, exchange_s=2.0, ways=(way, exact))
    assert advice_sentence(found).endswith(
        "The exact plan is 1.50 times as fast as data parallelism and changes nothing, "
        "the plan with gradients in part is 2.00 times as fast and changes which gradients wait."
    )


def test_nodes_of_other_speed_are_named_as_for_a_plan(meshwright, profile_file, cluster_file):
    asked = "advise", profile_file, "-c", cluster_file, "--batch", 64
    node = "node9"
    for given in (("--relative-speed", f"{node}=0.5"), ("--profile-of", f"{node}={profile_file}")):
        done = meshwright(*asked, *given)
        assert done.code == 2
        assert node in done.sentence
