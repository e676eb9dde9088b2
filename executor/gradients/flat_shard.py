"""Who updates which elements of a parameter whose exchange is sharded.

The parameter, as it lies in memory, is cut into as many equal chunks as there are peers; each peer
averages the gradient of its own chunk, keeps the optimizer's state of that chunk, and updates it.
That depends on nothing but the sizes, so that a checkpoint outlives a change of the slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.schema.errors import RunError
from ..comm.buffers import alias_for_comm, release_comm_buffers
from ..comm.control import digest
from ..comm.groups import Group
from ..comm.watchdog import Watchdog
from ..redistribution.shard_gradient import Members, ShardGradient


@dataclass(frozen=True, eq=False)
class Channels:
    """The process groups of sharded parameters beside that of their gradients, among the same
    peers: ``gathers`` for updated parameters, ``reads`` for what a user asks of a gradient.

    ``members`` combines figures of all who hold elements of the parameter: the peers, and where it
    is divided the members of each peer's group too.
    """

    gathers: Group
    reads: Group
    members: Members
    watch: Watchdog
    fetches: Group | None = None
    """For parameters that are put together for each use."""


class AllMembers(Members):
    """The holders of a divided parameter whose slices are sharded among peers."""

    def __init__(self, peers: Group, neighbours: Group, watch: Watchdog) -> None:
        super().__init__(peers, watch)
        self._inner = Members(neighbours, watch)

    def reduce(self, values: Tensor, op: Any) -> Tensor:
        """All holders' values combined, in place. Collective over the peers, then the members."""
        return self._inner.reduce(super().reduce(values, op), op)


@dataclass(frozen=True, eq=False)
class FlatShardSpec:
    """How the peers share one parameter. It holds no tensor, so that a gradient may hold it."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    peers: int
    slot: int
    channels: Channels
    divided: Members | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def chunk(self) -> int:
        """A peer's elements; the last peers may have fewer, or none."""
        return -(-self.numel // self.peers)

    @property
    def bounds(self) -> tuple[int, int]:
        """This rank's elements, in the order in which they lie in memory."""
        start = min(self.slot * self.chunk, self.numel)
        return start, min(start + self.chunk, self.numel)

    @property
    def owned(self) -> int:
        """How many elements are this rank's."""
        start, stop = self.bounds
        return stop - start

    def part(self, whole: Tensor) -> Tensor:
        """This rank's elements: one dim, sharing memory where the format is the parameter's."""
        start, stop = self.bounds
        return flat(self._formatted(whole))[start:stop]

    def whole(self, part: Tensor) -> Tensor:
        """The parts of all peers, in the parameter's shape. Collective over the peers."""
        self._check_same()
        padded = part.new_zeros(self.chunk)
        padded[: part.numel()] = part
        rows = part.new_empty(self.peers, self.chunk)
        gather(list(rows), padded, self.channels.reads, self.channels.watch, self.name)
        return rows.view(-1)[: self.numel].as_strided(self.shape, self.stride)

    def zeros(self, like: Tensor) -> Tensor:
        """Zeros in the parameter's shape and memory format, of the type of ``like``."""
        return like.new_empty_strided(self.shape, self.stride).zero_()

    def shown(self, part: Tensor) -> ShardGradient:
        """The part as a gradient that knows the norm of the whole."""
        return ShardGradient.of(part, self.channels.members)

    def is_whole(self, value: Any) -> bool:
        """Whether a value of the optimizer's state is as large as the parameter."""
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape == self.shape

    def is_part(self, value: Any) -> bool:
        """Whether it is as large as this rank's chunk."""
        return isinstance(value, Tensor) and value.shape == (self.owned,)

    def _formatted(self, whole: Tensor) -> Tensor:
        whole = whole.detach().as_subclass(Tensor)
        if whole.stride() == self.stride:
            return whole
        made = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device)
        return made.copy_(whole)

    def _check_same(self) -> None:
        """All peers must ask for the same parameter: what they send would be mixed up else."""
        mine = torch.tensor([digest(self.name)], dtype=torch.int64)
        reads, watch = self.channels.reads, self.channels.watch
        device = "cuda" if reads.on_stream else "cpu"
        theirs = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(self.peers)]
        gather(theirs, mine.to(device), reads, watch, self.name)
        if any(int(other) != int(mine) for other in theirs):
            raise RunError(
                f"ranks ask for different tensors at once, this one for that of {self.name!r}: its "
                "elements are shared among the ranks (exchange 'sharded'), so gradients must be "
                "read on all ranks in one order"
            )


def whole_state(state: dict[str, Any], sharing: FlatShardSpec) -> dict[str, Any]:
    """A parameter's optimizer state with every chunk put together. Collective over its peers."""
    return {k: sharing.whole(v) if sharing.is_part(v) else v for k, v in state.items()}


def gather(rows: list[Tensor], own: Tensor, group: Group, watch: Watchdog, name: str) -> None:
    """Fills ``rows`` with every peer's ``own``, by their slots, and waits for them."""
    if not own.numel():
        return
    doing = (
        f"putting {name!r} together, whose elements are shared among the ranks (read gradients "
        "on all of them)"
    )
    watch.issued(doing, group)
    *theirs, mine = [alias_for_comm(as_bytes(tensor)) for tensor in (*rows, own)]
    work = dist.all_gather(theirs, mine, group=group.handle, async_op=True)
    watch.wait(work, group, doing)
    release_comm_buffers([*theirs, mine])


def flat(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend carries."""
    return tensor.view(torch.uint8)
