"""A plan's memory timeline as figures for people and machines: which bytes are alive, of which
class, at which unit and point of the step."""

from ..cost.cost import CostModel
from ..memory.timeline import moment_of
from ..schema.cluster import Cluster
from ..schema.plan import Moment, Plan
from ..schema.profile import ModelProfile
from ..schema.record import Bytes, Count, Index, Record
from ..solve.evaluate import decisions_of, limits_bytes, rank_memory
from .why import check_belongs


class RankTimeline(Record, frozen=True, kw_only=True):
    """The timeline of ``ranks`` that hold the same and have the same ``limit_bytes``."""

    ranks: tuple[Index, ...]
    limit_bytes: Bytes
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda m: m.total)


class MemoryTimeline(Record, frozen=True, kw_only=True):
    """What every rank holds at each point of a step of ``target`` under a plan; ranks that are
    fuller first."""

    target: str
    micro_batches: Count
    timelines: tuple[RankTimeline, ...]


def memory_timeline(plan: Plan, profile: ModelProfile, cluster: Cluster) -> MemoryTimeline:
    """The timeline of ``plan``, made from ``profile`` and ``cluster``."""
    check_belongs(plan, profile, cluster)
    model = CostModel.of_plan(plan, profile, cluster)
    limits = limits_bytes(model)
    names = [unit.name for unit in profile.units]
    found = [
        RankTimeline(
            ranks=tuple(sorted(plan.placement[p] for p in each.positions if limits[p] == limit)),
            limit_bytes=limit,
            moments=tuple(moment_of(point, names) for point in each.points),
        )
        for each in rank_memory(model, decisions_of(plan))
        for limit in dict.fromkeys(limits[p] for p in each.positions)
    ]
    found.sort(key=lambda one: (-one.peak.total, one.ranks))
    return MemoryTimeline(
        target=plan.target, micro_batches=plan.micro_batches, timelines=tuple(found)
    )
