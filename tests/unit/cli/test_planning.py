"""``plan``, ``explain`` and ``compare`` on files, without a model or a GPU at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import msgspec
import pytest
from meshwright import __version__
from meshwright.cli.plan import _over_limit
from meshwright.cli.render.comparisons import SETTINGS, front_table, sizes_table
from meshwright.cli.render.documents import fewer_sentence, gain, verdict
from meshwright.cli.render.explanations import _gains
from meshwright.planner.explain.front import Front, FrontPoint
from meshwright.planner.explain.what_if import FewerDevices, Gain, Size, Sizes
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import FidelityProfile, ModelProfile
from meshwright.planner.schema.record import encode, load, save
from meshwright.planner.schema.text import seconds

from .conftest import cluster_of


def test_plan_prints_decisions_and_gain(meshwright, profile_file, cluster_file):
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256)
    assert done.code == 0
    assert "32.linear" in done.out
    assert "(1,8)" in done.out
    assert "times as fast as plain data parallelism" in done.out


def test_a_plan_says_what_its_times_are_based_on(meshwright, profile_file, cluster_file, tmp_path):
    def told(**changes):
        path = tmp_path / "other.json"
        save(msgspec.structs.replace(load(ModelProfile, profile_file), **changes), path)
        done = meshwright("plan", path, "-c", cluster_file, "--batch", 4096, "--optimizer", "adamw")
        assert done.code == 0
        return " ".join(done.out.split())

    measured = told(origin="measured", batches=(8, 16))
    assert "Predicted for one step of 4096 samples and adamw" in measured
    assert "were measured up to batches of 16 and are extrapolated to " in measured
    assert "and plan from that profile (its file as TARGET)." in measured
    assert "extrapolated" not in told(origin="measured", batches=(8, 4096))
    estimated = told(origin="estimated")
    assert "times are estimated from what is known of the " in estimated
    assert "extrapolated" not in estimated
    assert "published table, not measured" in told(origin="table")


def test_the_gain_printed_is_the_plans(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "p.json"
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", path)
    made = load(Plan, path)
    assert made.speedup > 2
    assert f"{made.speedup:.2f} times as fast" in done.out


def test_what_ddp_would_take_is_told_beside_a_plan_by_priority(meshwright, profile_file, tmp_path):
    """Data parallelism beside such a plan goes by priority too, as ``advise``'s does not."""
    links = tmp_path / "links.json"
    save(cluster_of(2, gbit_s=100.0), links)
    base = ("plan", profile_file, "-c", links, "--batch", 256)
    told = "As DistributedDataParallel sends gradients a step would take 58.47 ms, 1.23 times this"
    done = meshwright(*base, "--schedule", "priority", "--slices", "4MiB")
    assert told in " ".join(done.out.split())
    done = meshwright(*base, "--schedule", "barrier")
    assert done.code == 0
    assert "DistributedDataParallel" not in done.out
    done = meshwright("advise", profile_file, "-c", links, "--batch", 256)
    (ddp,) = (line for line in done.out.splitlines() if "data parallel (DDP)" in line)
    assert "58.47 ms" in ddp


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
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 9)
    assert "1 of them takes 2 samples and the others 1 sample, and" in done.err


@pytest.mark.slow
def test_a_limit_below_data_parallelism_gives_a_plan_that_fits(
    meshwright, vgg_file, cluster_file, tmp_path
):
    path = tmp_path / "p.json"
    limit = 3 * 10**9
    done = meshwright(
        *("plan", vgg_file, "-c", cluster_file, "--batch", 256, "-o", path),
        *("--memory-limit", "3GB"),
    )
    assert done.code == 0
    made = load(Plan, path)
    assert max(made.baseline.peak_bytes) > limit >= max(made.prediction.peak_bytes)
    words = " ".join(done.out.split())
    assert "Plain data parallelism does not fit in memory (it needs " in words
    assert "; this plan does, and is predicted to " in words


