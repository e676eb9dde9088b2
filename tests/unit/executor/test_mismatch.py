"""Scripts that do otherwise than their plans count on are told so, once."""

from __future__ import annotations

import warnings
from functools import partial

import msgspec
import pytest
import torch
from meshwright.executor.headroom import check_optimizer_state, state_copies
from meshwright.executor.optimizer.kinds import optimizer_for, optimizer_name
from meshwright.executor.synchronise import MicroBatchCheck
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.goal import OPTIMIZERS, STATE_COPIES, Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear


def plan_of(**goal):
    profile = chain_profile([linear("fc", 8, 8)])
    return make_plan(
        profile, cluster(2), Goal(batch=8, **goal), [Option(data_parallel(2))] * len(profile.units)
    )


def weights():
    return [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True), 3),
        (lambda p: torch.optim.LBFGS(p), None),
    ],
)
def test_what_optimizers_keep(make, copies):
    parameters = weights()
    optimizer = make(parameters)
    assert state_copies(optimizer) == copies
    if copies is None:
        return
    parameters[0].grad = torch.ones(2)
    optimizer.step()
    kept = [v for v in optimizer.state[parameters[0]].values() if torch.is_tensor(v) and v.ndim]
    assert len(kept) == copies


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planner_and_executor_state_alike_what_optimizers_keep(name, monkeypatch):
    """Both read one table: what it says of a class is planned and judged so."""
    asked = Goal(batch=8, optimizer=name)
    optimizer = optimizer_for(name, weights())
    assert optimizer_name(optimizer) == name
    assert state_copies(optimizer) == asked.state_copies
    kind = OPTIMIZERS[name]
    if kind.momentum:
        monkeypatch.setitem(OPTIMIZERS, name, kind._replace(momentum=0.5))
        assert optimizer_for(name, weights()).param_groups[0]["momentum"] == 0.5
    monkeypatch.setitem(STATE_COPIES, kind.torch_class, STATE_COPIES[kind.torch_class] + 5)
    assert state_copies(optimizer) == asked.state_copies + 5
    monkeypatch.setitem(OPTIMIZERS, name, kind._replace(state_copies=7, update_copies=3))
    assert asked.state_copies == 7
    model = CostModel(chain_profile([linear("fc", 8, 8)]), cluster(2), asked)
    found = MemoryModel(model).unit(1, model.baseline[1], 4)
    assert found.persistent.optimizer == 7 * 4 * 64
    assert found.phases.update_temp == 3 * 4 * 64


def test_an_optimizer_of_ones_own_is_not_judged():
    class AdamW(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

    assert state_copies(AdamW(weights())) is None


@pytest.mark.parametrize(
    ("optimizer", "planned", "sentence"),
    [
        (
            torch.optim.AdamW, {"memory_limit_bytes": 2**20},
            r"AdamW keeps 2 values .* for sgd with 0 values: it takes more memory than its limit "
            r"allows for; plan with --optimizer adamw \(optimizer='adamw'\)",
        ),
        (torch.optim.Adam, {}, "more memory than is predicted; plan with --optimizer adam "),
        (torch.optim.Adagrad, {}, "keeps 1 value .*; plan with --optimizer adam "),
        (
            torch.optim.SGD, {"optimizer": "adamw"},
            "SGD keeps 0 values .* for adamw with 2 values: it takes less memory than is "
            "predicted; plan with --optimizer sgd ",
        ),
        (
            partial(torch.optim.AdamW, amsgrad=True), {"optimizer": "adamw"},
            "keeps 3 values .* more memory than is predicted; no plan counts so many",
        ),
    ],
)  # fmt: skip
def test_an_optimizer_that_keeps_other_than_planned_is_told(optimizer, planned, sentence):
    with pytest.warns(UserWarning, match=sentence):
        check_optimizer_state(optimizer(weights(), lr=0.1), plan_of(**planned))


def test_an_optimizer_that_keeps_as_planned_is_not_told():
    adam, sgd = torch.optim.AdamW(weights()), torch.optim.SGD(weights(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_optimizer_state(sgd, plan_of(memory_limit_bytes=2**20))
        check_optimizer_state(None, plan_of(memory_limit_bytes=2**20))
        check_optimizer_state(adam, plan_of(memory_limit_bytes=2**20, optimizer="adamw"))
        check_optimizer_state(adam, plan_of(optimizer="adam"))
        check_optimizer_state(torch.optim.Adagrad(weights()), plan_of(optimizer="adam"))


def test_a_batch_that_is_not_cut_is_told_once():
    plan = msgspec.structs.replace(plan_of(memory_limit_bytes=2**20), micro_batches=4)
    pieces = MicroBatchCheck(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pieces.exchanged(4)
        pieces.exchanged(8)
    with pytest.warns(UserWarning, match=r"into 4 micro-batches .* 1 backward ran"):
        pieces.exchanged(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pieces.exchanged(1)
        MicroBatchCheck(msgspec.structs.replace(plan_of(), micro_batches=4)).exchanged(1)
