"""Shares of the batch where devices are unequal: by hand."""

import msgspec
import pytest
from meshwright.planner.cost.budget import single_device_batch_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.device_kinds import (
    device_kinds,
    slowed,
    times_of,
    with_profiles,
    with_relative_speeds,
)
from meshwright.planner.explain.memory_timeline import memory_timeline
from meshwright.planner.schema.capability import PLAIN, Capability
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.local_batches import local_batches
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import decode, encode
from meshwright.planner.solve.answer import answer
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.evaluate import decisions_of, evaluation, make_plan, rank_memory
from meshwright.planner.solve.heuristic.resize import resized_problem
from meshwright.planner.solve.local_batches import balanced_batches, least_in_turn, least_largest
from meshwright.planner.solve.local_steps import host_cluster
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.quicker_shares import with_quicker_shares
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear, share

FAST = 1e12
"""Bytes per second of links that take no time beside computing."""
WHOLE = msgspec.structs.replace(PLAIN, styles=("none",))
"""Plain data parallelism and nothing else."""
SOLVERS = ("heuristic", "integer", "lagrangian")


def model_of(*seconds, saved=256.0):
    """A model of one unit for each number of seconds that a sample's forward takes; its backward
    takes twice as long."""
    return chain_profile([linear(f"fc{i}", 64, 64, s, saved) for i, s in enumerate(seconds)])


def affine(fixed, each):
    """A model whose one unit takes so many seconds a call, and each sample more: a third forward,
    the rest backward."""
    unit = linear("fc", 64, 64)
    curve = Curve(x=(1.0, 2.0), y=(fixed + each, fixed + 2 * each))
    forward, backward = curve.scaled(1 / 3), curve.scaled(2 / 3)
    made = share("none", 1, forward, backward, 256.0, unit.parameter_bytes)
    return chain_profile([msgspec.structs.replace(unit, shares=(made,))])


def links(count, *, memory_bytes=10**12, inter=FAST, **speeds):
    made = cluster(count, inter=inter, latency_s=0.0, memory_bytes=memory_bytes)
    return with_relative_speeds(made, speeds)


def planned(profile, there, capability=WHOLE, solver="integer", **goal):
    return solve(Problem(profile, there, Goal(**goal), capability), solver).checked()


# -- which shares ----------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", SOLVERS)
def test_twice_as_fast_gets_twice_as_much(solver):
    plan = planned(model_of(1e-3), links(2, n1=0.5), batch=12, solver=solver)
    assert plan.local_batch_sizes == (8, 4)
    # Eight samples of 3 ms; even shares would take the slow one six of 6 ms.
    assert plan.prediction.step_s == pytest.approx(24e-3, rel=1e-3)
    assert plan.baseline.step_s == pytest.approx(36e-3, rel=1e-3)
    assert decode(Plan, encode(plan)) == plan


def test_a_fixed_cost_of_a_call_makes_shares_less_unequal():
    # 6 + n against 12 + 2n milliseconds: with (9, 3) 15 and 18, with (10, 2) 16 and 16.
    plan = planned(affine(6e-3, 1e-3), links(2, n1=0.5), batch=12)
    assert plan.local_batch_sizes == (10, 2)
    # A fixed cost that only the slow one has: n against 6 + 2n; (10, 2) takes 10 and 10.
    fast, slow = affine(0.0, 1e-3), affine(6e-3, 2e-3)
    joined = with_profiles(fast, {"n1": slow}, links(2))
    plan = planned(joined, links(2), batch=12)
    assert plan.local_batch_sizes == (10, 2)
    assert plan.prediction.step_s == pytest.approx(10e-3, rel=1e-3)


def test_samples_are_whole():
    # In proportion 2.8, 2.8 and 1.4 samples: of (3, 3, 1) the slowest takes 3, of (3, 2, 2) 4.
    plan = planned(model_of(1e-3), links(3, n2=0.5), batch=7)
    assert plan.local_batch_sizes == (3, 3, 1)
    # 2, 2 and 1 of five: one more goes to the first of those that take as long.
    plan = planned(model_of(1e-3), links(3, n2=0.5), batch=6)
    assert plan.local_batch_sizes == (3, 2, 1)


