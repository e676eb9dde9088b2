"""Dense exchange by host: ranks add up on their host what they have, and hosts exchange the sums.

The link between hosts carries 2 (H - 1) / H times a gradient, with H hosts, where a ring through
all n ranks sends 2 (n - 1) / n times as much over it: half of that for two hosts of many ranks.
"""

# [Note: The three stages of a slice]
# A slice is cut into a part for each rank of the host. The ranks send each other their parts and
# each adds up its own; those that own the same part on all hosts all-reduce it; and the ranks of a
# host send each other the sums. On gloo the next stage can start only when somebody has waited for
# the one before, so two threads carry slices on in the order of their turns: one waits for the
# parts, adds them up and issues the all-reduce, the other waits for that and gathers. While one
# slice crosses, the next is added up. Each stage has process groups of its own, on which only one
# thread issues, so that their order is the same on all ranks.
#
# What is received stands in buffers of one slice at a time and stage; the sums stand where the
# gradient was. Rounding (``wire``) is for the crossing alone: inside hosts numbers stay exact.
#
# On a device's streams (NCCL) there are no such groups: that library has algorithms of its own for
# hosts, and slices travel as any others.

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.collectives import ring_bytes
from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm, release_comm_buffers
from ..comm.groups import Group, HostGroups
from ..comm.two_way import all_to_all
from ..comm.watchdog import Watchdog
from ..comm.worker_threads import LINGER_S, IssueQueue
from .buckets import GradParam
from .flat_shard import as_bytes
from .slices import GradGroup, Slice
from .wire import decode, encode


class _Message(NamedTuple):
    """What is to be averaged in its place: as what it crosses, over how many ranks, called how, and
    what is told when it is done."""

    wire: Tensor
    dtype: torch.dtype
    divisor: int
    doing: str
    done: Future[None]


class Stages:
    """The threads that carry slices on through one set of process groups."""

    def __init__(self, hosts: HostGroups, watch: Watchdog) -> None:
        self._hosts, self._watch = hosts, watch.for_thread()
        self._adding = IssueQueue("meshwright sums of a host", linger_s=LINGER_S)
        self._gathering = IssueQueue("meshwright sums of all hosts", linger_s=LINGER_S)

    def average(self, wire: Tensor, dtype: torch.dtype, divisor: int, doing: str) -> Future[None]:
        """Starts to put the sum over all ranks, over ``divisor``, in the place of ``wire``, which
        crosses between hosts as ``dtype``. Collective, in the order of all slices."""
        message = _Message(wire, dtype, divisor, doing, Future())
        self._submit(self._adding, message, lambda: self._add(message))
        return message.done

    def _submit(self, queue: IssueQueue, message: _Message, stage: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                stage()
            except BaseException as error:  # raised where somebody waits for the gradient
                message.done.set_exception(error)

        queue.submit(guarded, in_thread=True)

    def _add(self, message: _Message) -> None:
        """Adds up this rank's part on its host, and sends it on its way to the other hosts."""
        own, sizes = self._parts(message.wire)
        received = own.new_empty(len(sizes), own.numel())
        alike = [own.numel()] * len(sizes)
        self._swap(self._hosts.adding, message, received.view(-1), message.wire, alike, sizes)
        torch.sum(received, dim=0, out=own)
        crossing = alias_for_comm(encode(own, message.dtype))
        work = None
        if crossing.numel():
            across = self._hosts.across.handle
            work = dist.all_reduce(crossing, group=across, async_op=True)
        self._submit(self._gathering, message, lambda: self._gather(message, work, crossing))

    def _gather(self, message: _Message, work: dist.Work | None, crossing: Tensor) -> None:
        """Waits for the sum of all hosts, averages, and gathers what the host's ranks have."""
        self._watch.wait(work, self._hosts.across, message.doing)
        release_comm_buffers([crossing])
        own, sizes = self._parts(message.wire)
        decode(own, message.dtype, message.divisor)
        alike = [own.numel()] * len(sizes)
        averages = own.repeat(len(sizes))
        self._swap(self._hosts.gathering, message, message.wire, averages, sizes, alike)
        message.done.set_result(None)

    def _parts(self, wire: Tensor) -> tuple[Tensor, list[int]]:
        """This rank's part of what is sent, and how many elements each of the host's ranks has."""
        many, numel = self._hosts.adding.size, wire.numel()
        bounds = [numel * i // many for i in range(many + 1)]
        mine = self._hosts.adding.member
        sizes = [after - before for before, after in pairwise(bounds)]
        return wire[bounds[mine] : bounds[mine + 1]], sizes

    def _swap(
        self,
        group: Group,
        message: _Message,
        into: Tensor,
        out: Tensor,
        received: list[int],
        sent: list[int],
    ) -> None:
        """Sends runs of ``out`` to the ranks of the host, and receives theirs ``into``."""
        width = out.element_size()
        counts = [[width * n for n in numbers] for numbers in (received, sent)]
        work, tensors = all_to_all(as_bytes(into), as_bytes(out), counts[0], counts[1], group)
        self._watch.wait(work, group, message.doing)
        release_comm_buffers(tensors)


class HostSlice(Slice):
    """A slice on its way through the three stages."""

    def __init__(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> None:
        super().__init__(params, slice_spec)
        assert params[0].hosts is not None, "made for parameters that are exchanged by host"
        self.hosts = params[0].hosts
        self.stages: Stages | None = None
        self._done: Future[None] | None = None

    @property
    def sent_bytes(self) -> int:
        inside, across = self.hosts.adding.size, self.hosts.across.size
        exact = sum(p.parameter.numel() * p.parameter.element_size() for p in self.params)
        exact //= self.slice_spec.parts
        crossing = ring_bytes("all_reduce", across, self.bytes // inside)
        return 2 * ring_bytes("all_gather", inside, exact) + crossing

    @property
    def is_completed(self) -> bool:
        return self._done is None or self._done.done()

    def start(self, wire: Tensor) -> None:
        assert self.stages is not None, "sent by a group that has its stages"
        first = self.params[0]
        doing = f"the exchange by host of the gradients of {first.name!r}"
        self._done = self.stages.average(wire, first.wire_dtype, first.group.size, doing)

    def wait_for_average(self, watch: Watchdog, doing: str) -> float:
        # Without a limit of its own: each wait in the threads has one.
        return watch.wait_for(self._done) if self._done is not None else 0.0


class HostGradGroup(GradGroup):
    """The gradients of a unit that are added up on each host before hosts exchange them."""

    slice_class = HostSlice
    slices: tuple[HostSlice, ...]

    @property
    def hosts(self) -> HostGroups:
        """The process groups that they go through."""
        return self.slices[0].hosts

    def wait_and_average(self, watch: Watchdog) -> float:
        waited = super().wait_and_average(watch)
        watch.compare(self.params[0].group)  # noted for it, and waited for by its stages' threads
        return waited

    def go_through(self, stages: Stages) -> None:
        """Names the threads that its slices go through."""
        for one in self.slices:
            one.stages = stages
