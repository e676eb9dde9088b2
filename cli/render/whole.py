"""Which units stay whole, in words."""

from collections.abc import Sequence

from ...planner.explain.why import UnitExplanation
from ...planner.schema.profile import UnitProfile


def whole_sentences(units: Sequence[UnitProfile] | Sequence[UnitExplanation]) -> list[str]:
    """Which units are not finer or not divided, why, and what would change that: a line for each
    reason."""
    places: dict[str, list[str]] = {}
    before = ""
    for unit in units:
        if unit.stays_whole:
            # Glue has a name of ours: users know the unit that it follows.
            glue = unit.name.startswith("@")
            place = f"What follows unit {before!r}" if glue else f"Unit {unit.name!r}"
            places.setdefault(unit.stays_whole, []).append(place)
        before = unit.name
    return [
        f"{first} stays whole: {reason}."
        if not more
        else f"{first} and {len(more)} more stay whole: {reason}."
        for reason, (first, *more) in places.items()
    ]
