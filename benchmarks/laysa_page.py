"""The tables of ``laysa.py``, and what they say of the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.planner.schema.plan import CLASS_NAMES
from rows import markdown

# LaySA's claims (Zhao et al., IEEE Access 2021): peak memory cut by up to 80.5%, throughput up by
# more than 150%; and what is asked of the time at equal batch.
CUT, FASTER, SLOWDOWN = 0.805, 2.5, 1.1
SINGLES = ("memory only", "sparse only")
OURS = "collaborative"


def table(columns: Mapping[str, Callable[[Mapping[str, Any]], object]], rows: Any) -> str:
    """The rows as Markdown; a column has a heading, and what it shows of a row."""
    return markdown(list(columns), ([show(row) for show in columns.values()] for row in rows))


def mb(count: float) -> str:
    """Bytes in millions."""
    return f"{count / 1e6:.1f}"


MAIN = {
    "variant": lambda r: r["variant"],
    "what": lambda r: r["what"],
    "peak MB": lambda r: mb(r["peak_bytes"]),
    "predicted": lambda r: mb(r["predicted_bytes"]),
    "step s": lambda r: f"{r['step_s']:.3f}",
    "largest batch": lambda r: r["max_batch"],
    "peak MB there": lambda r: mb(r["max_peak_bytes"]),
    "step s there": lambda r: f"{r['max_step_s']:.3f}",
    "samples/s": lambda r: f"{r['samples_per_s']:.2f}",
}
OWN = {
    "variant": lambda r: r["variant"],
    "micro-batches": lambda r: r["micro_batches"],
    "batch": lambda r: r["max_batch"],
    "peak MB": lambda r: mb(r["max_peak_bytes"]),
    "samples/s": lambda r: f"{r['samples_per_s']:.2f}",
}


class Gains(NamedTuple):
    """Of the collaborative plan, one model: peak memory below each peer at equal batch, its time
    there over dense's (with least memory, and as the quickest that keeps the budget), and its
    throughput at its largest batch over peers'."""

    cut: dict[str, float]
    slowdown: float
    quick_slowdown: float
    over_best: float
    over_worst: float
    over_dense: float


def gains(rows: Sequence[Mapping[str, Any]]) -> Gains:
    """The gains from a model's rows, one of each variant. A peer that cannot train at all within
    the budget makes no samples."""
    of = {row["variant"]: row for row in rows}
    ours, dense = of[OURS], of["dense"]
    rates = [of[name]["samples_per_s"] for name in SINGLES]
    return Gains(
        cut={n: 1 - ours["peak_bytes"] / r["peak_bytes"] for n, r in of.items() if n != OURS},
        slowdown=ours["step_s"] / dense["step_s"],
        quick_slowdown=ours["quick"]["step_s"] / dense["step_s"],
        over_best=ours["samples_per_s"] / max(rates),
        over_worst=ours["samples_per_s"] / min(rates) if min(rates) else float("inf"),
        over_dense=ours["samples_per_s"] / dense["samples_per_s"],
    )


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """The targets beside the figures of one model."""
    found = gains(rows)
    cuts = ", ".join(
        f"{100 * abs(cut):.1f}% {'below' if cut >= 0 else 'above'} {name}"
        for name, cut in found.cut.items()
    )
    return "\n".join(
        [
            f"- Peak memory of the collaborative plan at equal batch: {cuts} (the claim: up to "
            f"{CUT:.1%} below a single strategy).",
            f"- Its step there takes {found.slowdown:.2f} times dense's, and as the quickest plan "
            f"within the budget {found.quick_slowdown:.2f} times (at most {SLOWDOWN}).",
            f"- Its throughput at its largest batch: {found.over_best:.2f} times the best single "
            f"strategy's, {found.over_worst:.2f} times the worst's, {found.over_dense:.2f} times "
            f"dense's (the claim: up to {FASTER}).",
        ]
    )


def page(found: Mapping[str, Any]) -> str:
    """A model's tables and what they say of the targets."""
    intro = (
        f"Budget {mb(found['budget_bytes'])} MB for each rank; parameters "
        f"{mb(found['parameter_bytes'])} MB. Dense training's largest batch is {found['batch']}, "
        f"which computes for {found['compute_s']:.3f} s: links of {found['mbit_s']:.0f} Mbit/s "
        f"({found['goodput_mbit_s']:.0f} measured). Seconds are medians of {found['rounds']} turns "
        f"of {found['steps']} timed steps."
    )
    quick = next(row["quick"] for row in found["rows"] if "quick" in row)
    used = [n for n in CLASS_NAMES if any(row["classes"][n] for row in found["rows"])]
    classes = [
        (row["variant"], *(mb(row["classes"][name]) for name in (*used, "total")))
        for row in found["rows"]
    ]
    parts = [
        f"## {found['model']}",
        intro,
        f"At a batch of {found['batch']}, the plan that needs least memory; then at each variant's "
        "own largest batch:",
        table(MAIN, found["rows"]),
        f"At the batch of the first columns the quickest collaborative plan within the budget "
        f"({quick['what']}) takes {mb(quick['peak_bytes'])} MB "
        f"({mb(quick['predicted_bytes'])} predicted) and {quick['step_s']:.3f} s a step.",
        "At their largest batches: "
        + "; ".join(f"{r['variant']}: {r['max_what']}" for r in found["rows"])
        + ".",
        verdict(found["rows"]),
        f"Where devices have a host beside them, {found['host']['what']} is predicted to take "
        f"{mb(found['host']['predicted_bytes'])} MB at the equal batch (not run here).",
        "Predicted MB by class at the equal batch, each at the moment at which it is largest "
        "(`explain --memory` has all moments):",
        markdown(("variant", *(CLASS_NAMES[name] for name in used), "at the peak"), classes),
    ]
    if found["own"]:
        parts += [
            "Each with the number of micro-batches and the batch (up to twice the equal one) that "
            "are predicted to be best for it, or as at its largest batch where that was quicker:",
            table(OWN, found["own"]),
        ]
    return "\n\n".join(parts) + "\n"
