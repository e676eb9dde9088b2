"""Training under a lossy exchange, for the tests of its policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.parallel import run_of
from meshwright.planner.schema.plan import ExchangePolicy, FeedbackPolicy, Plan
from plans import plan, scheduled, unit
from torch import Tensor, nn
from torch.nn import functional as F

UNITS = ("0", "2", "3", "5")


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Four units with parameters, one of them a normalisation."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(8, 24),
        nn.Tanh(),
        nn.LayerNorm(24),
        nn.Linear(24, 40),
        nn.Tanh(),
        nn.Linear(40, 4),
    ).to(dtype)


def lossy_plan(
    exchange: ExchangePolicy,
    ratio: float,
    world: int = 2,
    *,
    slices_bytes: int = 2**20,
    feedback: FeedbackPolicy = "residual",
    units: Sequence[str] = UNITS,
) -> Plan:
    """Plain data parallelism with that exchange for all units, by priority."""
    with scheduled("priority"):
        units = [
            msgspec.structs.replace(
                unit(name, 1, "none", world),
                exchange=exchange,
                exchange_ratio=ratio,
                feedback=feedback,
            )
            for name in units
        ]
        return plan(world, units, message_bytes=slices_bytes)


def share(rank: int, step: int, dtype: torch.dtype, size: int = 6) -> tuple[Tensor, Tensor]:
    """One rank's samples of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, 8, generator=generator, dtype=dtype)
    return inputs, (inputs[:, :4].abs() + inputs[:, 4:]).argmax(1)


class Training:
    """A model in training under a plan on this rank."""

    def __init__(
        self,
        chosen: Plan,
        make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.05),
        *,
        dtype: torch.dtype = torch.float32,
        lossy: Lossy | None = None,
    ) -> None:
        self.model, self.dtype = net(dtype), dtype
        self.optimizer = make(self.model.parameters())
        apply(self.model, self.optimizer, chosen, timeout_s=20, lossy=lossy)
        self.run = run_of(self.model)

    def steps(self, numbers: Sequence[int]) -> list[Tensor]:
        """Trains, and returns the parameters after each step."""
        found = []
        for number in numbers:
            inputs, target = share(dist.get_rank(), number, self.dtype)
            F.cross_entropy(self.model(inputs), target).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append(self.parameters())
        return found

    def parameters(self) -> Tensor:
        """All parameters in one vector, finished."""
        return torch.cat([v.detach().flatten() for v in self.model.state_dict().values()]).clone()


def assert_equal_on_all_ranks(value: Tensor) -> None:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    for other in parts:
        assert torch.equal(other, value)
