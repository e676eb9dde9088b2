"""Hosts of unequal speed on the command line: profiles of nodes, ratios, and what is said."""

from __future__ import annotations

import json

import msgspec
import pytest
from meshwright.cli.render.documents import local_batch_sentences
from meshwright.cli.values import speeds
from meshwright.planner.cost.device_kinds import slowed, with_relative_speeds
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import load, save

from .conftest import cluster_of, short_vgg

FAST_GBIT_S = 10_000.0
"""So that plain data parallelism is best, and what it computes decides."""


@pytest.fixture
def asked(meshwright, profile_file, tmp_path):
    """Plans for three hosts."""
    save(cluster_of(3, FAST_GBIT_S), tmp_path / "three.json")

    def plan(*more, profile=profile_file):
        return meshwright(
            "plan", profile, "-c", tmp_path / "three.json", "--batch", 60, "--schedule", "barrier",
            "--pin", "*=3x1", "-o", tmp_path / "plan.json", *more,
        )  # fmt: skip

    return plan


def test_a_profile_of_a_node_decides_its_share(asked, meshwright, tmp_path):
    save(slowed(short_vgg(), 2.0), tmp_path / "slow.json")
    done = asked("--profile-of", "host1=slow.json")
    assert done.code == 0, done.err
    plan = load(Plan, tmp_path / "plan.json")
    fast, slow, last = plan.local_batch_sizes
    assert fast + slow + last == 60
    assert fast > 1.5 * slow
    assert abs(fast - last) <= 1
    words = " ".join(done.out.split())
    assert "Devices are unequal, and so are their shares of the 60 samples: of each rank" in words
    assert f"{slow} on host1" in words
    # What it was made from is found again.
    explained = meshwright("explain", "plan.json", "--no-what-if")
    assert explained.code == 0, explained.err
    assert f"{slow} on host1" in " ".join(explained.out.split())
    page = meshwright("report", "plan.json", "--no-what-if")
    assert page.code == 0, page.err
    assert f"{slow} on host1" in (tmp_path / "report.html").read_text()
    even = asked()
    assert "Devices are unequal" not in even.out
    assert plan.prediction.step_s < 0.8 * plan.baseline.step_s  # which has even shares


def test_a_ratio_stands_for_a_profile(asked, meshwright, tmp_path):
    save(slowed(short_vgg(), 2.0), tmp_path / "slow.json")
    asked("--profile-of", "host1=slow.json")
    by_profile = load(Plan, tmp_path / "plan.json")
    done = asked("--relative-speed", "host1=0.5")
    assert done.code == 0, done.err
    by_ratio = load(Plan, tmp_path / "plan.json")
    assert by_ratio.local_batch_sizes == by_profile.local_batch_sizes
    assert by_ratio.prediction.step_s == pytest.approx(by_profile.prediction.step_s)
    compared = asked()
    assert compared.code == 0
    save(by_ratio, tmp_path / "uneven.json")
    both = meshwright("compare", "uneven.json", "plan.json")
    assert "samples in order of position" in both.out


def test_a_ratio_of_a_node_that_no_rank_is_on_is_told(meshwright, profile_file, tmp_path):
    save(cluster_of(3, FAST_GBIT_S), tmp_path / "three.json")

    def told(ratio, ranks):
        # The same from a cluster's file, which a description may have the speed in.
        by_file = with_relative_speeds(cluster_of(3, FAST_GBIT_S), speeds([ratio]))
        save(by_file, tmp_path / "unequal.json")
        common = ("--batch", 60, "--ranks", ranks, "--solver", "heuristic")
        filed = meshwright("plan", profile_file, "-c", tmp_path / "unequal.json", *common)
        given = ("-c", tmp_path / "three.json", *common, "--relative-speed", ratio)
        done = meshwright("plan", profile_file, *given)
        assert filed.err == done.err
        assert done.code == 0, done.err
        return [line for line in done.err.splitlines() if "does not count" in line]

    (said,) = told("host1=0.5", "2")
    assert said.startswith(
        "note: relative speed host1=0.5 does not count with 2 ranks, which are all"
    )
    assert "on nodes like 'host0'" in said
    assert len(told("host1=0.5", "2,3")) == 1
    assert told("host1=0.5", "3") == told("host0=2", "2") == []


