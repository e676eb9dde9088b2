"""Gradients on their way, in slices: what is sent, and what has come back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.collectives import ring_bytes
from ...planner.schema.plan import SHARDING, ExchangePolicy
from ...planner.simulate import slicing
from ...planner.simulate.slicing import GradientSize, SliceSpec
from ..comm.buffers import alias_for_comm, release_comm_buffers
from ..comm.two_way import gather_rows
from ..comm.watchdog import Watchdog
from ..comm.worker_threads import abandon
from .buckets import GradParam
from .flat_shard import flat, in_one_piece
from .pending import bare
from .wire import decode, encode


class Slice:
    """One collective: a part of a large gradient where it lies, or copies of small ones."""

    def __init__(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> None:
        self.params = tuple(params)
        self.slice_spec = slice_spec
        self.work: dist.Work | None = None
        self._wire: Tensor | None = None
        self._comm_tensors: list[Tensor] = []  # what the library has
        self._arrived = True
        self.skipped = False
        """Whether its turn passes without a message, on all ranks alike."""

    def __del__(self) -> None:
        if self.work is not None:
            abandon(self.work)

    @property
    def bytes(self) -> int:
        """Its size on this rank, as that of an all-reduce which takes as long."""
        numel = sum(p.parameter.numel() for p in self.params)
        return numel * self.params[0].wire_dtype.itemsize // self.slice_spec.parts

    @property
    def shared_bytes(self) -> int:
        """Its size for ordering: the same number on all ranks, whatever each holds."""
        share = sum(p.shared_bytes for p in self.params) // self.slice_spec.parts
        first = self.params[0]
        share = share * first.wire_dtype.itemsize // first.parameter.element_size()
        # Of an all-reduce that takes as long as the way of gradients to those who own elements.
        return share // 2 if first.exchange in SHARDING else share

    @property
    def sent_bytes(self) -> int:
        """What a ring sends for it."""
        return ring_bytes("all_reduce", self.params[0].group.size, self.bytes)

    @property
    def elements(self) -> slice:
        """Of its only parameter, as they lie in memory."""
        numel, (_, part, parts) = self.params[0].parameter.numel(), self.slice_spec
        return slice(numel * part // parts, numel * (part + 1) // parts)

    def send(self, gradients: dict[GradParam, Tensor]) -> None:
        """Starts the sum over the group. Collective, in the order of all slices."""
        group = self.params[0].group
        flats = [flat(gradients[param]) for param in self.params]
        if len(flats) > 1:
            self._wire = torch.cat(flats)
        else:
            self._wire = flats[0][self.elements]
        self._arrived = False
        if group.handle is not None and self._wire.numel():
            self.start(self._wire)

    def start(self, wire: Tensor) -> None:
        """Starts to make the sum of ``wire`` in its place."""
        self._comm_tensors = [alias_for_comm(encode(wire, self.params[0].wire_dtype))]
        handle = self.params[0].group.handle
        self.work = dist.all_reduce(self._comm_tensors[0], group=handle, async_op=True)

    @property
    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def wait_and_average(
        self, gradients: dict[GradParam, Tensor], watch: Watchdog, doing: str
    ) -> float:
        """Waits, and turns the sum into the average. Returns the seconds waited."""
        if self._arrived:
            return 0.0
        waited = self.wait_for_average(watch, doing)
        assert self._wire is not None
        if len(self.params) > 1:
            flats = [flat(gradients[param]) for param in self.params]
            torch._foreach_copy_(flats, torch.split(self._wire, [f.numel() for f in flats]))
        self._finish()
        return waited

    def wait_for_average(self, watch: Watchdog, doing: str) -> float:
        """Waits until the average stands where the message was. Returns the seconds waited."""
        assert self._wire is not None
        group = self.params[0].group
        waited = watch.wait(self.work, group, doing)
        if group.handle is not None:
            decode(self._wire, self.params[0].wire_dtype, group.size)
        return waited

    def _finish(self) -> None:
        release_comm_buffers(self._comm_tensors)
        self._arrived, self._wire, self._comm_tensors, self.work = True, None, [], None


class SummedSlice(Slice):
    """One collective: every rank gets what each has, and adds it up in the order of ranks."""

    def start(self, wire: Tensor) -> None:
        group = self.params[0].group
        self._rows = wire.new_empty(group.size, len(wire))
        self.work, self._comm_tensors = gather_rows(self._rows, wire, group)

    def wait_for_average(self, watch: Watchdog, doing: str) -> float:
        assert self._wire is not None
        group = self.params[0].group
        waited = watch.wait(self.work, group, doing)
        if self.work is not None:
            first, *others = self._rows
            self._wire.copy_(first)
            for other in others:
                self._wire.add_(other)
            self._wire.div_(group.size)
            del self._rows
        return waited


def exact_slice(params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
    """A slice that loses nothing, among gradients of the same group which are gathered."""
    # A sum that the library makes goes its own way, in threads and hops of its own: where messages
    # between ranks fill the link it comes late, and the next forward waits for its first scales.
    # Not what may be large (complex parameters): its messages take memory beside it.
    small = all(param.parameter.ndim <= 1 for param in params)
    kind = SummedSlice if small and params[0].group.in_pairs else Slice
    return kind(params, slice_spec)


_ALIGNED_BYTES = 16


def padded_bytes(size_bytes: int) -> int:
    """The size of a message that carries so many bytes and is gathered: up to 15 more, which mean
    nothing."""
    # The ranks' messages lie one behind the other, and NCCL copies what begins elsewhere than at a
    # multiple of 16 bytes in smaller pieces, single bytes at worst.
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class GatheredSlice(Slice, ABC):
    """One collective: a message of one parameter's gradient, as every rank gets it from each."""

    def __init__(self, param: GradParam, slice_spec: SliceSpec) -> None:
        super().__init__([param], slice_spec)
        self._messages: list[Tensor] = []
        """What has come, in the order of ranks."""

    @property
    @abstractmethod
    def message_bytes(self) -> int:
        """What this rank sends to each other."""

    @property
    def sent_bytes(self) -> int:
        ranks = self.params[0].group.size
        return ring_bytes("all_gather", ranks, ranks * self.message_bytes)

    @property
    def bytes(self) -> int:
        # Those of a gradient whose sum would take a ring as long.
        return self.params[0].group.size * self.message_bytes // 2

    def gather(self, message: Tensor, rows: Tensor | None = None) -> None:
        """Starts to show the message to all peers; those of all come into ``rows``, where it may
        stand already. Collective, in the order of all slices."""
        self._arrived = False
        group = self.params[0].group
        if message.numel():
            self._wire = message
            rows = message.new_empty(group.size, len(message)) if rows is None else rows
            self._messages = list(rows)
            self.work, self._comm_tensors = gather_rows(rows, message, group)

    def wait_and_average(
        self, gradients: dict[GradParam, Tensor], watch: Watchdog, doing: str
    ) -> float:
        if self._arrived:
            return 0.0
        (param,) = self.params
        waited = watch.wait(self.work, param.group, doing)
        self.take(self._messages, gradients[param])
        self._messages = []
        self._finish()
        return waited

    @abstractmethod
    def take(self, messages: Sequence[Tensor], gradient: Tensor) -> None:
        """Makes the average of what has come, in the place of the gradient."""


