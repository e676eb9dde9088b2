"""Top-k exchange with error feedback: of each parameter every rank sends the largest elements of
what it has computed and not sent, and keeps the rest (Deep Gradient Compression, Lin et al., arXiv
1712.01887).

Ranks choose different elements, so values and numbers are gathered, and added up on every rank in
the order of ranks: all get the same sum, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm
from ..comm.watchdog import Watchdog
from .buckets import GradParam
from .feedback import Lossy, LossyGradGroup, folds, like, mirrors
from .flat_shard import flat
from .momentum import Momentum
from .slices import Slice
from .sparse import SparseAverage, SparseGradient

STRIDE, SPARSE, SAMPLED_FROM = 61, 8, 10_000
"""Of parameters from ``SAMPLED_FROM`` elements on one in ``STRIDE`` is looked at for the threshold,
where at most one in ``SPARSE`` is sent: of a million elements, choosing one in twenty takes 3.4 ms
so, and 12.2 ms among all; one in four takes the same (one core, torch 2.13)."""


def ratio_at(ratio: float, backwards: int, lossy: Lossy) -> float:
    """The share that is sent after so many backwards: from ``first_ratio`` down to ``ratio``."""
    stage = backwards // lossy.stage_backwards
    if stage >= lossy.stages or ratio >= lossy.first_ratio:
        return ratio
    return float(lossy.first_ratio * (ratio / lossy.first_ratio) ** (stage / lossy.stages))


class TopkState:
    """What the parcels of top-k share: how far the warm-up is, and the optimizer's momentum."""

    name = "topk"

    def __init__(self, grad_groups: Sequence[TopkGradGroup], lossy: Lossy) -> None:
        self._lossy = lossy
        self._backwards = 0
        self.momentum: Momentum | None = None
        self.parameters = [e.parameter for p in grad_groups for e in p.feedback]
        self.mirrored = [e.parameter for p in grad_groups for e in p.feedback if mirrors(e)]
        for grad_group in grad_groups:
            grad_group.picking = self

    def count(self, entry: GradParam) -> int:
        """How many elements of an entry each rank sends in this backward."""
        return topk_elements(entry.parameter.numel(), self.share(entry))

    def share(self, entry: GradParam) -> float:
        """The share of them."""
        return ratio_at(entry.ratio, self._backwards, self._lossy)

    def rate(self, entry: GradParam) -> float:
        """The learning rate that is in force for a mirror."""
        assert self.momentum is not None, "checked when the plan was applied"
        return self.momentum.rate(entry.parameter, entry.name)

    def begin(self) -> None:
        """Before a backward."""
        if self.momentum is not None:
            self.momentum.begin()

    def end(self) -> None:
        """After a backward, when everything has left."""
        self._backwards += 1
        if self.momentum is not None:
            self.momentum.end()

    def state(self) -> dict[str, Any]:
        """How far the warm-up is."""
        return {"backwards": self._backwards}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a ``state``."""
        self._backwards = int(state["backwards"])


def largest(elements: Tensor, count: int) -> Tensor:
    """The numbers of the ``count`` elements with the largest magnitudes.

    As in Deep Gradient Compression a sample tells about where the threshold is. The choice among
    those above it is exact; where they are too few, it is made among all.
    """
    sizes = elements.abs()
    if len(sizes) >= SAMPLED_FROM and count * SPARSE <= len(sizes):
        # Half as many again as are wanted, and some more where the sample says little.
        enough = 3 * count // (2 * STRIDE) + 8
        least = sizes[::STRIDE].topk(enough, sorted=False).values.min()
        index = torch.nonzero(sizes >= least).flatten()
        if len(index) >= count:
            return index[sizes[index].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def topk_elements(numel: int, share: float) -> int:
    """How many of so many elements are a share of them: at least one."""
    return min(numel, ceil(share * numel))


def _unpacked(part: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and the numbers of a message."""
    count = part.numel() // (dtype.itemsize + torch.int32.itemsize)
    # Copies, as messages of other ranks begin at bytes that no multiple of the type's size need be.
    values = part[: count * dtype.itemsize].clone().view(dtype)
    return values, part[count * dtype.itemsize :].clone().view(torch.int32)