def test_the_slow_node_may_be_the_first():
    plan = planned(model_of(1e-3), links(3, n0=0.25), batch=9)
    assert plan.local_batch_sizes == (1, 4, 4)


def test_no_rank_is_left_without_a_sample():
    plan = planned(model_of(1e-3), links(2, n1=0.01), batch=8)
    assert plan.local_batch_sizes == (7, 1)
    plan = planned(model_of(1e-3), links(2, n1=0.01), batch=8, micro_batches=(2,))
    assert plan.local_batch_sizes == (6, 2)


def test_equal_devices_have_even_shares():
    even = planned(model_of(1e-3), links(3), batch=8)
    assert even.local_batch_sizes == ()
    # Nor does it matter that all are slower than the device of the profile.
    slow = planned(model_of(1e-3), links(3, n0=0.5, n1=0.5, n2=0.5), batch=8)
    assert slow.local_batch_sizes == ()
    assert slow.prediction.step_s == pytest.approx(2 * even.prediction.step_s, rel=1e-3)
    # Nor that they have unequal memory, as long as there is enough.
    device = msgspec.structs.replace(links(3).devices[0], memory_bytes=10**11)
    nodes = (msgspec.structs.replace(links(3).nodes[0], devices=(device,)), *links(3).nodes[1:])
    there = msgspec.structs.replace(links(3), nodes=nodes)
    assert planned(model_of(1e-3), there, batch=8).local_batch_sizes == ()


def test_of_shares_that_wait_for_the_links_alike_the_quickest_are_taken():
    slow_links = links(2, inter=1e3, n1=0.5)  # 16 KiB of gradients take 16 seconds
    for sliced, schedule in ((False, "barrier"), (True, "priority")):
        # By priority the first unit computes while the second one's gradients travel, on any rank.
        made = CostModel(model_of(1e-3, 0.0), slow_links, Goal(batch=12), sliced=sliced)
        assert balanced_batches(made, schedule) == (8, 4)


def test_divided_units_do_not_keep_shares_that_an_exchange_decided():
    """Both units compute, the second is divided: as unequal shares as (11, 1) only make the first
    rank compute long."""
    problem = Problem(model_of(1e-3, 1e-3), links(2, n1=0.5), Goal(batch=12), PLAIN)
    model = problem.cost_model()
    decisions = list(model.baseline)
    decisions[2] = decisions[2]._replace(layout=Layout(groups=1, degree=2), style="row")
    for shares in ((11, 1), (8, 4)):
        chosen = choice(model.with_local_batches(shares), tuple(decisions), "barrier")
        found = answer(problem, chosen, "integer", None, proved=False)
        better = with_quicker_shares(problem, found)
        assert better.checked().local_batch_sizes == (8, 4)
    assert better is found


# -- within memory -----------------------------------------------------------------------------


def peak(profile, batch):
    """What a rank of two holds with so many samples."""
    made = CostModel(profile, links(2), Goal(batch=2 * batch))
    return rank_memory(made, made.baseline)[0].peak_bytes


def with_memory(there, **limits):
    def node(one):
        if one.name not in limits:
            return one
        device = msgspec.structs.replace(one.devices[0], memory_bytes=limits[one.name])
        return msgspec.structs.replace(one, devices=(device,))

    return msgspec.structs.replace(there, nodes=tuple(map(node, there.nodes)))


KEEPS_OR_RECOMPUTES: Capability = msgspec.structs.replace(WHOLE, memory=("keep", "recompute"))


@pytest.mark.parametrize("solver", SOLVERS)
def test_little_memory_takes_few_samples(solver):
    profile = model_of(1e-3, 1e-3, saved=2.0**20)
    there = with_memory(links(2), n1=peak(profile, 3))
    plan = planned(profile, there, KEEPS_OR_RECOMPUTES, solver, batch=12)
    assert plan.local_batch_sizes == (9, 3)
    assert {u.memory for u in plan.units} == {"keep"}  # what fits so is not computed twice
    assert plan.prediction.peak_bytes[1] <= peak(profile, 3)


