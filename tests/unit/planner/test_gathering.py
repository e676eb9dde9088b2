"""Parameters that are whole only while used: what that saves and costs, when it is chosen."""

import re
from dataclasses import replace

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory.prefetch_overlap import UnshardedBytes, gathered
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.simulate.schedule import messages_of
from meshwright.planner.simulate.slicing import by_urgency
from meshwright.planner.solve.evaluate import decisions_of, evaluate, make_plan, rank_memory
from meshwright.planner.solve.heuristic.schedules import without_shards
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, linear
from tests.unit.planner.test_schedules import SHARDS, exchanges, problem_of

MIB = 2**20
FULLY = msgspec.structs.replace(SHARDS, exchange=("dense", "sharded", "fully_sharded"))


def model_of(widths=(512, 512, 1024, 512), micro_batches=1):
    """Linear units of 1, 1, 2 and 1 MiB between an input and an output unit, on four ranks."""
    units = [linear(f"fc{i}", 512, width, 1e-4) for i, width in enumerate(widths)]
    goal = Goal(batch=64, optimizer="adam")
    return CostModel(
        chain_profile(units), cluster(4), goal, micro_batches=micro_batches, message_bytes=MIB,
        sliced=True,
    )  # fmt: skip


def all_with(model, exchange):
    return tuple(
        Option(data_parallel(4), exchange=exchange if owned else "dense") for owned in model.owned
    )


def test_a_rank_holds_its_chunks_and_the_units_at_work():
    model = model_of()
    sharded, fully = (
        rank_memory(model, all_with(model, exchange))[0].points
        for exchange in ("sharded", "fully_sharded")
    )
    assert {p.weights for p in sharded} == {5 * MIB}
    assert {p.weights for p in fully} == {5 * MIB / 4}
    assert [p.optimizer for p in fully] == [p.optimizer for p in sharded]
    forward = [p.workspace / MIB for p in fully if p.phase == "forward"]
    assert forward == [0, 2, 3, 3, 1, 1]  # its own, and the next unit's
    less = [p.workspace / MIB for p in sharded if p.phase == "forward"]
    assert less == [0] * 6
    # Chunks of weights and state, chunks of gradients that are complete; then its own parameters
    # and those of the unit before it, its gradient, and twice what others own of those of the two
    # units after it. Beside the input the first two units' gradients travel, beside the output the
    # last one's parameters are. Where it is more: as its gradient leaves, what others own of it.
    expected = {
        5: 3.75 + 1,
        4: 3.75 + 1 / 4 + 2 + 1 + 3 / 4,
        3: 3.75 + 3 / 4 + 2 + 1 + 2 * 3 / 4 + 1.5 * 1,
        2: 3.75 + 4 / 4 + 1 + 1 + 3 / 4 + 1.5 * (2 + 1),
        1: 3.75 + 5 / 4 + 1 + 0 + 3 / 4 + 1.5 * (1 + 2),
        0: 3.75 + 5 / 4 + 1.5 * (1 + 1),
    }
    backward = {p.unit: p.total / MIB for p in fully if p.phase == "backward"}
    assert backward == pytest.approx(expected, abs=0.05)  # and feature maps


def relu(name):
    unit = linear(name, 1, 1, 1e-5)
    return msgspec.structs.replace(unit, kind="relu", parameters=(), splits=())


def test_units_without_parameters_work_beside_their_neighbours_whole_ones():
    """Two of them between units of 2 and 3 MiB, of which any may be fully sharded or not."""
    units = [linear("fc0", 512, 1024), relu("a"), relu("b"), linear("fc1", 1024, 768)]
    goal = Goal(batch=64, optimizer="adam")
    model = CostModel(chain_profile(units), cluster(4), goal, message_bytes=MIB, sliced=True)
    home = Option(data_parallel(4))
    for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
        chosen = [home] * 6
        chosen[1] = home._replace(exchange="fully_sharded" if first else "dense")
        chosen[4] = home._replace(exchange="fully_sharded" if second else "dense")
        points = rank_memory(model, tuple(chosen))[0].points
        there = {(p.unit, p.phase): p.workspace / MIB for p in points}
        for k in (2, 3):
            assert there[k, "forward"] == 2 * first + 3 * second
            assert there[k, "backward"] == 2 * first + 1.5 * 3 * second


def test_micro_batches_add_up_whole_gradients():
    model = model_of(micro_batches=2)
    points = rank_memory(model, all_with(model, "fully_sharded"))[0].points
    assert {p.gradients for p in points if p.phase != "update"} == {5 * MIB}