class TopkSlice(Slice):
    """One collective: some elements of one parameter, with their numbers."""

    def __init__(self, entry: GradParam) -> None:
        super().__init__([entry], SliceSpec((0,)))
        self._parts: list[Tensor] = []
        self._share, self._message_bytes = 0.0, 0

    @property
    def sent_bytes(self) -> int:
        """What a ring sends for it: each rank's message passes every other rank."""
        return (self.entries[0].group.size - 1) * self._message_bytes

    @property
    def bytes(self) -> int:
        """Those of a gradient whose sum would take a ring as long."""
        return self.entries[0].group.size * self._message_bytes // 2

    @property
    def shared_bytes(self) -> int:
        """What every rank takes it to have, as if members had equally much."""
        (entry,) = self.entries
        width = entry.parameter.element_size()
        count = ceil(self._share * (entry.shared_bytes // width))
        return entry.group.size * count * (width + torch.int32.itemsize) // 2

    def expect(self, share: float) -> None:
        """Says which share of the elements it will carry."""
        parameter = self.entries[0].parameter
        size = parameter.element_size() + torch.int32.itemsize
        self._share, self._message_bytes = share, topk_elements(parameter.numel(), share) * size

    def send_picked(self, values: Tensor, index: Tensor) -> None:
        """Starts to show these elements to all peers. Collective, in the order of all slices."""
        self._settled = False
        group = self.entries[0].group
        # One message of both: half the latency of two.
        message = torch.cat([values.view(torch.uint8), index.int().view(torch.uint8)])
        wire = message.new_empty(group.size * message.numel())
        self._wire, self._parts = message, list(wire.chunk(group.size)) if len(values) else []
        if len(values):
            *parts, mine = self._carried = [alias_for_comm(t) for t in (*self._parts, message)]
            self.work = dist.all_gather(parts, mine, group=group.handle, async_op=True)

    def settle(self, gradients: dict[GradParam, Tensor], watch: Watchdog, doing: str) -> float:
        """Waits, and makes the dense average. Returns the seconds waited."""
        if self._settled:
            return 0.0
        (entry,) = self.entries
        waited = watch.wait(self.work, entry.group, doing)
        gradient = gradients[entry]
        parts = [_unpacked(part, gradient.dtype) for part in self._parts]
        if isinstance(gradient, SparseGradient):
            gradient.average.fill(parts)
        else:
            average = flat(gradient).zero_()
            for values, index in parts:
                average.index_add_(0, index, values)
            average.div_(entry.group.size)
        self._parts = []
        self._settle()
        return waited


class TopkGradGroup(LossyGradGroup):
    """Gradients of which the largest elements are sent; the others are held."""

    picking: TopkState

    def __init__(self, unit: int, entries: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, entries, limit_bytes)
        self.velocities: dict[GradParam, Tensor] = {}
        self._picks: dict[GradParam, tuple[Tensor, Tensor]] = {}
        self._absorbed: set[GradParam] = set()
        """The entries that backwards before this one have added to without an exchange."""

    def _slice(self, entries: Sequence[GradParam], cut: SliceSpec) -> Slice:
        if entries[0].whole:
            return Slice(entries, cut)
        one = TopkSlice(entries[0])
        one.expect(entries[0].ratio)
        return one

    @property
    def swells(self) -> bool:
        """What has come is copied out of its messages, and put together for most updates."""
        return any(isinstance(one, TopkSlice) for one in self.slices)

    def following(self, number: int) -> Slice:
        """Its next slice, with as many elements as this backward sends."""
        one = self.slices[number]
        if isinstance(one, TopkSlice):
            one.expect(self.picking.share(one.entries[0]))
        return one

    def send(self, number: int) -> None:
        """Sends its next slice."""
        one = self.slices[number]
        if not isinstance(one, TopkSlice):
            super().send(number)
            return
        assert number == self.sent, "slices of a parcel leave in their order"
        self.sent += 1
        (entry,) = one.entries
        picks = self._picks.pop(entry, None)
        one.send_picked(*(picks or self._pick(entry, self.gradients[entry].clone(), 1.0)))

    def absorb(self, entry: GradParam, gradient: Tensor) -> bool:
        """Takes in the gradient of a backward after which nothing is sent, where that is the same
        as to take it in with the last. False where it stays."""
        momentum, feedback = self.picking.momentum, self.feedback.get(entry)
        if feedback is None or not folds(entry):
            return False
        gradient = gradient.as_subclass(Tensor)
        if momentum is not None and momentum.gathers(entry.parameter):
            known = self.velocities.get(entry)
            fresh = entry not in self._absorbed
            velocity = momentum.gather(entry.parameter, known, gradient, fresh=fresh)
            if velocity is None:
                return False
            self.velocities[entry] = velocity
            self._absorbed.add(entry)
            return True
        feedback.add(gradient, self.picking.rate(entry) if mirrors(entry) else 1.0)
        feedback.take(torch.empty(0, dtype=torch.int64, device=gradient.device))  # none is sent
        return True

    def holds(self, entry: GradParam) -> bool:
        """Whether something of the entry waits to be sent."""
        return entry in self._absorbed or super().holds(entry)

    def fold(self, entry: GradParam, gradient: Tensor) -> SparseAverage | None:
        """Takes a gradient in as soon as it is computed, where its memory is not needed for the
        average: the choice is made, and what will come of it is returned."""
        if not folds(entry):
            return None
        gradient = gradient.as_subclass(Tensor)  # of a divided parameter it may know its members
        rate = self.picking.rate(entry) if mirrors(entry) else 1.0
        average = SparseAverage(entry, rate, gradient)
        self._picks[entry] = self._pick(entry, gradient, rate)
        return average

    def _pick(self, entry: GradParam, gradient: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """The values and the numbers of what is sent of an entry. Takes ``gradient`` over."""
        new, velocity = self._new(entry, gradient)
        held = self.feedback[entry].add(new, rate)
        index = largest(flat(held), self.picking.count(entry))
        values = self.feedback[entry].take(index)
        if velocity is not None and held is not new:  # where it is, nothing was held before
            delayed = values != flat(new)[index].mul_(rate)
            flat(velocity).index_fill_(0, index[delayed], 0)
        return values, index

    def _new(self, entry: GradParam, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """(what is to be applied of this backward, in the gradient's memory; the velocity behind it
        if there is one)."""
        momentum = self.picking.momentum
        # What this rank has not used leaves its velocity alone, as torch's SGD does without a grad.
        fresh = entry not in self._absorbed
        self._absorbed.discard(entry)
        unused = entry in self.idle and fresh
        if momentum is None or unused or not momentum.corrects(entry.parameter):
            return gradient, None
        known = self.velocities.get(entry)
        velocity, new = momentum.advance(entry.parameter, known, gradient, fresh=fresh)
        if velocity is not None:
            self.velocities[entry] = velocity
        return new, velocity

    def forget(self, entry: GradParam) -> None:
        """No rank has anything of the entry: what was sent of it does not count."""
        if entry in self.feedback:
            self.feedback[entry].restore(None)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what is held and of the velocities, by parameter."""
        state = super().state()
        for entry, velocity in self.velocities.items():
            state.setdefault(entry.name, {})["velocity"] = velocity.clone()
        return state

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Goes on from a ``state`` of the same parameters."""
        super().load(state)
        saved = {e: state.get(e.name, {}).get("velocity") for e in self.feedback}
        self.velocities = {e: like(e, value) for e, value in saved.items() if value is not None}
