"""Gradient exchange in buckets: averages over those who hold the same slice of a parameter."""

# Buckets are the same on every rank (made from the list of parameters and their full sizes, in the
# order in which backward finishes them) and leave in one order on every rank, as a collective
# library demands. Each is a flat tensor; gradients are views of it, so nothing is copied back.

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...planner.cost.collectives import ring_bytes
from ...planner.cost.exchange import message_kind, packed_bytes
from ...planner.cost.ownership import largest_share
from ...planner.schema.layout import Layout
from ...planner.schema.options import Option
from ...planner.schema.plan import ExchangePolicy, FeedbackPolicy, WireFormat
from ...planner.simulate import slicing
from ...planner.simulate.slicing import GradientSize
from ..comm.groups import Group, HostGroups
from ..comm.watchdog import Watchdog
from ..redistribution.shard_gradient import Members, ShardGradient
from .flat_shard import Channels, in_one_piece
from .wire import decode, encode, wire_dtype


@dataclass(frozen=True, eq=False)
class GradParam:
    """One parameter and who else holds the same values. ``full_numel`` is its undivided size.

    ``degree`` members hold the slices of a divided parameter; ``members`` is then their group.
    ``unit`` is the place of its first user in forward order; ``exchange``, ``ratio``, ``feedback``,
    ``wire`` and ``rank`` are that unit's policy. ``whole`` says that it is sent whole in every
    backward, whatever the policy.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    degree: int
    full_numel: int
    members: Members | None = None
    unit: int = 0
    exchange: ExchangePolicy = "dense"
    ratio: float = 1.0
    whole: bool = False
    feedback: FeedbackPolicy = "residual"
    wire: WireFormat = "exact"
    rank: int = 1
    """Of its thin matrices, under low rank."""
    channels: Channels | None = None
    """Where its elements are shared among the peers."""
    released: bool = False
    """Whether it is applied and freed in backward, when it has been exchanged."""
    layout: Layout | None = None
    """Its unit's layout, where that leaves ranks idle."""
    idle: bool = False
    """Whether this rank is one of those, and has nothing of it."""
    parts: int | None = None
    """How many parts of it the members of a divided one share out, its elements by default."""
    hosts: HostGroups | None = None
    """Where it is added up on each host first: through which groups."""
    divisor: float = 1.0
    """What a gradient is divided by before it is averaged over the peers, so that the result is the
    average over all ranks."""

    @property
    def kind(self) -> tuple[Option, torch.dtype, torch.device]:
        # Parameters of one kind can travel together.
        layout = self.layout or Layout(groups=self.group.size, degree=self.degree)
        sent = message_kind(
            layout, self.exchange, self.ratio, self.wire,
            self.hosts.adding.size if self.hosts else 1, early_release=self.released,
        )  # fmt: skip
        return sent, self.parameter.dtype, self.parameter.device

    @property
    def packed_bytes(self) -> int:
        """What it counts where gradients of several units are packed into one message."""
        own = self.kind[0]._replace(ratio=self.ratio)
        return packed_bytes(own, self.shared_bytes, whole=self.whole)

    @property
    def wire_dtype(self) -> torch.dtype:
        """As what its gradient travels."""
        return wire_dtype(self.wire, self.parameter.dtype)

    @property
    def full_bytes(self) -> int:
        """The size of the undivided parameter."""
        return self.full_numel * self.parameter.element_size()

    @property
    def shared_bytes(self) -> int:
        """The largest member's share of the parameter: the same number for all members."""
        share = largest_share(self.full_numel, self.parts or self.full_numel, self.degree)
        return share * self.parameter.element_size()

    def show(self, gradient: Tensor) -> Tensor:
        """The gradient as the user sees it."""
        return gradient if self.members is None else ShardGradient.of(gradient, self.members)


class Votes(NamedTuple):
    """The ranks' votes on a backward. ``counted`` waits for them, returns the parameters that some
    rank has a gradient for, and raises where ranks have gone different ways; ``have_come`` says
    whether it would wait."""

    counted: Callable[[], set[GradParam]]
    have_come: Callable[[], bool]


