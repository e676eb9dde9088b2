"""How long optimizers take, by bytes of parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch
from torch import Tensor

from ..planner.schema.errors import InputError
from ..planner.schema.profile import UpdateRate
from .collect import synchronise

LIMIT_BYTES = 256 * 2**20
"""Of so many bytes of parameters copies are made at most; rates are per byte."""

LEAST_ROUNDS, LONG_S = 3, 1.0

OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
}
"""With torch's defaults, as users make them."""


def update_rates(
    parameters: Iterable[Tensor], optimizers: Sequence[str], rounds: int = 9
) -> tuple[UpdateRate, ...]:
    """The measured rate of each optimizer on copies of ``parameters``; fewer rounds where they
    take long."""
    for name in optimizers:
        if name not in OPTIMIZERS:
            raise InputError(
                f"optimizer {name!r} is not known: choose from {', '.join(OPTIMIZERS)}"
            )
    copies: list[Tensor] = []
    for parameter in parameters:
        if copies and sum(c.nbytes for c in copies) + parameter.nbytes > LIMIT_BYTES:
            continue
        copies.append(parameter.detach().clone().requires_grad_(True))
    if not copies:
        return tuple(UpdateRate(optimizer=name, seconds_per_byte=0.0) for name in optimizers)
    for copy in copies:
        copy.grad = torch.full_like(copy, 1e-3)
    size = sum(c.nbytes for c in copies)
    return tuple(
        UpdateRate(optimizer=name, seconds_per_byte=_seconds(copies, name, rounds) / size)
        for name in optimizers
    )


def _seconds(copies: list[Tensor], name: str, rounds: int) -> float:
    optimizer = OPTIMIZERS[name](copies)
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        optimizer.step()
        synchronise(copies[0].device)
        taken.append(time.perf_counter() - start)
        if len(taken) > LEAST_ROUNDS and sum(taken) > LONG_S:
            break
    return median(taken[1:])  # the first makes the state
