"""What offload takes of the hosts' memory, where that is known, and which units may be offloaded.

Feature maps wait in pinned memory, which no other process can have meanwhile, and torch rounds each
piece of it up to a power of two (c10 ``CachingHostAllocator``: ``llvm::PowerOf2Ceil``). So they
count ``PINNED_ROUNDING`` times, and ``PINNED_SHARE`` of a host's memory is theirs.

The limit is a sum over units and no point of the timeline, which the solvers' rows would have to
know. Instead each unit has an allotment before the search, and is offloaded only in layouts in
which it keeps to that: every plan keeps the limit then. Where there is too little for all units,
those come first whose forward takes longest for a byte that it saves, as to recompute them instead
would cost most. A plan that the search would find with other allotments may be missed.
"""

from collections.abc import Mapping, Sequence
from math import inf

from ..cost.compute import busiest_samples, forward_s
from ..cost.cost import CostModel
from ..memory.unit_memory import memory_of
from ..schema.errors import InputError
from ..schema.layout import data_parallel
from ..schema.options import Option
from ..schema.text import size

PINNED_ROUNDING = 2
PINNED_SHARE = 0.8


def pinned_bytes(model: CostModel, k: int, option: Option) -> float:
    """What unit ``k`` takes of its host's memory where it is offloaded in the option's layout."""
    away = Option(option.layout, option.style, memory="offload")
    held = memory_of(model).unit(k, away, busiest_samples(model.counts, option.layout))
    return PINNED_ROUNDING * held.neighbours.offloaded


def may_offload(model: CostModel, k: int, option: Option) -> bool:
    """Whether the host's memory is enough to offload unit ``k`` in the option's layout."""
    if model.cluster.host_memory_bytes is None:
        return True
    allotted: Mapping[int, float] | None = vars(model).get("_allotments")
    if allotted is None:
        # Kept by the cost model itself, as its memory model is.
        allotted = vars(model)["_allotments"] = _allotments(model, _room(model))
    return pinned_bytes(model, k, option) <= allotted.get(k, 0.0)


def check_host_memory(model: CostModel, decisions: Sequence[Option]) -> None:
    """Raises ``InputError`` where what is offloaded is more than the hosts have."""
    if model.cluster.host_memory_bytes is None:
        return
    away = [(k, option) for k, option in enumerate(decisions) if option.memory == "offload"]
    needed = sum(pinned_bytes(model, k, option) for k, option in away)
    # Allotments add up to the room but for rounding.
    if needed > _room(model) * (1 + 1e-9):
        raise InputError(
            f"what is offloaded takes up to {size(needed)} of a host's memory for each device, and "
            f"{size(_room(model))} may be pinned there: offload fewer units, or state more "
            "(--host-memory)"
        )


def _room(model: CostModel) -> float:
    known = model.cluster.host_memory_bytes
    return inf if known is None else PINNED_SHARE * known


def _allotments(model: CostModel, room: float) -> dict[int, float]:
    """What each unit may take of the ``room``, by unit; units without any are left out."""
    plain = Option(data_parallel(model.world_size))
    units = model.profile.units
    wanted = {k: pinned_bytes(model, k, plain) for k, unit in enumerate(units) if not unit.fixed}
    wanted = {k: each for k, each in wanted.items() if each}
    total = sum(wanted.values())
    if total <= room:
        # Divided units, and those on fewer ranks, may take more than by data parallelism.
        return {k: each * room / total for k, each in wanted.items()}
    samples = busiest_samples(model.counts, plain.layout)

    def forward_of_a_byte(k: int) -> float:
        return forward_s(units[k], "none", 1, samples) / wanted[k]

    found = {}
    for k in sorted(wanted, key=forward_of_a_byte, reverse=True):
        if wanted[k] <= room:
            found[k] = wanted[k]
            room -= wanted[k]
    return found
