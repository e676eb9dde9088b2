"""Where the time of one training step goes, unit by unit, and what optimizers take.

See [Note: Times of units] below.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import sqrt
from statistics import NormalDist, median
from typing import Any, NamedTuple, cast

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
    """Seconds of each node's forward and backward in one step; ``issued_forward`` and
    ``issued_backward`` by the host's clock, which on CPUs are the same."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    issued_forward: dict[str, float] = field(default_factory=dict)
    issued_backward: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


class _Mark(NamedTuple):
    """Where the work before it ends and that of ``node`` begins: on the device, and by the clock of
    the host."""

    end: Moment
    begin: Moment
    issued_end_s: float
    issued_begin_s: float
    node: str


class Timeline:
    """Marks the nodes of a model while it runs; hooks are removed on leaving the context. ``node``
    is the one at work. A GPU is kept busy for ``ahead_s`` at each mark, in their order, before the
    work that follows; or the host waits for it at each mark (``apart``)."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[UnitSpec],
        device: torch.device,
        ahead_s: Sequence[float] = (),
        *,
        apart: bool = False,
    ) -> None:
        self.model, self.units = model, list(units)
        self.device, self.ahead_s, self.apart = device, ahead_s, apart
        self.marks: list[_Mark] = []
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
        before_s, number = time.perf_counter(), len(self.marks)
        end = begin = now(self.device)
        if number < len(self.ahead_s):
            keep_busy(self.device, self.ahead_s[number])
            begin = now(self.device)
        if self.apart:
            synchronise(self.device)
        self.marks.append(_Mark(end, begin, before_s, time.perf_counter(), node))

    def issued_s(self) -> list[float]:
        """What the host took for the work that followed each mark, all but the last."""
        return [b.issued_end_s - a.issued_begin_s for a, b in pairwise(self.marks)]

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
        self.mark("")
        self._made.clear()
        found = StepTimes()
        for i, (mark, after) in enumerate(pairwise(self.marks)):
            ahead = i < forward_marks
            taken_s = seconds_between(mark.begin, after.end)
            _add(found.forward if ahead else found.backward, mark.node, taken_s)
            issued_s = after.issued_end_s - mark.issued_begin_s
            _add(found.issued_forward if ahead else found.issued_backward, mark.node, issued_s)
        return found


def _add(times: dict[str, float], node: str, seconds: float) -> None:
    times[node] = times.get(node, 0.0) + seconds


def longer(issued_s: float) -> float:
    """For how long a GPU is kept busy while its host issues work that took it so long before."""
    return 1.5 * issued_s + 20e-6


def keep_busy(device: torch.device, seconds: float) -> None:
    """Has a GPU do nothing of use for so long, while the host goes on."""
    _spin(device, max(round(seconds * _cycles_per_s(device)), 1))


def _spin(device: torch.device, cycles: int) -> None:
    with torch.cuda.device(device):  # torch lets the current one wait
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@cache
def _cycles_per_s(device: torch.device) -> float:
    for _ in range(2):  # the first begins with the clock of an idle GPU
        start = now(device)
        _spin(device, _CYCLES)
        taken_s = seconds_between(start, now(device))
    return _CYCLES / taken_s


_CYCLES = 20_000_000


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
    on_streams = copies[0].device.type == "cuda"
    for name in optimizers:
        optimizer = optimizer_for(cast(OptimizerName, name), copies)
        for sharded, step in steps_of(optimizer):
            taken = _update(copies, step, rounds)
            rates.append(
                UpdateRate(
                    optimizer=name, seconds_per_byte=taken.done_s / size, sharded=sharded,
                    host_s=taken.issued_s / len(copies) if on_streams else 0.0,
                )
            )  # fmt: skip
    return tuple(rates)


def _update(parameters: Sequence[nn.Parameter], step: Callable[[], object], rounds: int) -> Taken:
    """The medians of an update of these, which frees their gradients."""

    def update() -> None:
        step()
        for parameter in parameters:
            parameter.grad = None

    taken: list[Taken] = []
    device = parameters[0].device
    for _ in range(rounds + 1):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        taken.append(timed(update, device, ahead_s=taken[-1].issued_s if taken else 0.0))
        if len(taken) > LEAST_ROUNDS and sum(one.done_s for one in taken) > LONG_S:
            break
    # The first makes the state and does not count.
    return Taken(median(t.done_s for t in taken[1:]), median(t.issued_s for t in taken[1:]))


class Taken(NamedTuple):
    """Seconds until work was done on its device, and until the host had issued it."""

    done_s: float
    issued_s: float


def timed(work: Callable[[], object], device: torch.device, ahead_s: float = 0.0) -> Taken:
    """What ``work`` takes on an idle device, or on a GPU that is kept busy for somewhat longer than
    ``ahead_s``, in which the host issues it: then what the device takes by itself."""
    synchronise(device)
    kept_busy = device.type == "cuda" and ahead_s > 0
    if kept_busy:
        keep_busy(device, longer(ahead_s))
    begin, start_s = now(device), time.perf_counter()
    work()
    issued_s, end = time.perf_counter() - start_s, now(device)
    synchronise(device)
    done_s = seconds_between(begin, end) if kept_busy else time.perf_counter() - start_s
    return Taken(done_s, issued_s)
