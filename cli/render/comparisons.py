"""Tables that hold one thing against another: two plans, a plan against a run or one process, what
a run corrects, and many plans over cluster sizes or as the front of step time and device time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.table import Table

from ...planner.explain.calibration import Calibration
from ...planner.explain.compare import Comparison
from ...planner.explain.front import Front
from ...planner.explain.what_if import Size, Sizes
from ...planner.schema.report import BackgroundFigures, Figures, RunReport
from ...planner.schema.text import expected, gap_text, ranks, seconds, size
from .table import filled_table

# It loads torch, which comparing plans need not wait for.
if TYPE_CHECKING:
    from ...executor.launch.losses import LossComparison
    from ...executor.launch.verify import Verification

QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step time", seconds),
    "compute_s": ("  computing", seconds),
    "copies_s": ("    copies to the host and back", seconds),
    "blocking_s": ("  blocking communication", seconds),
    "exposed_s": ("  exposed gradient exchange", seconds),
    "drawing_s": ("between steps, drawing a batch", seconds),
    "update_s": ("parameter update", seconds),
    "exchange_s": ("gradient exchange", seconds),
    "wire_bytes": ("sent by the busiest rank", size),
    "gpu_seconds": ("device time", seconds),
    "samples_per_s": ("samples per second", lambda v: f"{v:,.0f}" if v >= 10 else f"{v:.2g}"),
    "peak_bytes": ("peak memory of a rank", size),
    "reserved_bytes": ("  reserved for it", size),
}


# What people call the settings that a Comparison names by their fields.
SETTINGS = {
    "target": "model",
    "precision": "precision",
    "world_size": "ranks",
    "micro_batches": "micro-batches",
    "message_bytes": "largest bucket or slice",
    "schedule": "how gradients travel",
    "placement": "ranks in order of position",
    "local_batch_sizes": "samples in order of position",
    "solver": "solver",
    "goal.batch": "global batch",
    "goal.forbidden": "policies forbidden",
    "goal.memory_limit_bytes": "memory limit of a rank",
    "goal.optimizer": "optimizer",
    "goal.micro_batches": "micro-batches allowed",
    "goal.batch_statistics": "batch statistics of",
    "goal.allow_lossy": "lossy exchange allowed",
    "goal.min_fidelity": "least share of gradient energy",
    "goal.amplification_limit": "limit on device time, x one device",
    "goal.unit_amplification_limit": "the same for each unit",
    "goal.objective": "what is least",
    "goal.time_limit_s": "longest step allowed",
    "goal.slice_bytes": "slice sizes allowed",
    "goal.background": "background job",
    "goal.background_limit": "a step so many times as long for it",
    "goal.pins": "pins",
    "goal.all_layouts": "all layouts tried",
    "local_steps": "local steps",
    "goal.allow_local_steps": "local steps allowed",
    "goal.inner_steps": "inner steps asked for",
    "goal.fragments": "fragments asked for",
    "goal.outer_lr": "outer learning rate",
    "goal.outer_momentum": "outer momentum",
}
# What a table says of layouts that it names.
LAYOUTS = "layout is (groups, members of each)"
# Of longer lists the beginning and the end are shown.
LISTED = 8
# Pins are long, and there may be one for each unit.
LISTED_PINS = 2
_NO_VALUE = {
    "goal.memory_limit_bytes": "the device's own",
    "goal.slice_bytes": "not given",
    "goal.pins": "none",
    "goal.inner_steps": "the fewest that hide the links",
    "goal.fragments": "a few",
    "precision": "as the model was built",
}


def _setting(name: str, value: str, other: str) -> str:
    """The text of a setting's ``value``, beside which the ``other`` plan's is shown."""
    if not value:
        return _NO_VALUE.get(name, "no limit")
    words, texts = [], value.split(", ")
    if name == "goal.pins":
        # Of many the first are shown: those that the other plan does not have.
        shared = set(other.split(", "))
        texts.sort(key=lambda pin: pin in shared)
    for text in texts:
        if name.endswith("_bytes") and text.isdigit():
            words.append(size(int(text)))
        elif name.endswith("time_limit_s"):
            words.append(seconds(float(text)))
        else:
            words.append(
                {"True": "yes", "False": "no", "gpu_seconds": "device time"}.get(text, text)
            )
    most = LISTED_PINS if name == "goal.pins" else LISTED
    if len(words) > most:
        return f"{', '.join(words[:most])} … {words[-1]} ({len(words)})"
    return ", ".join(words)


def comparison_tables(found: Comparison, first: str, second: str) -> list[Table | str]:
    """What two plans predict, and where they differ."""
    parts: list[Table | str] = []
    rows = []
    # A figure that is not listed above is shown under its field's name.
    for figure in found.figures:
        if figure.name == "copies_s" and not (figure.first or figure.second):
            continue
        name, show = QUANTITIES.get(figure.name, (figure.name, str))
        by = f"{figure.second / figure.first:.2f}" if figure.first else ""
        rows.append((name, show(figure.first), show(figure.second), by))
    parts.append(filled_table("Predicted for one step", ("", first, second, "ratio"), rows))
    if found.settings:
        settings = [
            (SETTINGS.get(name, name), _setting(name, mine, theirs), _setting(name, theirs, mine))
            for name, mine, theirs in found.settings
        ]
        parts.append(filled_table("Settings", ("", first, second), settings))
    if found.units:
        differing = [
            (u.name, u.first or "-", u.second or "-", seconds(u.first_s), seconds(u.second_s))
            for u in found.units
        ]
        headings = ("unit", first, second, f"time in {first}", f"time in {second}")
        parts.append(filled_table(f"Units decided differently: {LAYOUTS}", headings, differing))
    else:
        parts.append("All units are decided alike.")
    if not found.same_model:
        parts.append("The plans are of different models.")
    elif not found.same_cluster:
        parts.append("The plans are for different clusters.")
    return parts


SURPRISING = (
    "The step lies outside of what was expected nine times in ten: was other work on the machines, "
    "when profiling or now? If not, calibrate corrects the profile and the cluster by this run."
)


UNMEASURED_PEAK = (
    "A script's peak memory is measured on GPUs only: on CPUs nothing counts what its tensors take."
)


def measured_rows(report: RunReport) -> list[tuple[str, str, str, str]]:
    """(what, predicted, measured, measured over predicted) as texts."""
    rows = []
    for name in ("step_s", "blocking_s", "exposed_s", "drawing_s", "peak_bytes", "reserved_bytes"):
        predicted, measured = getattr(report.predicted, name), getattr(report.measured, name)
        if name in ("drawing_s", "reserved_bytes") and predicted is measured is None:
            continue
        if name == "step_s" and report.background is not None:
            rows += _step_with_background(report, report.background)
        elif name == "step_s":
            rows.append(_step(report.predicted, report.measured))
            both = _computing_s(report.predicted), _computing_s(report.measured)
            if both != (None, None):
                rows.append(_predicted_and_measured(*QUANTITIES["compute_s"], *both))
        else:
            rows.append(_predicted_and_measured(*QUANTITIES[name], predicted, measured))
    return rows


def _computing_s(figures: Figures) -> float | None:
    """What a step takes besides communication; None where that was not measured."""
    if figures.blocking_s is None or figures.exposed_s is None:
        return None
    return max(figures.step_s - figures.blocking_s - figures.exposed_s, 0.0)


def _step(predicted: Figures, measured: Figures) -> tuple[str, str, str, str]:
    what, _, second, ratio = _predicted_and_measured(
        *QUANTITIES["step_s"], predicted.step_s, measured.step_s
    )
    return what, expected(predicted.step_s, predicted.low_s, predicted.high_s), second, ratio


def _predicted_and_measured(
    what: str, show: Callable[[float], str], predicted: float | None, measured: float | None
) -> tuple[str, str, str, str]:
    first, second = ("-" if v is None else show(v) for v in (predicted, measured))
    ratio = ""
    # Nothing is no measure for something: what is shown as 0 has no ratio.
    if predicted and measured and first != "0":
        ratio = f"{measured / predicted:.2f}"
    return what, first, second, ratio


def _step_with_background(
    report: RunReport, job: BackgroundFigures
) -> list[tuple[str, str, str, str]]:
    """The step while the background job was stopped, and the mean of all steps."""
    # The first is what a plan predicts, the second what the job's limit is about.
    first, second = "step time, background job held", "  with it, on average"
    undisturbed_s = mean_s = None
    if job.steps:
        undisturbed_s, mean_s = job.undisturbed_s, job.undisturbed_s * job.slowdown
        second += f" ({job.slowdown:.2f} times that, limit {job.limit:g})"
    return [
        _predicted_and_measured(first, seconds, report.predicted.step_s, undisturbed_s),
        _predicted_and_measured(second, seconds, None, mean_s),
    ]


def measured_table(report: RunReport) -> Table:
    """Predicted beside measured."""
    # Medians, and means where hosts train apart, which a report does not tell.
    steps = f"{report.steps} steps" if report.steps > 1 else "one step"
    title = f"{report.target} on {ranks(report.world_size)}, over {steps} after the first ones"
    headings = ("", "predicted", "measured", "ratio")
    table = filled_table(title, headings, measured_rows(report))
    remarks = [SURPRISING] if report.surprising else []
    if report.measured.peak_bytes is None and report.predicted.peak_bytes is not None:
        remarks.append(UNMEASURED_PEAK)
    if remarks:
        table.caption = "\n".join(remarks)
        table.caption_justify = "left"
    return table


def calibration_parts(found: Calibration) -> list[Table | str]:
    """The step as predicted, measured and predicted from what was corrected; then what that is."""
    every = (found.predicted, found.measured, found.calibrated)
    rows = [
        (QUANTITIES[name][0], *(seconds(_part(figures, name)) for figures in every))
        for name in ("step_s", "compute_s", "blocking_s", "exposed_s")
    ]
    title = "The plan's step, and what is predicted of it now"
    table = filled_table(title, ("", "predicted", "measured", "calibrated"), rows)
    # Their sentences begin with a small letter, as they stand inside others too.
    changed = [f"Corrected: {change.sentence}." for change in found.changes]
    return [table, *(changed or ["The run contradicts nothing."]), *found.remarks]


def _part(figures: Figures, name: str) -> float:
    found: float | None = _computing_s(figures) if name == "compute_s" else getattr(figures, name)
    return found or 0.0


def verification_table(found: Verification) -> Table:
    """How far each class of tensors is from the single process."""
    sizes = ", ".join(str(b) for b in found.batches)
    title = f"{found.target} on {ranks(found.world_size)}, {found.dtype}, batches of {sizes}"
    if found.draws:
        title += f", means of {found.draws} steps"
    headings = ("", "tensors", "largest difference", "of what is allowed", "")
    rows = [
        (
            d.what,
            str(d.tensors),
            f"{d.largest:.2g}",
            f"{d.of_allowed:.2g}",
            "equal" if d.passed else f"DIFFERS ({d.worst})",
        )
        for d in found.deviations
    ]
    return filled_table(title, headings, rows)


def losses_table(found: LossComparison) -> Table:
    """A row for each seed: where training began and where it ended, both ways."""
    title = (
        f"{found.target} on {ranks(found.world_size)}: mean loss of the last fifth of "
        f"{found.steps} steps"
    )
    rows = [
        (
            str(one.seed),
            f"{one.exact[0]:.4g}",
            f"{one.exact_end:.4g}",
            f"{one.plan_end:.4g}",
            f"{one.ratio:.4f}",
        )
        for one in found.seeds
    ]
    return filled_table(title, ("seed", "at first", "exact gradients", "plan", "ratio"), rows)


def losses_sentence(found: LossComparison) -> str:
    """What the comparison shows, and what it does not."""
    apart = f"{abs(found.ratio - 1):.2%}"
    than = f"{apart} {'higher' if found.ratio > 1 else 'lower'} than"
    if apart == "0.00%":
        than = "as high (within 0.01%) as"
    sure = ""
    if found.error is not None and apart != "0.00%":
        # Twice the standard error of paired seeds.
        within = abs(found.ratio - 1) <= 2 * found.error
        much = "no more than" if within else "more than"
        sure = f", {much} what seeds leave open (± {2 * found.error:.2%})"
    of = "the model's data" if found.data else "random batches"
    if not found.learns:
        return (
            f"With exact gradients the loss does not fall in {found.steps} steps on {of}, so they "
            "show nothing of the plan: ask for more --steps, or let make_batch give what the model "
            "can learn."
        )
    return (
        f"Under the plan the loss is {than} with exact gradients after {found.steps} "
        f"steps on {of}{sure}. That is what these steps show: not where a training ends, nor how "
        "accurate the model becomes."
    )


def sizes_table(found: Sizes) -> list[Table | str]:
    """A row for each cluster size, then how the clusters were made and why some do not fit."""
    headings = ("ranks", "nodes", "step", "over data parallel", "samples/s", "gap",
                "device time/sample", "solver", "fits")  # fmt: skip
    title = f"{found.target}, global batch {found.batch}"
    table = filled_table(title, headings, [_size(row) for row in found.rows])
    # Some reasons begin with the size themselves.
    why = [
        row.why if row.why.startswith(f"{row.ranks} ranks ") else f"{row.ranks} ranks: {row.why}"
        for row in found.rows
        if not row.fits
    ]
    if any(row.fits and not row.baseline_fits for row in found.rows):
        why.insert(0, "* data parallelism would not fit in memory there; this plan does.")
    return [table, f"Of the given cluster's kind: {found.how}.", *why]


def _size(row: Size) -> tuple[str, ...]:
    lead = str(row.ranks), str(row.nodes)
    if row.step_s is None or row.speedup is None:
        return (*lead, "-", "-", "-", "-", "-", row.solver, "no")
    over = f"{row.speedup:.2f}" + ("" if row.baseline_fits else "*")
    return (
        *lead,
        seconds(row.step_s),
        over,
        QUANTITIES["samples_per_s"][1](row.samples_per_s or 0.0),
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
            QUANTITIES["samples_per_s"][1](p.samples_per_s),
            f"{p.speedup:.2f}",
            _gap(p.gap),
            " ".join(p.layouts),
        )
        for p in found.points
    ]
    title = f"{found.target} on {ranks(found.ranks)}, global batch {found.batch}"
    return [
        filled_table(title, headings, rows),
        f"One device would take {seconds(found.single_device_s)} for the whole batch; plan with "
        "--amplification-limit to have one of these.",
    ]
