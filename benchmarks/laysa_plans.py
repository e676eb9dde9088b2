"""The variants that ``laysa.py`` compares, and the plans made for each.

All exchange by priority in the same slices. Sparse variants send the same share of every unit that
top-k can send in part; what is recomputed, alone or in segments, is the planner's own choice
(``planner/solve/heuristic/checkpointing.py``), and gradients are released early where that makes
the least predicted step that keeps the limit. The naive combination takes both strategies as they
come: early release everywhere, and residual buffers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
from meshwright.executor.capability import CAPABILITY
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory import gradient_buffers
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Decisions, Option, feedbacks, segments_of
from meshwright.planner.schema.plan import FeedbackPolicy, Plan
from meshwright.planner.schema.profile import FidelityProfile, ModelProfile
from meshwright.planner.solve.evaluate import evaluation, make_plan
from meshwright.planner.solve.heuristic.checkpointing import Checkpointing

OURS = "collaborative"
RANKS = 2
RATIO = 0.01
SLICE_BYTES = 4 * 2**20
OPTIMIZER = "momentum"
OWN_MICRO_BATCHES = (2, 4)
# Of its largest batch, what a variant may take instead where that is quicker for a sample.
SHARES = (1.0, 0.75, 0.5)
# So often the largest batch is guessed anew from what the last one took.
TRIES = 3
# The runs send RATIO from the first step on; the planner expects top-k's warm-up, which sends more.
gradient_buffers.FIRST_RATIO = RATIO


class Variant(NamedTuple):
    """A strategy: whether it saves memory (recompute, early release), sends sparsely, and lets
    feedback be kept where gradients were."""

    name: str
    saves: bool = False
    sparse: bool = False
    collaborates: bool = False


VARIANTS = (
    Variant("dense"),
    Variant("memory only", saves=True),
    Variant("sparse only", sparse=True),
    Variant("naive", saves=True, sparse=True),
    Variant(OURS, saves=True, sparse=True, collaborates=True),
)
DENSE, _, SPARSE, _, COLLABORATIVE = VARIANTS


class Common(NamedTuple):
    """What a plan of a variant has decided for all units alike."""

    saves: bool = False
    sparse: bool = False
    early: bool = False
    feedback: FeedbackPolicy = "residual"
    micro_batches: int = 1


class Chosen(NamedTuple):
    """A plan's decisions for a batch of ``batch`` samples on each rank, and their predictions."""

    common: Common
    batch: int
    decisions: Decisions
    peak_bytes: int
    step_s: float

    @property
    def words(self) -> str:
        common, segments = self.common, segments_of(self.decisions)
        inside = sum(last - first + 1 for first, last in segments)
        units = sum(o.memory == "recompute" and not o.segment for o in self.decisions)
        many = f"{inside} units recomputed in {len(segments)} segment{'s' * (len(segments) > 1)}"
        parts = {
            f"{units} unit{'s' * (units > 1)} recomputed alone": units,
            many: segments,
            "early release": common.early,
            f"top-k, {common.feedback}": common.sparse,
            f"{common.micro_batches} micro-batches": common.micro_batches > 1,
        }
        return ", ".join(words for words, said in parts.items() if said) or "all kept, dense"


def two_hosts(bytes_per_s: float, host_bytes_per_s: float | None = None) -> Cluster:
    """The bed, as measured."""
    device = Device(name="host", memory_bytes=2**40, host_bytes_per_s=host_bytes_per_s)
    nodes = tuple(Node(name=f"host{i}", devices=(device,)) for i in range(RANKS))
    link = Level(name="inter", latency_s=2e-4, bytes_per_s=bytes_per_s)
    return Cluster(name="bed", nodes=nodes, levels=(link,))


