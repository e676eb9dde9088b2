"""Which units stay whole, in words."""

from collections.abc import Sequence

from ...planner.explain.why import UnitExplanation
from ...planner.schema.profile import UnitProfile


def whole_sentences(units: Sequence[UnitProfile] | Sequence[UnitExplanation]) -> list[str]:
    """Which units are not finer or not divided, why, and what would change that: a line for each
    reason."""
    names: dict[str, list[str]] = {}
    for unit in units:
        if unit.stays_whole:
            names.setdefault(unit.stays_whole, []).append(unit.name)
    return [
        f"Unit {first!r} stays whole: {reason}."
        if not more
        else f"Unit {first!r} and {len(more)} more stay whole: {reason}."
        for reason, (first, *more) in names.items()
    ]
