"""Tables of many plans: over cluster sizes, and the front of step time and device time."""

from __future__ import annotations

from rich.table import Table

from ...planner.explain.front import Front
from ...planner.explain.what_if import Size, Sizes
from ...planner.schema.text import gap_text, seconds
from .table import filled_table


def sizes_table(found: Sizes) -> list[Table | str]:
    """A row for each cluster size, then how the clusters were made and why some do not fit."""
    headings = ("ranks", "nodes", "step", "over data parallel", "samples/s", "gap",
                "device time/sample", "solver", "fits")  # fmt: skip
    title = f"{found.target}, global batch {found.batch}"
    table = filled_table(title, headings, [_size(row) for row in found.rows])
    why = [_why(row) for row in found.rows if not row.fits]
    if any(row.fits and not row.baseline_fits for row in found.rows):
        why.insert(0, "* data parallelism would not fit in memory there; this plan does.")
    return [table, f"Of the given cluster's kind: {found.how}.", *why]


def _why(row: Size) -> str:
    lead = f"{row.ranks} ranks"
    return row.why if row.why.startswith(f"{lead} ") else f"{lead}: {row.why}"


def _size(row: Size) -> tuple[str, ...]:
    lead = str(row.ranks), str(row.nodes)
    if row.step_s is None or row.speedup is None:
        return (*lead, "-", "-", "-", "-", "-", row.solver, "no")
    over = f"{row.speedup:.2f}" + ("" if row.baseline_fits else "*")
    return (
        *lead,
        seconds(row.step_s),
        over,
        f"{row.samples_per_s or 0:,.0f}",
        _gap(row.gap),
        seconds(row.gpu_seconds_per_sample or 0.0),
        row.solver,
        "yes",
    )


def _gap(gap: float | None) -> str:
    return "unknown" if gap is None else gap_text(gap)


def front_table(found: Front) -> list[Table | str]:
    """The front, fastest first."""
    headings = ("step", "device time", "x one device", "samples/s", "over data parallel", "gap",
                "layouts")  # fmt: skip
    rows = [
        (
            seconds(p.step_s),
            seconds(p.gpu_seconds),
            f"{p.amplification:.3f}",
            f"{p.samples_per_s:,.0f}",
            f"{p.speedup:.2f}",
            _gap(p.gap),
            " ".join(p.layouts),
        )
        for p in found.points
    ]
    title = f"{found.target} on {found.ranks} ranks, global batch {found.batch}"
    return [
        filled_table(title, headings, rows),
        f"One device would take {seconds(found.alone_s)} for the whole batch; plan with "
        "--amplification-limit to have one of these.",
    ]
