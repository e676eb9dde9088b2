"""The cost model: what each unit costs under each option, kept in separate figures.

For unit k under an option (layout and style): F and B compute, A blocking communication (the
redistribution at its entry, by edge; the collectives inside it), C the exchange of its gradients,
U the update of its shard. Seconds on the busiest rank, for one micro-batch; C and U for one step.

A row or pair unit ends in partial sums: forward each member adds up those of its own samples, which
the others send it, backward the members gather the gradient of these. Both are all-to-alls among
the group, as every redistribution is: where several members share a host's link, these take longer
than a ring would. A unit with ``global`` batch statistics all-reduces them, forward and backward.

Reconstruction from the abstracts of GHP (Joo & Youn, IEEE Access 9:52601, 2021): the split of a
layer's time into these terms is ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np

from ..schema.cluster import Cluster, StepOverhead
from ..schema.errors import InputError
from ..schema.goal import OPTIMIZERS, Goal
from ..schema.layout import Layout, Style, data_parallel
from ..schema.options import Decisions, Option, segments_of
from ..schema.plan import MIRRORS, MemoryPolicy, Plan
from ..schema.profile import ModelProfile
from .collectives import Fabric, collective_s, ring_steps
from .compute import backward_s, batch_counts, busiest_samples, forward_s, saved_bytes, shard_bytes
from .device_kinds import DeviceKind, device_kinds
from .exchange import Exchanges
from .ownership import TensorPlacement, input_placement, output_placement
from .redistribution import Reals, Traffic, redistribution_s, traffic
from .step_time import LINKS, Chain, OnLink, empty_chain

FloatOrReals = TypeVar("FloatOrReals", float, Reals)

BUCKET_BYTES = 25 * 2**20
"""DDP's default size of a bucket (torch.nn.parallel.DistributedDataParallel, bucket_cap_mb)."""


class UnitCost(NamedTuple):
    """What one unit costs by itself. ``shard_bytes`` are the parameters that a member holds,
    ``trained_bytes`` those of them with a gradient, ``gradient_bytes`` what is exchanged.
    ``released`` is an exchange that the rank waits for in backward (early release), ``slice_s`` the
    time of one slice on the link of ``exchange`` (zero where gradients travel in buckets).
    ``host_s`` is what a GPU's host takes to issue all of it in a step, ``copies_s`` the part of
    forward and backward in which the rank waits for copies to its host's memory and back."""

    forward_s: float
    backward_s: float
    update_s: float
    inner_forward: OnLink
    inner_backward: OnLink
    exchange: OnLink
    gradient_bytes: int
    trained_bytes: int
    shard_bytes: int
    released: OnLink = OnLink()
    slice_s: float = 0.0
    host_s: float = 0.0
    copies_s: float = 0.0


class _Share(NamedTuple):
    """What of a unit's cost depends on the share of it alone."""

    forward_s: float
    backward_s: float
    trained_bytes: int
    shard_bytes: int


class UnitSizes(NamedTuple):
    """Bytes of a member's shard of a unit: its parameters, those of them that are trained, and what
    it has of the tensor that is exchanged."""

    shard_bytes: int
    trained_bytes: int
    gradient_bytes: int


class EdgeCost(NamedTuple):
    """The redistribution of one edge's tensor, forward and backward, the bytes that the busiest
    rank receives forward, those of all that stands side by side as the gradient goes back, and of a
    tensor that several divided units may share, those that it has in the form that they need;
    ``host_s`` is what a GPU's host takes to issue it in a step."""

    forward: OnLink
    backward: OnLink
    received_bytes: float
    returning_bytes: float
    kept_bytes: float
    host_s: float = 0.0


NO_MOVE = EdgeCost(OnLink(), OnLink(), 0.0, 0.0, 0.0)