def test_a_fast_device_of_little_memory():
    profile = model_of(1e-3, saved=2.0**20)
    there = with_memory(links(2, n0=4.0), n0=peak(profile, 6))
    assert planned(profile, there, batch=10).local_batch_sizes == (6, 4)
    assert planned(profile, links(2, n0=4.0), batch=10).local_batch_sizes == (8, 2)


def test_where_nothing_fits_what_is_missing_is_least():
    profile = model_of(1e-3, saved=2.0**20)
    there = with_memory(links(2, n0=4.0), n0=peak(profile, 2), n1=peak(profile, 4))
    made = CostModel(profile, there, Goal(batch=10))
    # Two too many for each: not as many as the speed of the first would take.
    assert balanced_batches(made, "barrier") == (4, 6)


# -- what is predicted ---------------------------------------------------------------------------


def test_each_rank_is_predicted_by_itself():
    """A unit that is slow on one rank, and another that is on the other: each rank waits at the end
    only, so that the step is the longer sum and not the sum of the longer."""
    profile, other = model_of(1e-3, 2e-3), model_of(2e-3, 1e-3)
    joined = with_profiles(profile, {"n1": other}, links(2))
    made = make_plan(joined, links(2), Goal(batch=8))
    assert made.prediction.step_s == pytest.approx(4 * 9e-3, rel=1e-3)
    # Where units wait for each other inside, the longer of each counts.
    halved = [u.layout for u in made.units]
    halved[1] = halved[2] = Layout(groups=1, degree=2)
    decisions = [o._replace(layout=y) for o, y in zip(decisions_of(made), halved, strict=True)]
    decisions[1] = decisions[1]._replace(style="column")
    decisions[2] = decisions[2]._replace(style="row")
    divided = make_plan(joined, links(2), Goal(batch=8), decisions)
    assert divided.prediction.compute_s == pytest.approx(8 * 12e-3 / 2, rel=1e-3)


def test_updates_are_those_of_the_slowest():
    profile = chain_profile([linear("fc", 64, 64, 1e-3)], updates=(("sgd", 1e-6),))
    there = links(2, n1=0.5)
    made = make_plan(profile, there, Goal(batch=12), local_batch_sizes=(8, 4))
    update = 64 * 64 * 4 * 1e-6
    assert made.prediction.step_s == pytest.approx(24e-3 + 2 * update, rel=1e-3)


def test_times_that_were_measured_count_before_a_ratio():
    profile = model_of(1e-3)
    joined = with_profiles(profile, {"n1": slowed(profile, 3.0)}, links(2))
    kinds = device_kinds(joined, links(2, n0=2.0, n1=0.1), (1, 0))
    assert [k.positions for k in kinds] == [(0,), (1,)]
    assert [k.profile.units[1].whole.forward(1) for k in kinds] == pytest.approx([3e-3, 0.5e-3])
    # Slowing all of it slows the times of other nodes too.
    again = device_kinds(slowed(joined, 2.0), links(2), (0, 1))
    assert [k.profile.units[1].whole.forward(1) for k in again] == pytest.approx([2e-3, 6e-3])


def test_a_plan_that_divides_all_has_even_shares_where_these_are_quicker():
    # Divided units compute the whole batch wherever it was fed; uneven shares only cost bytes.
    profile = chain_profile([linear("fc", 4096, 4096, 1e-6)], bytes_per_sample=1e6, features=64)
    there = links(2, inter=1e7, n1=0.5)
    problem = Problem(profile, there, Goal(batch=12))
    found = solve(problem, "integer")
    assert found.plan.units[1].layout.degree == 2
    assert found.plan.local_batch_sizes == ()
    assert found.status == found.plan.provenance.status == "heuristic"
    uneven = problem.cost_model()
    assert uneven.local_batch_sizes == (8, 4)


