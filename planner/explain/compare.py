"""Two plans side by side, as data for whoever prints it."""

import msgspec

from ..schema.goal import Pin
from ..schema.plan import ExchangePolicy, Plan, Prediction, UnitPlan, WireFormat
from ..schema.record import Record
from .why import Alternative, UnitExplanation

_FIGURES = (
    "step_s",
    "compute_s",
    "copies_s",
    "blocking_s",
    "exposed_s",
    "update_s",
    "exchange_s",
    "wire_bytes",
    "gpu_seconds",
    "samples_per_s",
)


class Figure(Record, frozen=True, kw_only=True):
    """One predicted figure in both plans; ``name`` carries the unit."""

    name: str
    first: float
    second: float


class UnitDifference(Record, frozen=True, kw_only=True):
    """A unit that the plans decide differently: how (layout, style and policies, None where a plan
    lacks the unit), and its predicted seconds (compute, blocking and exchange) in each."""

    name: str
    first: str | None
    second: str | None
    first_s: float
    second_s: float


class Comparison(Record, frozen=True, kw_only=True):
    """What differs between two plans. ``settings`` are (field, first, second) of what is
    outside units, as texts, empty where nothing was set."""

    same_model: bool
    same_cluster: bool
    figures: tuple[Figure, ...]
    settings: tuple[tuple[str, str, str], ...]
    units: tuple[UnitDifference, ...]


def compare(first: Plan, second: Plan) -> Comparison:
    """The differing units and settings of two plans, and all their predictions."""
    mine = {u.name: u for u in first.units}
    theirs = {u.name: u for u in second.units}
    names = list(dict.fromkeys([*mine, *theirs]))
    found = (_difference(n, mine.get(n), theirs.get(n)) for n in names)
    return Comparison(
        same_model=first.model == second.model,
        same_cluster=first.provenance.cluster == second.provenance.cluster,
        figures=_figures(first.prediction, second.prediction),
        settings=_settings(first, second),
        units=tuple(d for d in found if d.first != d.second),
    )


def decision_text(unit: UnitPlan) -> str:
    """A unit's decision in few words: ``(2,4) column``; policies only where they are not plain."""
    words = [str(unit.layout)]
    words += [unit.style] if unit.style != "none" else []
    return " ".join([*words, *policy_words(unit), *segment_words(unit)])


def segment_words(unit: UnitPlan) -> list[str]:
    """What a unit is recomputed together with, by the modules at the ends of its segment."""
    ends = dict.fromkeys((unit.segment[0], unit.segment[-1])) if unit.segment else ()
    return [f"as {' to '.join(ends)}"] if ends else []


def policy_words(one: UnitPlan | Alternative | UnitExplanation) -> list[str]:
    """Its policies in few words, those that are not plain."""
    words: list[str] = [one.memory] if one.memory != "keep" else []
    words += ["early release"] if one.early_release else []
    if one.exchange != "dense":
        part = f" {one.exchange_ratio:.3g}" if one.exchange_ratio < 1 else ""
        words.append(f"{one.exchange}{part}")
    words += [one.wire] if one.wire != "exact" else []
    words += ["by host"] if one.peers_per_host > 1 else []
    words += [one.feedback] if one.feedback != "residual" else []
    return words


def _difference(name: str, first: UnitPlan | None, second: UnitPlan | None) -> UnitDifference:
    def seconds(unit: UnitPlan | None) -> float:
        if unit is None:
            return 0.0
        return unit.forward_s + unit.backward_s + unit.blocking_s + unit.exchange_s

    return UnitDifference(
        name=name,
        first=decision_text(first) if first else None,
        second=decision_text(second) if second else None,
        first_s=seconds(first),
        second_s=seconds(second),
    )


def _figures(first: Prediction, second: Prediction) -> tuple[Figure, ...]:
    values = [
        Figure(name=n, first=float(getattr(first, n)), second=float(getattr(second, n)))
        for n in _FIGURES
    ]
    # What differs by rank is compared by the fullest one: that is the one which may not fit.
    peaks = (float(max(p.peak_bytes, default=0)) for p in (first, second))
    return (*values, Figure(name="peak_bytes", first=next(peaks), second=next(peaks)))


def _settings(first: Plan, second: Plan) -> tuple[tuple[str, str, str], ...]:
    plan = (
        "target", "precision", "world_size", "micro_batches", "message_bytes", "schedule",
        "placement",
    )  # fmt: skip
    asked = [(name, getattr(first, name), getattr(second, name)) for name in plan]
    for name in first.goal.__struct_fields__:
        asked.append((f"goal.{name}", getattr(first.goal, name), getattr(second.goal, name)))
    shares = (plan.local_batch_sizes or "even" for plan in (first, second))
    asked.append(("local_batch_sizes", next(shares), next(shares)))
    asked.append(("local_steps", _local_text(first), _local_text(second)))
    asked.append(("solver", first.provenance.solver, second.provenance.solver))
    return tuple((name, _text(a), _text(b)) for name, a, b in asked if a != b)


def _local_text(plan: Plan) -> str:
    local = plan.local_steps
    if local is None:
        return "none"
    return f"{local.inner_steps} in {len(local.fragments)} fragments, {local.delay} late"


def _text(value: object) -> str:
    """A setting's value in plain words; nothing where there is none."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(_text(part) for part in value)
    return f"{value.unit} {value.wish}" if isinstance(value, Pin) else str(value)


def with_exchange(plan: Plan, policy: ExchangePolicy, ratio: float | None = None) -> Plan:
    """The plan by priority with every unit's exchange under ``policy``, at ``ratio`` if given. Its
    prediction stays that of the plan that it was made from."""
    units = tuple(
        msgspec.structs.replace(
            u, exchange=policy, feedback="residual",
            exchange_ratio=u.exchange_ratio if ratio is None else ratio,
        )
        for u in plan.units
    )  # fmt: skip
    return msgspec.structs.replace(plan, schedule="priority", units=units)


def with_exact_gradients(plan: Plan) -> Plan:
    """The plan with gradients that travel whole and as they are in every step, all else being
    equal."""
    units = tuple(
        msgspec.structs.replace(
            u, exchange="dense" if u.lossy else u.exchange, exchange_ratio=1.0,
            wire="exact", feedback="residual",
        )
        for u in plan.units
    )  # fmt: skip
    return msgspec.structs.replace(plan, units=units, local_steps=None)


def with_wire(plan: Plan, wire: WireFormat) -> Plan:
    """The plan with every unit's gradients in that wire format. Its prediction stays, as above."""
    units = tuple(msgspec.structs.replace(u, wire=wire) for u in plan.units)
    return msgspec.structs.replace(plan, units=units)