class CostModel(Exchanges):
    """The costs of one profile on one cluster for one goal, micro-batch count and placement.

    Messages are buckets of at most ``message_bytes`` (the barrier's schedule), or with ``sliced``
    slices of at most that, unit by unit (the schedule by priority).

    Samples are shared out as ``local_batch_sizes``, by position; none given: evenly. Where devices
    are of several ``kinds`` a unit takes as long as on the slowest of them with its samples.

    Every answer is a pure function of these; the object only remembers what it has worked out.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        goal: Goal,
        *,
        micro_batches: int = 1,
        placement: tuple[int, ...] | None = None,
        message_bytes: int = BUCKET_BYTES,
        sliced: bool = False,
        local_batch_sizes: tuple[int, ...] = (),
    ) -> None:
        self.placement = placement or tuple(range(cluster.world_size))
        fabric = Fabric(cluster, self.placement)
        super().__init__(profile, fabric, micro_batches, message_bytes, sliced)
        self.cluster, self.goal = cluster, goal
        self.world_size, self.host_bytes_per_s = cluster.world_size, cluster.host_bytes_per_s
        self.host_memory_bytes = cluster.host_memory_bytes
        self.local_batch_sizes = local_batch_sizes
        self.counts = batch_counts(goal.batch, self.world_size, micro_batches, local_batch_sizes)
        self.kinds = device_kinds(profile, cluster, self.placement)
        self._units: dict[tuple[int, Option], UnitCost] = {}
        self._shares: dict[tuple[int, Style, int, tuple[int, ...]], _Share] = {}
        self._samples: dict[Layout, tuple[int, ...]] = {}
        self._inners: dict[tuple[int, Style, Layout], tuple[OnLink, OnLink]] = {}
        self._edges: dict[tuple[int, Option, Option], EdgeCost] = {}
        self._traffic: dict[tuple[TensorPlacement, TensorPlacement, int], Traffic] = {}

    @classmethod
    def of_plan(
        cls, plan: Plan, profile: ModelProfile, cluster: Cluster, goal: Goal | None = None
    ) -> CostModel:
        """The costs by which ``plan`` was made from the profile and the cluster, or the same with
        another ``goal``."""
        return cls(
            profile, cluster, goal or plan.goal, micro_batches=plan.micro_batches,
            placement=plan.placement, message_bytes=plan.message_bytes,
            sliced=plan.schedule == "priority", local_batch_sizes=plan.local_batch_sizes,
        )  # fmt: skip

    @cached_property
    def baseline(self) -> Decisions:
        """Plain data parallelism."""
        return (Option(data_parallel(self.world_size)),) * len(self.profile.units)

    def with_profile(self, profile: ModelProfile) -> CostModel:
        """The costs of another profile of the same model, all else being equal."""
        made = self._remade(profile, self.local_batch_sizes)
        # What moves between layouts does not depend on the profile: worked out for both together.
        made._traffic = self._traffic
        return made

    def with_local_batches(self, sizes: tuple[int, ...]) -> CostModel:
        """The costs with the batch shared out otherwise, all else being equal."""
        return self._remade(self.profile, sizes)

    def _remade(self, profile: ModelProfile, sizes: tuple[int, ...]) -> CostModel:
        return CostModel(
            profile, self.cluster, self.goal, micro_batches=self.micro_batches,
            placement=self.placement, message_bytes=self.message_bytes, sliced=self.sliced,
            local_batch_sizes=sizes,
        )  # fmt: skip

    def of_kind(self, kind: DeviceKind) -> CostModel:
        """The costs as positions of one of the ``kinds`` see them: what they compute, and all that
        is done together."""
        if len(self.kinds) == 1 and self.kinds[0] is kind:
            return self
        # Not made anew: links and batches are the same, and only what is computed differs.
        made = copy.copy(self)
        made.kinds, made._units, made._shares, made._samples = (kind,), {}, {}, {}
        vars(made).pop("_memory", None)  # that of the model it was copied from
        return made

    # -- costs -----------------------------------------------------------------------------------

    def unit(self, k: int, option: Option) -> UnitCost:
        """What unit ``k`` costs by itself under ``option``."""
        key = (k, option)
        if key not in self._units:
            self._units[key] = self._unit(k, option)
        return self._units[key]

    def _unit(self, k: int, option: Option) -> UnitCost:
        refuse_unmodelled(self, k, option)
        unit, (layout, style) = self.profile.units[k], option[:2]
        share = self._share(k, style, layout)
        _, trained, payload = self.unit_sizes(k, option)
        exchange, slice_s = self.exchanged(option, payload)
        inner_forward, inner_backward = self._inner(k, style, layout)
        # The rank waits for the copies of a mirror on the host: to the device and back.
        host_rate = self.host_bytes_per_s
        copies_s = 2.0 * trained / (host_rate or 1.0) if option.feedback == "host_mirror" else 0.0
        own_s = self.own_backward_s(k, trained, exchanged=layout.groups > 1)
        encode_s, decode_s = self._coding_s(k, option, trained)
        # Coded is what micro-batches have added up, in the last backward.
        encode_s /= self.micro_batches
        cost = UnitCost(
            forward_s=share.forward_s,
            backward_s=share.backward_s + own_s + copies_s + encode_s,
            update_s=self._update_s(option, trained) + decode_s,
            inner_forward=inner_forward,
            inner_backward=inner_backward,
            exchange=exchange,
            gradient_bytes=payload,
            trained_bytes=trained,
            shard_bytes=share.shard_bytes,
            slice_s=slice_s,
            host_s=self.host_s(k, option),
            copies_s=copies_s,
        )
        if option.memory == "recompute":
            cost = recomputed(cost, self.rerun_s(k))
        elif option.memory == "offload":
            assert host_rate is not None, "refused where the rate is not known"
            samples = self._most_samples(layout)
            cost = offloaded(cost, saved_bytes(unit, style, layout.degree, samples) / host_rate)
        return released(cost) if option.early_release else cost

    def unit_sizes(self, k: int, option: Option) -> UnitSizes:
        """The bytes of ``unit``'s cost, without its seconds."""
        share = self._share(k, option.style, option.layout)
        trained = share.trained_bytes
        return UnitSizes(share.shard_bytes, trained, self.payload_bytes(option, trained))

    def _share(self, k: int, style: Style, layout: Layout) -> _Share:
        """A member's share, which a unit's many policies in one layout have in common: its times
        where it takes longest."""
        samples = self.samples_by_kind(layout)
        key = (k, style, layout.degree, samples)
        if key not in self._shares:
            unit, owned = self.profile.units[k], self.owned[k]
            trainable = tuple(p for p in owned if p.trainable)
            units = (kind.profile.units[k] for kind in self.kinds)
            there = list(zip(units, samples, strict=True))
            self._shares[key] = _Share(
                max(forward_s(u, style, layout.degree, n) for u, n in there),
                max(backward_s(u, style, layout.degree, n) for u, n in there),
                shard_bytes(unit, style, layout.degree, trainable),
                shard_bytes(unit, style, layout.degree, owned),
            )
        return self._shares[key]

    def _most_samples(self, layout: Layout) -> int:
        """Samples of the group that has most, whoever is in it."""
        return max(self.samples_by_kind(layout))

    def samples_by_kind(self, layout: Layout) -> tuple[int, ...]:
        """For each kind of device in ``kinds`` the samples of the largest group that has a device
        of that kind."""
        if layout not in self._samples:
            # Of all positions at once it is quicker to tell.
            every = sum(len(kind.positions) for kind in self.kinds) == self.world_size
            alike = every and len(self.kinds) == 1
            self._samples[layout] = tuple(
                busiest_samples(self.counts, layout, None if alike else kind.positions)
                for kind in self.kinds
            )
        return self._samples[layout]

    def own_backward_s(self, k: int, trained_bytes: int, *, exchanged: bool) -> float:
        """What the backward of unit ``k`` takes besides what was measured of it, with gradients of
        so many bytes."""
        overhead_s = self.overhead_s(k, trained_bytes if exchanged else 0)
        return overhead_s + self._adding_s(trained_bytes)

    def overhead_s(self, k: int, gradient_bytes: int) -> float:
        """The executor's own work in the backward of unit ``k``, as far as its device does it: for
        each of its parameters, and of what comes once in a step its part: for what it exchanges."""
        if self.hosts_take_time:
            return 0.0
        exchanged_s = self._overhead.byte_s * gradient_bytes / self.micro_batches
        return self._around_parameters_s(k) + exchanged_s

    def _adding_s(self, trained_bytes: int) -> float:
        """What a backward takes to add gradients to those of the micro-batches before, in the mean
        of a step's: none does in the first. An update without momentum moves as many bytes."""
        rates = (kind.profile.update_seconds_per_byte("sgd") for kind in self.kinds)
        return (1 - 1 / self.micro_batches) * max(rates) * trained_bytes

    def rerun_s(self, k: int) -> float:
        """The executor's own work around the second forward of unit ``k``, as far as its device
        does it."""
        return 0.0 if self.hosts_take_time else self._around_rerun_s(k)

    @property
    def _overhead(self) -> StepOverhead:
        return self.cluster.overhead_of(sliced=self.sliced)

    def _around_parameters_s(self, k: int) -> float:
        own = self._overhead.parameter_s * sum(p.trainable for p in self.owned[k])
        # What comes once in a step is done at the end of the last backward, the first unit's.
        return own + (self._overhead.step_s / self.micro_batches if k == 0 else 0.0)

    def _around_rerun_s(self, k: int) -> float:
        return self._overhead.rerun_s if self.profile.units[k].modules else 0.0

    @cached_property
    def hosts_take_time(self) -> bool:
        """Whether devices work behind their hosts, which issue their work and do what the executor
        itself has to, and it is known how long that takes."""
        units = self.profile.units
        on_streams = self.profile.device_type == "cuda"
        return on_streams and any(u.host_forward_s or u.host_backward_s for u in units)

    def host_s(self, k: int, option: Option) -> float:
        """Seconds in which a GPU's host issues all that unit ``k`` does in a step, but for what is
        moved at its entry."""
        if not self.hosts_take_time:
            return 0.0
        again = option.memory == "recompute"
        moving_s = self.inner_host_s(k, option.style, option.layout, again=again)
        return self.working_host_s(k, option.memory) + moving_s + self.exchange_host_s(k, option)

    def working_host_s(self, k: int, memory: MemoryPolicy = "keep") -> float:
        """Of these its operators', the executor's own work, and its parameters' updates. Divided or
        not, these are about as many."""
        if not self.hosts_take_time:
            return 0.0
        more_s, unit = self._around_parameters_s(k), self.profile.units[k]
        if memory == "recompute":
            more_s += self._most(lambda p: p.units[k].host_forward_s) + self._around_rerun_s(k)
        elif memory == "offload":
            more_s += self._overhead.copy_s * unit.saved_storages
        return self.alone_host_s(k, self.micro_batches) + self.micro_batches * more_s

    def inner_host_s(self, k: int, style: Style, layout: Layout, *, again: bool = False) -> float:
        """Of these the collectives inside the unit, each as a redistribution: forward and backward,
        and ``again`` where its forward is."""
        forward, backward = (on.seconds > 0 for on in self._inner(k, style, layout))
        ways = (2 if again else 1) * forward + backward
        return self.micro_batches * ways * self._issued_move_s

    def exchange_host_s(self, k: int, option: Option) -> float:
        """Of these what its exchange takes beyond what overheads have for each parameter: messages,
        and what is done to a parameter's gradient but in a dense exchange."""
        overhead = self._overhead
        if option.layout.groups == 1 or not (overhead.message_s or overhead.exchanges):
            return 0.0
        sent = messages = self.own_messages(k, option)
        count = 0.0
        if option.shards:
            # What is gathered for each use is so in each micro-batch, forward and backward.
            times, ways = (self.micro_batches, 2) if option.gathers else (1, 1)
            messages += times * ways * self.own_gathers(k, option)
            count = times * sum(p.trainable for p in self.owned[k])
        elif option.lossy:
            count = self.codings(k, option)
        rounded = sent if option.rounded else 0.0
        return (
            messages * overhead.message_s
            + count * overhead.exchange_s(option.exchange)
            + rounded * overhead.exchange_s(option.wire)
        )

    def alone_host_s(self, k: int, micro_batches: int = 1) -> float:
        """``working_host_s`` without the executor's own work."""
        once_s = self._most(lambda p: p.units[k].host_forward_s + p.units[k].host_backward_s)
        trained = sum(p.trainable for p in self.owned[k])
        update_s = self._most(lambda p: p.update_host_s(self.goal.optimizer))
        return micro_batches * once_s + trained * update_s

    def _most(self, seconds: Callable[[ModelProfile], float]) -> float:
        """Of the kinds of devices, what it takes longest on."""
        return max(seconds(kind.profile) for kind in self.kinds)

    def _update_s(self, option: Option, trained_bytes: int) -> float:
        """The update of a member's shard, of its part of it where the exchange is sharded."""
        part = trained_bytes * max(
            kind.profile.update_seconds_per_byte(self.goal.optimizer, sharded=option.shards)
            for kind in self.kinds
        )
        if option.shards:
            part /= option.layout.groups
        return part

    def _coding_s(self, k: int, option: Option, trained_bytes: int) -> tuple[float, float]:
        """(before, after) the exchange of a member's shard of unit ``k``: choosing, rounding and
        packing what is sent, and making gradients of what has come."""
        if option.layout.groups == 1 or not (option.lossy or option.rounded):
            return 0.0, 0.0
        name = option.exchange if option.lossy else option.wire
        found = [kind.profile.compression_rate(name, option.ratio) for kind in self.kinds]
        rates = [rate for rate in found if rate is not None]
        groups = option.layout.groups
        fixed = any(r.fixed_s or r.received_fixed_s or r.gathered_fixed_s for r in rates)
        times = self.codings(k, option) if fixed else 0.0
        before = (trained_bytes * r.seconds_per_byte + times * r.fixed_s for r in rates)
        after = (
            trained_bytes * (r.received_seconds_per_byte + groups * r.gathered_seconds_per_byte)
            + times * (r.received_fixed_s + groups * r.gathered_fixed_s)
            for r in rates
        )
        return max(before, default=0.0), max(after, default=0.0)

    def _inner(self, k: int, style: Style, layout: Layout) -> tuple[OnLink, OnLink]:
        """The collectives inside a unit, forward and backward, which a unit's many policies in one
        layout have in common: the all-reduce of ``global`` batch statistics, and those of its
        partial sums."""
        key = (k, style, layout)
        if key not in self._inners:
            self._inners[key] = self._inner_of(*key)
        return self._inners[key]

    def _inner_of(self, k: int, style: Style, layout: Layout) -> tuple[OnLink, OnLink]:
        unit = self.profile.units[k]
        statistics = forward = backward = OnLink()
        if unit.batch_statistics and self.goal.batch_statistics == "global":
            ring = self.ring(layout, "all")
            seconds = collective_s(self.fabric, ring, "all_reduce", unit.statistics_bytes)
            part = ring_steps("all_reduce", ring.ranks) / ring.ranks
            statistics = OnLink(seconds, LINKS.index(ring.level), part * unit.statistics_bytes)
        if style in ("row", "pair") and layout.degree > 1:
            out, back = self.partial_sums_per_sample(k, style)
            # Members send each other the samples of each, and add up what comes; backward each gets
            # the gradient of the others' samples: the same boxes the other way.
            summed = output_placement(layout, style)
            moved = self._moved(summed, TensorPlacement(layout, "replicate"), 1)
            link = moved.level.item()
            forward = OnLink(
                self.move_s(moved, out, backward=True).item(), link, moved.received.item() * out
            )
            backward = OnLink(self.move_s(moved, back).item(), link, moved.sent.item() * back)
        return after(statistics, forward), after(statistics, backward)

    def partial_sums_per_sample(self, k: int, style: Style) -> tuple[float, float]:
        """(forward, backward) bytes of what members of a divided unit add up: as measured, as what
        follows in the unit may shrink it (pooling does), else the unit's output."""
        shares = self.profile.units[k].shares
        known = max((share.partial_sums for share in shares if share.style == style), default=0)
        return (float(known),) * 2 if known else self.output_bytes_per_sample(k)

    def output_bytes_per_sample(self, k: int) -> tuple[float, float]:
        """(forward, backward) bytes of a unit's output, the largest that an edge takes from it."""
        edges = [self.profile.edges[e] for e in self.edges_from[k]]
        return (
            max((e.bytes_per_sample for e in edges), default=0.0),
            max((e.gradient_bytes_per_sample for e in edges), default=0.0),
        )

    def edge(self, e: int, source: Option, target: Option) -> EdgeCost:
        """What edge ``e`` costs between its ends' options, taken by itself."""
        key = (e, source, target)
        if key not in self._edges:
            self._edges[key] = self._edge(
                e,
                output_placement(source.layout, source.style),
                input_placement(target.layout, target.style),
            )
        return self._edges[key]

    def _edge(self, e: int, source: TensorPlacement, target: TensorPlacement) -> EdgeCost:
        edge = self.profile.edges[e]
        # Where no end slices features, what moves is the same for any number of them.
        features = edge.features if "feature_shard" in (source.form, target.form) else 1
        moved = self._moved(source, target, features)
        link, sent, received = moved.level.item(), moved.sent.item(), moved.received.item()
        element = edge.bytes_per_sample / features
        back = edge.gradient_bytes_per_sample / features
        ahead, behind = self.move_s(moved, element), self.move_s(moved, back, backward=True)
        # Backward the same boxes go the other way: what was received is sent.
        return EdgeCost(
            OnLink(ahead.item(), link, sent * element),
            OnLink(behind.item(), link, received * back),
            received * element,
            moved.returning.item() * back,
            moved.needed.item() * element * self.kept_share(e, target),
            self.move_host_s(ahead, behind).item(),
        )

    def _moved(self, source: TensorPlacement, target: TensorPlacement, features: int) -> Traffic:
        key = (source, target, features)
        if key not in self._traffic:
            self._traffic[key] = traffic(self.fabric, self.counts, (source,), (target,), features)
        return self._traffic[key]

    def arrival(self, e: int, decisions: Sequence[Option]) -> EdgeCost:
        """What edge ``e`` costs in a plan: nothing where an earlier unit has got the same
        tensors in the same placement."""
        a, b = self.ends[e]
        cost = self.edge(e, decisions[a], decisions[b])
        moves = cost.received_bytes or cost.backward.sent_bytes
        return NO_MOVE if moves and self.redistributed_before(e, decisions) else cost

    def move_s(self, moved: Traffic, element_bytes: float, *, backward: bool = False) -> Reals:
        """[source, target] seconds of redistributions, with the executor's own work around each."""
        seconds = redistribution_s(self.fabric, moved, element_bytes, backward=backward)
        return seconds + self._around_s(moved.needed * element_bytes) * (seconds > 0)

    def move_host_s(self, *ways_s: Reals) -> Reals:
        """What a GPU's host takes in a step to issue redistributions that take so many seconds
        each way: those that take any."""
        moves: Reals = np.sum([seconds > 0 for seconds in ways_s], axis=0, dtype=np.float64)
        return self.micro_batches * self._issued_move_s * moves

    @property
    def _issued_move_s(self) -> float:
        return self.cluster.overhead.move_s if self.hosts_take_time else 0.0

    def _around_s(self, needed_bytes: FloatOrReals) -> FloatOrReals:
        """The executor's own work around redistributions to members that need so much."""
        overhead = StepOverhead() if self.hosts_take_time else self.cluster.overhead
        return overhead.move_s + overhead.move_byte_s * needed_bytes

    def chain(self, decisions: Sequence[Option]) -> Chain:
        """All costs of the decisions, in forward order, as the step formulas take them."""
        chain = empty_chain(len(decisions))
        for k, option in enumerate(decisions):
            self.write_unit(chain, k, option)
            self.write_entry(chain, k, decisions)
        self._rerun_segments(chain, decisions)
        return chain

    def _rerun_segments(self, chain: Chain, decisions: Sequence[Option]) -> None:
        """Moves the second forwards of a segment's units in ``chain`` to where they are: before the
        backward of its last unit."""
        for first, last in segments_of(decisions):
            before = slice(first, last)
            chain.backward_s[last] += chain.forward_s[before].sum()
            around_s = [self.rerun_s(k) for k in range(first, last)]  # once for all of them
            left = chain.backward_s[before] - chain.forward_s[before] - around_s
            chain.backward_s[before] = np.maximum(left, 0.0)  # below zero by rounding only
            if chain.host_s is not None and self.hosts_take_time:
                around_s = [self._around_rerun_s(k) for k in range(first, last)]
                chain.host_s[before] -= self.micro_batches * np.array(around_s)

    def write_unit(self, chain: Chain, k: int, option: Option) -> None:
        """Writes into ``chain`` what unit ``k`` costs by itself."""
        cost = self.unit(k, option)
        chain.forward_s[k], chain.backward_s[k] = cost.forward_s, cost.backward_s
        chain.update_s[k] = cost.update_s
        if chain.host_s is not None:
            chain.host_s[k] = cost.host_s
        for column, on in (
            (chain.inner_forward_s, cost.inner_forward),
            (chain.inner_backward_s, cost.inner_backward),
            (chain.exchange_s, cost.exchange),
        ):
            column[:, k] = 0.0
            column[on.link, k] = on.seconds
        chain.inner_backward_s[cost.released.link, k] += cost.released.seconds
        if chain.slice_s is not None:
            chain.slice_s[:, k] = 0.0
            chain.slice_s[cost.exchange.link, k] = cost.slice_s

    def write_entry(self, chain: Chain, k: int, decisions: Sequence[Option]) -> None:
        """Writes into ``chain`` the redistribution at the entry of unit ``k``."""
        chain.entry_forward_s[:, k] = chain.entry_backward_s[:, k] = 0.0
        if chain.entry_host_s is not None:
            chain.entry_host_s[k] = 0.0
        for e in self.edges_into[k]:
            cost = self.arrival(e, decisions)
            chain.entry_forward_s[cost.forward.link, k] += cost.forward.seconds
            chain.entry_backward_s[cost.backward.link, k] += cost.backward.seconds
            if chain.entry_host_s is not None:
                chain.entry_host_s[k] += cost.host_s


