"""What the planner simulates is what the executor sends: the same messages."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.gradients.buckets import BucketExchange
from meshwright.executor.gradients.low_rank import LowRankSlice
from meshwright.executor.gradients.topk import TopkSlice
from meshwright.executor.parallel import run_of
from meshwright.models import zoo as models
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Decisions, Option
from meshwright.planner.schema.plan import Plan, Style
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.simulate.schedule import messages_of, pack_gradients
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.catalogue import describe_cluster
from meshwright.profiler.estimate import estimate

DEVICE = "a100-sxm-40gb"
SLICE_BYTES = 2**17 + 100
"""So that small parameters are packed, and large ones are cut unevenly."""
Sent = list[tuple[list[str], list[tuple[tuple[str, ...], int, int]]]]
"""The groups: names of their gradients, and of each slice the names, part and parts."""


@cache
def profiled(name: str) -> ModelProfile:
    return estimate(models.build(name), DEVICE, batches=(8,))


def decided(
    profile: ModelProfile, world: int, degree: int, styles: tuple[Style, ...], **how: Any
) -> Decisions:
    """Data parallelism, or linear units divided in these styles in turn."""
    found, number = [], 0
    for unit in profile.units:
        style = styles[number % len(styles)]
        if degree > 1 and unit.kind == "linear" and unit.split(style) is not None:
            number += 1
            found.append(Option(Layout(groups=world // degree, degree=degree), style, **how))
        else:
            found.append(Option(Layout(groups=world), **({} if unit.fixed else how)))
    return tuple(found)


def planned(name: str, world: int, degree: int, **how: Any) -> tuple[Plan, CostModel, Decisions]:
    profile, goal = profiled(name), Goal(batch=8 * world)
    cluster = describe_cluster(device=DEVICE, nodes=world, inter_gbit_s=10.0)
    decisions = decided(profile, world, degree, ("column", "row"), **how)
    model = CostModel(profile, cluster, goal, message_bytes=SLICE_BYTES, sliced=True)
    plain = tuple(Option(o.layout, o.style) for o in decisions)
    plan = make_plan(profile, cluster, goal, plain, schedule="priority", message_bytes=SLICE_BYTES)
    units = [
        msgspec.structs.replace(u, exchange=o.exchange, exchange_ratio=o.ratio, wire=o.wire)
        for u, o in zip(plan.units, decisions, strict=True)
    ]
    return msgspec.structs.replace(plan, units=tuple(units)), model, decisions


def sent(rank: int, name: str, plan: Plan) -> tuple[Sent, list[int]]:
    """What this rank will send, and the bytes of each message."""
    torch.manual_seed(0)
    model = models.build(name).model
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, timeout_s=30)
    priority = run_of(model).priority
    assert priority is not None
    found, sizes = [], []
    for grad_group in priority.grad_groups:
        if grad_group.params[0].group.handle is None:
            continue
        slices = []
        for one in grad_group.slices:
            names = tuple(e.name for e in one.params)
            slices.append((names, one.slice_spec.part, one.slice_spec.parts))
            assert isinstance(one, TopkSlice) == (
                grad_group.params[0].exchange == "topk" and not one.params[0].whole
            )
            thin = isinstance(one, LowRankSlice)
            sizes.append(mean_bytes(one) if thin else one.bytes)
        found.append(([e.name for e in grad_group.params], slices))
    return found, sizes


def mean_bytes(one: LowRankSlice) -> int:
    """Of the two thin matrices that take turns."""
    both = [side for each in one.directions.values() for side in (each.left, each.right)]
    return sum(side.nbytes for side in both) // 2


def simulated(model: CostModel, decisions: Decisions) -> Sent:
    """The same of the planner's simulation."""
    found: Sent = []
    for packed in pack_gradients(model, decisions, "priority"):
        names = [g.name for g in packed.gradients]
        slices = [(tuple(names[i] for i in c.parameters), c.part, c.parts) for c in packed.slices]
        found.append((names, slices))
    return found