def test_status_bound_and_gap_are_printed(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "p.json"
    arguments = ("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", path)
    words = " ".join(meshwright(*arguments).out.split())
    assert load(Plan, path).provenance.status == "optimal"
    assert "proved best by the integer solver" in words
    assert "no step by the formula is below" in words
    assert "gap 0" in words
    words = " ".join(meshwright(*arguments, "--solver", "heuristic").out.split())
    assert "found by the heuristic solver, not proved best" in words
    assert "below" not in words


def test_what_a_plan_that_fits_costs_is_said_the_right_way_round(plan):
    slow = msgspec.structs.replace(plan.prediction, step_s=2 * plan.baseline.step_s)
    tight = msgspec.structs.replace(plan, baseline_fits=False)
    assert "is predicted to be " in gain(tight)
    assert "times as fast as that would be" in gain(tight)
    slower = msgspec.structs.replace(tight, prediction=slow)
    assert "is predicted to take 2.00 times as long as that would" in gain(slower)
    assert gain(msgspec.structs.replace(slower, baseline_fits=True)) == (
        "Predicted to be 0.50 times as fast as plain data parallelism"
    )


def test_a_proof_says_which_figure_it_is_of(plan):
    proof = msgspec.structs.replace(plan.provenance, bound_s=0.8, gap=0.2)
    near = msgspec.structs.replace(plan.prediction, step_s=1.001)
    far = msgspec.structs.replace(plan.prediction, step_s=1.15)
    made = msgspec.structs.replace(plan, provenance=proof, prediction=near)
    assert "The proof is about" not in verdict(made)
    text = verdict(msgspec.structs.replace(made, prediction=far))
    assert "by which this plan takes 1.00 s; the predicted 1.15 s are simulated" in text


def test_the_version_is_the_packages(meshwright):
    done = meshwright("--version")
    assert (done.code, done.out) == (0, f"meshwright {__version__}\n")


def test_columns_are_explained(meshwright, profile_file, cluster_file):
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256)
    assert "comm.: waiting for inputs" in " ".join(done.out.split())


@pytest.mark.parametrize("solver", ["heuristic", "integer", "lagrangian"])
def test_pins_hold_whoever_searches(meshwright, profile_file, cluster_file, tmp_path, solver):
    path = tmp_path / "p.json"
    done = meshwright(
        *("plan", profile_file, "-c", cluster_file, "--batch", 256, "--solver", solver),
        *("--pin", "3*.linear=2x4", "--forbid", "34.linear=column", "--forbid", "4x2", "-o", path),
    )
    assert done.code == 0, done.err
    made = load(Plan, path)
    linear = [u for u in made.units if u.kind == "linear"]
    assert [str(u.layout) for u in linear] == ["(2,4)"] * 3
    assert made.unit("34.linear").style == "row"
    assert all(str(u.layout) != "(4,2)" for u in made.units)


@pytest.mark.slow
def test_device_seconds_within_a_step_limit(meshwright, vgg_file, tmp_path):
    links = tmp_path / "fast.json"
    save(cluster_of(8, gbit_s=100), links)
    base = ("plan", vgg_file, "-c", links, "--batch", 64, "--bursts", "--slices", "4MiB")
    base = (*base, "--solver", "lagrangian", "--time-limit", 10)
    fast, cheap, between = (tmp_path / f"{name}.json" for name in ("fast_plan", "cheap", "between"))
    assert meshwright(*base, "-o", fast).code == 0
    assert meshwright(*base, "--objective", "gpu-seconds", "-o", cheap).code == 0
    quick, economical = load(Plan, fast).prediction, load(Plan, cheap).prediction
    assert economical.gpu_seconds < quick.gpu_seconds
    assert economical.step_s > quick.step_s
    limit = (quick.step_s + economical.step_s) / 2
    done = meshwright(
        *(*base, "--objective", "gpu-seconds", "--step-limit", f"{limit * 1e3}ms", "-o", between)
    )
    assert done.code == 0, done.err
    assert "no device time by the formula is below" in " ".join(done.out.split())
    found = load(Plan, between).prediction
    assert found.step_s <= limit * 1.001
    assert economical.gpu_seconds <= found.gpu_seconds * 1.01
    assert found.gpu_seconds < quick.gpu_seconds
    amplified = meshwright(*base, "--amplification-limit", 1.3, "-o", between)
    assert amplified.code == 0, amplified.err
    limited = load(Plan, between)
    assert limited.goal.amplification_limit == 1.3
    assert limited.prediction.gpu_seconds < quick.gpu_seconds


