"""What a GPU's host takes to issue a step, and what that makes of the step."""

from __future__ import annotations

import msgspec
import pytest
from meshwright.cli.render.documents import bound_sentence
from meshwright.planner.cost.budget import single_device_batch_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.device_kinds import slowed, with_profiles
from meshwright.planner.cost.exchange import PACKED_BYTES
from meshwright.planner.cost.step_time import host_s
from meshwright.planner.explain import why
from meshwright.planner.explain.why import bottleneck, device_time
from meshwright.planner.schema.cluster import ExchangeHostTime, StepOverhead
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import FidelityProfile, ModelProfile
from meshwright.planner.solve.device_timelines import timelines
from meshwright.planner.solve.evaluate import evaluation, issued_s, make_plan

from tests.strategies import chain_profile, cluster, linear

HOME = Option(data_parallel(2))
FORWARD_S, BACKWARD_S, UPDATE_S = 1e-3, 2e-3, 1e-4
OVERHEAD = StepOverhead(step_s=1e-2, parameter_s=1e-4, rerun_s=5e-4, copy_s=3e-4)


def profile_of(device_type: str = "cuda", seconds_per_sample: float = 1e-4) -> ModelProfile:
    made = chain_profile(
        [linear(name, seconds_per_sample=seconds_per_sample) for name in "ab"],
        updates=(("sgd", 0.0),),
    )
    units = tuple(
        msgspec.structs.replace(
            u, host_forward_s=FORWARD_S, host_backward_s=BACKWARD_S, saved_storages=2
        )
        if u.modules
        else u
        for u in made.units
    )
    rates = (msgspec.structs.replace(made.updates[0], host_s=UPDATE_S),)
    return msgspec.structs.replace(made, units=units, updates=rates, device_type=device_type)


def links():
    made = cluster(2, inter=1e12, latency_s=0.0, overhead=OVERHEAD)
    nodes = tuple(
        msgspec.structs.replace(
            n, devices=tuple(msgspec.structs.replace(d, host_bytes_per_s=1e12) for d in n.devices)
        )
        for n in made.nodes
    )
    return msgspec.structs.replace(made, nodes=nodes)


def model_of(profile: ModelProfile, micro_batches: int = 1) -> CostModel:
    return CostModel(profile, links(), Goal(batch=4), micro_batches=micro_batches)


ISSUED = FORWARD_S + BACKWARD_S + OVERHEAD.parameter_s
MORE = {"keep": 0.0, "recompute": FORWARD_S + OVERHEAD.rerun_s, "offload": 2 * OVERHEAD.copy_s}


@pytest.mark.parametrize("memory", MORE)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_policy_is_issued_by_the_host(memory: str, micro_batches: int) -> None:
    model = model_of(profile_of(), micro_batches)
    cost = model.unit(2, HOME._replace(memory=memory))
    expected = micro_batches * (ISSUED + MORE[memory]) + UPDATE_S
    assert cost.host_s == pytest.approx(expected)
    # Once in a step, in its first unit.
    assert model.unit(0, HOME).host_s == pytest.approx(OVERHEAD.step_s)


def test_what_the_host_does_is_no_work_of_the_device() -> None:
    on_cpus, on_gpus = (model_of(profile_of(kind)) for kind in ("cpu", "cuda"))
    for memory in ("keep", "recompute"):
        theirs, ours = (m.unit(2, HOME._replace(memory=memory)) for m in (on_cpus, on_gpus))
        own_s = OVERHEAD.parameter_s + (OVERHEAD.rerun_s if memory == "recompute" else 0.0)
        assert theirs.backward_s == pytest.approx(ours.backward_s + own_s)
        assert theirs.host_s == 0.0
    assert host_s(on_cpus.chain(on_cpus.baseline)) == 0.0


