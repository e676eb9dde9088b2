"""Sharded exchange: each peer averages, updates and keeps the optimizer's state of its own chunk of
a parameter (what ZeRO does, Rajbhandari et al., arXiv 1910.02054), in slices and in priority order.

A slice of gradients goes to the peers that own its elements (a reduce-scatter); after ``step()``
these are updated and sent to all peers (an all-gather), before the next forward needs them. The
bytes are those of an all-reduce.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from ..comm.worker_threads import as_here, spawn
from ..redistribution.shard_gradient import Members
from .buckets import GradParam
from .flat_shard import AllMembers, Channels, FlatShardSpec, as_bytes, flat
from .pending import bare
from .slices import GradGroup, Slice


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
    return [
        _with_channels(e, world, watch)
        if e.exchange in SHARDING and e.parameter in held
        else _dense(e)
        for e in entries
    ]


def _with_channels(entry: GradParam, world: World, watch: Watchdog) -> GradParam:
    if entry.layout is not None and entry.idle:  # its peers share it
        return entry if entry.layout.groups > 1 else _dense(entry)
    dense_memory = torch.ops.aten.is_non_overlapping_and_dense(entry.parameter.detach())
    if entry.group.handle is None or not dense_memory:
        return _dense(entry)
    place = entry.layout or entry.degree
    reads = world.reads[place]
    members = Members(reads, watch)
    if entry.layout is not None:  # who has nothing of it asks for norms too
        members = Members(world.crossings[range(world.size)], watch)
    elif entry.degree > 1:
        members = AllMembers(reads, world.redistribution[place], watch)
    unshards = world.unshards.get(place)
    return replace(entry, channels=Channels(world.gathers[place], reads, members, watch, unshards))


def _dense(entry: GradParam) -> GradParam:
    return replace(entry, exchange="dense") if entry.exchange in SHARDING else entry


class ShardSlice:
    """What a slice takes of one parameter: elements ``start`` to ``stop`` of each peer's chunk.

    ``columns`` is where they are in the rows that are sent, a row for each peer; ``own`` where this
    rank's are in its chunk.
    """

    def __init__(self, entry: GradParam, cut: SliceSpec, column: int) -> None:
        self.entry, self.spec = entry, flat_shard_spec(entry)
        chunk, owned = self.spec.chunk_numel, self.spec.own_numel
        self.start, self.stop = (chunk * (cut.part + i) // cut.parts for i in (0, 1))
        self.own = slice(min(self.start, owned), min(self.stop, owned))
        self.columns = slice(column, column + self.stop - self.start)

    def rows(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the flat ``whole``: the elements of the peers whose chunk is full, a row for
        each, and those of the next peer, which may have fewer."""
        chunk = self.spec.chunk_numel
        full = whole.numel() // chunk if chunk else 0
        rest = whole[full * chunk :][self.start : self.stop]
        return whole[: full * chunk].view(full, chunk)[:, self.start : self.stop], rest

    def pack(self, whole: Tensor, into: Tensor) -> Tensor:
        """Copies what the other peers get of the flat ``whole``, a row for each, and returns a view
        of this rank's elements."""
        full, rest = self.rows(whole)
        slot, many = self.spec.slot, len(full)
        into[: min(slot, many)] = full[:slot]
        into[slot : max(slot, many - 1)] = full[slot + 1 :]
        if slot == many:
            return rest
        if rest.numel():
            into[many - (slot < many), : rest.numel()] = rest
        return full[slot] if slot < many else rest[:0]


