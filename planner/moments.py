"""A plan's memory timeline as figures for people and machines: which bytes are alive, of which
class, at which unit and point of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .cluster import Cluster
from .cost import CostModel
from .evaluate import decisions_of, limits_bytes, rank_memory
from .explain import check_belongs
from .memory import CLASS_NAMES, MemoryPoint, Phase
from .noun import Bytes, Index, Noun
from .plan import Plan
from .profile import ModelProfile


class Moment(Noun, frozen=True, kw_only=True):
    """Bytes alive at one point of a step, by class, while ``unit`` is at work."""

    unit: str
    phase: Phase
    weights: Bytes
    optimizer: Bytes
    residuals: Bytes
    gradients: Bytes
    feature_maps: Bytes
    map_gradients: Bytes
    buffers: Bytes
    workspace: Bytes

    @property
    def total(self) -> int:
        """All bytes alive."""
        return sum(self.by_class().values())

    def by_class(self) -> dict[str, int]:
        """Bytes by class, in the order of ``CLASS_NAMES``."""
        return {name: getattr(self, name) for name in CLASS_NAMES}

    @property
    def largest(self) -> str:
        """The class that takes most."""
        held = self.by_class()
        return max(held, key=lambda name: held[name])


class RankTimeline(Noun, frozen=True, kw_only=True):
    """The timeline of ``ranks`` that hold the same, and the limit of each of them."""

    ranks: tuple[Index, ...]
    limit_bytes: Bytes
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The moment at which most is alive."""
        return max(self.moments, key=lambda m: m.total)


class MemoryTimeline(Noun, frozen=True, kw_only=True):
    """What every rank holds at each point of a step of ``target`` under a plan; ranks that are
    fuller first."""

    target: str
    micro_batches: int
    timelines: tuple[RankTimeline, ...]


def memory_timeline(plan: Plan, profile: ModelProfile, cluster: Cluster) -> MemoryTimeline:
    """The timeline of ``plan``, made from ``profile`` and ``cluster``."""
    check_belongs(plan, profile, cluster)
    model = CostModel(
        profile,
        cluster,
        plan.goal,
        plan.micro_batches,
        plan.placement,
        plan.bucket_bytes,
        plan.schedule == "priority",
    )
    limits = limits_bytes(cluster, plan.goal, plan.placement)
    names = [unit.name for unit in profile.units]
    found = [
        RankTimeline(
            ranks=tuple(sorted(plan.placement[p] for p in each.positions)),
            limit_bytes=min(limits[p] for p in each.positions),
            moments=tuple(_moments(names, each.points)),
        )
        for each in rank_memory(model, decisions_of(plan))
    ]
    found.sort(key=lambda one: (-one.peak.total, one.ranks))
    return MemoryTimeline(
        target=plan.target, micro_batches=plan.micro_batches, timelines=tuple(found)
    )


def _moments(names: Sequence[str], points: Sequence[MemoryPoint]) -> Iterator[Moment]:
    for point in points:
        held = {name: round(max(getattr(point, name), 0.0)) for name in CLASS_NAMES}
        yield Moment(unit=names[point.unit], phase=point.phase, **held)
