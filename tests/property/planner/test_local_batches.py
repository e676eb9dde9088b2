"""Shares of the batch on unequal devices, against all that there are."""

from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.device_kinds import with_profiles, with_relative_speeds
from meshwright.planner.cost.step_time import barrier_step, priority_step
from meshwright.planner.memory.unit_memory import memory_of
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.local_batches import local_batches
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.evaluate import evaluate, limits_bytes, make_plan, rank_memory
from meshwright.planner.solve.figures import UnitFigures
from meshwright.planner.solve.local_batches import NEAR, balanced_batches, least_largest
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.planner.solve.unit_options import all_options

from tests.problems import problem
from tests.strategies import chain_profile, cluster, linear, share

ROUNDING = 1 + 1e-9


def shares(total, least, most):
    """Every way to share out so many samples within the bounds."""
    ranges = [range(low, high + 1) for low, high in zip(least[:-1], most[:-1], strict=True)]
    for first in product(*ranges):
        last = total - sum(first)
        if least[-1] <= last <= most[-1]:
            yield (*first, last)


@st.composite
def rising(draw, size):
    """A function of 0 to ``size`` that does not fall, with flat pieces."""
    steps = draw(st.lists(st.integers(0, 3), min_size=size + 1, max_size=size + 1))
    values = np.cumsum(steps).tolist()
    return lambda n: (float(values[n]),)


