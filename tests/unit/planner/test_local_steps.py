"""Hosts that train apart: the round, when it is planned, and what it is predicted to take."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cli.render.documents import bound_sentence
from meshwright.planner.cost.budget import single_device_batch_s
from meshwright.planner.cost.collectives import Fabric
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.fragments import (
    FragmentCost,
    first_units,
    fragment_bytes,
    fragment_cost,
)
from meshwright.planner.explain import local_steps as hosts_apart
from meshwright.planner.explain import why
from meshwright.planner.explain.advice import LOCAL_STEPS, advise
from meshwright.planner.explain.compare import compare, with_exact_gradients
from meshwright.planner.explain.front import front
from meshwright.planner.explain.what_if import gains_of
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.cluster import Interference
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import make_goal
from meshwright.planner.schema.local_steps import MOST_INNER_STEPS, LocalSteps
from meshwright.planner.schema.record import decode, encode
from meshwright.planner.simulate.local_round import simulate_round
from meshwright.planner.solve.evaluate import evaluate, evaluation
from meshwright.planner.solve.local_steps import ROOM, kept_bytes, plan_of_host
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear

# A small choice, as it is planned many times here.
CAPABILITY = msgspec.structs.replace(PLAIN, styles=("none",), local_steps=True)
QUIET = Interference()
MBIT = 1e6 / 8


def rounds():
    """Rounds of all kinds."""

    @st.composite
    def drawn(draw):
        length = draw(st.integers(1, 40))
        count = draw(st.integers(1, min(length, 6)))
        return LocalSteps(
            hosts=2,
            inner_steps=length,
            fragments=tuple(range(count)),
            delay=draw(st.integers(0, length - 1)),
        )

    return drawn()


def asked_for_apart(objective="step", micro=1, **links):
    units = [linear(f"u{i}", 512, 512, 1e-3) for i in range(3)]
    goal = make_goal(64, allow_local_steps=True, objective=objective)
    there = cluster(2, 2, inter=MBIT, **links)
    return problem_for(chain_profile(units), there, goal, CAPABILITY)


def test_the_objective_of_a_plan_with_local_steps_is_the_goals():
    for objective, figure in (("step", "step_s"), ("gpu-seconds", "gpu_seconds")):
        result = solve(asked_for_apart(objective), "heuristic")
        assert result.plan.local_steps is not None
        assert result.objective_s == getattr(result.plan.prediction, figure)


def test_a_limit_of_device_seconds_is_of_the_whole_plan():
    """A host's own part keeps it, for its part of the batch; what hosts wait for, too, counts."""
    problem = asked_for_apart()
    plan = solve(problem, "heuristic").checked()
    assert plan.local_steps is not None
    alone_s = single_device_batch_s(CostModel(problem.profile, problem.cluster, problem.goal))
    limit = plan.prediction.gpu_seconds / alone_s
    for factor, kept in ((1.01, True), (0.99, False)):
        goal = msgspec.structs.replace(problem.goal, amplification_limit=limit * factor)
        found = solve(replace(problem, goal=goal), "heuristic").plan
        assert (found is not None and found.local_steps is not None) is kept


def test_the_front_has_plans_of_hosts_that_train_together():
    points = front(asked_for_apart(), 3, "heuristic")
    assert points
    assert all(point.result.plan.local_steps is None for point in points)


def test_another_algorithm_is_no_gain_of_a_change():
    problem = asked_for_apart()
    goal = msgspec.structs.replace(problem.goal, allow_local_steps=False)
    plan = solve(replace(problem, goal=goal), "heuristic").checked()
    exact = gains_of(plan, replace(problem, goal=goal))
    assert gains_of(plan, problem) == exact
    assert exact


# -- the round -------------------------------------------------------------------------------------