class Bucket:
    """Gradients that travel together. ``single_rank``: nobody else holds these slices, so that
    nothing travels."""

    def __init__(self, params: list[GradParam]) -> None:
        self.params = params
        self.group = params[0].group
        self.single_rank = self.group.handle is None
        self.numel = sum(p.parameter.numel() for p in params)
        self._wire_dtype = params[0].wire_dtype
        self.reset()

    def reset(self) -> None:
        self.missing = {p for p in self.params if not p.idle}
        self.launched = False
        self.work: dist.Work | None = None
        # Gradients keep its memory alive, whose views they are.
        self._flat: Tensor | None = None
        self._views: dict[GradParam, Tensor] = {}

    @property
    def sent_bytes(self) -> int:
        """What a ring all-reduce sends of it."""
        if self.single_rank:
            return 0
        size_bytes = self.numel * self._wire_dtype.itemsize
        return ring_bytes("all_reduce", self.group.size, size_bytes)

    def fill(self, param: GradParam) -> None:
        """Takes over the parameter's gradient: what has accumulated there, or zeros."""
        self.missing.discard(param)
        if self.single_rank:
            return
        view, gradient = self._view(param), param.parameter.grad
        if gradient is None:
            view.zero_()
        else:
            view.copy_(gradient)

    def launch(self) -> None:
        """Starts the sum over the group. Collective, in bucket order."""
        self.launched = True
        if not self.single_rank and self._flat is not None and self.numel:
            message = encode(self._flat, self._wire_dtype)
            self.work = dist.all_reduce(message, group=self.group.handle, async_op=True)

    def average(self) -> None:
        """Turns the sum into the average, once it has arrived."""
        if self._flat is not None:
            decode(self._flat, self._wire_dtype, self.group.size)

    def result(self, param: GradParam) -> Tensor:
        if not self.single_rank:
            return self._views[param]
        gradient = param.parameter.grad
        return torch.zeros_like(param.parameter) if gradient is None else gradient

    def _view(self, param: GradParam) -> Tensor:
        if self._flat is None:
            first = self.params[0].parameter
            self._flat = torch.empty(self.numel, dtype=first.dtype, device=first.device)
            start = 0
            for other in self.params:
                parameter = other.parameter
                own = self._flat.narrow(0, start, parameter.numel())
                start += parameter.numel()
                # In the parameter's memory format where that is dense, as autograd does.
                if parameter.numel() and in_one_piece(parameter):
                    self._views[other] = own.as_strided(parameter.shape, parameter.stride())
                else:
                    self._views[other] = own.view(parameter.shape)
        return self._views[param]


def make_buckets(params: Sequence[GradParam], message_bytes: int) -> list[Bucket]:
    """The buckets of parameters in the order of backward, as the planner packs them."""
    # Undivided sizes, so that members with less of a parameter, or nothing, make the same buckets.
    packed = slicing.pack_buckets(
        (GradientSize(p.kind, p.unit, p.full_bytes) for p in params), message_bytes
    )
    return [Bucket([params[i] for i in numbers]) for numbers in packed]


class Exchange(ABC):
    """A way to exchange gradients, driven by the synchroniser in each backward."""

    keeps_graphs = True
    """Whether gradients of ``backward(create_graph=True)`` can still be derived."""

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Seconds that this rank has waited for gradients."""

    @abstractmethod
    def reset(self) -> None:
        """Begins a backward."""

    @abstractmethod
    def sent(self, param: GradParam) -> bool:
        """Whether the gradient has left in this backward."""

    @abstractmethod
    def ready(self, param: GradParam) -> None:
        """The gradient is complete."""

    @abstractmethod
    def end(self, votes: Votes) -> None:
        """Backward is over: sends the rest."""

    def holds(self, param: GradParam) -> bool:
        """Whether this rank holds back some of what it has computed for the parameter: nothing,
        unless the exchange is lossy."""
        return False

    def absorb(self, param: GradParam) -> None:  # noqa: B027
        """The gradient is complete, in a backward after which nothing is exchanged. Where it stays
        in ``grad``, later ones are added to it."""

    def abandon(self) -> None:  # noqa: B027
        """A backward has failed halfway."""

    def foresee(self) -> None:  # noqa: B027
        """At the beginning of a backward after which gradients are exchanged: those that it will
        not compute on this rank need not be waited for."""

    def order_digest(self) -> int:
        """Stands for what this rank has put together, and in which order, since the last vote; zero
        where parameters are whole on every rank."""
        return 0


class BucketExchange(Exchange):
    """Sends buckets as they fill, in order, and waits for them at the end of backward.

    ``issued(text, sent, group)`` is told of each collective before it is issued, and the bytes that
    a ring sends for it. With ``eager`` off nothing leaves before ``end``.
    """

    keeps_graphs = False

    def __init__(
        self,
        buckets: list[Bucket],
        watch: Watchdog,
        *,
        eager: bool,
        issued: Callable[[str, int, Group], None],
    ) -> None:
        self.buckets = buckets
        self._waited_s = 0.0
        self._watch = watch
        self.bucket_of = {param: bucket for bucket in buckets for param in bucket.params}
        # Off on NCCL by ``leave_after_backward``.
        self._eager = eager
        self._issued = issued
        self._next = 0

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def reset(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.reset()

    def ready(self, param: GradParam) -> None:
        bucket = self.bucket_of[param]
        bucket.fill(param)
        param.parameter.grad = bucket.result(param)
        if self._eager and not bucket.missing:
            self._advance(all_of_them=False)

    def sent(self, param: GradParam) -> bool:
        return self.bucket_of[param].launched

    def end(self, votes: Votes) -> None:
        for bucket in self.buckets:
            for param in list(bucket.missing):
                bucket.fill(param)  # zeros, or what had accumulated before: nothing was computed
        self._advance(all_of_them=True)
        somewhere = votes.counted()
        for number, bucket in enumerate(self.buckets):
            doing = f"the exchange of gradients in bucket {number}"
            self._waited_s += self._watch.wait(bucket.work, bucket.group, doing)
            bucket.average()
            # Where no rank has a gradient of a parameter there is none after backward either, as
            # the optimizer would else apply weight decay and momentum to it.
            for param in bucket.params:
                if param in somewhere:
                    param.parameter.grad = param.show(bucket.result(param))
        self.reset()

    def _advance(self, *, all_of_them: bool) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not all_of_them:
                return  # later ones may be full: they wait, as all ranks send in one order
            text = f"bucket {self._next} from {bucket.params[0].name!r}"
            self._issued(text, bucket.sent_bytes, bucket.group)
            bucket.launch()
            self._next += 1
