"""Where the time of one training step goes, unit by unit, and what optimizers take.

See [Note: Times of units] below.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..executor.comm.moments import Moment, now, seconds_between
from ..executor.optimizer.chunks import steps_of
from ..executor.optimizer.kinds import optimizer_for
from ..models.opened import tensors_in
from ..models.spec import UnitSpec
from ..models.workload import Batch
from ..planner.schema.errors import InputError
from ..planner.schema.goal import OPTIMIZERS, OptimizerName
from ..planner.schema.profile import UpdateRate
from .collectives import synchronise

Loss = Callable[[Any, Any], Tensor]

# [Note: Times of units]
# A unit that is timed by itself finds its inputs in the cache and its memory allocated, and the sum
# over units is then less than the step. So the step itself is measured: hooks mark when the forward
# enters and leaves a unit and when a gradient arrives at a tensor that a node made, and the time
# between two marks belongs to the node at work. The hooks cost time themselves (5 to 18% of a step
# of small units on a CPU), so steps without them are timed in turn: those give the step, the marks
# its parts.


@dataclass
class StepTimes:
    """Seconds of each node's forward and backward in one step."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


class Timeline:
    """Marks the nodes of a model while it runs; hooks are removed on leaving the context. ``node``
    is the one at work."""

    def __init__(self, model: nn.Module, units: Sequence[UnitSpec], device: torch.device) -> None:
        self.model, self.units = model, list(units)
        self.device = device
        self.marks: list[tuple[Moment, str]] = []
        self.node = units[0].name
        # Weakly: tensors that nothing else holds are freed as in training.
        self._made: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._handles: list[Any] = []
        # An input that no unit made is of the node before: its glue, else the unit before it.
        self._before = {b.name: a.name for a, b in pairwise(self.units)}
        # After a unit its glue is at work. A unit that follows marks itself when it is entered.
        self._after = {a.name: a.name if b.modules else b.name for a, b in pairwise(self.units)}

    def __enter__(self) -> Timeline:
        for unit in self.units:
            if not unit.modules:
                continue
            first = self.model.get_submodule(unit.modules[0])
            last = self.model.get_submodule(unit.modules[-1])
            self._handles.append(
                first.register_forward_pre_hook(self._enter(unit.name), with_kwargs=True)
            )
            self._handles.append(last.register_forward_hook(self._leave(unit.name)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def mark(self, node: str) -> None:
        """From now on ``node`` is at work."""
        self.node = node
        self.marks.append((now(self.device), node))

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                self._watch(tensor, self._before[name])
            self.mark(name)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                self._watch(tensor, name)
            self.mark(self._after.get(name, name))

        return hook

    def _watch(self, tensor: Tensor, maker: str) -> None:
        """Marks ``maker`` when a gradient arrives at a tensor that it made."""
        if id(tensor) in self._made or not tensor.requires_grad or tensor.is_leaf:
            return
        self._made[id(tensor)] = tensor
        # The gradient arrives when the backward of all users is over: the maker's begins.
        tensor.register_hook(lambda gradient: self.mark(maker))  # type: ignore[no-untyped-call]

    def step(self, batch: Batch, loss: Loss) -> StepTimes:
        """One forward and backward; gradients stay where backward leaves them. Within the context:
        without its hooks all time is the ends'."""
        self.marks.clear()
        self._made.clear()
        self.mark(self.units[0].name)
        output = self.model(*batch.args, **batch.kwargs)
        self.mark(self.units[-1].name)
        value = loss(output, batch.target)
        forward_marks = len(self.marks)
        self.mark(self.units[-1].name)
        value.backward()  # type: ignore[no-untyped-call]
        self.marks.append((now(self.device), ""))
        self._made.clear()
        found = StepTimes()
        for i, ((moment, node), (after, _)) in enumerate(pairwise(self.marks)):
            times = found.forward if i < forward_marks else found.backward
            times[node] = times.get(node, 0.0) + seconds_between(moment, after)
        return found


def plain_step(model: nn.Module, batch: Batch, loss: Loss, device: torch.device) -> float:
    """Seconds of one forward and backward without any hook, as training runs it."""
    start = now(device)
    loss(model(*batch.args, **batch.kwargs), batch.target).backward()  # type: ignore[no-untyped-call]
    return seconds_between(start, now(device))


def spread_of(repeated: Iterable[Sequence[float]]) -> float:
    """How much longer than the median one repetition in six takes, relative to it: a standard
    deviation, were they normally distributed. Each sequence is of one thing, measured again and
    again; those measured less than three times tell nothing."""
    found = []
    for seconds in repeated:
        middle = median(seconds) if len(seconds) > 2 else 0.0
        if middle:
            # Of few, the median itself follows the disturbed ones.
            own = sqrt(len(seconds) / (len(seconds) - 1))
            found += [own * (one / middle - 1) for one in seconds]
    return max(float(np.quantile(found, NormalDist().cdf(1.0))), 0.0) if found else 0.0


# Of so many bytes of parameters copies are made at most; rates are per byte.
LIMIT_BYTES = 256 * 2**20

LEAST_ROUNDS, LONG_S = 3, 1.0


def update_rates(
    parameters: Iterable[Tensor], optimizers: Sequence[str], rounds: int = 9
) -> tuple[UpdateRate, ...]:
    """The measured rate of each optimizer on copies of ``parameters``, and that of a sharded
    exchange where it differs; fewer rounds where they take long. What is frozen is not updated.
    Each update is of new gradients and frees them, as in training: memory that goes back to the
    system takes as long as a large part of an update."""
    for name in optimizers:
        if name not in OPTIMIZERS:
            raise InputError(
                f"optimizer {name!r} is not known: choose from {', '.join(OPTIMIZERS)}"
            )
    copies: list[nn.Parameter] = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue  # no optimizer changes it, and of whole numbers none could
        if copies and sum(c.nbytes for c in copies) + parameter.nbytes > LIMIT_BYTES:
            continue
        copies.append(nn.Parameter(parameter.detach().clone()))
    if not copies:
        return tuple(UpdateRate(optimizer=name, seconds_per_byte=0.0) for name in optimizers)
    size, rates = sum(c.nbytes for c in copies), []
    for name in optimizers:
        optimizer = optimizer_for(cast(OptimizerName, name), copies)
        for sharded, step in steps_of(optimizer):
            taken = _update_s(copies, step, rounds)
            rates.append(UpdateRate(optimizer=name, seconds_per_byte=taken / size, sharded=sharded))
    return tuple(rates)


def _update_s(parameters: Sequence[nn.Parameter], step: Callable[[], object], rounds: int) -> float:
    """The median seconds of an update of these, which frees their gradients."""

    def update() -> None:
        step()
        for parameter in parameters:
            parameter.grad = None

    taken: list[float] = []
    for _ in range(rounds + 1):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        taken.append(timed_s(update, parameters[0].device))
        if len(taken) > LEAST_ROUNDS and sum(taken) > LONG_S:
            break
    return median(taken[1:])  # the first makes the state and does not count


def timed_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until what ``work`` does has been done on the device."""
    synchronise(device)  # what is still going on there does not count
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start