@given(rounds())
def test_each_fragment_leaves_once_a_round_and_arrives_its_delay_later(local):
    steps = range(1, 4 * local.inner_steps + 1)
    left = [(local.leaving(step), step) for step in steps if local.leaving(step) is not None]
    arrived = [(local.arriving(s), s) for s in steps if local.arriving(s) is not None]
    count = len(local.fragments)
    # In every round all of them in order, so that ranks issue the same.
    assert [fragment for fragment, _ in left] == [*range(count)] * 4
    late = [(fragment, step + local.delay) for fragment, step in left]
    assert arrived == [pair for pair in late if pair[1] <= steps[-1]]
    # A fragment has arrived before it leaves again.
    for fragment in range(count):
        turns = [step for one, step in left if one == fragment]
        assert all(a + local.delay < b for a, b in pairwise(turns))
    # The last leaves with the round's last step, and they are spread evenly.
    assert left[count - 1][1] == local.inner_steps
    gaps = {b - a for (_, a), (_, b) in pairwise(left)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_a_round_by_hand():
    local = LocalSteps(hosts=2, inner_steps=5, fragments=(0, 2), delay=2)
    assert [local.leaving(step) for step in range(1, 11)] == [
        None, None, 0, None, 1, None, None, 0, None, 1,
    ]  # fmt: skip
    assert [local.arriving(step) for step in range(1, 11)] == [
        None, None, None, None, 0, None, 1, None, None, 0,
    ]  # fmt: skip
    assert [local.fragment_of(unit) for unit in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"hosts": 1}, "leave nothing to average"),
        ({"fragments": (1, 2)}, "must begin with unit 0"),
        ({"fragments": (0, 2, 1)}, "must begin with unit 0"),
        ({"fragments": (0, 1, 2), "inner_steps": 2}, "3 fragments"),
        ({"delay": 4}, "lasts beyond the round of 4"),
        ({"mixing": 0.0}, "mixing of 0"),
        ({"outer_momentum": 1.0}, "outer momentum of 1"),
    ],
)
def test_rounds_that_cannot_be(fields, says):
    with pytest.raises(ValueError, match=says):
        LocalSteps(**{"hosts": 2, "inner_steps": 4, **fields})


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_fragments_are_of_about_equal_bytes_and_none_is_empty(sizes, count):
    first = first_units(sizes, count)
    found = fragment_bytes(sizes, first)
    assert sum(found) == sum(sizes)
    assert len(found) <= count
    if sum(sizes):
        assert all(found)
        # None is larger than its part and its largest unit.
        assert max(found) <= sum(sizes) / count + 2 * max(sizes)


# -- what it is predicted to take ------------------------------------------------------------------


def test_a_message_that_steps_hide_costs_nothing():
    local = LocalSteps(hosts=2, inner_steps=4, delay=2)
    found = simulate_round(local, 1.0, [FragmentCost(2.0, 0.0, 0.0)], QUIET)
    assert found.step_s == pytest.approx(1.0)
    assert found.exposed_s == 0


def test_what_is_not_hidden_is_waited_for_once_a_round():
    local = LocalSteps(hosts=2, inner_steps=4, delay=2)
    found = simulate_round(local, 1.0, [FragmentCost(3.0, 0.5, 0.0)], QUIET)
    # A second of waiting and half a second of applying over four steps.
    assert found.exposed_s == pytest.approx(0.25)
    assert found.applied_s == pytest.approx(0.125)
    assert found.step_s == pytest.approx(1.375)
    at_once = msgspec.structs.replace(local, delay=0)
    found = simulate_round(at_once, 1.0, [FragmentCost(3.0, 0.5, 0.0)], QUIET)
    assert found.step_s == pytest.approx(1 + 3.5 / 4)


def test_messages_of_fragments_share_the_link():
    local = LocalSteps(hosts=2, inner_steps=2, fragments=(0, 1), delay=1)
    found = simulate_round(local, 1.0, [FragmentCost(2.0, 0.0, 0.0)] * 2, QUIET)
    assert found.step_s == pytest.approx(2.0)  # the link is always busy