class ShardedSlice(Slice):
    """Two collectives: gradients to the peers who own their elements, parameters from them."""

    def __init__(self, entries: Sequence[GradParam], cut: SliceSpec) -> None:
        super().__init__(entries, cut)
        self.group = entries[0].group
        self.shard_slices: list[ShardSlice] = []
        self.width = 0
        """The elements of a peer."""
        for entry in entries:
            self.shard_slices.append(ShardSlice(entry, cut, self.width))
            self.width = self.shard_slices[-1].columns.stop
        channels = entries[0].channels
        assert channels is not None
        self.gather_group = channels.gathers
        self._packed: Tensor | None = None
        """What the other peers get, a row for each."""
        self._gathered: list[Tensor] = []
        """The parameters' memory, flat, which is filled after a step."""
        spec = self.shard_slices[0].spec
        self.slot = spec.slot
        self.in_place = len(entries) == 1 and spec.numel == spec.chunk_numel * spec.peers
        """Whether peers' elements are rows of equal length in the parameter's own memory."""

    @property
    def bytes(self) -> int:
        """Half its size: its all-to-all takes half the time of an all-reduce of all of it."""
        return self.width * self.group.size * self.params[0].parameter.element_size() // 2

    def pack(
        self, gradients: Mapping[GradParam, Tensor], averages: Mapping[GradParam, Tensor]
    ) -> None:
        """Takes what it will send out of the gradients, which it does not need after that, and
        writes this rank's own elements into its ``averages``."""
        wholes = [flat(gradients[s.entry]) for s in self.shard_slices]
        self._packed = wholes[0].new_zeros(self.group.size - 1, self.width)
        for one, whole in zip(self.shard_slices, wholes, strict=True):
            averages[one.entry][one.own] = one.pack(whole, self._packed[:, one.columns])

    def send(self, gradients: dict[GradParam, Tensor]) -> None:
        """Sends each peer its elements. Collective, in the order of all slices."""
        assert self._packed is not None, "a slice that has not been packed"
        self._wire = torch.empty_like(self._packed)
        self._arrived = False
        if self._wire.numel():
            # gloo's own reduce-scatter is an all-reduce inside (torch 2.13: it sends 16.8 MB of
            # 16.8 MB among two ranks). An all-to-all sends half of that, and the parts are added up
            # where they arrive. This rank's own elements stay: no buffer has a row for them.
            rows = [int(peer != self.slot) for peer in range(self.group.size)]
            into, out = self._comm_tensors = [
                alias_for_comm(as_bytes(t)) for t in (self._wire, self._packed)
            ]
            self.work = dist.all_to_all_single(
                into, out, rows, rows, group=self.group.handle, async_op=True
            )

    def wait_for_averages(
        self, averages: Mapping[GradParam, Tensor], watch: Watchdog, doing: str
    ) -> float:
        """Adds what the peers have sent to this rank's elements in ``averages``, and divides.
        Returns the seconds waited."""
        if self._arrived:
            return 0.0
        assert self._wire is not None
        waited = watch.wait(self.work, self.group, doing)
        for one in self.shard_slices:
            own = averages[one.entry][one.own]
            others = self._wire[:, one.columns][:, : own.numel()]
            own.add_(others[0] if len(others) == 1 else others.sum(dim=0)).div_(self.group.size)
        self._packed = None
        self._finish()
        return waited

    def gather(self, wholes: Mapping[GradParam, Tensor], own: Tensor | None = None) -> None:
        """Sends this rank's elements of the parameters, whose flat memory is in ``wholes``, to all
        peers: those in ``own``, or those that lie there. Collective, in the order of forward."""
        self._gathered = [wholes[s.entry] for s in self.shard_slices]
        self._wire = self._as_rows(self._gathered)
        self._arrived = False
        if self._wire.numel():
            # A copy of its own row, which is sent while the library may write the row.
            own = self._wire[self.slot].clone() if own is None else own
            *rows, mine = self._comm_tensors = [
                alias_for_comm(as_bytes(t)) for t in (*self._wire, own)
            ]
            self.work = dist.all_gather(rows, mine, group=self.gather_group.handle, async_op=True)

    def _as_rows(self, wholes: Sequence[Tensor]) -> Tensor:
        """A row of elements for each peer: in the parameter's memory, or a copy."""
        if self.in_place:
            return self.shard_slices[0].rows(wholes[0])[0]
        rows = wholes[0].new_zeros(self.group.size, self.width)
        for one, whole in zip(self.shard_slices, wholes, strict=True):
            full, rest = one.rows(whole)
            rows[: len(full), one.columns] = full
            if rest.numel():
                rows[len(full), one.columns][: rest.numel()] = rest
        return rows

    def wait_for_params(self, watch: Watchdog, doing: str) -> float:
        """Waits for the parameters, and writes them where they belong. Returns the seconds."""
        if self._arrived:
            return 0.0
        assert self._wire is not None
        waited = watch.wait(self.work, self.gather_group, doing)
        for one, whole in zip(self.shard_slices, self._gathered, strict=True):
            if self.in_place:
                break
            full, rest = one.rows(whole)
            full.copy_(self._wire[: len(full), one.columns])
            if rest.numel():
                rest.copy_(self._wire[len(full), one.columns][: rest.numel()])
        self._gathered = []
        self._finish()
        return waited


