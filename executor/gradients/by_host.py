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

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.collectives import ring_bytes
from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm, release_comm_buffers
from ..comm.groups import Group
from ..comm.watchdog import Watchdog
from ..comm.worker_threads import IssueQueue
from .buckets import GradParam
from .flat_shard import as_bytes
from .slices import GradGroup, Slice
from .wire import decode, encode


class Stages:
    """The threads that carry slices on through one set of process groups."""

    def __init__(self, watch: Watchdog) -> None:
        self.watch = watch.for_thread()
        self.adding = IssueQueue("meshwright sums of a host")
        self.gathering = IssueQueue("meshwright sums of all hosts")


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
        stages, self._done = self.stages, Future()
        stages.adding.submit(lambda: self._guarded(self._add, wire, stages), in_thread=True)

    def wait_for_average(self, watch: Watchdog, doing: str) -> float:
        # Without a limit of its own: each wait in the threads has one.
        return watch.wait_for(self._done) if self._done is not None else 0.0

    def _guarded(self, stage: Callable[..., None], *args: object) -> None:
        assert self._done is not None
        try:
            stage(*args)
        except BaseException as error:  # raised where somebody waits for the gradient
            self._done.set_exception(error)

    def _add(self, wire: Tensor, stages: Stages) -> None:
        """Adds up this rank's part on its host, and sends it on its way to the other hosts."""
        own, sizes = self._parts(wire)
        received = wire.new_empty(len(sizes), own.numel())
        alike = [own.numel()] * len(sizes)
        self._swap(self.hosts.adding, received.view(-1), wire, alike, sizes)
        torch.sum(received, dim=0, out=own)
        message = alias_for_comm(encode(own, self.params[0].wire_dtype))
        work = None
        if message.numel():
            across = self.hosts.across.handle
            work = dist.all_reduce(message, group=across, async_op=True)
        stages.gathering.submit(
            lambda: self._guarded(self._gather, wire, work, message), in_thread=True
        )

    def _gather(self, wire: Tensor, work: dist.Work | None, message: Tensor) -> None:
        """Waits for the sum of all hosts, averages, and gathers what the host's ranks have."""
        assert self.stages is not None
        assert self._done is not None
        self.stages.watch.wait(work, self.hosts.across, self._doing)
        release_comm_buffers([message])
        own, sizes = self._parts(wire)
        decode(own, self.params[0].wire_dtype, self.params[0].group.size)
        alike = [own.numel()] * len(sizes)
        self._swap(self.hosts.gathering, wire, own.repeat(len(sizes)), sizes, alike)
        self._done.set_result(None)

    def _parts(self, wire: Tensor) -> tuple[Tensor, list[int]]:
        """This rank's part of what is sent, and how many elements each of the host's ranks has."""
        many, numel = self.hosts.adding.size, wire.numel()
        bounds = [numel * i // many for i in range(many + 1)]
        mine = self.hosts.adding.member
        sizes = [after - before for before, after in pairwise(bounds)]
        return wire[bounds[mine] : bounds[mine + 1]], sizes

    def _swap(
        self, group: Group, into: Tensor, out: Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Sends runs of ``out`` to the ranks of the host, and receives theirs ``into``."""
        assert self.stages is not None
        width = out.element_size()
        tensors = [alias_for_comm(as_bytes(t)) for t in (into, out)]
        counts = [[width * n for n in numbers] for numbers in (received, sent)]
        work = dist.all_to_all_single(
            tensors[0], tensors[1], counts[0], counts[1], group=group.handle, async_op=True
        )
        self.stages.watch.wait(work, group, self._doing)
        release_comm_buffers(tensors)

    @property
    def _doing(self) -> str:
        return f"the exchange by host of the gradients of {self.params[0].name!r}"


class HostGradGroup(GradGroup):
    """The gradients of a unit that are added up on each host before hosts exchange them."""

    slice_class = HostSlice
    slices: tuple[HostSlice, ...]

    def go_through(self, stages: Stages) -> None:
        """Names the threads that its slices go through."""
        for one in self.slices:
            one.stages = stages