@pytest.mark.slow
def test_a_plan_uses_what_memory_asks_for(meshwright, vgg_file, cluster_file, tmp_path):
    path = tmp_path / "p.json"
    base = ("plan", vgg_file, "-c", cluster_file, "--batch", 256, "--memory-limit", "2300MB")
    base = (*base, "--schedule", "priority", "--slices", "4MiB", "--solver", "lagrangian")
    assert meshwright(*base, "--forbid", "recompute", "--forbid", "sharded").code == 3
    base = (*base, "-o", path)
    done = meshwright(*base, "--time-limit", 10)
    assert done.code == 0, done.err
    made = load(Plan, path)
    assert made.schedule == "priority"
    assert any(u.memory == "recompute" for u in made.units)
    assert not made.hypothetical
    words = " ".join(done.out.split())
    assert "recompute" in words
    without = meshwright(*base, "--forbid", "recompute", "--time-limit", 10)
    if without.code == 0:
        assert all(u.memory == "keep" for u in load(Plan, path).units)
    else:
        assert without.code == 3


@pytest.mark.slow
def test_sizes_are_a_table_and_its_json(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "sizes.json"
    base = ("plan", profile_file, "-c", cluster_file, "--batch", 256, "--ranks", "4,8,16")
    done = meshwright(*base, "-o", path)
    assert done.code == 0, done.err
    assert "whole nodes like 'host0'" in " ".join(done.out.split())
    found = json.loads(path.read_text())
    assert [row["ranks"] for row in found["rows"]] == [4, 8, 16]
    assert all(row["fits"] and row["speedup"] >= 1 for row in found["rows"])
    assert json.loads(meshwright(*base, "--json").out)["how"] == found["how"]
    eight = tmp_path / "p.json"
    meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", eight)
    assert found["rows"][1]["step_s"] == load(Plan, eight).prediction.step_s


def test_one_size_is_planned(meshwright, profile_file, cluster_file, tmp_path):
    path = tmp_path / "two.json"
    base = ("plan", profile_file, "-c", cluster_file, "--batch", 256, "--solver", "heuristic")
    assert meshwright(*base, "--ranks", 2, "-o", path).code == 0
    assert load(Plan, path).world_size == 2


@pytest.mark.slow
def test_sizes_that_do_not_fit_say_so(meshwright, vgg_file, cluster_file):
    base = ("plan", vgg_file, "-c", cluster_file, "--batch", 256, "--memory-limit", "1GB")
    done = meshwright(*base, "--ranks", "8,64", "--json")
    rows = json.loads(done.out)["rows"]
    assert [row["fits"] for row in rows] == [False, True]
    assert "are available" in rows[0]["why"]


def test_no_size_that_fits_is_no_success(meshwright, profile_file, cluster_file):
    base = ("plan", profile_file, "-c", cluster_file, "--batch", 256, "--memory-limit", "1kB")
    done = meshwright(*base, "--solver", "heuristic", "--ranks", "2,4", "--allow-lossy")
    assert done.code == 3
    assert "are available" in " ".join(done.out.split())
    assert "--allow-lossy: rows may be of plans that change the training" in done.err


@pytest.mark.slow
def test_the_front_falls(meshwright, vgg_file, tmp_path):
    links = tmp_path / "fast.json"
    save(cluster_of(8, gbit_s=100), links)
    base = ("plan", vgg_file, "-c", links, "--batch", 64, "--front", "--solver", "lagrangian")
    done = meshwright(*base, "--bursts", "--slices", "4MiB", "--time-limit", 3, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    points = found["points"]
    assert len(points) > 2
    for fast, cheap in pairwise(points):
        assert fast["step_s"] < cheap["step_s"]
        assert fast["gpu_seconds"] > cheap["gpu_seconds"]
    for point in points:
        assert point["amplification"] == pytest.approx(
            point["gpu_seconds"] / found["single_device_s"]
        )
    plain = meshwright(*base)
    assert "--bursts" in plain.err


def test_explain_says_what_binds_and_what_more_would_buy(meshwright, plan_file):
    done = meshwright("explain", plan_file)
    words = " ".join(done.out.split())
    assert "one more Gbit/s on inter links" in words
    assert "16 devices for 8" in words
    assert "4 devices for 8" in words
    assert "planned again" in words
    assert "duals" not in words
    assert "ends with the gradients of the units up to" in words
    assert "No limit keeps a better choice for a single unit out" in words
    assert "planned again" not in meshwright("explain", plan_file, "--no-what-if").out


@pytest.mark.slow
def test_explain_says_why_nothing_is_known_of_more_devices(meshwright, profile_file, tmp_path):
    device = Device(name="a100", memory_bytes=40 * 2**30)
    level = Level(name="intra", latency_s=5e-6, bytes_per_s=1e9)
    one = Cluster(name="here", nodes=(Node(name="host", devices=(device,) * 2),), levels=(level,))
    here, made = tmp_path / "here.json", tmp_path / "p.json"
    save(one, here)
    base = ("plan", profile_file, "-c", here, "--batch", 64, "--solver", "heuristic", "-o", made)
    assert meshwright(*base).code == 0
    words = " ".join(meshwright("explain", made).out.split())
    assert "4 devices for 2" in words
    assert "not known" in words
    assert "no links between nodes" in words


def test_explain_finds_what_the_plan_was_made_from(meshwright, plan_file):
    done = meshwright("explain", plan_file, "--no-what-if")
    assert done.code == 0
    assert "32.linear" in done.out
    assert "The largest part of the step" in done.out


def test_explain_json_names_alternatives(meshwright, plan_file):
    done = meshwright("explain", plan_file, "--no-what-if", "--json")
    units = {u["name"]: u for u in json.loads(done.out)["units"]}
    assert units["32.linear"]["alternatives"]


def test_explain_takes_the_files_where_nothing_is_remembered(
    meshwright, plan_file, profile_file, cluster_file, monkeypatch, tmp_path
):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "empty"))
    assert "--profile" in meshwright("explain", plan_file).sentence
    files = ("--profile", profile_file, "--cluster", cluster_file)
    assert meshwright("explain", plan_file, "--no-what-if", *files).code == 0


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