# -- records ---------------------------------------------------------------------------------------


def test_a_batch_of_another_size_is_shared_out_in_proportion():
    assert local_batches(7, 3) == (3, 2, 2)
    assert local_batches(12, 2, (8, 4)) == (8, 4)
    assert local_batches(13, 2, (8, 4)) == (9, 4)
    assert local_batches(6, 2, (8, 4)) == (4, 2)
    assert local_batches(0, 2, (8, 4)) == (0, 0)
    # Two thirds of a sample are one, as long as there are as many as ranks.
    assert local_batches(40, 2, (59, 1)) == (39, 1)
    assert local_batches(4, 4, (90, 1, 1, 1)) == (1, 1, 1, 1)
    assert local_batches(1, 2, (59, 1)) == (1, 0)
    plan = planned(model_of(1e-3), links(2, n1=0.5), batch=12)
    assert [plan.local_batch_size(rank) for rank in (0, 1)] == [8, 4]
    assert [plan.local_batch_size(rank, 7) for rank in (0, 1)] == [5, 2]
    with pytest.raises(InputError, match="no rank 2: name one from 0 to 1"):
        plan.local_batch_size(2)
    turned = msgspec.structs.replace(plan, placement=(1, 0))
    assert [turned.local_batch_size(rank) for rank in (0, 1)] == [4, 8]


@pytest.mark.parametrize("sizes", [[8, 5], [12], [4, 4, 4]])
def test_sizes_that_are_no_shares_of_the_batch_are_refused(sizes):
    plan = planned(model_of(1e-3), links(2, n1=0.5), batch=12)
    wrong = msgspec.json.encode({**msgspec.to_builtins(plan), "local_batch_sizes": sizes})
    with pytest.raises(InputError, match="are not the 12 samples of a batch over 2 ranks"):
        decode(Plan, wrong, "plan.json")


def test_local_steps_have_even_shares():
    plan = planned(model_of(1e-3), links(2, n1=0.5), batch=12)
    apart = {"hosts": 2, "inner_steps": 4, "fragments": [0]}
    wrong = {**msgspec.to_builtins(plan), "local_steps": apart}
    with pytest.raises(InputError, match="local_batch_sizes 8, 4 and local steps do not go"):
        decode(Plan, msgspec.json.encode(wrong), "plan.json")


@pytest.mark.parametrize("slow", ["n0", "n1"])
def test_hosts_that_train_apart_wait_for_the_slowest(slow):
    profile = model_of(1e-3)
    goal = Goal(batch=12, allow_local_steps=True)
    capability = msgspec.structs.replace(WHOLE, local_steps=True)
    joined = with_profiles(profile, {slow: slowed(profile, 2.0)}, links(2))
    for made_of, there in ((profile, links(2, **{slow: 0.5})), (joined, links(2))):
        own = host_cluster(made_of, there)
        assert [node.name for node in own.nodes] == [slow]
        found = solve(Problem(made_of, there, goal, capability), "integer").checked()
        # With shares by speed 8 and 4 samples, which none of them waits for.
        assert found.local_batch_sizes
        one = CostModel(made_of, own, Goal(batch=6))
        assert evaluation(one, one.baseline).prediction.compute_s == pytest.approx(6 * 2 * 3e-3)


def test_other_sizes_are_of_the_first_nodes_like():
    """With the times that the profile has of that node, under whatever name."""
    profile, there = model_of(1e-3), links(2)
    joined = with_profiles(profile, {"n0": slowed(profile, 2.0)}, there)
    problem = Problem(joined, there, Goal(batch=12), WHOLE)
    for ranks in (1, 4):
        other = resized_problem(problem, ranks)
        model = other.cost_model()
        step = evaluation(model, model.baseline).prediction
        assert step.compute_s == pytest.approx(12 / ranks * 2 * 3e-3)
    assert resized_problem(problem, 2).profile is joined
    by_ratio = resized_problem(Problem(profile, links(2, n0=0.5), Goal(batch=12), WHOLE), 1)
    model = by_ratio.cost_model()
    assert single_device_batch_s(model) == pytest.approx(12 * 2 * 3e-3)
    assert evaluation(model, model.baseline).prediction.compute_s == pytest.approx(12 * 2 * 3e-3)


