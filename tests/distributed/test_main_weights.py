"""Parameters of 16 bits under sharded exchange: updates go to float32 weights behind them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.optimizer.chunks import MAIN_WEIGHTS
from meshwright.executor.parallel import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
)
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import Plan
from plans import plan, unit
from test_sharded import OPTIMIZERS, Net, counts_of, layouts, loss_of, part, sharing
from torch import Tensor, nn

WORLD = 2
POLICIES = ("sharded", "fully_sharded")


class Trained:
    """A model in bfloat16 under a plan, and an optimizer of float32 copies of its parameters, which
    is given the gradients that the ranks have averaged."""

    def __init__(self, rank: int, chosen: Plan, optimizer: str = "adamw") -> None:
        self.place = chosen.placement.index(rank)
        self.model = Net().bfloat16()
        self.expected = [p.detach().float().requires_grad_() for p in self.model.parameters()]
        self.other = OPTIMIZERS[optimizer](self.expected)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        apply(self.model, self.optimizer, chosen, timeout_s=20)

    def step(self, seed: int) -> None:
        inputs, target = part(self.place, counts_of(WORLD), seed)
        loss_of(self.model, (inputs.bfloat16(), target)).backward()
        for expected, parameter in zip(self.expected, self.model.parameters(), strict=True):
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.bfloat16
            expected.grad = parameter.grad.float().clone()
        self.optimizer.step()
        self.other.step()
        self.optimizer.zero_grad()

    def check(self) -> None:
        """Parameters are the float32 ones rounded, whose bits the optimizer's state holds."""
        weights = full_state_dict(self.model)
        state = full_optimizer_state_dict(self.model, self.optimizer)["state"]
        for i, (name, _) in enumerate(self.model.named_parameters()):
            assert torch.equal(weights[name], self.expected[i].bfloat16()), name
            own, other = dict(state[i]), self.other.state_dict()["state"][i]
            assert torch.equal(own.pop(MAIN_WEIGHTS), self.expected[i].detach()), name
            assert own.keys() == other.keys()
            for key, value in other.items():
                assert own[key].dtype == value.dtype
                assert torch.equal(own[key], value), (name, key)


def steps_in_float32(rank: int, optimizer: str) -> None:
    for policy in POLICIES:
        with sharing(policy):
            for chosen in layouts(WORLD)[:2]:
                trained = Trained(rank, chosen, optimizer)
                for seed in range(4):
                    trained.step(seed)
                trained.check()


@pytest.mark.parametrize(
    "optimizer", ["sgd", "adamw", "foreach", pytest.param("rmsprop", marks=pytest.mark.slow)]
)
def test_steps_are_made_in_float32(ranks, optimizer):
    ranks(WORLD)(steps_in_float32, optimizer)


