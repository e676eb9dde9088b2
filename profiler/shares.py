"""What a member's share of a divided unit takes, compared with the whole unit.

Both are run alone, one after the other on the same inputs, and the ratio of their times is applied
to what the whole unit takes in the model. Equal units are measured once.

In a training step other units come between two uses of a unit's weights, and between its forward
and its backward: caches hold then what these have used. A share, being small, would fit into caches
that the whole does not fit into, and measured again and again seem quicker than it is. So as many
other bytes as a step touches, at most ``EVICTED_BYTES``, are read and written before each forward
and each backward; what a neighbour has just made (inputs, gradients of outputs) is left there.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..executor.comm.moments import Moment, now, seconds_between
from ..models.opened import tensors_in
from ..models.precision import autocast_of
from ..models.replay import UnitCall, copied, run_modules
from ..models.spec import SplitSpec, UnitSpec
from ..models.splits import apply_split
from ..models.splits.check import isolated, member_call
from ..planner.cost.ownership import largest_share
from ..planner.schema.capability import degrees
from ..planner.schema.precision import Precision
from ..planner.schema.profile import ShareProfile, SplitProfile, UnitProfile
from .collectives import synchronise
from .memory import SavedTensors
from .timing import keep_busy, longer

ROUNDS = 3
# More than last-level caches of CPUs and GPUs hold for one device, mostly.
EVICTED_BYTES = 64 * 2**20


class Cost(NamedTuple):
    """Seconds of forward and backward, bytes saved for backward, bytes of inputs and outputs that
    have a gradient, and of outputs; seconds in which the host issued forward and backward."""

    forward_s: float
    backward_s: float
    saved: float
    gradient: float
    output: float
    issued_forward_s: float
    issued_backward_s: float


class ShareMeter:
    """Measures shares in turns of several rounds until ``deadline`` (``time.perf_counter``), of one
    until ``end``, and leaves the rest out. A step of the model touches ``touched_bytes``."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        deadline: float,
        precision: Precision | None = None,
        touched_bytes: int = 0,
    ) -> None:
        self._model, self._device, self._deadline = model, device, deadline
        self.end = deadline
        self._precision = precision
        others = min(touched_bytes, EVICTED_BYTES)
        self._others = torch.zeros(others, dtype=torch.uint8, device=device)
        self._known: dict[tuple[Any, ...], tuple[Cost, Cost, int] | None] = {}
        self._late = set[tuple[Any, ...]]()
        self.late = set[str]()
        """Units of which a share was left out for time."""

    def shares(
        self,
        unit: UnitSpec,
        profile: UnitProfile,
        call: UnitCall,
        samples: int,
        wanted: Sequence[int],
    ) -> list[ShareProfile]:
        """The shares of a unit for every style and every degree of ``wanted`` that it can have;
        ``call`` is its call for so many samples."""
        whole = profile.whole
        found = []
        for split in unit.splits:
            for degree in wanted:
                if not degrees(profile, split.style, degree):
                    continue
                costs = self._costs(unit, split, call, degree)
                # It could not be, or no time was left for it.
                if costs is None:
                    continue
                undivided, member, partial_sums = costs
                ratio = Cost(*map(_over, member, undivided))
                saved = saved_ratio(whole.saved(samples), undivided.saved, member.saved, degree)
                size = shard_bytes(self._model, unit, split, degree)
                part = _over(size, whole.parameter_bytes)
                found.append(
                    ShareProfile(
                        style=split.style,
                        degree=degree,
                        forward=whole.forward.scaled(ratio.forward_s),
                        backward=whole.backward.scaled(ratio.backward_s),
                        saved=whole.saved.scaled(saved),
                        gradient=whole.gradient.scaled(ratio.gradient),
                        workspace=whole.workspace.scaled(ratio.output),
                        parameter_bytes=size,
                        new_grad=whole.new_grad.scaled(part),
                        never_together=whole.never_together.scaled(min(part, saved)),
                        partial_sums=ceil(partial_sums / samples),
                    )
                )
        return found

    def _costs(
        self, unit: UnitSpec, split: SplitSpec, call: UnitCall, degree: int
    ) -> tuple[Cost, Cost, int] | None:
        """Of the unit run by itself and of a member's share of it, and the bytes of partial sums
        that the share adds to others'."""
        modules = [self._model.get_submodule(name) for name in unit.modules]
        shapes = [tuple(p.shape) for module in modules for p in module.parameters()]
        inputs = [tuple(t.shape) for t in call.tensors()]
        # Modules by what they print: equal layers have the same sizes and settings.
        key = (unit.kind, split.style, degree, *map(str, modules), *shapes, *inputs)
        if key not in self._known:
            self._known[key] = None
            if time.perf_counter() < self.end:
                # A member's few samples may be too few for what follows in the unit: left out.
                with contextlib.suppress(Exception):
                    self._known[key] = self._measure(unit, split, call, degree)
            else:
                self._late.add(key)
        if key in self._late:
            self.late.add(unit.name)
        return self._known[key]

    def _measure(
        self, unit: UnitSpec, split: SplitSpec, call: UnitCall, degree: int
    ) -> tuple[Cost, Cost, int]:
        holder = isolated(self._model, unit.modules)
        shard, own_samples = copied(holder), OwnSamples(unit, degree)
        apply_split(shard, unit.modules, split, degree, 0, own_samples)
        given = member_call(unit, split, call, degree, 0)
        of = partial(cost_of, device=self._device, precision=self._precision, others=self._others)
        runs = partial(of, holder, unit, call), partial(of, shard, unit, given, divisor=degree)
        for run in runs:
            run()  # warms up
        partial_sums = own_samples.added_bytes
        times = ROUNDS if time.perf_counter() < self._deadline else 1
        rounds = costs_in_turns(runs, self._device, times)
        undivided, member = (
            Cost(*map(median, zip(*costs, strict=True))) for costs in zip(*rounds, strict=True)
        )
        return undivided, member, partial_sums