def test_hosts_issue_collectives() -> None:
    """Each redistribution there and back, those inside units among them, and again where forward
    runs again; nothing of them is the device's."""
    links_ = msgspec.structs.replace(links(), overhead=StepOverhead(move_s=1e-3))
    model = CostModel(profile_of(), links_, Goal(batch=4), micro_batches=2)
    column, row = (Option(Layout(groups=1, degree=2), style) for style in ("column", "row"))
    away, home = model.edge(1, HOME, column), model.edge(1, column, row)
    assert (away.host_s, home.host_s) == (pytest.approx(2 * 2e-3), 0.0)
    free = CostModel(profile_of(), links(), Goal(batch=4), micro_batches=2)
    assert away.forward.seconds == free.edge(1, HOME, column).forward.seconds > 0
    inside = model.unit(2, row).host_s - model.unit(2, column).host_s
    assert inside == pytest.approx(2 * 2e-3)
    again = row._replace(memory="recompute")
    rerun = model.unit(2, again).host_s - model.unit(2, row).host_s
    assert rerun == pytest.approx(2 * (FORWARD_S + 1e-3))
    decisions = (HOME, column, row, HOME)
    chain = model.chain(decisions)
    parts = sum(model.unit(k, option).host_s for k, option in enumerate(decisions))
    moved = sum(model.arrival(e, decisions).host_s for e in range(len(model.ends)))
    assert moved > 0
    assert host_s(chain) == pytest.approx(parts + moved)