class GradGroup:
    """The gradients of one unit (or of small ones that follow each other) that travel among the
    same peers. ``unit`` is the place of the first of them in forward order."""

    slice_class: type[Slice] = Slice
    absent = False
    """Whether it stands for what other ranks exchange."""

    def __init__(self, unit: int, params: Sequence[GradParam], message_bytes: int) -> None:
        self.unit = unit
        self.params = tuple(params)
        self.released = self.params[0].released
        """Whether its gradients are applied and freed in backward."""
        self.slices = tuple(self._cut(message_bytes))
        self.gradients: dict[GradParam, Tensor] = {}
        self.ready_s = 0.0
        self.sent = 0
        self.idle: set[GradParam] = set()
        """The parameters for which this rank has computed nothing, neither in this backward nor in
        those since one was exchanged."""
        self.update: Callable[[], None] | None = None
        """Applies the step that has taken these gradients over."""

    def _cut(self, message_bytes: int) -> list[Slice]:
        # Cut by shares of the undivided size, so that all members have as many slices.
        specs = slicing.cut([p.shared_bytes for p in self.params], message_bytes)
        return [self.slice_class([self.params[i] for i in spec.parameters], spec) for spec in specs]

    @property
    def on_stream(self) -> bool:
        """Whether it travels on a device's streams, where a wait does not hold the host and each
        question whether something has come costs it some microseconds."""
        return any(param.group.on_stream for param in self.params)

    @property
    def full(self) -> bool:
        return len(self.gradients) == len(self.params)

    @property
    def in_flight(self) -> bool:
        """Whether slices have taken what they send and not been waited for."""
        return self.sent > 0

    @property
    def is_completed(self) -> bool:
        return self.sent == len(self.slices) and all(s.is_completed for s in self.slices)

    @property
    def needs_room(self) -> bool:
        """Whether applying it takes extra memory."""
        return False

    def following(self, number: int) -> Slice:
        """Its next slice, which knows whether it will travel and what will be sent for it."""
        return self.slices[number]

    def send(self, number: int) -> None:
        assert number == self.sent, "slices of a group leave in their order"
        self.sent += 1
        if not self.slices[number].skipped:
            self.start(self.slices[number])

    def start(self, one: Slice) -> None:
        """Sends a slice whose turn it is."""
        one.send(self.gradients)

    def absorb(self, param: GradParam, gradient: Tensor) -> bool:
        """Takes in the gradient of a backward after which nothing is sent. False where it stays,
        for later ones to be added to it."""
        return False

    def sends(self, param: GradParam) -> bool:
        """Whether anything of the parameter is sent in this backward; if not, it is held."""
        return True

    def not_to_be_unscaled(self, param: GradParam) -> str:
        """Why its gradient cannot have been scaled; "" where it can."""
        return ""

    def holds(self, param: GradParam) -> bool:
        return False

    def hold(self, param: GradParam) -> None:
        """Keeps what a parameter that is not sent has computed."""
        raise NotImplementedError("what is sent densely is never held")

    def forget(self, param: GradParam) -> None:
        """No rank has anything of the parameter: what was sent of it does not count."""

    def wait_and_average(self, watch: Watchdog) -> float:
        """Waits for all slices; the gradients are averages then. Returns the seconds waited."""
        doing = f"the exchange of the gradients of {self.listed}"
        return sum(s.wait_and_average(self.gradients, watch, doing) for s in self.slices)

    @property
    def listed(self) -> str:
        """Its parameters in words."""
        names = ", ".join(repr(p.name) for p in self.params[:2])
        more = len(self.params) - 2
        return f"{names} and {more} more" if more > 0 else names

    def clear(self) -> None:
        """Begins anew; gradients live on where others hold them."""
        self.gradients, self.idle, self.sent, self.update = {}, set(), 0, None


