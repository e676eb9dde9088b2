"""What ``explain`` prints: units and their alternatives, what binds, what more would buy."""

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from ...planner.explain.compare import policy_words
from ...planner.explain.what_if import Gain
from ...planner.explain.why import (
    Alternative,
    DeviceTime,
    Explanation,
    LimitUse,
    UnitExplanation,
)
from ...planner.schema.text import seconds, size
from .comparisons import LAYOUTS
from .folding import fold as folded
from .folding import unfolded
from .table import empty_table, filled_table, names_of
from .whole import whole_sentences

# A saving below this share of the step is none: solvers stop at a gap, and sums are rounded.
NEGLIGIBLE = 1e-3
# A loss up to this share may be the solver's, which has proved nothing; above it is that of fewer
# devices.
COSTLY = 0.01
# What people call the limits of a goal.
LIMITS = {
    "memory_limit_bytes": "memory",
    "amplification_limit": "device time of a step",
    "unit_amplification_limit": "device time of a unit",
    "time_limit_s": "step time",
    "min_fidelity": "gradient energy not sent",
    "pins": "pins",
}


FOLDED = (
    "Of units that share a row the costs are added up, inside a block for one of its equal layers "
    "on average; the steps are the quickest that changing one of these units gives"
)


def explanation_tables(
    found: Explanation, objective: str = "time", *, fold: bool = True
) -> list[Table | str]:
    """Each unit's cost and what its alternatives would give, then what binds, then what more of
    anything would buy (of the ``objective`` of the goal)."""
    parts: list[Table | str] = [_units(found, fold=fold), *whole_sentences(found.units)]
    if found.host_step_s is not None:
        parts.append(
            "The units' rows (layouts and steps) and the formula are those of a host by itself, "
            f"whose step takes {seconds(found.host_step_s)}; all else is of the whole plan."
        )
    parts += _words(found)
    # Without times nothing can be a multiple of one device's.
    if found.device_time.single_device_s:
        parts.append(_device_time(found.device_time))
    if len(found.limits) > 1:
        rows = [_limit(use) for use in found.limits]
        parts.append(filled_table("Limits", ("", "used", "allowed", ""), rows))
    if found.gains:
        together = found.host_step_s is None
        known_by = "by the formula" if together else "as simulated"
        parts.append(_gains(found.gains, objective, known_by))
        parts += [f"{gain.change}: {gain.reason}." for gain in found.gains if gain.reason]
        if together and objective == "time":
            parts.append(
                f"Plans are searched by the formula, and the step that a plan predicts "
                f"({seconds(found.step_s)}) is simulated: of this table what is saved counts."
            )
    return parts


def _units(found: Explanation, *, fold: bool) -> Table:
    headings = ("unit", "layout", "compute", "blocking", "exchange", "if instead", "step", "but")
    title = f"Each unit, and the step if it alone were decided otherwise: {LAYOUTS}"
    table = empty_table(title, headings, left=2)
    # What changes and what it breaks are read together: names are folded instead.
    for column in table.columns[6:]:
        column.no_wrap = True

    def name(unit: UnitExplanation) -> str:
        return unit.name

    shown = [unit for unit in found.units if unit.alternatives]
    rows = folded(shown, name, _decision) if fold else unfolded(shown, name)
    table.columns[0].no_wrap = not any(row.is_block for row in rows)
    if any(len(row.units) > 1 for row in rows):
        table.caption, table.caption_justify = FOLDED, "left"
    now_s = found.step_s if found.host_step_s is None else found.host_step_s
    for row in rows:
        costs = (
            seconds(row.mean(lambda u: u.forward_s + u.backward_s)),
            seconds(row.mean(lambda u: u.redistribute_s + u.inner_s)),
            seconds(row.mean(lambda u: u.exchange_s)),
        )
        if row.is_block:
            table.add_row(row.indented, "", *costs, "", "", "")
            continue
        for i, other in enumerate(_best_alternatives(row.units)):
            lead = (row.indented, _option(row.units[0]), *costs) if i == 0 else ("",) * 5
            change = f"{seconds(other.step_s)} ({_percent(other.step_s, now_s)})"
            table.add_row(*lead, _option(other), change, _breaks(other))
    return table


def _decision(unit: UnitExplanation) -> tuple[str, ...]:
    return (_option(unit),)


def _best_alternatives(units: Sequence[UnitExplanation]) -> list[Alternative]:
    """The quickest instance of each alternative that any of these units has; at most as many as
    one unit lists."""
    # By their text, and by what they break: the same option may keep the limits for one unit and
    # break them for its neighbour.
    quickest: dict[tuple[str, str], Alternative] = {}
    for other in (other for unit in units for other in unit.alternatives):
        kind = _option(other), _breaks(other)
        if kind not in quickest or other.step_s < quickest[kind].step_s:
            quickest[kind] = other
    most = max(len(unit.alternatives) for unit in units)
    return sorted(quickest.values(), key=lambda other: other.step_s)[:most]


def _option(one: UnitExplanation | Alternative) -> str:
    words = [str(one.layout)] + ([one.style] if one.style != "none" else [])
    return " ".join([*words, *policy_words(one)])


def _percent(after: float, before: float) -> str:
    return f"{100 * (after / before - 1):+.1f}%" if before else ""