@pytest.mark.parametrize(
    ("option", "more_s"),
    [
        (HOME, 0.5e-3),
        (HOME._replace(wire="bf16"), 0.5e-3 + 0.5 * 7e-3),
        (HOME._replace(exchange="sharded"), 2 * 0.5e-3 + 3e-3),
        (HOME._replace(exchange="fully_sharded"), 0.5e-3 + 2 * 2 * 0.5e-3 + 2 * 4e-3),
        (HOME._replace(exchange="low_rank", ratio=0.5), 0.5e-3 + 1 * 5e-3),
        (HOME._replace(exchange="topk", ratio=0.5), 1e-3 + 1 * 6e-3),
        (Option(Layout(groups=1, degree=2), "column"), 0.0),
    ],
)
def test_hosts_issue_each_exchange(option: Option, more_s: float) -> None:
    """A matrix that fills half of a pack takes half of a message each way, in two micro-batches."""
    found = {"bf16": 7e-3, "sharded": 3e-3, "low_rank": 5e-3, "topk": 6e-3, "fully_sharded": 4e-3}
    overhead = StepOverhead(
        message_s=1e-3,
        exchanges=tuple(ExchangeHostTime(exchange=n, each_s=s) for n, s in found.items()),
    )
    made = profile_of()
    size = PACKED_BYTES // 2
    unit = made.units[2]
    (weight,) = unit.parameters
    weight = msgspec.structs.replace(weight, shape=(128, size // 512), bytes=size)
    kept = tuple(
        FidelityProfile(exchange=name, ratios=(0.5,), kept=(0.9,)) for name in ("low_rank", "topk")
    )
    unit = msgspec.structs.replace(unit, parameters=(weight,), fidelity=kept)
    made = msgspec.structs.replace(made, units=(*made.units[:2], unit, *made.units[3:]))
    seconds = [
        CostModel(
            made, msgspec.structs.replace(links(), overhead=each), Goal(batch=4), sliced=True,
            micro_batches=2,
        ).unit(2, option).host_s
        for each in (StepOverhead(), overhead)
    ]  # fmt: skip
    assert seconds[1] - seconds[0] == pytest.approx(more_s)


def test_a_segment_is_entered_once() -> None:
    model = model_of(profile_of())
    alone = HOME._replace(memory="recompute")
    together = [o._replace(segment=("a", "b")) if o.memory == "recompute" else o for o in
                (HOME, alone, alone, HOME)]  # fmt: skip
    one_by_one = model.chain((HOME, alone, alone, HOME))
    assert host_s(one_by_one) - host_s(model.chain(together)) == pytest.approx(OVERHEAD.rerun_s)


def test_a_step_is_what_takes_longer() -> None:
    """Of a GPU with little to do it is what its host takes; the rest is said to be waited for."""
    slow, quick = (evaluated(seconds) for seconds in (1e-1, 1e-6))
    assert slow.host_s == 0.0
    issued_s = 2 * (ISSUED + UPDATE_S) + OVERHEAD.step_s
    assert quick.step_s == pytest.approx(issued_s)
    assert quick.host_s == pytest.approx(issued_s - 12e-6, rel=1e-3)
    assert quick.compute_s + quick.blocking_s + quick.exposed_s == pytest.approx(quick.step_s)


def evaluated(seconds_per_sample: float):
    model = model_of(profile_of(seconds_per_sample=seconds_per_sample))
    return evaluation(model, model.baseline).prediction


def test_the_hosts_are_named_where_they_bind() -> None:
    profile = profile_of(seconds_per_sample=1e-6)
    plan = make_plan(profile, links(), Goal(batch=4))
    sentence = bound_sentence(bottleneck(plan, profile, links()))
    assert sentence.startswith("Bound by the hosts, which GPUs wait for to issue work (16.")
    assert "torch.compile" in sentence
    model = model_of(profile)
    done = evaluation(model, model.baseline)
    # They wait for their hosts, not for each other, and are not slowed by communication.
    used = device_time(done)
    assert used.slowing_s == pytest.approx(0.0, abs=1e-9)
    assert used.waiting_s == pytest.approx(0.0, abs=1e-6)
    assert used.host_s == pytest.approx(2 * done.prediction.host_s)
    assert why.term_of(done, "barrier") == why.BindingTerm(hosts=True)
    shown = timelines(model, model.baseline, "barrier")
    assert shown.step_s == pytest.approx(plan.prediction.step_s)


def test_slower_devices_have_slower_hosts_where_nothing_tells_them_apart() -> None:
    (unit,), (other,) = ([slowed(profile_of(), 2.0, hosts=both).units[1]] for both in (False, True))
    assert (unit.host_forward_s, other.host_forward_s) == (FORWARD_S, 2 * FORWARD_S)
    assert (
        unit.whole.forward(1)
        == other.whole.forward(1)
        == 2 * profile_of().units[1].whole.forward(1)
    )


def test_the_slowest_of_unequal_hosts_counts() -> None:
    profile = profile_of()
    slow = slowed(profile, 10.0, hosts=True)
    joined = with_profiles(profile, {"n1": slow}, links())
    model = CostModel(joined, links(), Goal(batch=4))
    assert model.unit(2, HOME).host_s == pytest.approx(
        10 * (FORWARD_S + BACKWARD_S + UPDATE_S) + OVERHEAD.parameter_s
    )


def test_one_device_has_a_host_as_well() -> None:
    """What amplification counts in: else a plan for one device would be refused."""
    model = model_of(profile_of(seconds_per_sample=1e-6))
    assert single_device_batch_s(model) == pytest.approx(2 * (FORWARD_S + BACKWARD_S + UPDATE_S))
    slow = model_of(profile_of(seconds_per_sample=1.0))
    assert single_device_batch_s(slow) == pytest.approx(2 * 4 * 3.0)


def test_a_host_issues_what_its_own_rank_does() -> None:
    """Of branches side by side each rank has one."""
    model = model_of(profile_of(seconds_per_sample=1e-6))
    alone = [HOME._replace(layout=Layout(groups=1, first=n)) for n in range(2)]
    decisions = (HOME, *alone, HOME)
    each = ISSUED + UPDATE_S
    assert issued_s(model, decisions, model.chain(decisions)) == pytest.approx(
        each + OVERHEAD.step_s
    )
    assert issued_s(model, model.baseline, model.chain(model.baseline)) == pytest.approx(
        2 * each + OVERHEAD.step_s
    )
