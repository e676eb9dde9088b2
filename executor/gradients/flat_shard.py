"""Flat shards: which elements of a parameter each peer averages, keeps state for and updates, and
what stands in ``grad`` for a gradient of which this rank has its chunk."""

# The parameter, as it lies in memory, is cut into as many equal chunks as there are peers. That
# depends on nothing but the sizes, so that a checkpoint outlives a change of the slices.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...models.trees import map_only
from ...planner.schema.errors import InputError, RunError
from ..comm.buffers import release_comm_buffers
from ..comm.control import digest
from ..comm.groups import Group
from ..comm.two_way import gather_rows
from ..comm.watchdog import Watchdog
from ..redistribution.shard_gradient import Members, ShardGradient
from .pending import WaitingGradient, bare, vacating


@dataclass(frozen=True, eq=False)
class Channels:
    """The process groups of sharded parameters besides that of their gradients, among the same
    peers: ``updated_chunks`` for updated parameters, ``full_gradients`` for what a user asks of a
    gradient, ``unshards`` for parameters that are put together for each unit that needs them.

    ``members`` combines figures of all who hold elements of the parameter: the peers, and where it
    is divided the members of each peer's group too.
    """

    updated_chunks: Group
    full_gradients: Group
    members: Members
    watch: Watchdog
    unshards: Group | None = None


class AllMembers(Members):
    """The holders of a divided parameter whose slices are sharded among peers."""

    def __init__(self, peers: Group, neighbours: Group, watch: Watchdog) -> None:
        super().__init__(peers, watch)
        self._inner = Members(neighbours, watch)

    def reduce(self, values: Tensor, op: Any) -> Tensor:
        return self._inner.reduce(super().reduce(values, op), op)


