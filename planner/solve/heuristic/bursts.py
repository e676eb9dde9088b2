"""Burst parallelism as DeepPool searches it: a device count for each layer, one after another.

A layer's count is doubled while its own time times its devices, over the time that one device would
take for the whole batch, stays under a limit (the amplification). A layer's own time is its
forward, backward and update and the exchange of its gradients. Nothing is divided but the batch,
and what it costs to go from one count to the next is not asked.

Written from the description in Park et al., MLSys 2022, arXiv 2112.10065; their code is not used.
The search over many units begins with such plans, and benchmarks compare with them.
"""

from ...cost.budget import single_device_s
from ...cost.cost import CostModel
from ...schema.layout import Layout
from ...schema.options import Decisions, Option

LIMITS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Amplification limits that are tried: from hardly any waste to nearly none refused."""


def greedy(model: CostModel, limit: float) -> Decisions:
    """The plan for an amplification limit; units whose layout is given keep plain data
    parallelism, and tied units the count of the first of them."""
    chosen: list[Option] = []
    for k, unit in enumerate(model.profile.units):
        first = model.ties[k][0]
        # Local batch statistics are those of a rank's own samples: another count changes them.
        if unit.fixed or (unit.batch_statistics and model.goal.batch_statistics == "local"):
            chosen.append(model.baseline[k])
        elif first < k:
            chosen.append(chosen[first])
        else:
            chosen.append(_widest(model, k, limit))
    return tuple(chosen)


def _widest(model: CostModel, k: int, limit: float) -> Option:
    """The last count, doubling from one, before the limit is passed."""
    best, single_s = Option(Layout(groups=1)), single_device_s(model, k)
    count = 2
    while count <= min(model.world_size, model.goal.batch):
        option = Option(Layout(groups=count))
        if own_s(model, k, option) * count > limit * single_s:
            break
        best, count = option, 2 * count
    return best


def own_s(model: CostModel, k: int, option: Option) -> float:
    """A unit's own time: compute, update and exchange."""
    cost = model.unit(k, option)
    took = model.micro_batches * (cost.forward_s + cost.backward_s) + cost.update_s
    return took + cost.exchange.seconds