def test_a_part_of_the_hosts_keeps_the_times_of_its_node(meshwright, profile_file, tmp_path):
    """As ``advise`` has its options where hosts were measured one by one."""
    save(cluster_of(3, FAST_GBIT_S), tmp_path / "three.json")
    save(slowed(short_vgg(), 2.0), tmp_path / "slow.json")
    base = ("-c", tmp_path / "three.json", "--batch", 60, "--ranks", 2, "--solver", "heuristic")
    slow = ("--profile-of", "host0=slow.json", "-o", "slow-plan.json")
    done = meshwright("plan", profile_file, *base, *slow)
    assert done.code == 0, done.err
    assert meshwright("plan", "slow.json", *base, "-o", "same.json").code == 0
    plans = [load(Plan, tmp_path / name) for name in ("slow-plan.json", "same.json")]
    assert plans[0].prediction.step_s == pytest.approx(plans[1].prediction.step_s)
    by_name = meshwright("plan", "mlp", *base, *slow)
    assert by_name.code == 2
    assert "give TARGET as the profile's file" in by_name.err
    several = meshwright("plan", profile_file, *base[:-4], "--ranks", "2,3", *slow)
    assert several.code == 2
    assert "several sizes" in several.err


def test_a_described_cluster_keeps_a_ratio(meshwright, tmp_path):
    done = meshwright(
        "cluster", "--device", "a100-sxm-40gb", "--nodes", 3, "--inter-gbit-s", 100,
        "--relative-speed", "node2=0.25", "-o", "cluster.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    speeds = [d.relative_speed for d in load(Cluster, tmp_path / "cluster.json").devices]
    assert speeds == [1.0, 1.0, 0.25]
    assert "0.25 times as fast" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--profile-of", "host7=profile.json"), "a profile of node 'host7', which cluster"),
        (("--relative-speed", "host7=0.5"), "a speed of node 'host7', which cluster"),
        (("--relative-speed", "host1"), "--relative-speed 'host1' is not NODE=VALUE"),
        (("--relative-speed", "host1=0"), "--relative-speed host1=0: 0 cannot be: give"),
        (("--relative-speed", "host1=half"), "'half' is not a number: give more than 0"),
        (
            ("--relative-speed", "host1=1,host2=2"),
            "give more than 0, and --relative-speed once for",
        ),
        (("--profile-of", "host1=none.json"), "cannot read none.json"),
        (("--profile-of", "host1=profile.json", "--ranks", "2,3"), "several sizes plan for others"),
    ],
)
def test_what_cannot_be_is_a_sentence(asked, tmp_path, options, sentence):
    done = asked(*options)
    assert done.code == 2
    assert sentence in done.sentence
    assert not (tmp_path / "plan.json").exists()


def test_a_profile_of_another_model_is_refused(asked, tmp_path):
    other = json.loads((tmp_path / "profile.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps({**other, "model": "f" * 16}))
    done = asked("--profile-of", "host1=other.json")
    assert done.code == 2
    assert "measure the same model on both" in done.sentence
    twice = asked("--profile-of", "host1=other.json", "--profile-of", "host1=profile.json")
    assert "--profile-of is given twice for 'host1'" in twice.sentence


def test_a_profile_with_times_of_nodes_says_so(meshwright, tmp_path):
    from meshwright.cli.render.documents import speed_sentences
    from meshwright.planner.cost.device_kinds import with_profiles

    profile = short_vgg()
    joined = with_profiles(profile, {"host1": slowed(profile, 0.5)}, cluster_of(2))
    (sentence,) = speed_sentences(joined)
    assert sentence.startswith(f"On host1 ({profile.device}) a step")
    save(joined, tmp_path / "joined.json")
    assert load(ModelProfile, tmp_path / "joined.json") == joined


def test_nodes_with_the_same_share_are_named_where_others_lie_between(plan):
    sizes = (36, 20, 36, 36, 32, 32, 32, 32)
    (words,) = local_batch_sentences(
        msgspec.structs.replace(plan, local_batch_sizes=sizes), cluster_of(8)
    )
    assert "36 on host0, host2, host3; 20 on host1; 32 on host4 … host7 (4)." in words