@dataclass
class Chooser:
    """Plans of the variants of one model."""

    profile: ModelProfile
    cluster: Cluster
    budget_bytes: int
    _searches: dict[tuple[Common, int], Checkpointing] = field(default_factory=dict)
    _least: dict[tuple[Common, int], Chosen] = field(default_factory=dict)

    def commons(self, variant: Variant, micro_batches: int = 1) -> Iterator[Common]:
        """What may be decided within a variant. Early release needs one micro-batch."""
        every: tuple[FeedbackPolicy, ...] = ("residual",)
        if variant.collaborates:
            host = self.cluster.host_bytes_per_s
            every = feedbacks("topk", OPTIMIZER, CAPABILITY.feedback, host)
        releasing = variant.saves and micro_batches == 1
        # The naive combination releases early everywhere, whether that helps or not.
        early = (True,) if variant.name == "naive" and releasing else (False, True)[: 1 + releasing]
        for release in early:
            for feedback in every:
                yield Common(variant.saves, variant.sparse, release, feedback, micro_batches)

    def least(self, variant: Variant, batch: int, micro_batches: int = 1) -> Chosen:
        """The plan that needs least memory."""
        found = []
        for common in self.commons(variant, micro_batches):
            # Bisections ask again and again for the same batches.
            if (common, batch) not in self._least:
                search = self._search(common, batch)
                decisions = search.least() if common.saves else search.decisions
                self._least[common, batch] = self._chosen(common, batch, decisions)
            found.append(self._least[common, batch])
        return min(found, key=lambda one: (one.peak_bytes, one.step_s))

    def quickest(
        self, variant: Variant, batch: int, limit_bytes: float, micro_batches: int = 1
    ) -> Chosen:
        """The plan with the least predicted step among those within the limit; the one that needs
        least memory where none is."""
        found = []
        for common in self.commons(variant, micro_batches):
            search = self._search(common, batch)
            decisions = search.quickest(limit_bytes) if common.saves else search.decisions
            if decisions is not None:
                found.append(self._chosen(common, batch, decisions))
        found = [one for one in found if one.peak_bytes <= limit_bytes]
        if not found:
            return self.least(variant, batch, micro_batches)
        return min(found, key=lambda one: (one.step_s, one.peak_bytes))

    def best(self, variant: Variant, most: int) -> tuple[int, int]:
        """(micro-batches, samples of a rank) with most samples a second by prediction within the
        budget, of the largest batch up to ``most`` and parts of it; (1, 0) where nothing fits."""
        rates: dict[tuple[int, int], float] = {}
        for parts in (1, *OWN_MICRO_BATCHES):

            def fits(count: int, parts: int = parts) -> bool:
                return self.least(variant, parts * count, parts).peak_bytes <= self.budget_bytes

            top = bisected(fits, most // parts)
            for count in sorted({max(int(share * top), 1) for share in SHARES}) if top else ():
                size = parts * count
                chosen = self.quickest(variant, size, self.budget_bytes, parts)
                rates[parts, size] = RANKS * size / chosen.step_s
        return max(rates, key=lambda key: rates[key], default=(1, 0))

    def _chosen(self, common: Common, batch: int, decisions: Decisions) -> Chosen:
        model = self._search(common, batch).model
        done = evaluation(model, decisions, schedule="priority").prediction
        return Chosen(common, batch, decisions, max(done.peak_bytes), done.step_s)

    def _search(self, common: Common, batch: int) -> Checkpointing:
        """What may be recomputed where the rest is decided."""
        key = common, batch
        if key not in self._searches:
            model = CostModel(
                self.profile, self.cluster, self._goal(common, batch),
                micro_batches=common.micro_batches,
                message_bytes=SLICE_BYTES, sliced=True,
            )  # fmt: skip
            decisions = []
            for unit in self.profile.units:
                option = Option(data_parallel(RANKS))
                if any(p.trainable for p in unit.parameters):
                    option = option._replace(early_release=common.early)
                    if common.sparse and unit.kept("topk", RATIO) is not None:
                        feedback = common.feedback
                        option = option._replace(exchange="topk", ratio=RATIO, feedback=feedback)
                decisions.append(option)
            self._searches[key] = Checkpointing(model, decisions, CAPABILITY)
        return self._searches[key]

    def _goal(self, common: Common, batch: int) -> Goal:
        return Goal(
            batch=RANKS * batch, optimizer=OPTIMIZER, memory_limit_bytes=self.budget_bytes,
            micro_batches=(common.micro_batches,), allow_lossy=common.sparse,
            min_fidelity=0.0 if common.sparse else 1.0,
        )  # fmt: skip

    def plan(self, chosen: Chosen) -> Plan:
        """The plan of some decisions."""
        common = chosen.common
        return make_plan(
            self.profile, self.cluster, self._goal(common, chosen.batch), chosen.decisions,
            common.micro_batches, schedule="priority", message_bytes=SLICE_BYTES,
            executor=CAPABILITY,
        )  # fmt: skip


def with_ratio(profile: ModelProfile, ratio: float) -> ModelProfile:
    """The profile with top-k at that ratio as the only lossy exchange."""
    units = []
    for unit in profile.units:
        kept = unit.kept("topk", ratio)
        curve = FidelityProfile(exchange="topk", ratios=(ratio,), kept=(kept or 0.0,))
        fidelity = () if kept is None else (curve,)
        units.append(msgspec.structs.replace(unit, fidelity=fidelity))
    return msgspec.structs.replace(profile, units=tuple(units))


class Peak(NamedTuple):
    """What a plan was predicted to take at most, and what it took."""

    predicted_bytes: int
    measured_bytes: int


class Largest(NamedTuple):
    """The largest batch that kept the budget (0: none did), and the peak measured there."""

    batch: int
    peak_bytes: int


def bisected(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` that fits, 0 where not even 1 does; what is larger than one
    that does not fit is taken not to fit."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_within(
    predicted: Callable[[int], float],
    run: Callable[[int, float], Peak],
    budget_bytes: int,
    most: int,
) -> Largest:
    """The largest batch that was run within the budget.

    Guessed by bisection over ``predicted(batch)`` bytes, and run: ``run(batch, limit_bytes)`` makes
    a plan within a limit. Where it took more or less than predicted, the next guess expects that
    share of error. Where no guess kept the budget, batches are lowered one by one until one does.
    """
    limit, peaks = float(budget_bytes), dict[int, int]()
    for _ in range(TRIES):
        batch = bisected(lambda b: predicted(b) <= limit, most)  # noqa: B023  # called at once
        if batch == 0 or batch in peaks:
            break
        peak = run(batch, limit)
        peaks[batch] = peak.measured_bytes
        limit = budget_bytes * peak.predicted_bytes / peak.measured_bytes
    lowest = min(peaks, default=1)
    while lowest > 1 and min(peaks.values()) > budget_bytes:
        lowest -= 1
        peaks[lowest] = run(lowest, limit).measured_bytes
    good = [b for b, taken in peaks.items() if taken <= budget_bytes]
    return Largest(max(good), peaks[max(good)]) if good else Largest(0, 0)
