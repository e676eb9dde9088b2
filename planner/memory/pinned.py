"""What a plan takes of its hosts' pinned memory: feature maps that are offloaded, and mirrors that
are kept there.

Pinned memory no other process can have meanwhile, and torch rounds each piece of it up to a power
of two (c10 ``CachingHostAllocator``: ``PowerOf2Ceil``). So each byte counts ``PINNED_ROUNDING``
times, at most.
"""

from collections.abc import Sequence
from math import ceil

from ..cost.cost import CostModel
from ..cost.ownership import position_classes
from ..schema.options import Option
from .unit_memory import memory_of

PINNED_ROUNDING = 2


def offloaded_bytes(model: CostModel, k: int, option: Option, samples: int | None) -> float:
    """What unit ``k`` pins on a position whose group has ``samples`` (None: it takes no part) where
    it is offloaded in the option's layout."""
    # Whatever its exchange: the same feature maps, so it is looked up once for all of them.
    away = Option(option.layout, option.style, memory="offload")
    return PINNED_ROUNDING * memory_of(model).unit(k, away, samples).neighbours.offloaded


def mirrored_bytes(model: CostModel, k: int, option: Option) -> float:
    """What unit ``k`` pins where its gradients have mirrors on the host, in the option's layout."""
    return float(PINNED_ROUNDING * sum(size for _, size in memory_of(model).sizes_bytes(k, option)))


def pinned_bytes(model: CostModel, k: int, option: Option, samples: int | None) -> float:
    """What unit ``k`` takes of its host's memory under ``option``."""
    if samples is None:
        return 0.0
    taken = offloaded_bytes(model, k, option, samples) if option.memory == "offload" else 0.0
    return taken + (mirrored_bytes(model, k, option) if option.feedback == "host_mirror" else 0.0)


def pinned_by_position(model: CostModel, decisions: Sequence[Option]) -> tuple[int, ...]:
    """What each position takes of its host's memory; empty where none takes any."""
    found = [0] * model.world_size
    for group in position_classes(model.counts, [o.layout for o in decisions]):
        each = (pinned_bytes(model, k, o, group.samples[o.layout]) for k, o in enumerate(decisions))
        taken = ceil(sum(each))
        for position in group.positions:
            found[position] = taken
    return tuple(found) if any(found) else ()