def test_compare_names_settings_as_people_do(meshwright, plan_file, profile_file, tmp_path):
    tight, other = tmp_path / "tight.json", tmp_path / "other.json"
    save(cluster_of(8), tight)
    options = ("--memory-limit", "3GiB", "--micro-batches", "1,2", "--forbid", "34.linear=column")
    done = meshwright("plan", profile_file, "-c", tight, "--batch", 512, *options, "-o", other)
    assert done.code == 0, done.err
    words = " ".join(meshwright("compare", plan_file, other).out.split())
    assert "global batch 256 512" in words
    assert "memory limit of a rank the device's own 3.00 GiB" in words
    assert "micro-batches allowed 1 1, 2" in words
    assert "pins none 34.linear not column" in words
    for raw in ("goal.", "memory_limit_bytes", "None", "Pin(", "world_size"):
        assert raw not in words


def test_every_setting_of_a_goal_has_a_name_for_people():
    assert {f"goal.{name}" for name in Goal.__struct_fields__} <= set(SETTINGS)


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
        "import sys; from meshwright.cli.app import run; code = run(sys.argv[1:]); "
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


@pytest.mark.slow
def test_a_lossy_exchange_is_planned_where_fidelity_was_measured(
    meshwright, profile_file, tmp_path
):
    """The linear layers of VGG-16, whose gradients would be exposed."""
    made = load(ModelProfile, profile_file)
    curve = FidelityProfile(exchange="topk", ratios=(0.01,), kept=(0.95,))
    units = tuple(
        msgspec.structs.replace(u, fidelity=(curve,)) if u.kind == "linear" else u
        for u in made.units
    )
    save(msgspec.structs.replace(made, units=units), profile_file)
    links, path = tmp_path / "slow.json", tmp_path / "p.json"
    save(cluster_of(2), links)
    base = ("plan", profile_file, "-c", links, "--batch", 64, "--hypothetical", "-o", path)
    base = (*base, "--slices", "4MiB", "--pin", "*=2x1", "--allow-lossy")
    done = meshwright(*base, "--min-fidelity", 0.9)
    assert done.code == 0, done.err
    assert any(u.exchange == "topk" for u in load(Plan, path).units)
    assert "topk 0.01" in " ".join(done.out.split())
    done = meshwright(*base, "--min-fidelity", 0.999)
    assert done.code == 0, done.err
    assert all(u.exchange != "topk" for u in load(Plan, path).units)
    # Rounded ones keep more than that, and are all that is allowed without a share.
    assert any(u.wire == "bf16" for u in load(Plan, path).units)
    assert "bf16" in " ".join(done.out.split())
    assert meshwright(*base).code == 0
    assert any(u.wire == "bf16" for u in load(Plan, path).units)
    done = meshwright(*base, "--min-fidelity", 0.999, "--forbid", "bf16")
    assert "no unit rounds its gradient or sends it in part" in done.err
    assert "--forbid bf16 rules that out" in " ".join(done.err.split())
    done = meshwright(*base, "--min-fidelity", 0.9, "--forbid", "topk")
    assert all(u.exchange != "topk" for u in load(Plan, path).units)


