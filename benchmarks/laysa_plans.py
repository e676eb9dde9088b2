"""The variants that ``laysa.py`` compares, and the plans made for each.

All exchange by priority in the same slices. Sparse variants send the same share of every unit that
top-k can send in part; what is recomputed, in segments of how many blocks, and whether gradients
are released early is chosen for the least predicted step that keeps the limit, by the planner's
memory timeline and simulation. The naive combination takes both strategies as they come: early
release everywhere, and residual buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from laysa_figures import OURS, largest
from laysa_units import EVEN
from meshwright.executor.capability import CAPABILITY
from meshwright.planner import travelling
from meshwright.planner.cluster import Cluster, Device, Level, Node
from meshwright.planner.cost import CostModel
from meshwright.planner.evaluate import evaluation, make_plan, rank_memory
from meshwright.planner.feedback import feedbacks
from meshwright.planner.goal import Goal
from meshwright.planner.layout import data_parallel
from meshwright.planner.options import Decisions, Option
from meshwright.planner.plan import FeedbackPolicy, Plan
from meshwright.planner.profile import ModelProfile, UnitProfile

RANKS = 2
RATIO = 0.01
SLICE_BYTES = 4 * 2**20
OPTIMIZER = "momentum"
SEGMENTS = (1, 2, 4, EVEN)
"""Blocks of a segment that are tried."""
OWN_MICRO_BATCHES = (2, 4)
SHARES = (1.0, 0.75, 0.5)
"""Of its largest batch, what a variant may take instead where that is quicker for a sample."""
DISCOVERED = 0
"""Units as the model has them, not in segments."""
# The runs send RATIO from the first step on; the planner expects top-k's warm-up, which sends more.
travelling.FIRST_RATIO = RATIO


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


class Way(NamedTuple):
    """What a plan of a variant has decided for all units alike."""

    segment: int = DISCOVERED
    saves: bool = False
    sparse: bool = False
    early: bool = False
    feedback: FeedbackPolicy = "residual"
    micro_batches: int = 1


class Chosen(NamedTuple):
    """A plan's decisions for a batch of ``batch`` samples on each rank, and their predictions."""

    way: Way
    batch: int
    decisions: Decisions
    peak_bytes: int
    step_s: float

    @property
    def words(self) -> str:
        """What was decided."""
        again = [o for o in self.decisions if o.memory == "recompute"]
        length = "even length" if self.way.segment == EVEN else str(self.way.segment)
        segment = f" in segments of {length}" if self.way.segment else ""
        parts = [
            f"{len(again)} units recomputed{segment}" if again else "",
            "early release" if self.way.early else "",
            f"top-k, {self.way.feedback}" if self.way.sparse else "",
            f"{self.way.micro_batches} micro-batches" if self.way.micro_batches > 1 else "",
        ]
        return ", ".join(p for p in parts if p) or "all kept, dense"


def two_hosts(bytes_per_s: float, host_bytes_per_s: float | None = None) -> Cluster:
    """The bed, as measured."""
    device = Device(name="host", memory_bytes=2**40, host_bytes_per_s=host_bytes_per_s)
    nodes = tuple(Node(name=f"host{i}", devices=(device,)) for i in range(RANKS))
    link = Level(name="inter", latency_s=2e-4, bytes_per_s=bytes_per_s)
    return Cluster(name="bed", nodes=nodes, levels=(link,))