class ShardedGradGroup(GradGroup):
    """The gradients of a unit on their way to the peers that own their elements, and after a step
    the parameters on their way back."""

    made_of = ShardedSlice
    slices: tuple[ShardedSlice, ...]

    def __init__(self, unit: int, entries: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, entries, limit_bytes)
        self.specs = {entry: flat_shard_spec(entry) for entry in entries}
        self.changed = False
        """Whether some rank has had gradients of it since parameters were last gathered."""
        self.pipeline: ShardedStepPipeline | None = None
        """After a step: what updates and gathers its parameters."""
        self._averages: dict[GradParam, Tensor] = {}
        self._wholes: dict[GradParam, Tensor] = {}
        self._averaging = self._packed = False

    @property
    def in_flight(self) -> bool:
        """Whether slices have taken what they send and not been waited for."""
        return self._packed or super().in_flight

    @property
    def gathered_slices(self) -> tuple[ShardedSlice, ...]:
        """The slices that are gathered after a step."""
        return self.slices

    def pack(self) -> None:
        """All slices take what they will send, so that nothing needs the whole gradients any more:
        the last slices may leave much later, behind those of units in front."""
        averages = {entry: self.average_of(entry) for entry in self.params}
        for one in self.slices:
            one.pack(self.gradients, averages)
        self.gradients, self._packed = averages, True

    def send(self, number: int) -> None:
        if not self._packed:
            self.pack()
        super().send(number)

    def clear(self) -> None:
        super().clear()
        self._packed = False

    def average_of(self, entry: GradParam) -> Tensor:
        """Where the averages of this rank's elements will stand once they have come."""
        if entry not in self._averages:
            self._averages[entry] = bare(entry.parameter).new_empty(self.specs[entry].own_numel)
        return self._averages[entry]

    def chunk_of(self, entry: GradParam) -> Tensor:
        """This rank's elements of the parameter, where they lie."""
        return self.specs[entry].chunk_of(entry.parameter)

    def awaits(self, average: Tensor) -> bool:
        """Whether ``average`` is to be waited for, or a step still uses it."""
        return self.pipeline is not None or any(a is average for a in self._averages.values())

    @property
    def there(self) -> bool:
        """Whether every slice has come back, after a step the parameters'."""
        return (self.pipeline is None or self.pipeline.has_sent(self)) and super().there

    @property
    def arrived(self) -> bool:
        """Whether every gradient that is waited for has come."""
        return all(s.there for s in self.slices)

    def start_step(self, pipeline: ShardedStepPipeline) -> None:
        """Hands it to the pipeline of a step (see [Note: Sharded steps pipeline]). From then on
        nothing here may touch the parameters as such: they make whoever touches them wait."""
        self._averaging = self.in_flight
        if self._averaging:
            self._averages = {entry: self.average_of(entry) for entry in self.params}
        gathered = {entry for one in self.gathered_slices for entry in one.params}
        self._wholes = {entry: flat(entry.parameter.detach()) for entry in gathered}
        self.changed, self.sent, self.pipeline = False, len(self.slices), pipeline

    def wait_and_average(self, watch: Watchdog) -> float:
        """Waits for all slices, on either way. Returns the seconds waited."""
        if self.pipeline is None:
            self._averages = {entry: self.average_of(entry) for entry in self.params}
            return self._wait_for_averages(watch)
        waited = self.pipeline.wait_for(self)
        doing = f"the gathering of the updated {self.listed}"
        waited += sum(s.wait_for_params(watch, doing) for s in self.gathered_slices)
        self.pipeline = None
        return waited

    def wait_for_averages(self, watch: Watchdog) -> float:
        """For the step that has begun; nothing where they came before it. Returns the seconds."""
        return self._wait_for_averages(watch) if self._averaging else 0.0

    def _wait_for_averages(self, watch: Watchdog) -> float:
        doing = f"the exchange of the gradients of {self.listed}"
        waited = sum(s.wait_for_averages(self._averages, watch, doing) for s in self.slices)
        self._averages, self.gradients = {}, {}  # who shows a gradient holds its average
        return waited

    def gather(self) -> None:
        for one in self.gathered_slices:
            one.gather(self._wholes)
        self._wholes = {}