class AbsentSlice(Slice):
    """A slice that other ranks exchange. Its turn passes without a message: its group here is this
    rank alone."""

    @property
    def bytes(self) -> int:
        return self.shared_bytes  # about what a member has of it there

    @property
    def sent_bytes(self) -> int:
        return 0


class AbsentGradGroup(GradGroup):
    """Gradients that other ranks exchange, while this one has nothing of their parameters."""

    # It is there for its slices' turns, as all ranks order all slices alike.
    slice_class = AbsentSlice
    absent = True


def make_grad_groups(
    params: Iterable[GradParam],
    message_bytes: int,
    kinds: Mapping[ExchangePolicy, type[GradGroup]] = MappingProxyType({"dense": GradGroup}),
    by_host: type[GradGroup] = GradGroup,
) -> list[GradGroup]:
    """The groups in forward order, each with its parameters in the order of backward, as the
    planner packs them; ``kinds`` says which class carries out a policy, ``by_host`` which one those
    that are added up on hosts first."""
    every = list(params)  # the last unit comes first
    packed = slicing.pack_units(GradientSize(p.kind, p.unit, p.packed_bytes) for p in every)
    found = []
    for numbers in packed:
        mine = [every[i] for i in numbers]
        first = mine[0]
        kind = kinds[first.exchange]
        if first.idle:
            kind = AbsentGradGroup
        elif first.group.handle is None:
            kind = GradGroup  # where nothing travels, nothing is saved by leaving it behind
        elif first.hosts is not None:
            kind = by_host
        found.append(kind(mine[-1].unit, mine, message_bytes))
    return sorted(found, key=lambda grad_group: grad_group.unit)


def as_sent(param: GradParam) -> Tensor:
    """The parameter's gradient in the memory format in which slices are cut: the gradient itself
    where it has that, else a copy, or zeros."""
    gradient = param.parameter.grad
    if gradient is not None and gradient.stride() == _stride(param):
        return gradient
    made = empty_like(param)
    return made.zero_() if gradient is None else made.copy_(gradient)


def empty_like(param: GradParam) -> Tensor:
    parameter = param.parameter
    return torch.empty_strided(
        parameter.shape, _stride(param), dtype=parameter.dtype, device=parameter.device
    )


def _stride(param: GradParam) -> tuple[int, ...]:
    # The same on all peers: the parameter's own format where that is dense, as autograd has it.
    parameter = bare(param.parameter)
    if in_one_piece(parameter):
        return parameter.stride()
    return torch.empty(parameter.shape, device="meta").stride()