def test_steps_are_slowed_while_messages_travel():
    local = LocalSteps(hosts=2, inner_steps=8, delay=4)
    slow = Interference(compute_slowdown=2.0)
    found = simulate_round(local, 1.0, [FragmentCost(2.0, 0.0, 0.0)], slow)
    # In two seconds of the message one second's work is done.
    assert found.step_s == pytest.approx(1 + 1 / 8)
    assert found.slowed_s == pytest.approx(1 / 8)


def test_ranks_of_a_host_share_a_message_out():
    links = cluster(2, 2, inter=1e6, intra=1e9, latency_s=0.0)
    found = fragment_cost(Fabric(links, (0, 1, 2, 3)), 2, 8_000_000, 0.0)
    # Each rank's half, all-reduced over two hosts, sends its half once: 4 MB, both over one link.
    assert found.message_s == pytest.approx(8.0, rel=1e-6)
    assert found.sent_bytes == pytest.approx(4e6 + 4e6)
    alone = fragment_cost(Fabric(cluster(2, inter=1e6, latency_s=0.0), (0, 1)), 2, 8_000_000, 0.0)
    assert alone.message_s == pytest.approx(found.message_s, rel=1e-6)
    assert alone.applied_s == 0


# -- when it is planned ----------------------------------------------------------------------------


def profile_of():
    units = [linear(f"fc{i}", 512, 512, 1e-3) for i in range(4)]
    return chain_profile(units, updates=(("sgd", 1e-12), ("momentum", 1e-12)))


def links_of(mbit_s, hosts=2, each=1, **more):
    return cluster(hosts, each, inter=mbit_s * MBIT, **more)


def problem_of(links, **goal):
    asked = make_goal(64, **goal)
    return problem_for(profile_of(), links, asked, CAPABILITY, schedule="barrier")


def planned(links, **goal):
    found = solve(problem_of(links, **{"allow_local_steps": True, **goal}), "heuristic")
    return found.plan, found


@pytest.mark.parametrize("each", [1, 2])
def test_on_slow_links_and_not_on_fast_ones(each):
    slow, _ = planned(links_of(50, each=each))
    fast, found = planned(links_of(10_000, each=each))
    assert slow.local_steps.hosts == 2
    assert fast.local_steps is None
    assert "not clearly quicker" in found.reason
    together, _ = planned(links_of(50, each=each), allow_local_steps=False)
    assert slow.prediction.step_s < 0.95 * together.prediction.step_s
    assert slow.baseline == together.baseline


def test_without_leave_nothing_changes():
    together, _ = planned(links_of(10_000))
    plain, _ = planned(links_of(10_000), allow_local_steps=False)
    assert together.units == plain.units
    assert together.prediction == plain.prediction
    assert plain.local_steps is None
    assert encode(decode(type(plain), encode(plain))) == encode(plain)


def test_another_cluster_s_hosts_are_refused():
    made, _ = planned(links_of(50, each=2))
    with pytest.raises(InputError, match=r"hosts of 2 ranks .* nodes of 1 devices: .*--cluster"):
        plan_of_host(made, profile_of(), links_of(50, hosts=4))


def waited_s(local, own_s, links, slower):
    """What a step of the round waits for messages that take ``slower`` times as long as they do."""
    sizes = fragment_bytes([0] + [4 * 512 * 512] * 4, local.fragments)  # the first is the input
    costs = [fragment_cost(Fabric(links, (0, 1)), 2, size, 0.0) for size in sizes]
    longer = [cost._replace(message_s=slower * cost.message_s) for cost in costs]
    return simulate_round(local, own_s, longer, QUIET).exposed_s


def test_the_round_is_the_shortest_that_hides_a_link_that_is_a_little_slower():
    links = links_of(4)
    slow, _ = planned(links)
    local, own = slow.local_steps, plan_of_host(slow, profile_of(), links)[0].prediction.step_s
    assert slow.prediction.exposed_s == 0
    assert waited_s(local, own, links, ROOM) <= 0.01 * own
    shorter, _ = planned(links, inner_steps=local.inner_steps - 1)
    assert waited_s(shorter.local_steps, own, links, ROOM) > 0.01 * own
    slower, _ = planned(links_of(2))
    assert slower.local_steps.inner_steps > local.inner_steps
    # On links that no round hides the longest is taken, and waits.
    slowest, _ = planned(links_of(0.05))
    assert slowest.local_steps.inner_steps == MOST_INNER_STEPS
    assert slowest.prediction.exposed_s > 0


