"""Sharded exchange: each peer averages, updates and keeps the optimizer's state of its own chunk of
a parameter (what ZeRO does, Rajbhandari et al., arXiv 1910.02054), in slices and in priority order.

A slice of gradients goes to the peers that own its elements; after ``step()`` these are updated and
sent to all peers (``trip``), before the next forward needs them. The bytes are those of an
all-reduce. gloo's own reduce-scatter is an all-reduce inside (torch 2.13: 16.8 MB sent of 16.8 MB
among two ranks), so that the parts travel by an all-to-all (8.4 MB) and are added up where they
arrive. A rank's own elements stay: neither what is sent nor what is received has room for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.schema.plan import SHARDING
from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm
from ..comm.groups import World
from ..comm.watchdog import Watchdog
from ..redistribution.shard_gradient import Members
from .buckets import GradParam
from .flat_shard import AllMembers, Channels, FlatShardSpec, as_bytes, flat
from .pending import bare
from .slices import GradGroup, Slice
from .step_pipeline import ShardedStepPipeline


def flat_shard_spec(entry: GradParam) -> FlatShardSpec:
    """How the peers share an entry's parameter."""
    assert entry.channels is not None, "an entry whose exchange is sharded has its channels"
    parameter, group = entry.parameter, entry.group
    return FlatShardSpec(
        entry.name,
        parameter.shape,
        parameter.stride(),
        group.size,
        group.slots[group.member],
        entry.channels,
        entry.members,
    )


def shard(
    entries: Sequence[GradParam], optimizer: Optimizer | None, world: World, watch: Watchdog
) -> list[GradParam]:
    """The entries, sharded ones with their channels; those that cannot be are dense.

    That is what no optimizer or another one holds, who would see this rank's chunk only; what has
    nobody to share with; and parameters that do not lie in one piece.
    """
    held = set[nn.Parameter]()
    if optimizer is not None:
        held = {p for group in optimizer.param_groups for p in group["params"]}
    loose = [e.name for e in entries if e.exchange in SHARDING and e.parameter not in held]
    if loose:
        warnings.warn(
            f"the plan shards the exchange of {loose[0]!r} and no optimizer that updates it was "
            f"passed along: the gradients of {len(loose)} parameters are exchanged whole, and "
            "their optimizer's state is not divided",
            stacklevel=4,
        )
    return [_channelled(e, world, watch) if e.parameter in held else _dense(e) for e in entries]


def _channelled(entry: GradParam, world: World, watch: Watchdog) -> GradParam:
    if entry.layout is not None and entry.idle:  # its peers share it
        return entry if entry.layout.groups > 1 else _dense(entry)
    parameter, degree = entry.parameter.detach(), entry.degree
    place = entry.layout or degree
    whole = bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))
    if entry.exchange not in SHARDING or entry.group.handle is None or not whole:
        return _dense(entry)
    reads = world.reads[place]
    members = Members(reads, watch)
    if entry.layout is not None:  # who has nothing of it asks for norms too
        members = Members(world.spans[range(world.size)], watch)
    elif degree > 1:
        members = AllMembers(reads, world.neighbours[place], watch)
    fetches = world.fetches.get(place)
    return replace(entry, channels=Channels(world.gathers[place], reads, members, watch, fetches))


def _dense(entry: GradParam) -> GradParam:
    return replace(entry, exchange="dense") if entry.exchange in SHARDING else entry