def test_memory_is_told_with_each_devices_own_limit():
    profile, there = model_of(1e-3), with_memory(links(2), n1=10**9)
    plan = planned(profile, there, batch=12)
    found = memory_timeline(plan, profile, there).timelines
    assert {one.ranks: one.limit_bytes for one in found} == {(0,): 10**12, (1,): 10**9}


def test_what_cannot_be_joined_is_refused():
    profile, there = model_of(1e-3), links(2)
    with pytest.raises(InputError, match="profile of node 'n7', which cluster 'test' does not"):
        with_profiles(profile, {"n7": profile}, there)
    with pytest.raises(InputError, match=r"there is a speed of node 'n7'.*choose from n0, n1"):
        with_relative_speeds(there, {"n7": 0.5})
    with pytest.raises(InputError, match="measure the same model on both"):
        with_profiles(profile, {"n1": model_of(1e-3, 1e-3)}, there)
    half = msgspec.structs.replace(profile, precision="bf16-mixed")
    with pytest.raises(InputError, match=r"precision float32, bf16-mixed, and the other with"):
        with_profiles(profile, {"n1": half}, there)
    twice = (times_of(profile, ("n0", "n1")), times_of(profile, ("n1",)))
    with pytest.raises(ValueError, match="lists node 'n1' twice"):
        msgspec.structs.replace(profile, node_times=twice)
    other = times_of(model_of(1e-3, 1e-3), ("n1",))
    with pytest.raises(ValueError, match="node_times of n1 are of other units"):
        msgspec.structs.replace(profile, node_times=(other,))


def test_times_of_a_node_are_replaced_by_later_ones():
    profile, there = model_of(1e-3), links(3)
    both = msgspec.structs.replace(profile, node_times=(times_of(profile, ("n1", "n2")),))
    joined = with_profiles(both, {"n1": slowed(profile, 2.0)}, there)
    assert [times.nodes for times in joined.node_times] == [("n2",), ("n1",)]


# -- the least of the largest ------------------------------------------------------------------


def test_bounds_are_kept_and_what_is_alike_is_even():
    def same(n):
        return (0.0,)

    def double(n):
        return (2.0 * n,)

    def single(n):
        return (float(n),)

    assert least_largest(7, [same] * 3, [0] * 3, [7] * 3) == (3, 2, 2)
    assert least_largest(7, [same] * 3, [1] * 3, [7, 7, 1]) == (3, 3, 1)
    assert least_largest(9, [single, double], [0, 4], [9, 9]) == (5, 4)
    assert least_largest(9, [single, double], [0, 0], [4, 9]) == (4, 5)
    # One that is slow with the least that it must have does not leave the others' shares open.
    assert least_largest(8, [lambda n: (100.0,), single, double], [1, 0, 0], [1, 8, 8]) == (1, 5, 2)


def test_what_takes_as_long_with_any_number_does_not_decide():
    """A rank whose updates are slow is the last to be done with any share: that is no reason to
    give it the least that it may have."""

    def fast(n):
        return (1.0, 1.0 * n)

    def slow(n):
        return (1.1, 2.0 * n)

    assert least_in_turn(12, [fast, slow], [1, 1], [12, 12]) == (8, 4)
    assert least_in_turn(12, [slow, fast], [1, 1], [12, 12]) == (4, 8)


def test_what_hardly_takes_longer_with_more_samples_does_not_decide_either():
    """VGG-11 over a slow link: of 48 samples the slow host was given one, for 0.1% of the step."""

    def fast(n):
        return (1.0427 + 0.0009 * n, 0.14 + 0.009 * n)

    def slow(n):
        return (1.0862 + 0.0002 * n, 0.23 + 0.025 * n)

    assert least_in_turn(48, [fast, slow], [1, 1], [48, 48]) == (38, 10)
