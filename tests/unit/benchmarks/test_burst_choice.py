"""Burst plans that are chosen with a background in mind, against all bursts of small networks."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.multiplex.jobs import Assumptions, BackgroundJob
from meshwright.planner.schema.capability import Capability
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.heuristic.space import OptionSpace, ScoredDecisions
from meshwright.planner.solve.problem import Problem

from tests.strategies import chain_profile, cluster, linear

MS = 1e-3
BURSTS = Capability(
    styles=("none",), memory=("keep",), exchange=("dense",), idle_positions=True,
    early_release=False, micro_batches=True, priority=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def choice() -> ModuleType:
    """The benchmark's module, which is in no package."""
    folder = str(Path(__file__).parents[3] / "benchmarks")
    sys.path.append(folder)
    try:
        import burst_choice
    finally:
        sys.path.remove(folder)
    return burst_choice


def stiff_problem(*names):
    """Eight devices; stiff units take nearly as long for an eighth of the samples: devices are
    wasted on them."""
    flat = Curve(x=(1.0, 8.0), y=(8 * MS, 9 * MS))
    units = []
    for name in names:
        unit = linear(name, seconds_per_sample=MS)
        if name.startswith("stiff"):
            share = msgspec.structs.replace(unit.shares[0], forward=flat, backward=flat)
            unit = msgspec.structs.replace(unit, shares=(share,))
        units.append(unit)
    return Problem(
        chain_profile(units), cluster(8, inter=1e12, latency_s=1e-6), Goal(batch=8), BURSTS,
        schedule="priority", message_bytes=2**20, tie_tolerance=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("slack", [1.02, 1.1, 1.5, 4.0])
def test_narrowing_finds_the_best_of_all_bursts(choice, slack):
    problem = stiff_problem("even", "stiff", "stiff too")
    model = CostModel(
        problem.profile, problem.cluster, problem.goal, message_bytes=2**20, sliced=True
    )
    scored = ScoredDecisions(OptionSpace(model, BURSTS), "priority")
    limit_s, rate = slack * scored.step_s(), 400.0
    made = choice.narrowed(model, BURSTS, model.baseline, "priority", rate, limit_s, 20.0)
    every = product([Option(Layout(groups=g)) for g in (1, 2, 4, 8)], repeat=3)
    found = []
    for chosen in (made, *((model.baseline[0], *c, model.baseline[0]) for c in every)):
        scored.move_to(chosen)
        found.append(choice.worth(scored, rate, limit_s).samples_per_s)
    assert found[0] > 0
    assert found[0] == pytest.approx(max(found), rel=1e-5)


def test_the_burst_is_chosen_with_the_background_in_mind(choice):
    problem = stiff_problem("even", "stiff")
    given = Assumptions(slowdown=1.0)
    plain = choice.best_data_parallel(problem)
    slack = 1.2 * plain.step_s
    background = BackgroundJob("bg", 8, 20 * MS)
    tried = choice.candidates(problem, given, slack, 5.0)
    model, found = choice.burst_with_background(problem, tried, background, given, slack)
    assert found.step_s <= slack * (1 + 1e-6)
    by_name = dict(zip((u.name for u in model.profile.units), found.decisions, strict=True))
    assert by_name["stiff"].layout.size < 8
    assert found.share > 0.3
    # with no room in time, nothing is shared
    _, alone = choice.burst_with_background(problem, tried, background, given, plain.step_s / 10)
    assert alone.copies == 0
    assert alone.background_samples_s == 0
