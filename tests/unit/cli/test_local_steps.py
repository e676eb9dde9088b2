"""What the commands say of plans whose hosts train apart."""

from __future__ import annotations

import json

import meshwright as mw
import pytest
from meshwright.cli.render.advice import advice_sentence
from meshwright.planner.explain.advice import Advice, Way
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import Figures, RunReport
from meshwright.planner.schema.text import seconds, size

from tests.strategies import chain_profile, cluster, linear


@pytest.fixture
def files(tmp_path):
    """A profile, and clusters of two hosts with slow links and with fast ones."""
    units = [linear(f"fc{i}", 512, 512, 1e-6) for i in range(3)]
    profile = chain_profile(units, updates=(("sgd", 1e-12), ("momentum", 1e-12)))
    paths = [tmp_path / f"{name}.json" for name in ("profile", "slow", "fast")]
    made = (profile, cluster(2, inter=50e6 / 8), cluster(2, inter=10e9 / 8))
    for record, path in zip(made, paths, strict=True):
        save(record, path)
    return paths


def test_plan_says_how_hosts_train_apart(meshwright, files, tmp_path):
    profile, slow, fast = files
    out = tmp_path / "plan.json"
    command = ("--batch", 4096, "--solver", "heuristic", "--schedule", "barrier")
    done = meshwright("plan", profile, "-c", slow, *command, "--allow-local-steps", "-o", out)
    assert done.code == 0, done.err
    local = load(Plan, out).local_steps
    said = " ".join(done.out.split())
    assert "The 2 hosts train apart (local steps, DiLoCo)" in said
    assert f"is averaged once in {local.inner_steps} steps" in said
    assert "That changes the training" in said
    assert "Bound by computing" in said
    assert "note: hosts do not train apart" not in done.err

    explained = meshwright("explain", out, "--profile", profile, "--cluster", slow, "--no-what-if")
    assert "The 2 hosts train apart" in " ".join(explained.out.split())
    memory = meshwright(
        "explain", out, "--profile", profile, "--cluster", slow, "--memory", "--json"
    )
    assert json.loads(memory.out)
    beside = meshwright("compare", out, out, "--json")
    assert json.loads(beside.out)["units"] == []

    asked = meshwright(
        "plan", profile, "-c", slow, *command, "--allow-local-steps", "--inner-steps", 10,
        "--fragments", 2, "--outer-lr", 0.5, "--outer-momentum", 0, "--json",
    )  # fmt: skip
    made = json.loads(asked.out)["local_steps"]
    assert (made["inner_steps"], len(made["fragments"])) == (10, 2)
    assert (made["outer_lr"], made["outer_momentum"]) == (0.5, 0.0)

    quick = meshwright("plan", profile, "-c", fast, *command, "--allow-local-steps")
    assert "note: hosts do not train apart: that is not predicted" in " ".join(quick.err.split())
    alone = ("--batch", 1, "--solver", "heuristic", "--schedule", "barrier")
    few = meshwright("plan", profile, "-c", slow, *alone, "--allow-local-steps")
    assert "do not train apart: a batch of 1 leaves ranks" in " ".join(few.err.split())
    assert "train apart" not in quick.out


def test_what_is_only_for_local_steps_needs_them(meshwright, files):
    profile, slow, _ = files
    done = meshwright("plan", profile, "-c", slow, "--batch", 64, "--inner-steps", 8)
    assert done.code == 2
    assert "--inner-steps 8 (inner_steps=8) says nothing without --allow-local" in done.sentence
    assert done.sentence.endswith("add that, or leave it out")


def test_plan_and_explain_say_the_same_of_the_whole_step(meshwright, files, tmp_path):
    profile, slow, _ = files
    out, both = tmp_path / "plan.json", ("--profile", profile, "--cluster", slow)
    done = meshwright(
        "plan", profile, "-c", slow, "--batch", 4096, "--solver", "heuristic", "--schedule",
        "barrier", "--allow-local-steps", "--inner-steps", 9, "--fragments", 9, "-o", out,
    )  # fmt: skip
    assert done.code == 0, done.err
    plan = load(Plan, out)
    step = seconds(plan.prediction.step_s)
    said, noted = " ".join(done.out.split()), " ".join(done.err.split())
    assert f"of {step}): --inner-steps 18 saves" in said
    assert "note: the model is averaged in 3 fragments, not in 9: each is of whole" in noted
    explained = meshwright("explain", out, *both)
    told = " ".join(explained.out.split())
    assert f"The largest part of the step of {step} is waiting for other hosts" in told
    assert f"{size(max(plan.prediction.peak_bytes))} of " in told
    assert "No gradient exchange is exposed" not in told
    assert "the largest part the averages over hosts" in told
    assert "The units' rows (layouts and steps) and the formula are those of a host" in told
    assert "18 inner steps for 9" in told
    assert "GiB of memory on every device" not in told
    memory = " ".join(meshwright("explain", out, *both, "--memory").out.split())
    assert f"{size(max(plan.prediction.peak_bytes))} in all" in memory


@pytest.fixture
def made(files):
    profile, slow, _ = (load(kind, path) for kind, path in zip(KINDS, files, strict=True))
    goal = mw.Goal(batch=4096, allow_local_steps=True)
    return mw.plan(profile, slow, goal, solver="heuristic", schedule="barrier"), profile, slow


KINDS = (mw.ModelProfile, mw.Cluster, mw.Cluster)


def test_what_cannot_be_done_with_such_a_plan(made):
    plan, profile, slow = made
    assert plan.local_steps is not None
    with pytest.raises(InputError, match=r"hosts train apart.*verify --steps 50"):
        mw.verify(plan)
    figures = Figures(step_s=1.0)
    report = RunReport(
        target=plan.target, world_size=2, steps=3, predicted=figures, measured=figures,
        data_parallel=figures,
    )  # fmt: skip
    with pytest.raises(InputError, match="local steps cannot be held against a run"):
        mw.calibrate(plan, report, profile, slow)
    with pytest.raises(InputError, match="local steps cannot be simulated beside others"):
        mw.multiplex([plan], profiles=[profile], clusters=[slow])


def test_launch_says_that_steps_are_no_whole_round(meshwright, made, tmp_path):
    plan, _, _ = made
    save(plan, tmp_path / "plan.json")
    round_steps = plan.local_steps.inner_steps
    there = "launch", "plan.json", "--hosts", "a,b", "--dry-run"
    few = meshwright(*there, "--steps", round_steps - 1)
    assert few.code == 0, few.err
    assert f"--steps {round_steps - 1} is no whole round" in " ".join(few.err.split())
    for enough in (("--steps", round_steps), ("train.py",)):
        assert "no whole round" not in " ".join(meshwright(*there, *enough).err.split())


def test_advise_recommends_them_last():
    def way(name, changes, gain, **more):
        return Way(
            name=name, changes=changes, ranks=2, batch=8, step_s=1 / gain, samples_per_s=8 * gain,
            gain=gain, **more,
        )  # fmt: skip

    ways = (
        way("plan with local steps", "algorithm", 9.0, inner_steps=32),
        way("plan with bfloat16 gradients", "rounding", 2.0),
        way("exact plan", "nothing", 1.5),
    )
    found = Advice(target="net", batch=8, ranks=2, compute_s=1.0, exchange_s=9.0, ways=ways)
    said = advice_sentence(found)
    assert "plan with bfloat16 gradients is 2.00 times as fast and changes the rounding" in said
    assert "the plan with local steps is 9.00 times as fast in rounds of 32 inner steps" in said
    assert said.endswith("changes the algorithm.")
