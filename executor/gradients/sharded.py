"""Sharded exchange: each peer averages, updates and keeps the optimizer's state of its own chunk of
a parameter (what ZeRO does, Rajbhandari et al., arXiv 1910.02054), in slices and in priority order.

A slice of gradients goes to the peers that own its elements (a reduce-scatter); after ``step()``
these are updated and sent to all peers (an all-gather). The bytes are those of an all-reduce.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...planner.cost.collectives import ring_bytes
from ...planner.schema.plan import SHARDING
from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import scatter_sums
from ..comm.groups import Group, World
from ..comm.steps import parameters_of
from ..comm.two_way import all_to_all, gather_rows
from ..comm.watchdog import Watchdog
from ..comm.worker_threads import spawn, with_current_modes
from ..redistribution.shard_gradient import Members
from .buckets import GradParam
from .flat_shard import AllMembers, Channels, FlatShardSpec, as_bytes, flat, in_one_piece
from .pending import bare
from .slices import GradGroup, Slice


def flat_shard_spec(param: GradParam) -> FlatShardSpec:
    """How the peers share a parameter whose exchange is sharded."""
    assert param.channels is not None
    parameter, group = param.parameter, param.group
    return FlatShardSpec(
        param.name, parameter.shape, parameter.stride(), group.size,
        group.group_ranks[group.member], param.channels, param.members,
    )  # fmt: skip


def shard(
    params: Sequence[GradParam], optimizer: Optimizer | None, world: World, watch: Watchdog
) -> list[GradParam]:
    """The parameters, sharded ones with their channels; those that cannot be are dense."""
    # Of what another optimizer holds, or none, whoever updates it would see this rank's chunk only.
    optimized = parameters_of(optimizer)
    loose = [p.name for p in params if p.exchange in SHARDING and p.parameter not in optimized]
    if loose:
        warnings.warn(
            f"the plan shards the exchange of {loose[0]!r} and no optimizer that updates it was "
            f"passed along: the gradients of {len(loose)} parameters are exchanged whole, and "
            "their optimizer's state is not divided",
            stacklevel=4,
        )
    found = []
    for param in params:
        if param.exchange in SHARDING:
            shared = _with_channels(param, world, watch) if param.parameter in optimized else None
            param = shared or replace(param, exchange="dense")
        found.append(param)
    return found


def _with_channels(param: GradParam, world: World, watch: Watchdog) -> GradParam | None:
    """None where it has nobody to share with, does not lie in one piece, or has no dims: its state
    could not be told from a count of steps."""
    # Of what is elsewhere a rank knows the size alone, and all must decide alike.
    if param.full_numel == 1 and (param.layout is not None or param.parameter.ndim == 0):
        return None
    if param.layout is not None and param.idle:  # its peers share it
        return param if param.layout.groups > 1 else None
    if param.group.handle is None or not in_one_piece(param.parameter):
        return None
    place = param.layout or param.degree
    full_gradients = world.full_gradients[place]
    members = Members(full_gradients, watch)
    if param.layout is not None:  # who has nothing of it asks for norms too
        members = Members(world.crossings[range(world.size)], watch)
    elif param.degree > 1:
        members = AllMembers(full_gradients, world.redistribution[place], watch)
    unshards = world.unshards.get(place)
    return replace(
        param,
        channels=Channels(world.updated_chunks[place], full_gradients, members, watch, unshards),
    )


class ParamSlice:
    """What a slice takes of one parameter: elements ``start`` to ``stop`` of each peer's chunk.

    ``columns`` is where they are in the rows that are sent, a row for each peer; ``own`` where this
    rank's are in its chunk.
    """

    def __init__(self, param: GradParam, slice_spec: SliceSpec, column: int) -> None:
        self.param, self.spec = param, flat_shard_spec(param)
        chunk, owned = self.spec.chunk_numel, self.spec.own_numel
        self.start, self.stop = (chunk * (slice_spec.part + i) // slice_spec.parts for i in (0, 1))
        self.own = slice(min(self.start, owned), min(self.stop, owned))
        self.columns = slice(column, column + self.stop - self.start)

    def rows(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the flat ``whole``: the elements of the peers whose chunk is full, a row for
        each, and those of the next peer."""
        # Behind that peer, which may have fewer elements, the others have none.
        chunk = self.spec.chunk_numel
        full = whole.numel() // chunk if chunk else 0
        rest = whole[full * chunk :][self.start : self.stop]
        return whole[: full * chunk].view(full, chunk)[:, self.start : self.stop], rest

    def pairs(self, whole: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the flat ``whole``, each with that of the same elements in ``rows``."""
        full, rest = self.rows(whole)
        yield full, rows[: len(full), self.columns]
        if rest.numel():
            yield rest, rows[len(full), self.columns][: rest.numel()]

    def pack(self, whole: Tensor, into: Tensor) -> Tensor:
        """Copies what the other peers get of the flat ``whole``, a row for each, and returns a view
        of this rank's elements."""
        full, rest = self.rows(whole)
        mine, many = self.spec.group_rank, len(full)
        into[: min(mine, many)] = full[:mine]
        into[mine : max(mine, many - 1)] = full[mine + 1 :]
        if mine == many:
            return rest
        if rest.numel():
            into[many - (mine < many), : rest.numel()] = rest
        return full[mine] if mine < many else rest[:0]


# [Note: Sums and rows on a device's streams]
# NCCL adds up what it scatters, over a ring that enters each host once; an all-to-all would send a
# host as many copies as it has ranks. So there a slice is a reduce-scatter, of the gradient where
# it lies if its rows do so one behind the other. Gradients that are rounded to travel stay with the
# all-to-all, and are added up in their own type where they arrive.
#
# The rows of a slice of several lie apart in the parameter, and NCCL's backend would gather them by
# way of memory of its own and copy each. All slices of a parameter together are its memory: there
# they are gathered as one, and this rank's row is sent from where it lies, as NCCL allows.


def gathers_of(
    slices: Sequence[ShardedSlice], gather_group: Group | None = None
) -> tuple[ShardedSlice, ...]:
    """What the parameters of gradients in those slices are gathered by, in their order: the slices,
    or on a device's streams whole parameters."""
    found = []
    for one in slices:
        spec = one.slice_spec
        if (gather_group or one.gather_group).on_stream and spec.parts > 1:
            if spec.part:  # went with the first
                continue
            spec = SliceSpec(spec.parameters)
        found.append(ShardedSlice(one.params, spec, gather_group))
    return tuple(found)


class ShardedSlice(Slice):
    """Two collectives: gradients to the peers who own their elements, parameters from them. See
    [Note: Sums and rows on a device's streams]."""

    def __init__(
        self, params: Sequence[GradParam], slice_spec: SliceSpec, gather_group: Group | None = None
    ) -> None:
        super().__init__(params, slice_spec)
        self.group = params[0].group
        self.param_slices: list[ParamSlice] = []
        self.width = 0
        """The elements of a peer."""
        for param in params:
            self.param_slices.append(ParamSlice(param, slice_spec, self.width))
            self.width = self.param_slices[-1].columns.stop
        channels = params[0].channels
        assert channels is not None
        self.gather_group = gather_group or channels.updated_chunks
        self._packed: Tensor | None = None
        """What the other peers get, a row for each."""
        self._gathered: list[Tensor] = []
        """The parameters' memory, flat, which is filled after a step."""
        spec = self.param_slices[0].spec
        self.group_rank = spec.group_rank
        self.in_place = len(params) == 1 and spec.numel == spec.chunk_numel * spec.peers
        """Whether peers' elements are rows of equal length in the parameter's own memory."""
        exact = params[0].wire_dtype == params[0].parameter.dtype
        self.adds_up = self.group.on_stream and exact
        """Whether the library adds up what peers send."""

    @property
    def bytes(self) -> int:
        # Half its size: its all-to-all takes half the time of an all-reduce of all of it.
        return self.width * self.group.size * self.params[0].wire_dtype.itemsize // 2

    @property
    def gathered_bytes(self) -> int:
        """What a ring sends of its parameters."""
        size = self.width * self.group.size * self.params[0].parameter.element_size()
        return ring_bytes("all_gather", self.group.size, size)

    def pack(
        self, gradients: Mapping[GradParam, Tensor], averages: Mapping[GradParam, Tensor]
    ) -> None:
        """Takes what it will send out of the gradients, which it does not need after that, and
        this rank's own elements into its ``averages`` unless these come with the sums."""
        wholes = [flat(gradients[s.param]) for s in self.param_slices]
        if self.adds_up:
            self._packed = self._as_rows(wholes).contiguous()
            return
        peers, dtype = self.group.size - 1, self.params[0].wire_dtype
        self._packed = wholes[0].new_zeros(peers, self.width, dtype=dtype)
        for one, whole in zip(self.param_slices, wholes, strict=True):
            averages[one.param][one.own] = one.pack(whole, self._packed[:, one.columns])

    def send(self, gradients: dict[GradParam, Tensor]) -> None:
        assert self._packed is not None, "a slice that has not been packed"
        self._arrived = False
        if self.adds_up:
            self._wire = self._sums(gradients)
            if self._wire.numel():
                self.work, self._comm_tensors = scatter_sums(self._wire, self._packed, self.group)
            return
        self._wire = torch.empty_like(self._packed)
        if self._wire.numel():
            # gloo's own reduce-scatter is an all-reduce inside (torch 2.13: it sends 16.8 MB of
            # 16.8 MB among two ranks). An all-to-all sends half of that, and the parts are added up
            # where they arrive. This rank's own elements stay: no buffer has a row for them.
            rows = [int(peer != self.group_rank) for peer in range(self.group.size)]
            into, out = as_bytes(self._wire), as_bytes(self._packed)
            self.work, self._comm_tensors = all_to_all(into, out, rows, rows, self.group)

    def _sums(self, averages: Mapping[GradParam, Tensor]) -> Tensor:
        """Where the sums of this rank's elements come: where their averages stand, or memory for
        those of several parameters, or of parts that are not equal."""
        if self.in_place:
            return averages[self.params[0]][self.param_slices[0].own]
        assert self._packed is not None
        return self._packed.new_empty(self.width)

    def wait_for_averages(
        self, averages: Mapping[GradParam, Tensor], watch: Watchdog, doing: str
    ) -> float:
        """Adds what the peers have sent to this rank's elements in ``averages``, and divides.
        Returns the seconds waited."""
        if self._arrived:
            return 0.0
        assert self._wire is not None
        waited = watch.wait(self.work, self.group, doing)
        for one in self.param_slices:
            own = averages[one.param][one.own]
            if self.adds_up:
                if not self.in_place:
                    own.copy_(self._wire[one.columns][: own.numel()])
                own.div_(self.group.size)
                continue
            others = self._wire[:, one.columns][:, : own.numel()]
            summed = others[0] if len(others) == 1 else others.sum(dim=0, dtype=own.dtype)
            own.add_(summed).div_(self.group.size)
        self._packed = None
        self._finish()
        return waited

    def gather(
        self, wholes: Mapping[GradParam, Tensor], chunks: Mapping[GradParam, Tensor] | None = None
    ) -> None:
        """Sends this rank's elements of the parameters to all peers, into ``wholes``, their flat
        memory: those in ``chunks``, or those that lie there. Collective, in the order of use."""
        self._gathered = [wholes[s.param] for s in self.param_slices]
        own: Tensor | None = None
        if chunks is not None and self.in_place:
            own = chunks[self.params[0]][self.param_slices[0].own]
        elif chunks is not None:
            for one, whole in zip(self.param_slices, self._gathered, strict=True):
                whole[slice(*one.spec.bounds)][one.own] = chunks[one.param][one.own]
        self._wire = self._as_rows(self._gathered)
        self._arrived = False
        if self._wire.numel():
            if own is None:
                own = self._wire[self.group_rank]
                if not self.gather_group.on_stream:
                    own = own.clone()  # it is sent while the library may write the row
            rows = as_bytes(self._wire)
            self.work, self._comm_tensors = gather_rows(rows, as_bytes(own), self.gather_group)

    def _as_rows(self, wholes: Sequence[Tensor]) -> Tensor:
        """A row of elements for each peer: in the parameter's memory, or a copy."""
        if self.in_place:
            return self.param_slices[0].rows(wholes[0])[0]
        rows = wholes[0].new_zeros(self.group.size, self.width)
        for one, whole in zip(self.param_slices, wholes, strict=True):
            for part, row in one.pairs(whole, rows):
                row.copy_(part)
        return rows

    def wait_for_params(self, watch: Watchdog, doing: str) -> float:
        """Waits for the parameters and writes them to their memory. Returns the seconds waited."""
        if self._arrived:
            return 0.0
        assert self._wire is not None
        waited = watch.wait(self.work, self.gather_group, doing)
        if not self.in_place:
            for one, whole in zip(self.param_slices, self._gathered, strict=True):
                for part, row in one.pairs(whole, self._wire):
                    part.copy_(row)
        self._gathered = []
        self._finish()
        return waited


class ShardedGradGroup(GradGroup):
    """The gradients of a unit on their way to the peers that own their elements, and after a step
    the parameters on their way back."""

    slice_class = ShardedSlice
    slices: tuple[ShardedSlice, ...]

    def __init__(self, unit: int, params: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, params, limit_bytes)
        self.specs = {param: flat_shard_spec(param) for param in params}
        self.gathered_slices = self._gathered()
        """What updated parameters are gathered by, in forward order."""
        self.changed = False
        """Whether some rank has had gradients of it since parameters were last gathered."""
        self.pipeline: ShardedStepPipeline | None = None
        """After a step: what updates and gathers its parameters."""
        self._averages: dict[GradParam, Tensor] = {}
        self._wholes: dict[GradParam, Tensor] = {}
        self._packed = False

    @property
    def in_flight(self) -> bool:
        return self._packed or super().in_flight

    def _gathered(self) -> tuple[ShardedSlice, ...]:
        return gathers_of(self.slices)

    def pack(self) -> None:
        """All slices take what they will send: nothing needs the whole gradients any more."""
        # At once, as the last slices may leave much later, behind those of units in front.
        for param, spec in self.specs.items():
            spec.check_format(bare(param.parameter))
        averages = {param: self.average_of(param) for param in self.params}
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

    def average_of(self, param: GradParam) -> Tensor:
        """Where the averages of this rank's elements will stand once they have come."""
        if param not in self._averages:
            self._averages[param] = bare(param.parameter).new_empty(self.specs[param].own_numel)
        return self._averages[param]

    def chunk_of(self, param: GradParam) -> Tensor:
        """This rank's elements of the parameter, sharing their memory."""
        return self.specs[param].chunk_of(param.parameter)

    def awaits(self, average: Tensor) -> bool:
        """Whether ``average`` is to be waited for, or a step still uses it."""
        return self.pipeline is not None or any(a is average for a in self._averages.values())

    @property
    def is_completed(self) -> bool:
        if self.pipeline is None:
            return super().is_completed
        # After a step, it is the parameters that come.
        return self.pipeline.has_sent(self) and all(
            one.is_completed for one in self.gathered_slices
        )

    @property
    def arrived(self) -> bool:
        """Whether every gradient that is waited for has come."""
        return all(s.is_completed for s in self.slices)

    def start_step(self, pipeline: ShardedStepPipeline) -> None:
        """Hands it to the pipeline of a step (see [Note: Sharded steps pipeline])."""
        if self.in_flight:
            self._averages = {param: self.average_of(param) for param in self.params}
        # Now, as from here on nothing may touch the parameters: they make whoever does wait.
        gathered = {param for one in self.gathered_slices for param in one.params}
        self._wholes = {param: flat(param.parameter.detach()) for param in gathered}
        self.changed, self.sent, self.pipeline = False, len(self.slices), pipeline

    def wait_and_average(self, watch: Watchdog) -> float:
        if self.pipeline is None:
            self._averages = {param: self.average_of(param) for param in self.params}
            return self.wait_for_averages(watch)
        waited = self.pipeline.wait_for(self)
        doing = f"the gathering of the updated {self.listed}"
        waited += sum(s.wait_for_params(watch, doing) for s in self.gathered_slices)
        self.pipeline = None
        return waited

    def wait_for_averages(self, watch: Watchdog) -> float:
        """Waits for the gradients, not for the parameters. Returns the seconds waited."""
        doing = f"the exchange of the gradients of {self.listed}"
        waited = sum(s.wait_for_averages(self._averages, watch, doing) for s in self.slices)
        self._averages, self.gradients = {}, {}  # who shows a gradient holds its average
        return waited

    def gather(self) -> None:
        """Sends the updated chunks to all peers. Collective, in forward order."""
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


class ShardedStepPipeline:
    """The groups of one step, in forward order, with what updates their chunks. ``waited(group,
    seconds)`` is told how long each one's averages were waited for."""

    def __init__(
        self,
        updates: Mapping[ShardedGradGroup, Callable[[], None]],
        watch: Watchdog,
        waited: Callable[[ShardedGradGroup, float], None],
    ) -> None:
        self._updates = dict(updates)
        self._gathers: dict[ShardedGradGroup, Future[None]] = {g: Future() for g in updates}
        """Done when a group's all-gather has been issued, or never will be."""
        self._watch, self._waited = watch, waited

    def start(self) -> None:
        """Runs it in a thread of its own."""
        spawn("meshwright sharded step", with_current_modes(self._run))

    def run(self) -> None:
        self._run()
        for gather in self._gathers.values():
            gather.result()

    def has_sent(self, grad_group: ShardedGradGroup) -> bool:
        """Whether the all-gather of a group has been issued."""
        return self._gathers[grad_group].done()

    def wait_for(self, grad_group: ShardedGradGroup) -> float:
        """Waits until the all-gather of a group has been issued; raises what has prevented that.
        Returns the seconds waited."""
        start_s = time.perf_counter()
        # Without a limit of its own: each wait in the thread has one.
        self._gathers[grad_group].result()
        return time.perf_counter() - start_s

    def _run(self) -> None:
        try:
            with torch.no_grad():
                for grad_group, gather in self._gathers.items():
                    if not grad_group.on_stream:
                        self._update_arrived(before=grad_group)
                    self._update(grad_group)
                    grad_group.gather()
                    gather.set_result(None)
        except BaseException as error:  # raised where somebody waits for its outcome
            for gather in self._gathers.values():
                if not gather.done():
                    gather.set_exception(error)

    def _update_arrived(self, before: ShardedGradGroup) -> None:
        # Groups behind whose gradients are there, while those of the one whose turn it is come.
        for other in self._gathers:
            if before not in self._updates or before.arrived:
                return
            if other.arrived:
                self._update(other)

    def _update(self, grad_group: ShardedGradGroup) -> None:
        if grad_group in self._updates:
            self._waited(grad_group, grad_group.wait_for_averages(self._watch))
            # Taken out of the dict, which lets go of the gradients that it holds.
            self._updates.pop(grad_group)()
