"""The verb ``multiplex`` as users call it."""

import json
from importlib.util import find_spec

import pytest
from meshwright.planner.schema.record import save

from tests.unit.cli.conftest import cluster_of


@pytest.fixture
def burst_file(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "burst.json"
    done = meshwright(
        "plan", profile_file, "-c", cluster_file, "--batch", 64, "--bursts",
        "--objective", "gpu-seconds", "--forbid", "column", "--forbid", "row",
        "--time-limit", 5, "-o", path,
    )  # fmt: skip
    assert done.code == 0, done.err
    return path


def test_a_burst_and_a_background(meshwright, burst_file, profile_file, tmp_path):
    trace = tmp_path / "t.json"
    done = meshwright(
        "multiplex", burst_file, "--background", profile_file, "--trace", trace, "--json"
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["devices"] == 8
    assert found["backgrounds"][0]["share"] > 0.1
    assert found["ratio"] > found["bounded_ratio"] - 1
    total = sum(
        (c["foreground_s"] + c["background_s"] + c["idle_s"]) * len(c["devices"])
        for c in found["classes"]
    )
    assert total == pytest.approx(8 * found["horizon_s"])
    assert len(json.loads(trace.read_text())["traceEvents"]) > 50
    shown = meshwright("multiplex", burst_file, "--background", profile_file)
    words = " ".join(shown.out.split())
    share = sum(b["share"] * b["devices"] for b in found["backgrounds"]) / 8
    assert f"{found['ratio']:.2f} times that of plain data parallelism on the devices" in words
    assert f"runs at {found['bounded_ratio'] - share:.2f} times the speed of plain data" in words
    assert f"what {share:.0%} of the 8 devices would give it alone" in words
    assert f"the sum is {found['bounded_ratio']:.2f}." in words
    alone = meshwright("multiplex", burst_file)
    assert "In device equivalents" not in alone.out


def test_two_plans_share_a_larger_cluster(meshwright, plan_file, burst_file):
    done = meshwright("multiplex", plan_file, burst_file, "--devices", 20, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert [f["devices"] for f in found["foregrounds"]] == [8, 8]
    assert sum(len(c["devices"]) for c in found["classes"]) == 20


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_map_is_drawn(meshwright, burst_file, profile_file, tmp_path):
    path = tmp_path / "map.png"
    done = meshwright("multiplex", burst_file, "--background", profile_file, "--plot", path)
    assert done.code == 0, done.err
    assert path.read_bytes().startswith(b"\x89PNG")


WRONG = (
    (("--devices", "3"), "for 8 devices and the cluster has 3"),
    (("--slowdown", "0.5"), "--slowdown 0.5 cannot be: give 1 or more"),
    (("--speed", "1.5"), "--speed 1.5 cannot be: give 0 to 1"),
    (("--piece", "0"), "write it like"),
    (("--horizon", "100000s"), "ask for at most"),
    (("--trace", "nowhere/t.json"), "there is no folder"),
)


def test_what_cannot_be_is_one_sentence(meshwright, plan_file, profile_file, tmp_path):
    for options, sentence in WRONG:
        done = meshwright("multiplex", plan_file, *options)
        assert done.code == 2
        assert sentence in done.sentence
    done = meshwright("multiplex", plan_file, plan_file, "--profile", profile_file)
    assert done.code == 2
    assert "1 profiles for 2 plans" in done.sentence
    other = tmp_path / "other.json"
    save(cluster_of(4), other)
    done = meshwright("multiplex", plan_file, "--cluster", other)
    assert done.code == 2
    assert "8 ranks and cluster '4 hosts' has 4" in done.sentence
