"""``advise``: a table of ways and a sentence on top, as a file too."""

from __future__ import annotations

import json
import re
import shlex

import msgspec
import pytest
from meshwright.cli.render.advice import (
    advice_sentence,
    gain_sentences,
    spoken,
    told_ways,
    ways_table,
    why_sentences,
)
from meshwright.planner.explain.advice import Advice, Way
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import CompressionRate, FidelityProfile
from meshwright.planner.schema.record import load, save

from tests.strategies import chain_profile, cluster, linear

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


def test_the_ways_it_tells_of_have_whole_commands(meshwright, tmp_path):
    profile = msgspec.structs.replace(lossy_profile(), origin="estimated")
    save(profile, tmp_path / "my profile.json")
    save(cluster(4, inter=2e6), tmp_path / "cluster.json")
    done = meshwright(
        "advise", "my profile.json", "--batch", 64, "--cluster", "cluster.json", "--optimizer",
        "sgd", "--micro-batches", "1,2", "--memory-limit", "1536MiB", "--solver", "heuristic",
        "--relative-speed", "n0=1.0", "-o", "ways.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "The units' times are estimated from what is known of the" in done.out
    found = load(Advice, tmp_path / "ways.json")
    commands = dict(re.findall("^(.*): meshwright (plan .*)$", done.out, re.MULTILINE))
    told = told_ways(found)
    assert [name.lower() for name in commands] == [spoken(way) for way in told]
    assert len(told) == 3
    for command in commands.values():
        assert "--memory-limit 1536MiB" in command
        made = meshwright(*shlex.split(command))
        assert made.code == 0, made.err
    # Each has left a file of its own.
    files = [tmp_path / shlex.split(command)[-1] for command in commands.values()]
    assert len(set(files)) == 3
    for way, path in zip(told, files, strict=True):
        assert load(Plan, path).prediction.step_s == pytest.approx(way.step_s)


def test_why_a_way_cannot_be_had_is_said_below_the_table():
    lacks = "rank 0 lacks memory at unit 'fc': it needs 1.45 GiB and 1.00 GiB are there"
    ways = [way("one host", why=lacks), way("one device", why=lacks), way("exact plan", step_s=1.0)]
    found = Advice(target="m", batch=8, ranks=2, compute_s=1.0, exchange_s=1.0, ways=tuple(ways))
    assert list(ways_table(found).columns[-1].cells)[:2] == ["(cannot be had)"] * 2
    assert why_sentences(found) == [f"Cannot be had (one host, one device): {lacks}."]


def test_rounding_is_told_of_where_it_is_about_as_good_as_a_larger_batch():
    """It has a command then, and changes less."""
    exact, batch = way("exact plan", gain=1.0), way("plan for twice the batch", "batch", gain=2.0)
    for gain, told in ((1.95, True), (1.8, False)):
        rounds = way("plan with bfloat16 gradients", "rounding", gain=gain)
        found = Advice(
            target="m", batch=8, ranks=2, compute_s=1.0, exchange_s=1.0,
            ways=(batch, rounds, exact),
        )  # fmt: skip
        assert told_ways(found) == [exact, *([rounds] if told else []), batch]
    # Where nothing has to change for that, nothing does.
    found = msgspec.structs.replace(found, ways=(batch, rounds, way("exact plan", gain=1.78)))
    assert rounds not in told_ways(found)


def way(name, changes="nothing", **known):
    if "step_s" in known:
        known["samples_per_s"] = 8 / known["step_s"]
    return Way(name=name, changes=changes, ranks=2, batch=8, **known)


def test_commands_leave_out_what_a_way_has_itself(meshwright, tmp_path):
    save(lossy_profile(), tmp_path / "profile.json")
    save(cluster(2, inter=1e8), tmp_path / "cluster.json")
    given = "--batch", 64, "--micro-batches", "1", "--solver", "heuristic"
    done = meshwright("advise", "profile.json", "-c", "cluster.json", *given)
    told = re.search("^The plan for twice the batch: (.*)$", done.out, re.MULTILINE)
    assert told is not None, done.out
    assert told[1].count("--batch") == told[1].count("--micro-batches") == 1
    assert "--batch 128 --micro-batches 1,2 " in told[1]


def lossy_profile():
    """Units whose gradients every exchange that loses something has been measured on."""
    kept = {
        "topk": (0.05, 0.97), "dropped": (0.5, 0.95), "low_rank": (0.02, 0.95),
        "int8": (1.0, 0.9999),
    }  # fmt: skip
    curves = tuple(
        FidelityProfile(exchange=exchange, ratios=(ratio,), kept=(share,))
        for exchange, (ratio, share) in kept.items()
    )
    units = [
        msgspec.structs.replace(
            linear(f"fc{i}", 512, 512, 1e-4), fidelity=curves, gradient_energy=1.0
        )
        for i in range(3)
    ]
    made = chain_profile(units, features=512, updates=(("sgd", 1e-12),))
    rates = (*kept, "bf16")
    return msgspec.structs.replace(
        made, compression=tuple(CompressionRate(exchange=r, seconds_per_byte=1e-10) for r in rates)
    )


def test_what_changes_the_training_is_told_wherever_a_plan_is_shown(meshwright, tmp_path):
    save(lossy_profile(), tmp_path / "profile.json")
    save(cluster(4, inter=2e6), tmp_path / "cluster.json")
    base = ("profile.json", "-c", "cluster.json", "--batch", 64, "--solver", "heuristic")
    allowed = ("--allow-lossy", "--min-fidelity", 0.9, "-o", "plan.json")
    made = meshwright("plan", *base, *allowed)
    explained = meshwright("explain", "plan.json", "--no-what-if")
    assert meshwright("report", "plan.json", "-o", "page.html").code == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for shown in (made.out, explained.out, page):
        assert "for later steps (" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("nodes", "devices", "bytes_per_s", "changes"),
    [
        (4, 1, 2e6, "waiting algorithm"),
        pytest.param(2, 2, 1e8, "rounding", marks=pytest.mark.slow),
    ],
)
def test_every_way_is_planned_as_its_line_says(
    meshwright, tmp_path, nodes, devices, bytes_per_s, changes
):
    profile, links = tmp_path / "profile.json", tmp_path / "cluster.json"
    save(lossy_profile(), profile)
    save(cluster(nodes, devices=devices, inter=bytes_per_s), links)
    base = (profile, "-c", links, "--solver", "heuristic", "--time-limit", 2)
    done = meshwright("advise", *base, "--batch", 64, "--json")
    assert done.code == 0, done.err
    ways = [way for way in json.loads(done.out)["ways"] if way["step_s"] is not None]
    planned = [way for way in ways if way["options"] is not None]
    assert {way["changes"] for way in planned} >= {"nothing", "batch", *changes.split()}
    for way in planned:
        batch = () if "--batch" in way["options"] else ("--batch", way["batch"])
        made = meshwright("plan", *base, *batch, *way["options"], "--json")
        assert made.code == 0, (way["options"], made.err)
        step_s = json.loads(made.out)["prediction"]["step_s"]
        assert step_s == pytest.approx(way["step_s"], rel=1e-6), way["options"]


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
    assert gain_sentences(found)[0].startswith(
        "Gains are over data parallelism as DDP does it on all 2"
    )
    assert gain_sentences(msgspec.structs.replace(found, ways=(plain,))) == []
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
