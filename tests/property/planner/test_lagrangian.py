"""The Lagrangian against brute force, and its tables against the cost model."""

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from meshwright.planner.memory.rows import (
    ENTRY,
    KEPT_INPUT,
    RECEIVED,
    RETURNED,
    RETURNING,
    seconds_of,
    slice_waits,
    values,
)
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.lagrangian.dynamic import minimise, order_of
from meshwright.planner.solve.lagrangian.judging import IDLE, PlanJudge
from meshwright.planner.solve.lagrangian.lagrange import LagrangianSearch, Weights
from meshwright.planner.solve.lagrangian.restricted_program import RestrictedProgram
from meshwright.planner.solve.lagrangian.solver import LagrangianSolver, lagrangian_of
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.unit_options import unit_options

from tests import brute, problems

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
QUICK = range(3000, 3006)
SAMPLED = range(3006, 3040)
FULL = range(3040, 3340)
EDGE_FIGURES = [*ENTRY, KEPT_INPUT, RETURNING, RECEIVED]


def judge(seed):
    """Solves one random problem both ways; returns by what share the plan is above the optimum."""
    made = problems.problem(seed, most=20_000)
    best = brute.best(made)
    result = LagrangianSolver().solve(made, 30)
    if result.plan is None:
        assert best.objective_s == float("inf"), f"seed {seed}: a feasible plan was not found"
        return 0.0
    assert result.bound_s <= best.objective_s * (1 + 1e-9) + 1e-15
    assert result.objective_s >= best.objective_s * (1 - 1e-9)
    assert result.gap == pytest.approx(1 - result.bound_s / result.objective_s, abs=1e-12)
    assert result.objective_s / best.objective_s - 1 <= result.gap / (1 - result.gap) + 1e-9
    if result.status == "optimal":
        assert result.objective_s == pytest.approx(best.objective_s, rel=1e-8)
    return result.objective_s / best.objective_s - 1


def test_bound_never_exceeds_the_optimum_and_the_gap_is_truthful():
    excess = [judge(seed) for seed in QUICK]
    assert np.mean(excess) < 0.02, "plans are far above the optimum"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bound_never_exceeds_the_optimum_on_more_problems():
    assert np.mean([judge(seed) for seed in SAMPLED]) < 0.02


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bound_never_exceeds_the_optimum_on_many_problems():
    assert np.mean([judge(seed) for seed in FULL]) < 0.02


def lagrangians(seed, saves_outputs=True):
    made = problems.problem(seed, most=20_000).placed()
    if seed % 3 == 0:
        made = problems.issued_by_hosts(made, seed)
    elif seed % 3 == 1:
        made = problems.with_overhead(made, seed)
    if not saves_outputs:
        units = (
            msgspec.structs.replace(u, output_kept=False, modules=()) for u in made.profile.units
        )
        made = replace(made, profile=msgspec.structs.replace(made.profile, units=tuple(units)))
    for model in made.cost_models():
        found = lagrangian_of(made, model)
        if found is not None:
            yield made, model, found


@pytest.mark.parametrize("saves_outputs", [True, False])
@pytest.mark.parametrize("seed", range(4000, 4012))
def test_tables_hold_what_the_cost_model_says_of_every_option(seed, saves_outputs):
    for made, model, lagrangian in lagrangians(seed, saves_outputs):
        table = lagrangian.table
        for k, unit in enumerate(table.units):
            options = set(unit_options(model, k, made.capability))
            assert {unit.option(n) for n in unit.numbers()} == options
            for number in unit.numbers():
                option = unit.option(number)
                assert unit.find(option) == number
                expected = table.figures.of(k, option)
                found = table.units[k].figures(number)
                found[np.flatnonzero(expected == 0) if option.lossy else []] = 0.0
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(4100, 4130))
def test_rows_of_a_plan_are_the_step_formula_and_the_memory_timeline(seed):
    rng = np.random.default_rng(seed)
    for made, model, lagrangian in lagrangians(seed):
        table = lagrangian.table
        numbers = np.array([rng.choice(u.numbers()) for u in table.units])
        figures = table.plan_figures(numbers)
        found = values(lagrangian.rows, figures)
        chosen = choice(model, table.choose(numbers), made.schedule)
        assert found.step_s(slice_waits(figures)) == pytest.approx(chosen.step_s, rel=1e-9)
        limit = lagrangian.limits.memory_bytes
        assert found.peak_bytes(lagrangian.rows.timed) <= chosen.over_bytes + limit + 2


@pytest.mark.parametrize("seed", range(4200, 4220))
def test_price_of_every_plan_is_at_least_the_bound_of_the_weights(seed):
    rng = np.random.default_rng(seed)
    for made, model, lagrangian in lagrangians(seed):
        table = lagrangian.table
        search = LagrangianSearch(lagrangian, time.perf_counter() + 5, 0.0)
        outcome = search.run([])
        for _ in range(50):
            numbers = np.array([rng.choice(u.numbers()) for u in table.units])
            chosen = choice(model, table.choose(numbers), made.schedule)
            if chosen.feasible and not search.judge.judged(numbers).score.over:
                assert chosen.objective_s >= outcome.bound * (1 - 1e-9)


def random_weights(lagrangian, rng):
    """Of all rows; a limit on bytes is worth little or much, and may be most so in backward."""
    rows, limits = lagrangian.rows, lagrangian.limits
    tracks = rng.random((len(rows.before), len(lagrangian.table.units)))
    tracks[rows.timed :] *= rng.choice([1, 10, 100]) / limits.memory_bytes
    tracks[rows.memory_track("backward")] *= rng.choice([1, 30])
    totals = np.zeros(len(rows.totals))
    totals[seconds_of(totals)] = rng.random()
    return Weights(tracks, totals)