def test_what_is_asked_for_is_planned():
    made, _ = planned(links_of(50), inner_steps=12, fragments=3, outer_lr=0.5, outer_momentum=0.8)
    local = made.local_steps
    assert (local.inner_steps, len(local.fragments)) == (12, 3)
    assert (local.outer_lr, local.outer_momentum) == (0.5, 0.8)


def test_predicted_of_a_plan_with_local_steps():
    links = links_of(50, each=2, intra=1e10)
    made, _ = planned(links, inner_steps=400)
    profile = profile_of()
    own, host = plan_of_host(made, profile, links)
    assert (own.world_size, host.world_size, own.goal.batch) == (2, 2, 32)
    alone = evaluate(profile, host, own.goal)
    assert own.prediction.step_s == pytest.approx(alone.step_s)
    # A step, and what it is longer by for the round.
    assert made.prediction.step_s == pytest.approx(own.prediction.step_s, rel=0.02)
    assert made.prediction.samples_per_s == pytest.approx(64 / made.prediction.step_s)
    kept = kept_bytes(profile, links)
    assert kept == 3 * 4 * 4 * 512 * 512 // 2
    assert made.prediction.peak_bytes == tuple(p + kept for p in own.prediction.peak_bytes) * 2
    assert made.prediction.fullest.total == max(made.prediction.peak_bytes)
    assert made.prediction.gpu_seconds == pytest.approx(4 * made.prediction.step_s)
    parameters = 4 * 4 * 512 * 512
    more = made.prediction.wire_bytes - own.prediction.wire_bytes
    assert more == pytest.approx(parameters / 400, rel=0.01)


def test_a_host_has_room_for_what_is_kept():
    roomy, _ = planned(links_of(50), optimizer="adam")
    limit = max(roomy.prediction.peak_bytes)
    tight, _ = planned(links_of(50), optimizer="adam", memory_limit_bytes=limit)
    assert tight.local_steps is not None
    less, found = planned(links_of(50), optimizer="adam", memory_limit_bytes=int(0.6 * limit))
    assert less is None or less.local_steps is None
    assert "nothing fits in the memory of a host's ranks then" in found.reason


def test_hosts_train_by_what_goes_on_inside_them():
    made, _ = planned(links_of(50, each=4))
    for unit in made.units:
        assert unit.layout.size == 8
        assert unit.layout.groups % 2 == 0
        assert unit.exchange == "dense"
    assert not CAPABILITY.refusals(made)
    without = msgspec.structs.replace(CAPABILITY, local_steps=False)
    assert without.refusals(made) == ("the plan has local steps",)
    assert with_exact_gradients(made).local_steps is None
    told = {name: (a, b) for name, a, b in compare(made, with_exact_gradients(made)).settings}
    assert told["local_steps"][1] == "none"


@pytest.mark.parametrize(
    ("links", "goal", "says"),
    [
        (cluster(1, 4), {}, "one host only"),
        (links_of(50), {"batch_statistics": "global"}, "are not shared by hosts"),
    ],
)
def test_where_hosts_cannot_train_apart(links, goal, says):
    made, found = planned(links, **goal)
    assert made.local_steps is None
    assert f"no local steps: {says}" in found.reason or says in found.reason


