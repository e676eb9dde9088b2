"""What would make a plan possible, as sentences that hold the least value that would do.

``proved`` says that nothing less would do; else a value is one that was tried and is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, floor, inf, log10

import msgspec

from ...cost.budget import single_device_s, unit_amplification
from ...cost.cost import CostModel
from ...schema.layout import Layout
from ...schema.options import Option
from ..choices import unit_options
from ..objective import Value
from ..problem import Problem, Relaxation

DIGITS = 4
"""Of a value that is named; it is rounded up."""
LIFTED = {"amplification_limit": "gpu_seconds", "time_limit_s": "time"}
"""The objective that shows the least that would do of a limit."""
TRIES = 20
"""Values of a limit on each unit that are tried."""


def rounded_up(value: float) -> float:
    """The value with ``DIGITS`` digits, never less than it was."""
    if value <= 0:
        return value
    places = DIGITS - 1 - floor(log10(value))
    unit = 10.0**-places
    found = round(ceil(value / unit * (1 - 1e-12)) * unit, max(places, 0))
    return found if found >= value else round(found + unit, max(places, 0))


def more_memory(needed_bytes: int, *, proved: bool) -> Relaxation:
    """That many bytes on each rank."""
    option = f"(--memory-limit {ceil(needed_bytes / 2**20 * 10) / 10:.1f}MiB)"
    count = f"{needed_bytes:,} bytes per rank"
    sentence = (
        f"allow at least {count} {option}" if proved else f"allow {count}, which is enough {option}"
    )
    return Relaxation("memory_limit_bytes", needed_bytes, sentence, proved)


def higher(what: str, least: float, *, proved: bool) -> Relaxation:
    """A limit of the goal that is not memory's, ``least`` or a little more."""
    value = rounded_up(least)
    told = f"{value:.{DIGITS}g}" if value < 10**DIGITS else f"{value:.0f}"
    thing, option = {
        "amplification_limit": ("an amplification limit of", f"--amplification-limit {told}"),
        "unit_amplification_limit": (
            "a unit's amplification of", f"--unit-amplification-limit {told}",
        ),
        "time_limit_s": ("a step of", f"--step-limit {told}s"),
    }[what]  # fmt: skip
    unit = " s" if what == "time_limit_s" else ""
    each = (
        f"at least {told}{unit} ({option})"
        if proved
        else f"{told}{unit}, which is enough ({option})"
    )
    return Relaxation(what, value, f"allow {thing} {each}", proved)  # type: ignore[arg-type]


def lifted(problem: Problem, what: str) -> Problem:
    """The problem without a limit, what it bounds being made small."""
    changes = {what: None, "objective": LIFTED[what]}
    return replace(problem, goal=msgspec.structs.replace(problem.goal, **changes))


def needed(what: str, value: Value, model: CostModel) -> float:
    """How much of a limit that is not memory's a plan with that value takes."""
    if what == "time_limit_s":
        return value.step_s * model.goal.slowdown
    return value.gpu_seconds / max(single_device_batch_s(model), 1e-300)


def single_device_batch_s(model: CostModel) -> float:
    """Seconds that one device would take for the whole batch: what amplification counts in."""
    return sum(single_device_s(model, k) for k in range(len(model.profile.units)))


def with_limit(problem: Problem, what: str, value: float | None) -> Problem:
    """The problem under another limit."""
    goal = msgspec.structs.replace(problem.goal, **{what: value})
    return replace(problem, goal=goal, progress=None)


def higher_unit_limit(
    problems: Sequence[Problem],
    solves: Callable[[Problem], bool],
    deadline: float,
    *,
    proves: bool,
) -> Relaxation | None:
    """The least limit on every unit's device-seconds under which ``solves`` finds a plan for one of
    the problems; None if it never does, or not before ``deadline`` (of ``time.perf_counter``).
    Where less would leave a unit nothing that it can be, or ``proves`` says that ``solves`` knows,
    that is proved."""
    what = "unit_amplification_limit"
    least, every = _unit_values([with_limit(problem, what, None) for problem in problems])
    values = list(dict.fromkeys(rounded_up(v * (1 + 1e-9)) for v in every if v >= least))
    low, high, best = 0, len(values) - 1, None
    middle = 0  # less leaves some unit no option: often that is all
    for _ in range(TRIES):
        if low > high or time.perf_counter() > deadline:
            break
        if any(solves(with_limit(problem, what, values[middle])) for problem in problems):
            best, high = middle, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    if best is None:
        return None
    bare = best == 0 and least > 0
    return higher(what, values[best], proved=bare or (proves and low > high))


def _unit_values(problems: Sequence[Problem]) -> tuple[float, list[float]]:
    """The least limit that leaves every unit an option, and all that make a difference, rising."""
    least, every = inf, set()
    for problem, model in ((p, m) for p in problems for m in p.cost_models()):
        options = [
            unit_options(model, k, problem.capability) for k in range(len(model.profile.units))
        ]
        each = [{_limited(model, k, o) for o in row} for k, row in enumerate(options)]
        if all(each):
            least = min(least, max(min(values) for values in each))
            every |= {v for values in each for v in values if 0 < v < inf}
    return least, sorted(every)


def _limited(model: CostModel, k: int, option: Option) -> float:
    """What a limit on each unit must be for an option; on one device it keeps any."""
    return 0.0 if option.layout == Layout(groups=1) else unit_amplification(model, k, option)
