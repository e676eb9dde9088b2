"""Steps of several rank classes: the plain simulation if there is one, else the critical path."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import EdgeProfile
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.rank_classes import rank_classes, simulate_rank_classes
from meshwright.planner.simulate.schedule import step_of

from tests.strategies import chain_profile, cluster, decided, linear, up_to

SOME = settings(max_examples=60, deadline=None)


@SOME
@given(decided(bursts=False), st.sampled_from(["barrier", "priority"]))
def test_one_rank_class_is_the_plain_simulation(case, schedule):
    model, chosen = case
    model = CostModel(
        model.profile, model.cluster, model.goal, micro_batches=model.micro_batches,
        message_bytes=20_000, sliced=schedule == "priority",
    )  # fmt: skip
    step = step_of(model, chosen, model.chain(chosen), schedule)
    noise = model.cluster.interference
    plain = simulate(step, noise)
    classes = simulate_rank_classes(model, chosen, step.messages, schedule, noise)
    levels = {on.link for k, o in enumerate(chosen) for on in entries(model, k, chosen, o)}
    near = 1e-9 if len(levels) < 2 else 0.2  # within a unit links may take turns differently
    assert classes.step_s == pytest.approx(plain.step_s, rel=near, abs=1e-15)
    assert classes.update_s == pytest.approx(plain.update_s, rel=1e-2, abs=1e-12)


def entries(model, k, chosen, option):
    cost = model.unit(k, option)
    found = [cost.inner_forward, cost.inner_backward]
    for e in model.edges_into[k]:
        edge = model.edge(e, chosen[model.ends[e][0]], option)
        found += [edge.forward, edge.backward]
    return [on for on in found if on.seconds]


def forked(seconds, bytes_per_sample=0.0):
    """input → a → (b | c) → d → output, with forward seconds by sample of each unit."""
    units = [linear(n, 10, 10, s) for n, s in zip("abcd", seconds, strict=True)]
    chain = chain_profile(units, bytes_per_sample=bytes_per_sample, features=10)
    edges = [
        EdgeProfile(
            source=a, target=b, bytes_per_sample=bytes_per_sample,
            gradient_bytes_per_sample=bytes_per_sample,
        )
        for a, b in (("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"))
    ]  # fmt: skip
    ends = [e for e in chain.edges if "put" in e.source + e.target]
    return msgspec.structs.replace(chain, edges=(*ends, *edges))


def seconds_of(profile, layouts, links=None, batch=8):
    links = links or cluster(4, inter=1e15, intra=1e15, latency_s=0.0)
    model = CostModel(profile, links, Goal(batch=batch))
    home = Option(data_parallel(4))
    named = {u.name: home for u in profile.units} | {n: Option(y) for n, y in layouts.items()}
    chosen = tuple(named[u.name] for u in profile.units)
    return simulate_rank_classes(model, chosen, (), "barrier")


def test_branches_that_share_no_rank_run_side_by_side():
    profile = forked((1e-3, 4e-3, 4e-3, 1e-3))
    halves = {"b": Layout(groups=2), "c": Layout(groups=2, first=2)}
    # forward and backward are 3 times the forward: a and d on 4 ranks with 2 samples each, b and c
    # on 2 ranks with 4 samples each, at the same time
    assert seconds_of(profile, halves).step_s == pytest.approx(3 * (2 + 16 + 2) * 1e-3)
    turns = {"b": Layout(groups=2), "c": Layout(groups=2)}
    assert seconds_of(profile, turns).step_s == pytest.approx(3 * (2 + 16 + 16 + 2) * 1e-3)
    assert seconds_of(profile, {}).step_s == pytest.approx(3 * (2 + 8 + 8 + 2) * 1e-3)


def test_the_longer_branch_counts():
    profile = forked((1e-3, 6e-3, 1e-3, 1e-3))
    found = seconds_of(profile, {"b": Layout(groups=3), "c": Layout(groups=1, first=3)}, batch=12)
    assert found.step_s == pytest.approx(3 * (3 + 24 + 3) * 1e-3)
    assert found.compute_s == pytest.approx(3 * (3 + 24 + 3) * 1e-3)


def test_rank_classes_are_the_positions_that_do_the_same():
    layouts = [Layout(groups=4), Layout(groups=2), Layout(groups=1, first=2)]
    assert rank_classes(4, layouts) == ((0, 1), (2,), (3,))


@SOME
@given(up_to(1e-2), up_to(1e-2), st.floats(1e3, 1e6))
def test_a_step_is_never_shorter_than_any_rank_class_or_any_path(b, c, size):
    profile = forked((1e-3, b, c, 1e-3), bytes_per_sample=size)
    links = cluster(4, inter=1e9, intra=1e9, latency_s=1e-5)
    halves = {"b": Layout(groups=2), "c": Layout(groups=2, first=2)}
    found = seconds_of(profile, halves, links)
    assert found.step_s >= 3 * (2e-3 + 4 * max(b, c) + 2e-3) * (1 - 1e-9)
    assert found.step_s >= found.compute_s + found.blocking_s - 1e-12


def test_no_message_starts_between_two_things_of_one_moment():
    # both backwards take no time: the more urgent exchange is the first to leave
    layers = [linear("a", 64, 64, 0.0), linear("b", 8, 8, 0.0)]
    model = CostModel(
        chain_profile(layers, updates=(("sgd", 1e-9),)), cluster(2), Goal(batch=2),
        message_bytes=1_000_000, sliced=True,
    )  # fmt: skip
    chosen = (Option(data_parallel(2)),) * 4
    step = step_of(model, chosen, model.chain(chosen), "priority")
    classes = simulate_rank_classes(model, chosen, step.messages, "priority")
    assert classes.step_s == pytest.approx(simulate(step).step_s, rel=1e-9)