def costs_in_turns(
    runs: Sequence[Callable[..., Cost]], device: torch.device, rounds: int
) -> list[list[Cost]]:
    """What each of ``runs`` takes, which are ``cost_of`` and have warmed up: in turn, so that a
    disturbance hits all."""
    ahead = [(0.0, 0.0) for _ in runs]
    if device.type == "cuda":
        # On an idle device, behind whose work the host may have to wait.
        alone = [run() for run in runs]
        ahead = [(cost.issued_forward_s, cost.issued_backward_s) for cost in alone]
    return [
        [run(ahead_s=each) for run, each in zip(runs, ahead, strict=True)] for _ in range(rounds)
    ]


class OwnSamples:
    """Stands for the sum over members, at no cost: gives the first one its own samples of the
    group's. Counts the bytes of what it is given."""

    def __init__(self, unit: UnitSpec, degree: int) -> None:
        self._dim, self._degree = unit.batch_dim, degree
        self.added_bytes = 0

    def __call__(self, partial: Tensor) -> Tensor:
        self.added_bytes += partial.nbytes
        return partial.narrow(self._dim, 0, ceil(partial.shape[self._dim] / self._degree))


def shard_bytes(model: nn.Module, unit: UnitSpec, split: SplitSpec, degree: int) -> int:
    """Bytes of a unit's parameters on its first member, which has most."""
    cuts = {cut.name: cut for cut in split.cuts}
    total = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(name.startswith(f"{m}.") for m in unit.modules):
            continue
        size = parameter.nbytes
        if name in cuts:
            parts = cuts[name].parts(parameter.shape[cuts[name].dim])
            size = largest_share(size, parts, degree)
        total += size
    return total


def saved_ratio(whole: float, undivided: float, member: float, degree: int) -> float:
    """What a member of a divided unit saves, of ``whole`` bytes that the unit saves in the model,
    where by themselves the unit saves ``undivided`` bytes and the member's share of it ``member``.
    The rest is the unit's output, which others save: for a member that of its own samples."""
    if whole <= 0:
        return 1.0
    own = member * min(whole / undivided, 1.0) if undivided else 0.0
    return (own + max(whole - undivided, 0.0) / degree) / whole


def _over(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 1.0


def cost_of(
    holder: nn.Module,
    unit: UnitSpec,
    call: UnitCall,
    device: torch.device,
    precision: Precision | None = None,
    others: Tensor | None = None,
    divisor: int = 1,
    ahead_s: tuple[float, float] = (0.0, 0.0),
) -> Cost:
    """What one run of a unit's modules takes, under the autocast of ``precision``, with ``others``
    used before each forward and backward. Gradients of parameters are divided by ``divisor``, as
    the executor does with those of divided parameters. A GPU is idle when forward and backward
    begin, or kept busy while its host issues them, which took it ``ahead_s`` seconds before."""
    given = call.fresh()
    if others is not None:
        others += 1
        with torch.no_grad():
            for tensor in given.tensors():
                tensor.clone()
    # Without its inputs, which belong to whoever made them.
    apart = (*holder.parameters(), *holder.buffers(), *given.tensors())
    saved = SavedTensors(apart, lambda: "")
    start, issued_from_s = _begun(device, ahead_s[0])
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t)
    with torch.enable_grad(), hooks, autocast_of(precision, device):
        output = run_modules(holder, unit.modules, given)
    issued_forward_s, middle = time.perf_counter() - issued_from_s, now(device)
    leaves = [t for t in tensors_in(output) if t.requires_grad]
    if others is not None:
        others += 1
    gradients = [torch.ones_like(t) for t in leaves]
    # Making the gradients is no part of the backward: a second moment in between.
    begin, issued_from_s = _begun(device, ahead_s[1])
    if leaves:
        torch.autograd.backward(leaves, gradients)
    for parameter in holder.parameters() if divisor > 1 else ():
        if parameter.grad is not None:
            parameter.grad /= divisor
    issued_backward_s, end = time.perf_counter() - issued_from_s, now(device)
    for parameter in holder.parameters():
        parameter.grad = None
    inputs = sum(t.nbytes for t in given.tensors() if t.requires_grad)
    out = sum(t.nbytes for t in leaves)
    return Cost(
        seconds_between(start, middle),
        seconds_between(begin, end),
        saved.bytes.get("", 0),
        inputs + out,
        out,
        issued_forward_s,
        issued_backward_s,
    )


def _begun(device: torch.device, ahead_s: float) -> tuple[Moment, float]:
    """The moment at which a GPU comes to what is issued now, and that of the host. Where it is kept
    busy all of that is there by then, as in the midst of a step."""
    synchronise(device)
    if device.type == "cuda" and ahead_s > 0:
        keep_busy(device, longer(ahead_s))
    return now(device), time.perf_counter()


def split_profiles(
    model: nn.Module, unit: UnitSpec, shared: dict[str, str]
) -> tuple[SplitProfile, ...]:
    """The unit's splits as the planner knows them; ``shared`` are canonical parameter names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return tuple(
        SplitProfile(
            style=split.style,
            parts=split.parts,
            uneven=split.uneven,
            features=split.features,
            sharded=tuple((shared[c.name], c.dim) for c in split.cuts if c.name in parameters),
        )
        for split in unit.splits
    )
