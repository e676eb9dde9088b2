"""What plans pin of the hosts' memory, where that is known, and which units may pin some.

Feature maps that are offloaded and mirrors on the host wait in pinned memory
(``planner/memory/pinned.py``); ``PINNED_SHARE`` of a host's memory is theirs.

The limit is a sum over units and no point of the timeline, which the solvers' rows would have to
know. Instead each unit has allotments before the search, one for feature maps and one for mirrors,
and is offloaded, or mirrored there, only in layouts in which it keeps to them: every plan keeps the
limit then. Where there is too little for all units, feature maps come first, those whose forward
takes longest for a byte that it saves, as to recompute them instead would cost most; a mirror on
the device costs nothing but memory. A plan that the search would find with other allotments may be
missed.
"""

from collections.abc import Sequence
from math import inf
from typing import Literal

from ..cost.compute import busiest_samples, forward_s
from ..cost.cost import CostModel
from ..memory.pinned import mirrored_bytes, offloaded_bytes, pinned_bytes
from ..schema.errors import InputError
from ..schema.goal import OPTIMIZERS
from ..schema.layout import data_parallel
from ..schema.options import Option
from ..schema.text import size

PINNED_SHARE = 0.8

Kind = Literal["offloaded", "mirrored"]
Allotments = dict[tuple[int, Kind], float]
"""What each unit may take for each kind; what may take nothing is left out."""


def may_offload(model: CostModel, k: int, option: Option) -> bool:
    """Whether the host's memory is enough to offload unit ``k`` in the option's layout."""
    room = allotted_bytes(model, k, "offloaded")
    if room == inf:
        return True
    samples = busiest_samples(model.counts, option.layout)
    return offloaded_bytes(model, k, option, samples) <= room


def may_mirror(model: CostModel, k: int, option: Option) -> bool:
    """Whether it is enough for mirrors of the gradients of unit ``k`` in the option's layout."""
    room = allotted_bytes(model, k, "mirrored")
    return room == inf or mirrored_bytes(model, k, option) <= room


def allotted_bytes(model: CostModel, k: int, kind: Kind) -> float:
    """What unit ``k`` may take of the host's memory for that; infinite where it is not known."""
    if model.host_memory_bytes is None:
        return inf
    allotted: Allotments | None = vars(model).get("_allotments")
    if allotted is None:
        # Kept by the cost model itself, as its memory model is.
        allotted = vars(model)["_allotments"] = _allotments(model, _room(model))
    return allotted.get((k, kind), 0.0)


def check_host_memory(model: CostModel, decisions: Sequence[Option]) -> None:
    """Raises ``InputError`` where what is offloaded or mirrored is more than the hosts have."""
    if model.host_memory_bytes is None:
        return
    needed = sum(
        pinned_bytes(model, k, option, busiest_samples(model.counts, option.layout))
        for k, option in enumerate(decisions)
    )
    # Allotments add up to the room but for rounding.
    if needed > _room(model) * (1 + 1e-9):
        raise InputError(
            f"what is offloaded or mirrored there takes up to {size(needed)} of a host's memory "
            f"for each device, and {size(_room(model))} may be pinned there: offload or mirror "
            "fewer units, or state more (--host-memory, host_memory_bytes)"
        )


def _room(model: CostModel) -> float:
    known = model.host_memory_bytes
    return inf if known is None else PINNED_SHARE * known


def _allotments(model: CostModel, room: float) -> Allotments:
    plain = Option(data_parallel(model.world_size))
    units = model.profile.units
    samples = busiest_samples(model.counts, plain.layout)
    wanted: Allotments = {}
    for k, unit in enumerate(units):
        if not unit.fixed:
            wanted[k, "offloaded"] = offloaded_bytes(model, k, plain, samples)
    for k in range(len(units)):
        if _may_have_mirrors(model, k):
            wanted[k, "mirrored"] = mirrored_bytes(model, k, plain)
    wanted = {key: each for key, each in wanted.items() if each}
    total = sum(wanted.values())
    if total <= room:
        # Divided units, and those on fewer ranks, may take more than by data parallelism.
        return {key: each * room / total for key, each in wanted.items()}

    def forward_of_a_byte(key: tuple[int, Kind]) -> float:
        k, kind = key
        return forward_s(units[k], "none", 1, samples) / wanted[key] if kind == "offloaded" else 0.0

    found: Allotments = {}
    for key in sorted(wanted, key=forward_of_a_byte, reverse=True):
        if wanted[key] <= room:
            found[key] = wanted[key]
            room -= wanted[key]
    return found


def _may_have_mirrors(model: CostModel, k: int) -> bool:
    """Whether some exchange of unit ``k`` may keep mirrors."""
    unit, goal = model.profile.units[k], model.goal
    sends_parts = any(curve.exchange == "topk" for curve in unit.fidelity)
    linear = OPTIMIZERS[goal.optimizer].linear
    return not unit.fixed and goal.allows_parts and linear and sends_parts