def after(one: OnLink, other: OnLink) -> OnLink:
    """Two collectives one after the other, as on the link of the longer."""
    link = max(one, other).link
    return OnLink(one.seconds + other.seconds, link, one.sent_bytes + other.sent_bytes)


def recomputed(cost: UnitCost, around_s: float) -> UnitCost:
    """With recompute the forward runs again in backward, its collectives too. ``around_s`` is the
    executor's own work around that."""
    again, inner = cost.inner_forward, cost.inner_backward
    both = OnLink(
        inner.seconds + again.seconds,
        again.link if again.seconds else inner.link,
        inner.sent_bytes + again.sent_bytes,
    )
    backward_s = cost.backward_s + cost.forward_s + around_s
    return cost._replace(backward_s=backward_s, inner_backward=both)


def offloaded(cost: UnitCost, copy_s: float) -> UnitCost:
    """With offload the feature maps are copied to the host and back in ``copy_s`` each: counted as
    if the rank waited, though copies go on beside a neighbour's work, whose time is its own."""
    return cost._replace(
        forward_s=cost.forward_s + copy_s,
        backward_s=cost.backward_s + copy_s,
        copies_s=cost.copies_s + 2 * copy_s,
    )


def released(cost: UnitCost) -> UnitCost:
    """With early release the rank waits for the unit's exchange in backward and updates there."""
    return cost._replace(
        backward_s=cost.backward_s + cost.update_s,
        update_s=0.0,
        exchange=OnLink(),
        released=cost.exchange,
        slice_s=0.0,
    )