def sent_in_buckets(rank: int, name: str, plan: Plan) -> list[tuple[list[str], int]]:
    """What this rank will send: of each bucket the names of its gradients, and its bytes."""
    torch.manual_seed(0)
    model = models.build(name).model
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, timeout_s=30)
    exchange = run_of(model).gradients._exchange
    assert isinstance(exchange, BucketExchange)
    return [
        ([e.name for e in b.params], b.sent_bytes) for b in exchange.buckets if not b.single_rank
    ]


@pytest.mark.parametrize(
    ("name", "world", "degree", "style"),
    [
        ("gpt-tiny", 2, 1, "none"),
        ("cnn-digits", 2, 1, "none"),
        pytest.param("mlp", 4, 2, "column", marks=pytest.mark.slow),
        pytest.param("mlp", 4, 2, "row", marks=pytest.mark.slow),  # biases stay whole
        pytest.param("resnet50-32", 2, 1, "none", marks=pytest.mark.slow),
    ],
)
def test_the_planner_simulates_the_buckets_that_are_sent(ranks, name, world, degree, style):
    profile, goal = profiled(name), Goal(batch=8 * world)
    cluster = describe_cluster(device=DEVICE, nodes=world, inter_gbit_s=10.0)
    decisions = decided(profile, world, degree, (style,))
    model = CostModel(profile, cluster, goal, message_bytes=SLICE_BYTES)
    plan = make_plan(profile, cluster, goal, decisions, message_bytes=SLICE_BYTES)
    theirs = ranks(world)(sent_in_buckets, name, plan)[0]
    groups = pack_gradients(model, decisions, "barrier")
    assert [[g.name for g in group.gradients] for group in groups] == [names for names, _ in theirs]
    assert any(len(names) > 1 for names, _ in theirs), "nothing shares a bucket"
    assert len(theirs) > 1, "everything is in one bucket"
    predicted = [message.sent_bytes for message in messages_of(model, decisions, "barrier")]
    assert predicted == pytest.approx([size for _, size in theirs], abs=1)


CASES = [
    ("gpt-tiny", 2, 1, {}),  # tied weights
    ("gpt-tiny", 2, 1, {"wire": "bf16"}),
    ("gpt-tiny", 2, 1, {"exchange": "sharded"}),
    ("cnn-digits", 2, 1, {}),
    ("gpt-tiny", 2, 1, {"exchange": "topk", "ratio": 0.1}),
    ("gpt-tiny", 2, 1, {"exchange": "dropped", "ratio": 0.1}),
    ("gpt-tiny", 2, 1, {"exchange": "low_rank", "ratio": 0.05}),
    pytest.param("mlp", 4, 2, {}, marks=pytest.mark.slow),
    pytest.param("resnet50-32", 2, 1, {"exchange": "fully_sharded"}, marks=pytest.mark.slow),
    pytest.param("vgg11", 4, 2, {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "world", "degree", "how"), CASES)
def test_the_planner_simulates_the_messages_that_are_sent(ranks, name, world, degree, how):
    plan, model, decisions = planned(name, world, degree, **how)
    theirs, sizes = ranks(world)(sent, name, plan)[0]
    ours = simulated(model, decisions)
    assert sorted(ours) == sorted(theirs)
    if how.get("exchange", "low_rank") != "low_rank":
        return
    messages = messages_of(model, decisions, "priority")
    assert len(messages) == len(sizes)
    assert len({m.units for m in messages}) < len(messages)
    assert sum(len(m.units) > 1 for m in messages) > 0, "no small units that share a message"
    ring = {unit.layout.groups for unit in plan.units}
    if ring == {world}:
        predicted = sum(m.sent_bytes for m in messages)
        # The rank is the whole number that is next to the ratio.
        off = 0.1 if "exchange" in how else 1e-3
        assert predicted == pytest.approx(sum(2 * (world - 1) / world * s for s in sizes), rel=off)