@pytest.mark.slow
def test_one_device_that_is_quicker_is_said(meshwright, profile_file, cluster_file, tmp_path):
    base = ("plan", profile_file, "--batch", 256, "-c")
    words = " ".join(meshwright(*base, cluster_file).out.split())
    front = " ".join(meshwright(*base, cluster_file, "--front").out.split())
    alone = front.partition("One device would take ")[2].partition(" for the whole")[0]
    assert f"One device by itself would take {alone} for the whole batch" in words
    assert "--ranks 1,8 compares" in words
    fast = tmp_path / "fast.json"
    save(cluster_of(8, gbit_s=100), fast)
    assert "by itself" not in meshwright(*base, fast).out
    small = (*base, cluster_file, "--memory-limit", "4GiB")
    assert "by itself" not in meshwright(*small).out


def test_a_proof_says_within_what(meshwright, profile_file, cluster_file):
    base = ("plan", profile_file, "-c", cluster_file, "--batch", 256)
    words = " ".join(meshwright(*base, "--pin", "34.linear=1x8").out.split())
    assert "proved best by the integer solver under the pins and the schedule by " in words


@pytest.mark.slow
def test_a_plan_that_fills_its_gpus_is_said_to(meshwright, profile_file, tmp_path):
    def said(memory_bytes, *more):
        path = tmp_path / "small.json"
        save(cluster_of(8, memory_bytes=memory_bytes), path)
        done = meshwright("plan", profile_file, "-c", path, "--batch", 256, *more)
        assert done.code == 0, done.err
        return " ".join(done.out.split())

    plain = tmp_path / "p.json"
    said(40 * 2**30, "-o", plain)
    peak = max(load(Plan, plain).prediction.peak_bytes)
    full = said(int(peak * 1.02))
    assert "Memory is filled to 98%" in full
    assert "GiB leaves room" in full
    assert "is filled" not in said(int(peak * 1.2))
    assert "is filled" not in said(40 * 2**30, "--memory-limit", f"{int(peak * 1.02)}")
    beyond = said(int(peak * 0.9), "--memory-limit", "8GiB", "--forbid", "recompute")
    assert "The limit of 8.00 GiB lets a rank need" in beyond
    assert "the plan is for devices with more memory." in beyond


