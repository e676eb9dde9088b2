"""``plan``, ``explain`` and ``compare`` on files, without a model or a GPU at hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from meshwright.planner.noun import encode, load, save
from meshwright.planner.plan import Plan

from .conftest import cluster_of


def test_plan_prints_decisions_and_gain(meshwright, profile_file, cluster_file):
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256)
    assert done.code == 0
    assert "32.linear" in done.out
    assert "(1,8)" in done.out
    assert "times as fast as plain data parallelism" in done.out


def test_the_gain_printed_is_the_plans(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "p.json"
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", path)
    made = load(Plan, path)
    assert made.speedup > 2
    assert f"{made.speedup:.2f} times as fast" in done.out


def test_runs_of_equal_decisions_are_folded(meshwright, profile_file, cluster_file):
    arguments = ("plan", profile_file, "-c", cluster_file, "--batch", 256)
    folded, whole = meshwright(*arguments), meshwright(*arguments, "--all-units")
    assert "12.conv2d" not in folded.out
    assert "12.conv2d" in whole.out


def test_json_is_alone_on_stdout_and_is_the_file(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "p.json"
    done = meshwright(
        "plan", profile_file, "-c", cluster_file, "--batch", 250, "--json", "-o", path
    )
    assert json.loads(done.out)["document"] == "Plan"
    assert done.out.encode() == path.read_bytes()


def test_a_batch_that_does_not_divide_is_allowed_and_said(meshwright, profile_file, cluster_file):
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 250)
    assert done.code == 0
    assert "2 of them take 32 samples and the others 31" in done.err


def test_a_limit_below_data_parallelism_gives_a_plan_that_fits(
    meshwright, profile_file, cluster_file, tmp_path
):
    path = tmp_path / "p.json"
    limit = 3 * 10**9
    done = meshwright(
        *("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", path),
        *("--memory-limit", "3GB"),
    )
    assert done.code == 0
    made = load(Plan, path)
    assert max(made.baseline.peak_bytes) > limit >= max(made.prediction.peak_bytes)
    assert "which does not fit in memory" in done.out


def test_explain_finds_what_the_plan_was_made_from(meshwright, plan_file):
    done = meshwright("explain", plan_file)
    assert done.code == 0
    assert "32.linear" in done.out
    assert "The largest part of the step" in done.out


def test_explain_json_names_alternatives(meshwright, plan_file):
    done = meshwright("explain", plan_file, "--json")
    units = {u["name"]: u for u in json.loads(done.out)["units"]}
    assert units["32.linear"]["alternatives"]


def test_explain_takes_the_files_where_nothing_is_remembered(
    meshwright, plan_file, profile_file, cluster_file, monkeypatch, tmp_path
):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "empty"))
    assert "--profile" in meshwright("explain", plan_file).sentence
    done = meshwright("explain", plan_file, "--profile", profile_file, "--cluster", cluster_file)
    assert done.code == 0


def test_compare_names_units_decided_differently(meshwright, plan_file, profile_file, tmp_path):
    fast, other = tmp_path / "fast.json", tmp_path / "other.json"
    save(cluster_of(8, gbit_s=400), fast)
    meshwright("plan", profile_file, "-c", fast, "--batch", 256, "-o", other)
    done = meshwright("compare", plan_file, other)
    assert done.code == 0
    different = [
        a.name
        for a, b in zip(load(Plan, plan_file).units, load(Plan, other).units, strict=True)
        if a.layout != b.layout or a.style != b.style
    ]
    assert different
    assert all(name in done.out for name in different)


def test_compare_json(meshwright, plan_file):
    found = json.loads(meshwright("compare", plan_file, plan_file, "--json").out)
    assert found["same_model"]
    assert found["units"] == []


@pytest.mark.parametrize(
    "verb",
    ["profile", "probe", "cluster", "plan", "explain", "compare", "verify", "launch", "demo"],
)
def test_every_verb_has_help_and_json(meshwright, verb):
    done = meshwright(verb, "--help")
    assert done.code == 0
    assert "--json" in done.out


def test_planning_from_files_never_loads_torch(profile_file, cluster_file, tmp_path):
    code = (
        "import sys; from meshwright.cli import run; code = run(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    arguments = ["plan", str(profile_file), "-c", str(cluster_file), "--batch", "256"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", "MESHWRIGHT_CACHE": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_round_trip_of_the_printed_plan(meshwright, plan_file, plan):
    assert encode(plan) == plan_file.read_bytes()
