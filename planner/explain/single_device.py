"""Whether one device by itself would be quicker than a plan for several."""

from __future__ import annotations

import msgspec

from ..cost.cost import CostModel
from ..schema.cluster import Cluster
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..solve.evaluate import excess, rank_memory
from ..solve.heuristic.relaxations import single_device_batch_s
from ..solve.heuristic.resize import resized


def quicker_alone_s(plan: Plan, profile: ModelProfile, cluster: Cluster) -> float | None:
    """Seconds of one device for the plan's whole batch at once, where these are fewer than the
    plan's step and the model fits in that device's memory as it is; else None."""
    if plan.world_size == 1:
        return None
    goal = msgspec.structs.replace(plan.goal, pins=())  # their layouts are of more devices
    model = CostModel(profile, resized(cluster, 1), goal)
    took_s = single_device_batch_s(model)
    if took_s >= plan.prediction.step_s:
        return None
    fits = excess(model, rank_memory(model, model.baseline)).over_bytes <= 0
    return took_s if fits else None
