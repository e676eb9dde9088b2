"""``multiplex``: plans and background jobs on one cluster, as tables and a plot."""

from pathlib import Path
from typing import Any

from rich.table import Table

from ...planner.multiplex.report import ClusterReport, devices_of, utilisation
from ...planner.multiplex.simulation import ClusterRun
from ...planner.schema.text import seconds
from ...planner.simulate.events import Interval
from .plots import figure_in
from .table import filled_table

COLOURS = {"foreground": "#1f5fa8", "communication": "#f0a030", "background": "#8cc08c"}
# Steps of the longest job that the map shows.
SHOWN_STEPS = 2.0


def cluster_tables(found: ClusterReport) -> list[Table | str]:
    """Jobs, classes of devices, and the cluster's throughput in a few sentences."""
    horizon_s = found.horizon_s
    rows = []
    for one in found.classes:
        parts = one.foreground_s, one.background_s, one.idle_s
        rows.append((devices_of(one.devices), *(f"{100 * s / horizon_s:.1f}%" for s in parts)))
    title = "Devices that see the same, and what their time goes to"
    classes = filled_table(title, ("devices", "foreground", "background", "idle"), rows)
    return [_jobs(found), classes, "\n".join(_throughput(found))]


def _throughput(found: ClusterReport) -> list[str]:
    """Each measure in a sentence of its own, with what it is a ratio of."""
    total = f"Cluster throughput, all jobs together: {found.samples_per_s:,.0f} samples/s"
    if found.ratio is None or found.bounded_ratio is None:
        return [f"{total} on {found.devices} devices."]
    jobs = "the plan" if len(found.foregrounds) == 1 else "the plans"
    said = [
        f"{total}, which is {found.ratio:.2f} times that of plain data parallelism on the devices "
        f"of {jobs} without any background job."
    ]
    if found.backgrounds:
        shares = sum(b.share * b.devices for b in found.backgrounds) / found.devices
        said.append(
            f"In device equivalents: the foreground runs at {found.bounded_ratio - shares:.2f} "
            "times the speed of plain data parallelism, and the background gets what "
            f"{shares:.0%} of the {found.devices} devices would give it alone; the sum is "
            f"{found.bounded_ratio:.2f}."
        )
    return said


def _jobs(found: ClusterReport) -> Table:
    headings = ("job", "devices", "batch", "step", "slowdown", "samples/s", "against", "ratio")
    rows = []
    for f in found.foregrounds:
        plain = f.data_parallel_samples_s
        rows.append(
            (
                f"{f.name}, foreground" + (" (waits for devices)" if f.waited else ""),
                str(f.devices), str(f.batch), seconds(f.step_s), f"{f.slowdown:.3f}",
                f"{f.samples_per_s:,.1f}", f"{plain:,.1f}" if plain else "-",
                f"{f.samples_per_s / plain:.2f}" if plain else "-",
            )
        )  # fmt: skip
    for b in found.backgrounds:
        plain_samples_s = b.single_device_samples_s * b.devices
        rows.append(
            (
                f"{b.name}, background", str(b.devices), str(b.batch), "", "",
                f"{b.samples_per_s:,.1f}", f"{plain_samples_s:,.1f}", f"{b.share:.2f}",
            )
        )  # fmt: skip
    title = "Jobs: foregrounds against data parallelism, backgrounds against themselves alone"
    return filled_table(title, headings, rows)


def plot_cluster(run: ClusterRun, path: Path) -> None:
    """Draws the device map of the first steps and the utilisation over the horizon into ``path``
    (.png, .svg or .pdf). Raises ``InputError`` where matplotlib is missing or cannot write it."""
    with figure_in(path, 2, 1, figsize=(11, 7), height_ratios=(3, 1)) as (top, bottom):
        _draw_map(top, run)
        _draw_utilisation(bottom, run)


def _draw_map(axes: Any, run: ClusterRun) -> None:
    """A band for each class, as high as the square root of its devices."""
    steps = (step.step_s for step in run.steps)
    until_s = min(SHOWN_STEPS * max(steps, default=run.horizon_s), run.horizon_s)
    at, ticks, names = 0.0, [], []
    for one in run.classes:
        # By square root the few devices of a narrow burst can be seen beside hundreds.
        height = len(one.devices) ** 0.5
        rows: dict[str, list[Interval]] = {
            "background": [(f.start_s, f.end_s) for f in one.filled if f.pieces],
            "foreground": [interval for interval, _, _ in one.computing],
            "communication": [interval for interval, _, _ in one.communicating],
        }
        for what, intervals in rows.items():
            part = [(1e3 * a, 1e3 * (min(b, until_s) - a)) for a, b in intervals if a < until_s]
            low, high = (at, height) if what != "communication" else (at, 0.15 * height)
            axes.broken_barh(part, (low, 0.94 * high), facecolors=COLOURS[what])
        ticks.append(at + height / 2)
        names.append(devices_of(one.devices))
        at += height
    axes.set_yticks(ticks, names, fontsize="small")
    axes.set_ylim(at, 0)
    axes.set_xlim(0, 1e3 * until_s)
    axes.set_xlabel("ms")
    axes.set_title(", ".join(dict.fromkeys(one.name for one in run.foregrounds)))
    handles = [axes.barh([0], [0], color=colour, label=what) for what, colour in COLOURS.items()]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, fontsize="small"
    )


def _draw_utilisation(axes: Any, run: ClusterRun) -> None:
    moments = utilisation(run)
    times = [1e3 * m.start_s for m in moments]
    shares = [[100 * m.foreground for m in moments], [100 * m.background for m in moments]]
    colours = [COLOURS["foreground"], COLOURS["background"]]
    axes.stackplot(times, shares, step="post", colors=colours)
    axes.set_xlim(0, 1e3 * run.horizon_s)
    axes.set_ylim(0, 100)
    axes.set_xlabel("ms")
    axes.set_ylabel("% of devices")
