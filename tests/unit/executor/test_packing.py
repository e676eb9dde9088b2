"""How gradients are packed is said once: the simulation and the executor ask the same functions."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from meshwright.executor.comm.groups import Group
from meshwright.executor.gradients.buckets import GradParam, make_buckets
from meshwright.executor.gradients.feedback import LossyGradGroup
from meshwright.executor.gradients.slices import make_grad_groups
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.goal import Goal
from meshwright.planner.simulate import slicing
from meshwright.planner.simulate.schedule import bucketed_s, pack_gradients
from meshwright.planner.simulate.slicing import SliceSpec
from torch import nn

from tests.strategies import chain_profile, cluster, linear

SIZES = (8, 20, 8, 8)
"""Of the input and output of small units, which all fit into one message."""


def simulated(schedule: str, **how: object) -> list[tuple[list[int], tuple[SliceSpec, ...]]]:
    """The units of each group's gradients and the group's slices, in the simulation."""
    units = [linear(f"fc{i}", n, n, 1e-4) for i, n in enumerate(SIZES)]
    profile, sliced = chain_profile(units), schedule == "priority"
    model = CostModel(profile, cluster(4), Goal(batch=16), message_bytes=2_000, sliced=sliced)
    decisions = tuple(o._replace(**how) for o in model.baseline)
    groups = pack_gradients(model, decisions, schedule)
    return [([g.unit for g in group.gradients], group.slices) for group in groups]


def sent(schedule: str, **how: object) -> list[tuple[list[int], tuple[SliceSpec, ...]]]:
    """The same in the executor, last group first as there."""
    alone = Group((0,), 0, None, "exchange")
    params = []
    for unit, size in reversed(list(enumerate(SIZES, start=1))):
        weight = nn.Parameter(torch.zeros(size, size))
        param = GradParam(f"fc{unit}", weight, alone, 1, weight.numel(), unit=unit, **how)  # type: ignore[arg-type]
        params.append(param)
    if schedule == "barrier":
        return [
            ([e.unit for e in b.params], (SliceSpec(tuple(range(len(b.params)))),))
            for b in make_buckets(params, 2_000)
        ]
    groups = [LossyGradGroup(0, params, 2_000)] if how else make_grad_groups(params, 2_000)
    return [
        ([e.unit for e in g.params], tuple(s.slice_spec for s in g.slices)) for g in groups[::-1]
    ]


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_both_sides_pack_alike(schedule: str) -> None:
    assert simulated(schedule) == sent(schedule)


def _one_each(gradients, limit_bytes=0):
    return [[i] for i, _ in enumerate(gradients)]


def _numbered(*given):
    parts = count(1)
    return tuple(SliceSpec((0,), 0, next(parts)) for _ in range(5))


@pytest.mark.parametrize(
    ("schedule", "function", "instead", "how"),
    [
        ("barrier", "pack_buckets", _one_each, {}),
        ("priority", "pack_units", _one_each, {}),
        ("priority", "cut", _numbered, {}),
        ("priority", "cut_lossy", _numbered, {"exchange": "dropped", "ratio": 0.5}),
    ],
)
def test_both_sides_ask_one_function(monkeypatch, schedule, function, instead, how) -> None:
    before = simulated(schedule, **how), sent(schedule, **how)
    monkeypatch.setattr(slicing, function, instead)
    after = simulated(schedule, **how), sent(schedule, **how)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_the_step_formula_asks_it_too(monkeypatch) -> None:
    profile = chain_profile([linear(f"fc{i}", n, n, 1e-4) for i, n in enumerate(SIZES)])
    model = CostModel(profile, cluster(4), Goal(batch=16), message_bytes=2_000)
    before = bucketed_s(model, model.baseline)
    monkeypatch.setattr(slicing, "pack_buckets", _one_each)
    assert (bucketed_s(model, model.baseline) != before).any()