class ShardSlice:
    """What a slice takes of one parameter: elements ``start`` to ``stop`` of each peer's chunk."""

    def __init__(self, entry: GradParam, sharing: FlatShardSpec, part: int, parts: int) -> None:
        self.entry, self.sharing = entry, sharing
        self.start, self.stop = (sharing.chunk * (part + i) // parts for i in (0, 1))

    @property
    def width(self) -> int:
        return self.stop - self.start

    def rows(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the flat ``whole``: the elements of the peers whose chunk is full, a row for
        each, and those of the next peer, which may have fewer."""
        chunk = self.sharing.chunk
        full = whole.numel() // chunk if chunk else 0
        rest = whole[full * chunk :][self.start : self.stop]
        return whole[: full * chunk].view(full, chunk)[:, self.start : self.stop], rest

    def leave(self, whole: Tensor, into: Tensor) -> Tensor:
        """Copies what the other peers get of the flat ``whole``, a row for each, and returns a view
        of this rank's elements."""
        full, rest = self.rows(whole)
        slot, many = self.sharing.slot, len(full)
        into[: min(slot, many)] = full[:slot]
        into[slot : max(slot, many - 1)] = full[slot + 1 :]
        if slot == many:
            return rest
        if rest.numel():
            into[many - (slot < many), : rest.numel()] = rest
        return full[slot] if slot < many else rest[:0]

    @property
    def mine(self) -> slice:
        """Where this rank's elements of the slice are in its part of the parameter."""
        owned = self.sharing.owned
        return slice(min(self.start, owned), min(self.stop, owned))


class ShardedSlice(Slice):
    """Two collectives: gradients to the peers who own their elements, parameters from them."""

    def __init__(self, entries: Sequence[GradParam], cut: SliceSpec) -> None:
        super().__init__(entries, cut)
        self.group = entries[0].group
        self.strips = [ShardSlice(e, flat_shard_spec(e), cut.part, cut.parts) for e in entries]
        channels = entries[0].channels
        assert channels is not None
        self.gathers = channels.gathers
        self._held: Tensor | None = None  # what is being sent
        self._wholes: list[Tensor] = []  # the parameters' memory, as they wait when touched
        self._exact = False

    @property
    def width(self) -> int:
        """The elements of a peer."""
        return sum(strip.width for strip in self.strips)

    @property
    def bytes(self) -> int:
        """Of an all-reduce that takes as long as the gradients' way, which is half of its way."""
        return self.width * self.group.size * self.entries[0].parameter.element_size() // 2

    def take(
        self, gradients: Mapping[GradParam, Tensor], parts: Mapping[GradParam, Tensor]
    ) -> None:
        """Takes what it will send out of the gradients, which it does not need after that, and
        writes this rank's own elements into its ``parts``."""
        wholes = [flat(gradients[s.entry]) for s in self.strips]
        self._held = wholes[0].new_zeros(self.group.size - 1, self.width)
        at = 0
        for strip, whole in zip(self.strips, wholes, strict=True):
            own = strip.leave(whole, self._held[:, at : at + strip.width])
            parts[strip.entry][strip.mine] = own
            at += strip.width

    def send(self, gradients: dict[GradParam, Tensor]) -> None:
        """Sends each peer its elements. Collective, in the order of all slices."""
        assert self._held is not None, "a slice that has taken nothing"
        self._wire = torch.empty_like(self._held)
        self._settled = False
        if self._wire.numel():
            rows = [int(peer != self.strips[0].sharing.slot) for peer in range(self.group.size)]
            into, out = self._carried = [
                alias_for_comm(as_bytes(t)) for t in (self._wire, self._held)
            ]
            self.work = dist.all_to_all_single(
                into, out, rows, rows, group=self.group.handle, async_op=True
            )

    def _rows(self, wholes: Sequence[Tensor]) -> Tensor:
        """A row of elements for each peer; where they lie, if they lie like that."""
        first = self.strips[0]
        self._exact = len(wholes) == 1 and self._alike(first)
        if self._exact:
            return first.rows(wholes[0])[0]
        wire = wholes[0].new_zeros(self.group.size, self.width)
        at = 0
        for strip, whole in zip(self.strips, wholes, strict=True):
            full, rest = strip.rows(whole)
            wire[: len(full), at : at + strip.width] = full
            if rest.numel():
                wire[len(full), at : at + rest.numel()] = rest
            at += strip.width
        return wire

    def _alike(self, strip: ShardSlice) -> bool:
        """Whether the strip is the whole parameter, and all peers have equal chunks of it."""
        sharing = strip.sharing
        return strip.width == sharing.chunk and sharing.numel == sharing.chunk * sharing.peers

    def reduce(self, parts: dict[GradParam, Tensor], watch: Watchdog, doing: str) -> float:
        """Waits, and writes the averages of this rank's elements into its ``parts``. Returns the
        seconds waited."""
        if self._settled:
            return 0.0
        assert self._wire is not None
        waited = watch.wait(self.work, self.group, doing)
        at = 0
        for strip in self.strips:
            part = parts[strip.entry][strip.mine]
            others = self._wire[:, at : at + part.numel()]
            part.add_(others[0] if len(others) == 1 else others.sum(dim=0)).div_(self.group.size)
            at += strip.width
        self._held = None
        self._settle()
        return waited

    def gather(self, wholes: Mapping[GradParam, Tensor]) -> None:
        """Sends this rank's elements of the parameters, whose memory is in ``wholes``, to all
        peers. Collective, in the order of forward."""
        self._wholes = [wholes[s.entry] for s in self.strips]
        self._wire = self._rows(self._wholes)
        self._settled = False
        if self._wire.numel():
            self._gather(self._wire[self.strips[0].sharing.slot].clone())

    def _gather(self, own: Tensor) -> None:
        assert self._wire is not None
        *rows, mine = self._carried = [alias_for_comm(as_bytes(t)) for t in (*self._wire, own)]
        self.work = dist.all_gather(rows, mine, group=self.gathers.handle, async_op=True)

    def land(self, watch: Watchdog, doing: str) -> float:
        """Waits for the parameters, and writes them where they belong. Returns the seconds."""
        if self._settled:
            return 0.0
        assert self._wire is not None
        waited = watch.wait(self.work, self.gathers, doing)
        at = 0
        places = () if self._exact else zip(self.strips, self._wholes, strict=True)
        for strip, whole in places:
            full, rest = strip.rows(whole)
            full.copy_(self._wire[: len(full), at : at + strip.width])
            if rest.numel():
                rest.copy_(self._wire[len(full), at : at + rest.numel()])
            at += strip.width
        self._wholes = []
        self._settle()
        return waited


class ShardedGradGroup(GradGroup):
    """The gradients of a unit on their way to the peers that own their elements, and after a step
    the parameters on their way back."""

    made_of = ShardedSlice

    def __init__(self, unit: int, entries: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, entries, limit_bytes)
        self.sharings = {entry: flat_shard_spec(entry) for entry in entries}
        self.changed = False
        """Whether some rank has had gradients of it since parameters were last gathered."""
        self.trip: ShardedStepPipeline | None = None
        """After a step: what updates and gathers its parameters."""
        self._parts: dict[GradParam, Tensor] = {}
        self._wholes: dict[GradParam, Tensor] = {}
        self._reducing = self._taken = False

    @property
    def travelling(self) -> bool:
        """Whether slices have taken what they send and not been waited for."""
        return self._taken or super().travelling

    def take(self) -> None:
        """All slices take what they will send, so that nothing needs the whole gradients any more:
        the last slices may leave much later, behind those of units in front."""
        parts = {entry: self.part(entry) for entry in self.entries}
        for one in self.reduced:
            one.take(self.gradients, parts)
        self.gradients, self._taken = parts, True

    def send(self, number: int) -> None:
        """Sends its next slice."""
        if not self._taken:
            self.take()
        super().send(number)

    def clear(self) -> None:
        """Begins anew; gradients live on where others hold them."""
        super().clear()
        self._taken = False

    def part(self, entry: GradParam) -> Tensor:
        """Where the averages of this rank's elements will stand once they have settled."""
        if entry not in self._parts:
            owned = self.sharings[entry].owned
            self._parts[entry] = bare(entry.parameter).new_empty(owned)
        return self._parts[entry]

    def own(self, entry: GradParam) -> Tensor:
        """This rank's elements of the parameter, where they lie."""
        return self.sharings[entry].part(entry.parameter)

    def awaits(self, part: Tensor) -> bool:
        """Whether the averages in ``part`` are to be waited for, or a step still uses them."""
        return self.trip is not None or any(other is part for other in self._parts.values())

    @property
    def there(self) -> bool:
        """Whether every slice has come back, after a step the parameters'."""
        return (self.trip is None or self.trip.past(self)) and super().there

    @property
    def arrived(self) -> bool:
        """Whether every gradient that is waited for has come."""
        return all(s.there for s in self.slices)

    def depart(self, trip: ShardedStepPipeline) -> None:
        """Hands it to the trip of a step, after which nothing of it touches the parameters as such:
        these make whoever touches them wait for it."""
        self._reducing = self.travelling
        if self._reducing:
            self._parts = {entry: self.part(entry) for entry in self.entries}
        self._wholes = self._gathered()
        self.changed, self.sent, self.trip = False, len(self.slices), trip

    def _gathered(self) -> dict[GradParam, Tensor]:
        """The memory of the parameters that are put together after a step."""
        return {entry: flat(entry.parameter.detach()) for entry in self.entries}

    def settle(self, watch: Watchdog) -> float:
        """Waits for all slices, on either way. Returns the seconds waited."""
        if self.trip is None:
            self._parts = {entry: self.part(entry) for entry in self.entries}
            return self._average(watch)
        waited = self.trip.wait_for(self)
        doing = f"the gathering of the updated {self.listed}"
        waited += sum(s.land(watch, doing) for s in self.sharded)
        self.trip = None
        return waited

    def reduce(self, watch: Watchdog) -> float:
        """Waits for the averages, unless that has been done before the step. Returns the seconds
        waited."""
        return self._average(watch) if self._reducing else 0.0

    def _average(self, watch: Watchdog) -> float:
        doing = f"the exchange of the gradients of {self.listed}"
        waited = sum(s.reduce(self._parts, watch, doing) for s in self.reduced)
        self._parts, self.gradients = {}, {}  # who shows a gradient holds its part
        return waited

    def gather(self) -> None:
        """Sends this rank's elements of all slices to all peers."""
        for one in self.sharded:
            one.gather(self._wholes)
        self._wholes = {}

    @property
    def reduced(self) -> tuple[ShardedSlice, ...]:
        """Its slices, as what they are."""
        return tuple(s for s in self.slices if isinstance(s, ShardedSlice))

    @property
    def sharded(self) -> tuple[ShardedSlice, ...]:
        """The slices that are gathered after a step."""
        return self.reduced