def weighted(lagrangian, weights, numbers):
    """A plan's rows at the weights, less what keeping to the limits is worth."""
    figures, limits = lagrangian.table.plan_figures(numbers), lagrangian.limits
    found = values(lagrangian.rows, figures)
    total = (weights.tracks * found.tracks).sum() + (weights.totals * found.totals).sum()
    idle = figures[:, IDLE].sum() * limits.economical
    return total - weights.charge(limits, lagrangian.rows.timed) - idle


@pytest.mark.parametrize("seed", range(4300, 4340))
def test_no_plan_is_below_the_least_for_random_weights_and_on_chains_one_is_at_it(seed):
    rng = np.random.default_rng(seed)
    for _, model, lagrangian in lagrangians(seed):
        weights = random_weights(lagrangian, rng)
        numbers, bound = lagrangian.cheapest(weights)
        units, ties = lagrangian.table.units, lagrangian.table.ties
        every = [numbers, *([rng.choice(u.numbers()) for u in units] for _ in range(30))]
        states = [[u.state(n) for u, n in zip(units, one, strict=True)] for one in every]
        least = min(
            weighted(lagrangian, weights, np.array(one))
            for one, s in zip(every, states, strict=True)
            if all(tie.agree[s[tie.source], s[tie.target]] for tie in ties)
        )
        assert bound <= least + 1e-9 * abs(least)
        # Where a unit has several edges, only one of them is charged for some of the bytes.
        if all(len(edges) <= 1 for edges in (*model.edges_into, *model.edges_from)):
            assert weighted(lagrangian, weights, numbers) == pytest.approx(bound, rel=1e-9)


def test_policies_suit_what_comes_back(monkeypatch):
    """The head of a language model has less in its own backward than the gradient that comes back
    to it: what more it has itself, up to that, is free."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import planner as benchmark

    goal = Goal(batch=4 * 16, optimizer="adamw", allow_lossy=True, min_fidelity=0.9)
    capability = msgspec.structs.replace(EVERYTHING, idle_positions=False)
    made = Problem(
        benchmark.gpt_like(4), benchmark.cluster_of(16), goal, capability, schedule="priority",
        message_bytes=benchmark.SLICE_BYTES,
    ).placed()  # fmt: skip
    (model,) = made.cost_models()
    lagrangian = lagrangian_of(made, model)
    for seed in range(60):
        rng = np.random.default_rng(seed)
        weights = random_weights(lagrangian, rng)
        weights.tracks[lagrangian.rows.timed :] *= 10 ** rng.uniform(-3, 0)
        numbers, bound = lagrangian.cheapest(weights)
        assert weighted(lagrangian, weights, numbers) == pytest.approx(bound, rel=1e-9)


@pytest.mark.parametrize("seed", range(4300, 4330))
def test_rows_of_the_restricted_program_are_those_of_its_plans(seed):
    """Of bytes at backward, as they alone have a variable of their own."""
    rng = np.random.default_rng(seed)
    for _, model, lagrangian in lagrangians(seed):
        if any(model.sharable):
            continue  # counted for each of the units that share
        table, rows, limits = lagrangian.table, lagrangian.rows, lagrangian.limits
        judge, weights = PlanJudge(table, rows, limits), random_weights(lagrangian, rng)
        plans = [
            judge.judged(np.array([rng.choice(u.numbers()) for u in table.units])) for _ in range(3)
        ]
        prices = lagrangian.prices(weights)
        program = RestrictedProgram(judge, plans[0], plans[1:], prices, weights.tracks)
        track, units = rows.memory_track("backward"), range(len(table.units))
        program.rows = [(track, k, -1) for k in units]
        lines, _ = program._limits(1.0)
        for plan in plans:
            chosen = [plan.numbers[k] == number for k, number in program.policies]
            states = [u.state(n) for u, n in zip(table.units, plan.numbers, strict=True)]
            ends = [(table.edges[e].source, table.edges[e].target) for e, _, _ in program.pairs]
            taken = [
                (states[s], states[t]) == pair[1:]
                for (s, t), pair in zip(ends, program.pairs, strict=True)
            ]
            returned = plan.figures[program.returned, RETURNED] / limits.memory_bytes
            x = np.array([*chosen, *taken, *returned, 0.0])
            found = lines @ x
            least = plan.rows.tracks[track] / limits.memory_bytes
            np.testing.assert_allclose(found[: len(units)], least, rtol=1e-9)
            # What is returned is no less than each edge asks for, no more than one of them does;
            # a row of device-seconds may come last.
            asked = dict.fromkeys(program.returned, -np.inf)
            edges = zip(program.returning, found[len(units) :], strict=False)
            for source, value in ((table.edges[e].source, value) for e, value in edges):
                asked[source] = max(asked[source], value)
            for most, share in zip(asked.values(), returned, strict=True):
                assert most == pytest.approx(0.0, abs=1e-12) if share else most <= 1e-12


@pytest.mark.parametrize("seed", range(30))
def test_elimination_finds_the_least_over_all_assignments(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 7))
    sizes = [int(rng.integers(1, 4)) for _ in range(count)]
    units = [rng.normal(size=s) for s in sizes]
    ends = [(a, b) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.5]
    edges = [(a, b, rng.normal(size=(sizes[a], sizes[b]))) for a, b in ends]
    answer = minimise(order_of(sizes, ends), units, edges)

    def price(states):
        return sum(u[s] for u, s in zip(units, states, strict=True)) + sum(
            table[states[a], states[b]] for a, b, table in edges
        )

    least = min(price(states) for states in np.ndindex(*sizes))
    assert answer.price == pytest.approx(least)
    assert price(answer.states) == pytest.approx(least)