def test_a_plan_is_kept_whatever_fails_when_it_is_shown(
    meshwright, monkeypatch, profile_file, cluster_file, tmp_path
):
    def failing(*arguments, **more):
        raise ZeroDivisionError

    monkeypatch.setattr("meshwright.cli.plan.decision_table", failing)
    path = tmp_path / "plan.json"
    with pytest.raises(ZeroDivisionError):
        meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", path)
    assert load(Plan, path).goal.batch == 256


def test_a_limit_that_simulated_steps_break_counts_the_background_job(plan):
    step_s = plan.prediction.step_s

    def told(limit_s, **goal):
        asked = msgspec.structs.replace(plan.goal, time_limit_s=limit_s, **goal)
        return _over_limit(msgspec.structs.replace(plan, goal=asked))

    assert told(None) is None
    assert told(step_s) is None
    words = told(0.8 * step_s)
    assert f"simulated the step takes {seconds(step_s)}:" in words
    assert words.endswith(f"such as --step-limit {0.64 * step_s:.3g}s")
    job = {"background": True, "background_limit": 1.5}
    assert told(1.5 * step_s, **job) is None
    words = told(1.2 * step_s, **job)
    assert f"takes up to {seconds(1.5 * step_s)} with the background job:" in words
    assert words.endswith(f"such as --step-limit {0.96 * step_s:.3g}s")


def test_fewer_devices_are_not_compared_by_pins_of_all(plan):
    fewer = FewerDevices(1, 0.1)
    assert fewer_sentence(plan, fewer).endswith("its memory: --ranks 1,8 compares sizes.")
    goal = msgspec.structs.replace(plan.goal, pins=(Pin(unit="0", only=(Layout(groups=8),)),))
    pinned = msgspec.structs.replace(plan, goal=goal)
    assert fewer_sentence(pinned, fewer).endswith("fits in its memory.")


def test_no_plan_is_known_to_be_none_though_there_is_a_reason():
    """Other than a question that could not be asked."""
    asked = Gain(change="8 devices for 4", before_s=1.0, after_s=None, reason="its pins")
    unasked = Gain(change="8 devices for 4", before_s=1.0, after_s=None, method="", reason="no")
    then = list(_gains((asked, unasked), "step", "known").columns[2].cells)
    assert then == ["no plan found", "not known"]


def test_what_fewer_devices_cost_is_said():
    less = Gain(change="4 devices for 8", before_s=1.0, after_s=1.5)
    same = Gain(change="4 devices for 8", before_s=1.0, after_s=1.005)
    shown = list(_gains((less, same), "step", "known").columns[3].cells)
    assert shown == ["costs 50.0%", "nothing"]


def test_less_than_a_sample_in_a_second_is_no_zero():
    size = Size(
        ranks=8, nodes=8, fits=True, step_s=4000.0, speedup=1.0, baseline_fits=True,
        samples_per_s=0.064, solver="heuristic",
    )  # fmt: skip
    table, *_ = sizes_table(Sizes(target="m", batch=256, how="alike", rows=(size,)))
    assert list(table.columns[4].cells) == ["0.064"]
    point = FrontPoint(
        step_s=4000.0, gpu_seconds=4000.0, amplification=1.0, samples_per_s=0.064, speedup=1.0,
        layouts=("(8,1)",), solver="heuristic", status="heuristic",
    )  # fmt: skip
    table, *_ = front_table(Front(
        target="m", ranks=8, batch=256, single_device_s=9000.0, points=(point,)
    ))  # fmt: skip
    assert list(table.columns[3].cells) == ["0.064"]