def test_nothing_is_gathered_where_nothing_is_divided():
    model = model_of()
    alone = Option(msgspec.structs.replace(data_parallel(4), groups=1), exchange="fully_sharded")
    assert (
        gathered(model, 1, alone)
        == gathered(model, 1, Option(data_parallel(4)))
        == UnshardedBytes()
    )


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_parameters_are_sent_once_more_for_each_use(micro_batches):
    """An all-gather takes half of what a reduce-scatter and an all-gather take here."""
    model = model_of(micro_batches=micro_batches)
    home = Option(data_parallel(4))
    dense, sharded, fully = (
        model.unit(2, home._replace(exchange=exchange))
        for exchange in ("dense", "sharded", "fully_sharded")
    )
    parts = 1 + 2 * micro_batches
    assert fully.exchange.sent_bytes == pytest.approx(sharded.exchange.sent_bytes * parts / 2)
    assert fully.exchange.seconds == pytest.approx(sharded.exchange.seconds * parts / 2)
    assert fully.update_s == sharded.update_s == dense.update_s / 4


def limited(problem, bytes_):
    goal = msgspec.structs.replace(problem.goal, memory_limit_bytes=bytes_)
    return replace(problem, goal=goal)


@pytest.mark.parametrize("either", [False, True])
@pytest.mark.parametrize("solver", ["heuristic", "integer", "lagrangian"])
def test_it_is_chosen_where_nothing_else_fits(solver, either):
    problem = replace(problem_of(1e-11), capability=FULLY)
    free = solve(problem, solver)
    assert exchanges(free) == {"dense"}
    asked = problem.profile, problem.cluster, problem.goal
    chosen = tuple(
        option._replace(exchange="sharded") if owned else option
        for option, owned in zip(decisions_of(free.plan), CostModel(*asked).owned, strict=True)
    )
    sharded = evaluate(*asked, chosen, schedule="priority", message_bytes=2**19)
    roomy = limited(problem, max(sharded.peak_bytes) + 1)
    assert exchanges(solve(roomy, solver)) <= {"dense", "sharded"}
    tight = limited(problem, max(sharded.peak_bytes) - MIB // 4)
    found = solve(tight, solver)
    assert "fully_sharded" in exchanges(found)
    assert max(found.plan.prediction.peak_bytes) <= tight.goal.memory_limit_bytes
    assert solve(without_shards(tight, ("fully_sharded",)), solver).plan is None
    # Where units may be offloaded, they may not be gathered: what needs that is planned without.
    kinds = msgspec.structs.replace(FULLY, memory=("keep", "offload"))
    open_ = replace(tight, any_schedule=either, shard_if_needed=not either)
    found = solve(replace(open_, capability=kinds, cluster=with_hosts(tight.cluster)), solver)
    assert found.plan.schedule == "priority"
    assert "fully_sharded" in exchanges(found)


def with_hosts(links):
    """The cluster, its devices linked to their hosts."""
    device = msgspec.structs.replace(links.devices[0], host_bytes_per_s=1e9)
    nodes = tuple(msgspec.structs.replace(node, devices=(device,)) for node in links.nodes)
    return msgspec.structs.replace(links, nodes=nodes)


def test_offload_is_refused():
    model = model_of()
    option = Option(data_parallel(4), memory="offload", exchange="fully_sharded")
    with pytest.raises(InputError, match="offload"):
        model.unit(1, option)


def test_offload_beside_parameters_in_shards_is_refused():
    made = make_plan(model_of().profile, cluster(4), Goal(batch=4))
    units = list(made.units)
    for k, decision in ((1, {"memory": "offload"}), (2, {"exchange": "fully_sharded"})):
        units[k] = msgspec.structs.replace(units[k], **decision)
    plan = msgspec.structs.replace(made, units=tuple(units), schedule="priority")
    (why,) = EVERYTHING.refusals(plan)
    assert re.search(r"asks for offload and unit .* cannot be in one plan", why)


def test_where_a_unit_is_fully_sharded_all_leave_as_they_get_ready():
    model = model_of()
    plain, one = all_with(model, "dense"), list(all_with(model, "dense"))
    one[2] = one[2]._replace(exchange="fully_sharded")
    by_priority = [m.urgency for m in messages_of(model, plain, "priority")]
    assert by_priority == sorted(by_priority, reverse=True)
    assert len(set(by_priority)) > 1
    assert {m.urgency for m in messages_of(model, one, "priority")} == {0.0}
    # The executor asks the same.
    assert by_urgency(option.exchange for option in plain)
    assert not by_urgency(option.exchange for option in one)