@dataclass
class Chooser:
    """Plans of the variants of one model. ``profiles`` are the same in units and in segments, by
    their length."""

    profiles: Mapping[int, ModelProfile]
    cluster: Cluster
    budget_bytes: int
    _models: dict[tuple[Way, int], CostModel] = field(default_factory=dict)

    def ways(self, variant: Variant, micro_batches: int = 1) -> Iterator[Way]:
        """What may be decided within a variant. Early release needs one micro-batch."""
        every: tuple[FeedbackPolicy, ...] = ("residual",)
        if variant.collaborates:
            host = self.cluster.host_bytes_per_s
            every = feedbacks("topk", OPTIMIZER, CAPABILITY.feedback, host)
        releasing = variant.saves and micro_batches == 1
        early = (True,) if variant.name == "naive" and releasing else (False, True)[: 1 + releasing]
        for segment in self.profiles if variant.saves else (DISCOVERED,):
            for release in early:
                for feedback in every:
                    yield Way(
                        segment, variant.saves, variant.sparse, release, feedback, micro_batches
                    )

    def least(self, variant: Variant, batch: int, micro_batches: int = 1) -> Chosen:
        """The plan that needs least memory."""
        found = [self._chosen(way, batch, frozenset()) for way in self.ways(variant, micro_batches)]
        return min(found, key=lambda one: (one.peak_bytes, one.step_s))

    def quickest(
        self, variant: Variant, batch: int, limit_bytes: float, micro_batches: int = 1
    ) -> Chosen:
        """The plan with the least predicted step among those within the limit; the one that needs
        least memory where none is."""
        found = []
        for way in self.ways(variant, micro_batches):
            if self._peak(way, batch, frozenset()) <= limit_bytes:
                kept = self._kept(way, batch, limit_bytes)
                found.append(self._chosen(way, batch, kept))
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

            top = largest(fits, most // parts)
            for count in sorted({max(int(share * top), 1) for share in SHARES}) if top else ():
                size = parts * count
                chosen = self.quickest(variant, size, self.budget_bytes, parts)
                rates[parts, size] = RANKS * size / chosen.step_s
        return max(rates, key=lambda key: rates[key], default=(1, 0))

    def _kept(self, way: Way, batch: int, limit_bytes: float) -> frozenset[int]:
        """The units that need not be recomputed: those first that take longest for their bytes."""
        units, kept = self.profiles[way.segment].units, frozenset[int]()
        able = [k for k, unit in enumerate(units) if may_recompute(unit)] if way.saves else []
        able.sort(key=lambda k: _worth(units[k], batch), reverse=True)
        for k in able:
            if self._peak(way, batch, kept | {k}) <= limit_bytes:
                kept |= {k}
        return kept

    def _peak(self, way: Way, batch: int, kept: frozenset[int]) -> int:
        found = rank_memory(self._model(way, batch), self._decisions(way, kept))
        return max(one.peak_bytes for one in found)

    def _chosen(self, way: Way, batch: int, kept: frozenset[int]) -> Chosen:
        decisions = self._decisions(way, kept)
        done = evaluation(self._model(way, batch), decisions, schedule="priority").prediction
        return Chosen(way, batch, decisions, max(done.peak_bytes), done.step_s)

    def _decisions(self, way: Way, kept: frozenset[int]) -> Decisions:
        units = self.profiles[way.segment].units
        return tuple(_option(way, unit, k in kept) for k, unit in enumerate(units))

    def _model(self, way: Way, batch: int) -> CostModel:
        key = way, batch
        if key not in self._models:
            self._models[key] = CostModel(
                self.profiles[way.segment], self.cluster, self._goal(way, batch),
                way.micro_batches, None, SLICE_BYTES, sliced=True,
            )  # fmt: skip
        return self._models[key]

    def _goal(self, way: Way, batch: int) -> Goal:
        return Goal(
            batch=RANKS * batch,
            optimizer=OPTIMIZER,
            memory_limit_bytes=self.budget_bytes,
            micro_batches=(way.micro_batches,),
            allow_lossy=way.sparse,
            min_fidelity=0.0 if way.sparse else 1.0,
        )

    def plan(self, chosen: Chosen) -> Plan:
        """The plan of some decisions."""
        way = chosen.way
        return make_plan(
            self.profiles[way.segment],
            self.cluster,
            self._goal(way, chosen.batch),
            chosen.decisions,
            way.micro_batches,
            schedule="priority",
            bucket_bytes=SLICE_BYTES,
            executor=CAPABILITY,
        )


def may_recompute(unit: UnitProfile) -> bool:
    """Whether there is anything to recompute."""
    return bool(unit.modules) and unit.whole.saved(1) > 0


def _worth(unit: UnitProfile, batch: int) -> float:
    return unit.whole.forward(batch) / max(unit.whole.saved(batch), 1.0)


def _option(way: Way, unit: UnitProfile, kept: bool) -> Option:
    option = Option(data_parallel(RANKS))
    if way.saves and not kept and may_recompute(unit):
        option = option._replace(memory="recompute")
    if not any(p.trainable for p in unit.parameters):
        return option
    if way.sparse and unit.kept("topk", RATIO) is not None:
        option = option._replace(exchange="topk", ratio=RATIO, feedback=way.feedback)
    return option._replace(early_release=way.early)