class Ones(nn.Module):
    """Weights of one, each with a gradient of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def ones(policy: str) -> tuple[Ones, torch.optim.Optimizer]:
    model = Ones().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    made = with_exchange(plan(WORLD, [unit("layer", 1, "none", WORLD)]), policy)
    apply(model, optimizer, made, timeout_s=20)
    return model, optimizer


def descend(model: Ones, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def small_updates_add_up(rank: int) -> None:
    # Below 1 bfloat16 has steps of 1/256: 1 - 0.001 is 1 there, however often.
    dense, optimizer = ones("dense")
    descend(dense, optimizer, 10)
    assert torch.equal(dense.layer.weight, torch.ones(3, 4, dtype=torch.bfloat16))
    for policy in POLICIES:
        model, optimizer = ones(policy)
        descend(model, optimizer, 10)
        assert torch.equal(model.layer.weight, torch.full((3, 4), 0.99).bfloat16())


def what_is_set_counts(rank: int) -> None:
    """Weights that somebody has set are updated as they are, others from their float32 ones."""
    for policy in POLICIES:
        model, optimizer = ones(policy)
        descend(model, optimizer, 1)
        with torch.no_grad():
            model.layer.weight[0] = 0.5
        descend(model, optimizer, 9)
        expected = torch.full((3, 4), 0.99)
        expected[0] = 0.5 - 9e-3
        assert torch.equal(model.layer.weight, expected.bfloat16())
        model.load_state_dict({"layer.weight": torch.full((3, 4), 2.0)})
        descend(model, optimizer, 10)
        assert torch.equal(model.layer.weight, torch.full((3, 4), 1.99).bfloat16())


def resumes(rank: int) -> None:
    """From this rank's own state and from the whole one, bit for bit."""
    for policy in POLICIES:
        with sharing(policy):
            for chosen in layouts(WORLD)[:2]:
                trained = Trained(rank, chosen)
                for seed in range(3):
                    trained.step(seed)
                weights = copy.deepcopy(full_state_dict(trained.model))
                own = copy.deepcopy(trained.optimizer.state_dict())
                whole = copy.deepcopy(full_optimizer_state_dict(trained.model, trained.optimizer))
                trained.step(3)
                for way, state in (("own", own), ("whole", whole)):
                    again = Trained(rank, chosen)
                    again.model.load_state_dict(weights)
                    if way == "own":
                        again.optimizer.load_state_dict(state)
                    else:
                        load_full_optimizer_state_dict(again.model, again.optimizer, state)
                    again.step(3)
                    again.expected, again.other = trained.expected, trained.other
                    again.check()


def goes_on_from_a_plain_optimizer(rank: int) -> None:
    """State that an optimizer has before a plan is applied is of the parameters' type."""
    for policy in POLICIES:
        model = Ones().bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
        descend(model, optimizer, 1)
        made = with_exchange(plan(WORLD, [unit("layer", 1, "none", WORLD)]), policy)
        apply(model, optimizer, made, timeout_s=20)
        descend(model, optimizer, 2)
        state = full_optimizer_state_dict(model, optimizer)["state"][0]
        assert torch.equal(state["momentum_buffer"], torch.full((3, 4), 1.75))
        assert torch.equal(
            state[MAIN_WEIGHTS],
            torch.ones(3, 4).sub_(torch.full((3, 4), 1.5), alpha=1e-3)
            .sub_(torch.full((3, 4), 1.75), alpha=1e-3),
        )  # fmt: skip


@pytest.mark.parametrize(
    "check", [small_updates_add_up, what_is_set_counts, resumes, goes_on_from_a_plain_optimizer]
)
def test_main_weights(ranks, check: Callable[[int], None]):
    ranks(WORLD)(check)


def loads_whole_state(rank: int) -> None:
    """As one process saves it, into an optimizer whose parameters are divided and shared out."""
    for policy in POLICIES:
        with sharing(policy):
            (chosen,) = layouts(4)[2:]
        made = []
        for _ in range(2):
            model = Net().bfloat16()
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            apply(model, optimizer, chosen, timeout_s=20)
            made.append((model, optimizer))
        (model, optimizer), (again, later) = made
        inputs, target = part(chosen.placement.index(rank), counts_of(4), 0)
        loss_of(model, (inputs.bfloat16(), target)).backward()
        optimizer.step()
        saved = copy.deepcopy(full_optimizer_state_dict(model, optimizer))
        later.load_state_dict(copy.deepcopy(saved))
        found = full_optimizer_state_dict(again, later)["state"]
        assert found.keys() == saved["state"].keys()
        for index, state in saved["state"].items():
            for key, value in state.items():
                assert found[index][key].dtype == value.dtype, key
                assert torch.equal(found[index][key], value), (index, key)
        loss_of(again, (inputs.bfloat16(), target)).backward()
        later.step()
        again.state_dict()  # waits for the step


def test_whole_state_is_loaded_by_the_optimizer_itself(ranks):
    ranks(4)(loads_whole_state)