def test_hosts_of_unequal_size():
    links = links_of(50, hosts=2, each=2)
    nodes = (links.nodes[0], msgspec.structs.replace(links.nodes[1], devices=links.devices[:1]))
    made, found = planned(msgspec.structs.replace(links, nodes=nodes))
    assert made.local_steps is None
    assert "different numbers of devices" in found.reason


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"inner_steps": 8}, "--inner-steps 8 .* says nothing without --allow-local-steps"),
        ({"outer_lr": 0.5}, r"--outer-lr 0.5 \(outer_lr=0.5\) says nothing without"),
        ({"allow_local_steps": True, "inner_steps": 0}, "number of inner steps of 0 cannot be"),
        ({"allow_local_steps": True, "fragments": 0}, "number of fragments of 0 cannot be"),
        (
            {"allow_local_steps": True, "fragments": 3, "inner_steps": 2},
            "3 fragments cannot each have one of 2 inner steps: ask for at most 2",
        ),
        ({"allow_local_steps": True, "outer_lr": 0.0}, "outer learning rate of 0 cannot be"),
        ({"allow_local_steps": True, "outer_momentum": 1.0}, "outer momentum of 1 cannot be"),
        ({"allow_local_steps": True, "outer_momentum": -0.1}, "outer momentum of -0.1 cannot be"),
    ],
)
def test_wrong_options_end_in_a_sentence(options, says):
    with pytest.raises(InputError, match=says):
        make_goal(64, **options)


def test_advise_names_them_with_their_round():
    found = advise(problem_of(links_of(50)), "heuristic")
    ways = {way.name: way for way in found.ways}
    way, (made, _) = ways[LOCAL_STEPS], planned(links_of(50))
    assert way.changes == "algorithm"
    assert way.options == ("--allow-local-steps",)
    assert way.inner_steps == made.local_steps.inner_steps
    assert way.step_s == pytest.approx(made.prediction.step_s)
    fast = advise(problem_of(links_of(10_000)), "heuristic")
    (way,) = (way for way in fast.ways if way.name == LOCAL_STEPS)
    assert way.step_s is None
    assert way.why == "it would not be clearly quicker than the exact plan"
    alone = advise(problem_of(cluster(1, 4)), "heuristic")
    assert LOCAL_STEPS not in {way.name for way in alone.ways}


# -- why it is so ----------------------------------------------------------------------------------


def test_waiting_for_other_hosts_bounds_a_round_that_is_too_short():
    profile, links = profile_of(), links_of(5)
    made, _ = planned(links, inner_steps=4)
    found = hosts_apart.bottleneck(made, profile, links)
    assert (found.part, found.step_s) == ("averages", made.prediction.step_s)
    # On one device a host exchanges nothing by itself.
    assert found.part_s == pytest.approx(made.prediction.exposed_s)
    assert found.hosts.inner_steps == 4
    # What would shorten the step is what planning so predicts.
    longer, _ = planned(links, inner_steps=8)
    faster, _ = planned(links_of(10), inner_steps=4)
    assert found.hosts.longer_s == pytest.approx(longer.prediction.step_s)
    assert found.hosts.faster_s == pytest.approx(faster.prediction.step_s)
    sentence = bound_sentence(found)
    assert sentence.startswith("Bound by waiting for other hosts (")
    assert ": --inner-steps 8 saves " in sentence
    assert "published" not in sentence
    assert "twice the bandwidth between nodes saves nothing" not in sentence


def test_a_host_bounds_a_round_that_hides_the_link():
    profile, links = profile_of(), links_of(50)
    made, _ = planned(links)
    found = hosts_apart.bottleneck(made, profile, links)
    assert (found.part, found.part_s) == ("compute", made.prediction.compute_s)
    assert found.step_s == made.prediction.step_s
    assert "other hosts" not in bound_sentence(found)


def test_what_is_waited_for_besides_computing_is_said():
    # The longest round, on links that it does not hide.
    profile, links = profile_of(), links_of(0.14)
    made, _ = planned(links)
    found = hosts_apart.bottleneck(made, profile, links)
    assert made.local_steps.inner_steps == MOST_INNER_STEPS
    assert (found.part, found.part_s) == ("compute", made.prediction.compute_s)
    sentence = bound_sentence(found)
    assert "Waiting for other hosts takes" in sentence
    assert "--inner-steps 1000 saves" in sentence
    assert "up to 500" in sentence