def _breaks(other: Alternative) -> str:
    names = [LIMITS[limit] for limit in other.breaks]
    return f"breaks {', '.join(names)}" if names else ""


def _words(found: Explanation) -> Iterator[str]:
    largest = {
        "compute": "computing",
        "copies": "copying to the host's memory and back",
        "blocking": "blocking communication",
        "exchange": "gradient exchange that nothing hides",
        "communication": "communication, blocking and of gradients together",
        "averages": "waiting for other hosts, whose averages nothing hides",
    }[found.bound_by]
    yield f"The largest part of the step of {seconds(found.step_s)} is {largest}."
    if found.copies_s:
        used = {policy for unit in found.units for policy in (unit.memory, unit.feedback)}
        without = (f"--forbid {name}" for name in ("offload", "host_mirror") if name in used)
        yield (
            f"For {seconds(found.copies_s)} of the step a rank waits for copies to its host's "
            "memory and back, which count as computing: more memory of devices or more bandwidth "
            f"to the host shortens that, {' '.join(without)} plans without."
        )
    if found.slowed_s > found.step_s:
        yield (
            f"With a background job a step may take up to {seconds(found.slowed_s)}, "
            f"{found.slowed_s / found.step_s:g} times as long: a step limit holds for that."
        )
    if found.term is None:
        yield "Branches run side by side: the step is their critical path."
    elif found.term.hosts:
        yield "The step is what hosts take to issue it: GPUs have less to do."
    elif found.term.link is None:
        yield (
            "The formula that ranks plans before they are simulated counts what a rank itself "
            "computes and waits for."
        )
    else:
        yield (
            "The formula that ranks plans before they are simulated ends with the gradients of the "
            f"units up to {found.term.unit} on {found.term.link} links."
        )
    yield (
        f"Memory is tightest on rank {found.tightest_rank} at {found.tightest_unit}: "
        f"{size(found.needed_bytes)} of {size(found.available_bytes)}."
    )
    names = [LIMITS[limit] for limit in found.binding]
    if names:
        yield f"A better choice for a unit is kept out by: {', '.join(names)}."
    else:
        yield "No limit keeps a better choice for a single unit out."
    if found.exposed:
        worst = max(found.exposed, key=lambda e: e.seconds)
        every = seconds(sum(e.seconds for e in found.exposed))
        what = f"gradients of {names_of(worst.units)}"
        # Hosts that train apart exchange no gradients between them.
        if found.host_step_s is not None and worst.link == "inter":
            what = "averages over hosts"
        yield (
            f"Exposed exchange: {every}, the largest part the {what} ({seconds(worst.seconds)}, "
            f"{worst.link})."
        )
    else:
        yield "No gradient exchange is exposed."
    if found.waiting_s:
        yield (
            f"For {seconds(found.waiting_s)} a median rank waits for the slowest, which a plan has "
            "as exposed or blocking communication."
        )


def _device_time(found: DeviceTime) -> Table:
    parts = (
        ("one device, whole batch at once", found.single_device_s),
        ("smaller or divided shares", found.shares_s),
        ("updates on every device", found.updates_s),
        ("the executor's own work", found.executor_s),
        *((("copies to the host and back", found.copies_s),) if found.copies_s else ()),
        ("slowed by communication", found.slowing_s),
        ("waiting for communication", found.waiting_s),
        *((("waiting for hosts to issue work", found.host_s),) if found.host_s else ()),
        ("device time of a step", found.used_s),
    )
    rows = [
        (
            what,
            ("-" if part < 0 else "") + seconds(abs(part)),
            f"{part / found.single_device_s:.2f} x",
        )
        for what, part in parts
        if abs(part) > NEGLIGIBLE * found.used_s
    ]
    return filled_table("Device time of a step (amplification)", ("", "seconds", "share"), rows)


def _limit(use: LimitUse) -> tuple[str, str, str, str]:
    shown: Callable[[float], str] = {
        "memory_limit_bytes": size,
        "unit_amplification_limit": lambda v: f"{v:.2f} x",
        "min_fidelity": lambda v: f"{100 * v:.1f}%",
    }.get(use.limit, seconds)
    share = f"{100 * use.used / use.available:.1f}%" if use.available else ""
    return LIMITS[use.limit], shown(use.used), shown(use.available), share


def _gains(gains: Sequence[Gain], objective: str, known_by: str) -> Table:
    what = "step" if objective == "time" else "device time"
    rows = []
    for gain in gains:
        if gain.after_s is None:
            then = "no plan found" if gain.method else "not known"
            rows.append((gain.change, seconds(gain.before_s), then, "", gain.method))
            continue
        share = gain.saved_s / gain.before_s if gain.before_s else 0.0
        saved = f"{100 * share:.1f}%" if share >= NEGLIGIBLE else "nothing"
        if share < -COSTLY:
            saved = f"costs {-100 * share:.1f}%"
        times = seconds(gain.before_s), seconds(gain.after_s)
        rows.append((gain.change, *times, saved, gain.method))
    headings = ("", f"{what} now", "then", "saves", "known by")
    return filled_table(
        f"What more, or fewer devices, would buy ({what} {known_by})", headings, rows
    )