@given(data=st.data(), total=st.integers(0, 9), ranks=st.integers(1, 4))
def test_the_largest_is_the_least_that_it_can_be(data, total, ranks):
    keys = [data.draw(rising(total)) for _ in range(ranks)]
    least = [data.draw(st.integers(0, total // ranks)) for _ in range(ranks)]
    most = [data.draw(st.integers(low, total)) for low in least]
    possible = shares(total, least, most)
    every = [max(k(n) for k, n in zip(keys, each, strict=True)) for each in possible]
    if not every:
        return
    found = least_largest(total, keys, least, most)
    assert sum(found) == total
    assert all(a <= n <= b for a, n, b in zip(least, found, most, strict=True))
    assert max(k(n) for k, n in zip(keys, found, strict=True)) == min(every)


@st.composite
def rising_curves(draw):
    """Measured seconds that rise with the batch, from a fixed cost."""
    x = sorted(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True)))
    steps = [draw(st.floats(1e-4, 1.0)) for _ in x]
    return Curve(x=tuple(map(float, x)), y=tuple(np.cumsum(steps).tolist()))


@st.composite
def measured(draw, names, curves):
    """A model's profile with times of its own."""
    units = []
    for name in names:
        unit = linear(name, 8, 8)
        times = share("none", 1, draw(curves), draw(curves), 512.0, unit.parameter_bytes)
        units.append(msgspec.structs.replace(unit, shares=(times,)))
    return chain_profile(units, updates=(("sgd", draw(st.sampled_from((0.0, 1e-5)))),))


@st.composite
def unequal(draw, curves=None):
    """A profile and a cluster of two or three nodes with curves, speeds and memory of their own."""
    count = draw(st.integers(2, 3))
    curves = rising_curves() if curves is None else curves
    names = [f"u{i}" for i in range(draw(st.integers(1, 3)))]
    profile = draw(measured(names, curves))
    there = cluster(count, inter=draw(st.sampled_from((1e3, 1e5, 1e12))))
    others = {
        f"n{i}": draw(measured(names, curves)) for i in range(1, count) if draw(st.booleans())
    }
    speeds = {f"n{i}": draw(st.sampled_from((0.5, 1.0, 3.0))) for i in range(count)}
    memory = [draw(st.sampled_from((4_000, 6_000, 10**9))) for _ in range(count)]
    nodes = tuple(
        msgspec.structs.replace(n, devices=(msgspec.structs.replace(n.devices[0], memory_bytes=m),))
        for n, m in zip(there.nodes, memory, strict=True)
    )
    there = with_relative_speeds(msgspec.structs.replace(there, nodes=nodes), speeds)
    return with_profiles(profile, others, there), there


def step_s(model, schedule):
    """The step of plain data parallelism from its definition: that of the rank which, by itself,
    takes longest with its own times and its own samples."""
    formula = barrier_step if schedule == "barrier" else priority_step
    found = []
    for position in range(model.world_size):
        kind = next(k for k in model.kinds if position in k.positions)
        alone = model.of_kind(kind._replace(positions=(position,)))
        found.append(formula(alone.chain(model.baseline), model.micro_batches))
    return max(found)


def fits(model):
    peaks = {p: r.peak_bytes for r in rank_memory(model, model.baseline) for p in r.positions}
    return all(peaks[p] <= limit for p, limit in enumerate(limits_bytes(model)))


@settings(deadline=None, max_examples=60)
@given(made=unequal(), batch=st.integers(3, 10), sliced=st.booleans(), times=st.integers(1, 2))
def test_no_whole_shares_are_quicker_within_memory(made, batch, sliced, times):
    profile, there = made
    ranks = there.world_size
    times = times if batch >= times * ranks else 1
    schedule = "priority" if sliced else "barrier"
    model = CostModel(
        profile, there, Goal(batch=batch), micro_batches=times, sliced=sliced, message_bytes=64
    )
    found = balanced_batches(model, schedule)
    chosen = model if found is None else model.with_local_batches(found)
    every = [
        model.with_local_batches(sizes) for sizes in shares(batch, [times] * ranks, [batch] * ranks)
    ]
    fitting = [step_s(each, schedule) for each in every if fits(each)]
    if not fitting:
        return
    assert fits(chosen)
    assert step_s(chosen, schedule) <= min(fitting) * (1 + NEAR) * ROUNDING


@settings(deadline=None, max_examples=40)
@given(
    made=unequal(st.builds(
        lambda a, b, c: Curve(x=(1.0, 3.0, 8.0), y=(a, b, c)),
        *(st.floats(0.01, 1.0) for _ in range(3)),
    )),
    batch=st.integers(3, 10),
)  # fmt: skip
def test_where_noise_lets_curves_fall_shares_are_kept_within_memory(made, batch):
    profile, there = made
    model = CostModel(profile, there, Goal(batch=batch))
    found = balanced_batches(model, "barrier")
    if found is not None:
        assert sum(found) == batch
        assert min(found) >= 1
    ranks = there.world_size
    every = map(model.with_local_batches, shares(batch, [1] * ranks, [batch] * ranks))
    if any(map(fits, every)):
        assert fits(model if found is None else model.with_local_batches(found))


@settings(deadline=None, max_examples=40)
@given(made=unequal(), batch=st.integers(3, 12), sliced=st.booleans())
def test_the_prediction_is_that_of_the_slowest_rank(made, batch, sliced):
    """As predicted for a cluster in which all ranks are like that one, with as many samples."""
    profile, there = made
    goal, schedule = Goal(batch=batch), "priority" if sliced else "barrier"
    model = CostModel(profile, there, goal, sliced=sliced, message_bytes=300)
    sizes = balanced_batches(model, schedule) or local_batches(batch, there.world_size)
    how = {"schedule": schedule, "message_bytes": 300}
    found = make_plan(profile, there, goal, local_batch_sizes=sizes, **how).prediction
    alike = with_relative_speeds(there, {node.name: 1.0 for node in there.nodes})
    ranks = []
    for position, samples in enumerate(sizes):
        kind = next(k for k in model.kinds if position in k.positions)
        same = Goal(batch=samples * there.world_size)
        ranks.append(evaluate(kind.profile, alike, same, **how).step_s)
    assert found.step_s == pytest.approx(max(ranks), rel=1e-9)


def steps_of_ranks(chains, steps=4):
    """The time between the ends of two exchanges when ranks go their own ways, first in, first
    out: a message leaves when the last rank has its gradient, and each rank updates after the last
    message."""
    exchange_s = chains[0].exchange_s.sum(axis=0)
    ready, ends = [0.0] * len(chains), []
    for _ in range(steps):
        at = [t + chain.forward_s.sum() for t, chain in zip(ready, chains, strict=True)]
        link = 0.0
        for k in reversed(range(len(exchange_s))):
            at = [t + chain.backward_s[k] for t, chain in zip(at, chains, strict=True)]
            # Only what exchanges something is waited for there; all of it is at the end.
            link = max(link, *at) + exchange_s[k] if exchange_s[k] else link
        ends.append(max(link, *at))
        ready = [ends[-1] + chain.update_s.sum() for chain in chains]
    return ends[-1] - ends[-2]


@settings(deadline=None, max_examples=60)
@given(made=unequal(), batch=st.integers(3, 12))
def test_a_step_of_several_ranks_is_that_of_the_slowest_by_itself(made, batch):
    profile, there = made
    model = CostModel(profile, there, Goal(batch=batch))
    chains = [model.of_kind(kind).chain(model.baseline) for kind in model.kinds]
    alone = max(map(barrier_step, chains))
    assert steps_of_ranks(chains) == pytest.approx(alone, rel=1e-9)
    # Each unit on its slowest rank can only take longer.
    assert barrier_step(model.chain(model.baseline)) >= alone / ROUNDING


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), slow=st.floats(0.2, 3.0))
def test_the_quick_way_to_all_figures_knows_of_unequal_devices(seed, slow):
    drawn = problem(seed, most=20_000)
    there = with_relative_speeds(drawn.cluster, {drawn.cluster.nodes[-1].name: slow})
    model = CostModel(drawn.profile, there, drawn.goal)
    model = model.with_local_batches(balanced_batches(model, "barrier") or ())
    quick = UnitFigures(model, memory_of(model), 0)
    for k, options in enumerate(all_options(model, PLAIN)):
        states = tuple(dict.fromkeys((o.layout, o.style) for o in options))
        if states:
            table = quick.plain(k, states)
            one_by_one = [quick.of(k, Option(*state)) for state in states]
            np.testing.assert_allclose(table, one_by_one, rtol=1e-12, atol=1e-15)


@settings(deadline=None, max_examples=15)
@given(made=unequal(), batch=st.integers(3, 10), solver=st.sampled_from(("heuristic", "integer")))
def test_a_plan_is_never_slower_than_with_even_shares(made, batch, solver):
    profile, there = made
    goal = Goal(batch=batch)
    ours, even = (
        solve(Problem(profile, there, goal, even=even, explains=False), solver)
        for even in (False, True)
    )
    if even.plan is None or even.decisions is None:
        return
    assert ours.plan is not None
    if all(option == even.decisions[0] for option in even.decisions):  # plain data parallelism
        assert ours.plan.prediction.step_s <= even.plan.prediction.step_s * ROUNDING