@pytest.mark.parametrize("limit", [None, 10**9])
def test_a_higher_limit_is_advised_where_one_was_asked(limit):
    """A host's own goal always has one: what is left of the device's memory."""
    profile, links = profile_of(), links_of(50)
    made, _ = planned(links, memory_limit_bytes=limit)
    away = tuple(msgspec.structs.replace(unit, memory="offload") for unit in made.units)
    device = msgspec.structs.replace(links.devices[0], host_bytes_per_s=1e9)
    nodes = tuple(msgspec.structs.replace(node, devices=(device,)) for node in links.nodes)
    there = msgspec.structs.replace(links, nodes=nodes)
    found = hosts_apart.bottleneck(msgspec.structs.replace(made, units=away), profile, there)
    assert found.copies.limited is (limit is not None)


@pytest.mark.parametrize("objective", ["step", "gpu-seconds"])
def test_explained_is_the_whole_plan(objective):
    profile, links = profile_of(), links_of(5, each=2, intra=1e10)
    limits = {"memory_limit_bytes": 10**9, "step_limit_s": 10.0, "amplification_limit": 1e3}
    made, _ = planned(links, inner_steps=4, objective=objective, **limits)
    own, _ = plan_of_host(made, profile, links)
    found = hosts_apart.explain(made, profile, links, capability=CAPABILITY, best=1, what_if=True)
    whole = made.prediction
    assert found.host_step_s == own.prediction.step_s < found.step_s == whole.step_s
    assert found.bound_by == "averages"
    assert found.baseline_s == made.baseline.step_s
    waited = sum(e.seconds for e in found.exposed)
    assert waited == pytest.approx(whole.exposed_s)
    assert (found.needed_bytes, found.available_bytes) == (max(whole.peak_bytes), 10**9)
    used = {use.limit: (use.used, use.available) for use in found.limits}
    assert used["memory_limit_bytes"] == (found.needed_bytes, 10**9)
    assert used["time_limit_s"] == (whole.step_s, 10.0)
    assert used["amplification_limit"][0] == whole.gpu_seconds
    # One device computes the batch of all hosts, and the parts add up.
    time = found.device_time
    model = CostModel(profile, links, make_goal(64))
    together = why.device_time(evaluation(model, model.baseline))
    assert time.single_device_s == together.single_device_s
    assert time.used_s == pytest.approx(whole.gpu_seconds)
    assert time.updates_s == pytest.approx(together.updates_s)
    assert time.shares_s == pytest.approx(together.shares_s)
    assert time.waiting_s > 0.5 * time.used_s
    longer, _ = planned(links, inner_steps=8, objective=objective, **limits)
    then = longer.prediction.step_s if objective == "step" else longer.prediction.gpu_seconds
    rounds, wider = found.gains
    assert rounds.change == "8 inner steps for 4"
    assert rounds.after_s == pytest.approx(then)
    assert wider.change == "twice the bandwidth between nodes"
    assert wider.saved_s > 0
    without = hosts_apart.explain(
        made, profile, links, capability=CAPABILITY, best=1, what_if=False
    )
    assert without.gains == ()


def test_alternatives_of_a_host_have_the_memory_that_is_left_to_it():
    profile, links = profile_of(), links_of(50, each=2, intra=1e10)
    made, _ = planned(links)
    known = msgspec.structs.replace(CAPABILITY, styles=PLAIN.styles)

    def alternatives(limit=None):
        goal = msgspec.structs.replace(made.goal, memory_limit_bytes=limit)
        found = hosts_apart.explain(
            msgspec.structs.replace(made, goal=goal), profile, links, capability=known, best=3,
            what_if=False,
        )  # fmt: skip
        return [other for unit in found.units for other in unit.alternatives]

    # The fullest of a host's other choices would fit by itself, and not beside what is kept.
    most = max(other.peak_bytes for other in alternatives())
    limited = alternatives(most + kept_bytes(profile, links) - 1)
    assert {other.exchange for other in limited} == {"dense"}
    assert {other.fits for other in limited} == {True, False}
    assert all(other.fits == (other.peak_bytes < most) for other in limited)