def refuse_unmodelled(model: CostModel, k: int, option: Option) -> None:
    """Raises for a policy whose cost is not known here, or which the schedule cannot have."""
    unit = model.profile.units[k]
    reason = ""
    if option.memory == "offload" and model.host_bytes_per_s is None:
        reason = "asks for offload: state host_bytes_per_s of every device in the cluster"
    elif option.feedback == "host_mirror" and model.host_bytes_per_s is None:
        reason = "asks for 'host_mirror': state host_bytes_per_s of every device in the cluster"
    elif option.feedback in MIRRORS and not OPTIMIZERS[model.goal.optimizer].linear:
        reason = (
            f"asks for {option.feedback!r} with optimizer {model.goal.optimizer!r}: only the "
            "update of SGD is linear in the gradient, so use 'in_place'"
        )
    elif option.lossy and unit.kept(option.exchange, option.ratio) is None:
        reason = f"asks for {option.exchange!r} at ratio {option.ratio}: measure its fidelity there"
    elif option.rounded and model.wire_share(option.wire) == 1:
        reason = f"asks for {option.wire!r} with gradients of {model.profile.dtype}: use 'exact'"
    elif option.shards and not model.sliced:
        reason = "asks for a sharded exchange: plan it with the priority schedule"
    elif option.gathers and option.memory == "offload":
        reason = "asks for offload and fully_sharded exchange: choose one of them"
    elif option.early_release and not model.sliced:
        reason = "asks for early release: plan it with the priority schedule"
    elif option.early_release and model.micro_batches > 1:
        reason = "asks for early release: its gradients add up, so use one micro-batch"
    if reason:
        raise InputError(f"unit {unit.name!r} {reason}")