# [Note: Sharded steps pipeline]
# After ``step()`` three things are left to do for each group of gradients: wait for the averages of
# this rank's chunk, update the chunk, and all-gather the parameters. ``step()`` only notes with
# which hyperparameters and gradients (optimizer/lazy.py) and returns; a thread does the
# rest, group by group in forward order, while the thread that trains goes on to the next forward.
#
# All ranks must issue the all-gathers in one order. They have a process group of their own, on
# which only this thread issues, so that their order is that of forward on every rank, however late
# its main thread is. For the same reason a rank that reads its parameters after a step needs
# nothing that other ranks' programs have to do: their threads send, even while their main threads
# wait in something else.
#
# The next forward waits in ``ShardedGradGroup.wait_and_average``: first until the all-gather of its
# unit has been issued, then for the all-gather. An error in the thread is raised there as well.
#
# On a device's streams (NCCL) kernels of two communicators must be launched in one order on all
# ranks, and a wait does not hold the host: there ``step()`` runs all of it itself.


class StepStage:
    """One group's part of a step. ``apply`` updates this rank's chunks; None when that is done,
    which lets go of their gradients."""

    def __init__(self, apply: Callable[[], None]) -> None:
        self.apply: Callable[[], None] | None = apply
        self.sent = threading.Event()
        """Set when its all-gather has been issued, or never will be."""


class ShardedStepPipeline:
    """The groups of one step, in forward order, with what updates their chunks. ``waited(group,
    seconds)`` is told how long each one's averages were waited for."""

    def __init__(
        self,
        updates: Mapping[ShardedGradGroup, Callable[[], None]],
        watch: Watchdog,
        waited: Callable[[ShardedGradGroup, float], None],
    ) -> None:
        self._stages = {group: StepStage(apply) for group, apply in updates.items()}
        self._watch, self._waited = watch, waited
        self._error: BaseException | None = None

    def start(self) -> None:
        """Runs it in a thread of its own."""
        spawn("meshwright sharded step", as_here(self._run))

    def run(self) -> None:
        self._run()
        self._check()

    def has_sent(self, grad_group: ShardedGradGroup) -> bool:
        """Whether the all-gather of a group has been issued."""
        return self._stages[grad_group].sent.is_set()

    def wait_for(self, grad_group: ShardedGradGroup) -> float:
        """Waits until the all-gather of a group has been issued; raises what has prevented that.
        Returns the seconds waited. It ends in any case: each wait in the thread has its limit."""
        start_s = time.perf_counter()
        self._stages[grad_group].sent.wait()
        self._check()
        return time.perf_counter() - start_s

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with torch.no_grad():
                for grad_group, stage in self._stages.items():
                    self._update_arrived(before=grad_group)
                    self._update(grad_group)
                    grad_group.gather()
                    stage.sent.set()
        except BaseException as error:  # raised where somebody waits for its outcome
            self._error = error
        finally:
            for stage in self._stages.values():
                stage.sent.set()

    def _update_arrived(self, before: ShardedGradGroup) -> None:
        """Updates the chunks of groups behind whose gradients are there, while those of the one
        whose turn it is still come."""
        for other in self._stages:
            if self._stages[before].apply is None or before.arrived:
                return
            if other.arrived:
                self._update(other)

    def _update(self, grad_group: ShardedGradGroup) -> None:
        stage = self._stages[grad_group]
        if stage.apply is not None:
            self._waited(grad_group, grad_group.wait_for_averages(self._watch))
            stage.apply()
            stage.apply = None