@dataclass(frozen=True, eq=False)
class FlatShardSpec:
    """How the ``peers`` share one parameter; this rank's chunk is that of number ``group_rank``."""

    # No tensor: a gradient holds its spec, and would keep the parameter alive that holds it.
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    peers: int
    group_rank: int
    channels: Channels
    divided: Members | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def chunk_numel(self) -> int:
        """A peer's elements; the last peers may have fewer, or none."""
        return -(-self.numel // self.peers)

    @property
    def bounds(self) -> tuple[int, int]:
        """This rank's elements, in the order in which they lie in memory."""
        start = min(self.group_rank * self.chunk_numel, self.numel)
        return start, min(start + self.chunk_numel, self.numel)

    @property
    def own_numel(self) -> int:
        start, stop = self.bounds
        return stop - start

    def check_format(self, parameter: Tensor) -> None:
        """Raises ``InputError`` where the parameter does not lie in memory as it did."""
        if parameter.stride() != self.stride:
            raise InputError(
                f"the memory format of {self.name!r} has changed since the plan was applied, by "
                "which ranks share its elements out: change it before, as by "
                "model.to(memory_format=...)"
            )

    def chunk_of(self, whole: Tensor) -> Tensor:
        """This rank's elements: one dim, sharing memory where the format is the parameter's."""
        # As a plain tensor: a gradient may know the members that hold the other slices.
        whole = whole.detach().as_subclass(Tensor)
        if whole.stride() != self.stride:
            own_format = torch.empty_strided(
                self.shape, self.stride, dtype=whole.dtype, device=whole.device
            )
            whole = own_format.copy_(whole)
        return flat(whole)[slice(*self.bounds)]

    def all_gather(self, chunk: Tensor) -> Tensor:
        """The chunks of all peers, in the parameter's shape. Collective over the peers."""
        self._check_same()
        padded = chunk.new_zeros(self.chunk_numel)
        padded[: chunk.numel()] = chunk
        rows = chunk.new_empty(self.peers, self.chunk_numel)
        self._gather(rows, padded)
        return rows.view(-1)[: self.numel].as_strided(self.shape, self.stride)

    def _check_same(self) -> None:
        # All peers must ask for the same parameter, or what they send would be mixed up.
        device = self.channels.full_gradients.device
        own = torch.tensor([digest(self.name)], dtype=torch.int64, device=device)
        names = own.new_empty(self.peers, 1)
        self._gather(names, own)
        if bool((names != own).any()):
            raise RunError(
                f"ranks ask for different tensors at once, this one for that of {self.name!r}: its "
                "elements are shared among the ranks (exchange 'sharded'), so gradients must be "
                "read on all ranks in one order"
            )

    def _gather(self, rows: Tensor, own: Tensor) -> None:
        """Fills the ``rows`` with the ``own`` of every peer, by group rank, and waits for them."""
        if not own.numel():
            return
        doing = (
            f"putting {self.name!r} together, whose elements are shared among the ranks (read "
            "gradients on all of them)"
        )
        full_gradients, watch = self.channels.full_gradients, self.channels.watch
        watch.issued(doing, full_gradients)
        work, buffers = gather_rows(as_bytes(rows), as_bytes(own), full_gradients)
        watch.wait(work, full_gradients, doing)
        release_comm_buffers(buffers)


def flat(tensor: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_one_piece(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory without gaps or overlaps."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(bare(tensor)))


def laid_as(gradient: Tensor, held: Tensor) -> Tensor:
    """What is held, in the memory format that the gradient has now: elements are chosen and sent as
    they lie in memory."""
    if held.stride() == gradient.stride():
        return held
    return torch.empty_like(gradient, dtype=held.dtype).copy_(held)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend carries."""
    return tensor.view(torch.uint8)


class ShardedGradient(WaitingGradient):
    """Stands in ``grad``, in the parameter's shape, where this rank has the averages of its chunk
    (see [Note: Reading a parameter or a gradient that is on its way] in pending.py)."""

    # Norms over all chunks take one small all-reduce, and scaling none, so that unmodified clipping
    # by norm costs no more than elsewhere. Whatever else reads it puts the whole together. Both are
    # collective among those who hold elements: a gradient must be asked for on every rank in one
    # order, and a rank that asks alone gets an error after the time limit.

    _spec: FlatShardSpec
    _chunk: Tensor
    _wait: Callable[[], None]

    @staticmethod
    def stand_for(
        parameter: nn.Parameter, spec: FlatShardSpec, chunk: Tensor, wait: Callable[[], None]
    ) -> ShardedGradient:
        """What stands for the gradient whose averages are in ``chunk`` after ``wait()``."""

        def arrive() -> Tensor:
            wait()
            whole = spec.all_gather(chunk)
            return whole if spec.divided is None else ShardGradient.of(whole, spec.divided)

        zeros = vacating(
            parameter, lambda: chunk.new_empty_strided(spec.shape, spec.stride).zero_()
        )
        waiting = ShardedGradient.of(bare(parameter), arrive, zeros)
        waiting._spec, waiting._chunk, waiting._wait = spec, chunk, wait
        return waiting

    def take_over(self) -> Tensor:
        """This rank's elements for a step, once they have come."""
        # What is done to the gradient from now on waits until the step has used them.
        self.taken = True
        if self._gradient is None:
            return self._chunk
        return self._spec.chunk_of(self._gradient).clone()

    def clear(self) -> None:
        if self._gradient is None:
            # Nothing is waited for: a step that needs the chunk holds it.
            self._gradient, self._arrive = self._vacate(self), None
        else:
            self._gradient.zero_()

    def as_chunk(self) -> Tensor:
        """The chunk, which knows the norm of the whole, or the whole where that was gathered."""
        if self._gradient is not None:
            return self._gradient
        self._wait()
        return ShardGradient.of(self._chunk, self._spec.channels.members)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (_is_norm(func, args, kwargs) or _is_scaling(func, args, kwargs)):
            return super().__torch_function__(func, types, args, kwargs)

        def chunk_or_whole(gradient: WaitingGradient) -> Tensor:
            if isinstance(gradient, ShardedGradient):
                return gradient.as_chunk()
            return gradient.complete()

        result = func(*map_only(WaitingGradient, chunk_or_whole, args), **kwargs)
        return args[0] if func in _SCALE_ONE else result


def _is_norm(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for norms of whole gradients that combine from their chunks'."""
    given = {key for key, value in kwargs.items() if value is not None and value is not False}
    if func not in _DEFAULT_ORDERS or len(args) > 2 or not given <= {"ord", "p", "dtype"}:
        return False
    default = kwargs.get("ord", kwargs.get("p", _DEFAULT_ORDERS[func]))
    order = args[1] if len(args) > 1 else default
    if func is torch.linalg.norm:
        return order is None
    if order is None or order == "fro":
        return func in (torch.norm, Tensor.norm)
    return isinstance(order, int | float) and order >= 0


def _is_scaling(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call multiplies gradients in place by one number."""
    if func is torch._amp_foreach_non_finite_check_and_unscale_:
        return True
    if func not in _SCALE_ONE | _SCALE_ALL or len(args) != 2 or kwargs:
        return False
    factor = args[1]
    if isinstance(factor, Tensor):
        return factor.ndim == 0 and not isinstance(factor, WaitingGradient)
    return isinstance(factor, int | float)


_DEFAULT_ORDERS: dict[Any, Any] = {
    torch.linalg.vector_norm: 2,
    torch.linalg.norm: None,
    torch.norm: "fro",
    Tensor.norm: "fro",
    torch._foreach_norm: 2,
}
"""What asks for norms, and of which order unless it is given."""
_SCALE_ONE = {Tensor.mul_, Tensor.div_, Tensor.__imul__, Tensor.__itruediv__}
_SCALE_ALL = {torch._foreach_mul_, torch._foreach_div_}
