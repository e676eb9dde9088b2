"""What a simulated cluster reached: throughput of each job, how busy devices were, and when; as
figures, and as a trace that Perfetto and chrome://tracing open.

Cluster throughput is told in two ways. ``ratio`` adds samples of foregrounds and backgrounds and
divides by those of data parallelism alone: it has no upper bound where data parallelism mostly
waits. ``bounded_ratio`` is the foregrounds' speed over data parallelism's (mean over devices) plus
the mean over devices of the share of its speed alone that the background keeps.
"""

from collections.abc import Iterator

import numpy as np

from ..cost.step_time import Vector
from ..schema.record import Count, Index, Record, Seconds, Share
from ..simulate.events import Interval
from ..simulate.trace_events import TraceProcess, TraceSpan, TraceTrack, encode_trace
from .jobs import Assumptions
from .simulation import ClusterRun, DeviceClass

BINS = 200


class ForegroundReport(Record, frozen=True, kw_only=True):
    """One foreground: its step beside backgrounds and alone, samples per second while it runs, and
    those of data parallelism (0 where not known). ``waited`` says that it never got devices."""

    name: str
    devices: Count
    batch: Count
    step_s: Seconds
    undisturbed_step_s: Seconds
    samples_per_s: float
    data_parallel_samples_s: float
    start_s: Seconds
    end_s: Seconds
    waited: bool = False

    @property
    def slowdown(self) -> float:
        """Its step here over its step alone."""
        return self.step_s / self.undisturbed_step_s


class BackgroundReport(Record, frozen=True, kw_only=True):
    """One background on ``devices`` of the cluster: what one device reaches alone at this batch,
    what all of them reach here, and the mean share of their speed alone."""

    name: str
    devices: Index
    batch: Count
    single_device_samples_s: float
    samples_per_s: float
    share: float


class ClassReport(Record, frozen=True, kw_only=True):
    """Devices that see the same: seconds of one of them, which add up to the horizon.
    ``foreground`` and ``background`` name their jobs."""

    devices: tuple[Index, ...]
    foreground: tuple[str, ...]
    background: str
    foreground_s: Seconds
    background_s: Seconds
    idle_s: Seconds


class Utilisation(Record, frozen=True, kw_only=True):
    """Shares of all devices' time from ``start_s`` on, up to the next."""

    start_s: Seconds
    foreground: Share
    background: Share


class ClusterReport(Record, frozen=True, kw_only=True):
    """A simulated cluster in figures."""

    devices: Count
    horizon_s: Seconds
    assumptions: Assumptions
    foregrounds: tuple[ForegroundReport, ...]
    backgrounds: tuple[BackgroundReport, ...]
    classes: tuple[ClassReport, ...]
    utilisation: tuple[Utilisation, ...]
    samples_per_s: float
    ratio: float | None = None
    bounded_ratio: float | None = None


def report(run: ClusterRun, bins: int = BINS) -> ClusterReport:
    foregrounds = tuple(_foreground(run, i) for i in range(len(run.foregrounds)))
    backgrounds = tuple(_background(run, i) for i in range(len(run.backgrounds)))
    ratio, bounded = _ratios(run, foregrounds, backgrounds)
    return ClusterReport(
        devices=run.devices,
        horizon_s=run.horizon_s,
        assumptions=run.assumptions,
        foregrounds=foregrounds,
        backgrounds=backgrounds,
        classes=tuple(_class(run, each) for each in run.classes),
        utilisation=utilisation(run, bins),
        # Foregrounds count while they ran; a background's rate is over the horizon already.
        samples_per_s=sum(
            f.samples_per_s * (f.end_s - f.start_s) / run.horizon_s for f in foregrounds
        )
        + sum(b.samples_per_s for b in backgrounds),
        ratio=ratio,
        bounded_ratio=bounded,
    )


def _foreground(run: ClusterRun, job: int) -> ForegroundReport:
    one, step = run.foregrounds[job], run.steps[job]
    ran = next((each for each in run.runs if each.job == job), None)
    return ForegroundReport(
        name=one.name,
        devices=one.devices,
        batch=one.batch,
        step_s=step.step_s,
        undisturbed_step_s=one.unshared.step_s,
        samples_per_s=one.batch / step.step_s,
        data_parallel_samples_s=one.data_parallel_samples_s,
        start_s=ran.start_s if ran else 0.0,
        end_s=ran.end_s if ran else 0.0,
        waited=ran is None,
    )


def _background(run: ClusterRun, job: int) -> BackgroundReport:
    one = run.backgrounds[job]
    mine = [each for each in run.classes if each.background == job]
    devices = sum(len(each.devices) for each in mine)
    own_s = sum(each.pieces * len(each.devices) for each in mine) * run.assumptions.piece_s
    share = own_s / (devices * run.horizon_s) if devices else 0.0
    return BackgroundReport(
        name=one.name,
        devices=devices,
        batch=one.batch,
        single_device_samples_s=one.samples_per_s,
        samples_per_s=share * devices * one.samples_per_s,
        share=share,
    )


def _class(run: ClusterRun, one: DeviceClass) -> ClassReport:
    names = dict.fromkeys(run.foregrounds[visit.job].name for visit in one.visits)
    idle_s = run.horizon_s - one.foreground_s - one.background_s
    return ClassReport(
        devices=one.devices,
        foreground=tuple(names),
        background="" if one.background is None else run.backgrounds[one.background].name,
        foreground_s=one.foreground_s,
        background_s=one.background_s,
        idle_s=max(idle_s, 0.0),
    )


def _ratios(
    run: ClusterRun,
    foregrounds: tuple[ForegroundReport, ...],
    backgrounds: tuple[BackgroundReport, ...],
) -> tuple[float | None, float | None]:
    """Both forms; none where a foreground's data parallel speed is not known, or where one did not
    run through."""
    # What data parallelism would have done while a job waited or was over is another question.
    through = all(f.end_s - f.start_s >= run.horizon_s * (1 - 1e-9) for f in foregrounds)
    if not foregrounds or not through or not all(f.data_parallel_samples_s for f in foregrounds):
        return None, None
    plain = sum(f.data_parallel_samples_s for f in foregrounds)
    ours = sum(f.samples_per_s for f in foregrounds) + sum(b.samples_per_s for b in backgrounds)
    used = sum(f.devices for f in foregrounds)
    speeds = (f.samples_per_s / f.data_parallel_samples_s * f.devices for f in foregrounds)
    shares = sum(b.share * b.devices for b in backgrounds) / run.devices
    return ours / plain, sum(speeds) / used + shares


def utilisation(run: ClusterRun, bins: int = BINS) -> tuple[Utilisation, ...]:
    """The share of all devices' time that goes to foregrounds and to backgrounds, in ``bins`` equal
    parts of the horizon."""
    edges = np.linspace(0.0, run.horizon_s, bins + 1)
    ahead, behind = np.zeros(bins), np.zeros(bins)
    for one in run.classes:
        weight = len(one.devices) / run.devices / (run.horizon_s / bins)
        ahead += weight * _covered([i for i, _, _ in one.computing], edges)
        behind += weight * _covered([(f.start_s, f.end_s) for f in one.filled], edges)
    return tuple(
        Utilisation(
            start_s=float(start), foreground=min(float(a), 1.0), background=min(float(b), 1.0)
        )
        for start, a, b in zip(edges, ahead, behind, strict=False)
    )


def _covered(intervals: list[Interval], edges: Vector) -> Vector:
    """Seconds between one edge and the next that the intervals (in order, apart) cover."""
    # np.interp takes no empty list of points.
    if not intervals:
        return np.zeros(len(edges) - 1)
    ends = np.array(intervals, dtype=np.float64)
    done = np.concatenate([[0.0], np.cumsum(ends[:, 1] - ends[:, 0])])
    # Seconds covered up to any time: a piecewise linear function, so bins are its differences.
    values = np.repeat(done, 2)[1:-1]  # at each start what was done before, at each end also it
    return np.diff(np.interp(edges, ends.ravel(), values))


# -- the trace -------------------------------------------------------------------------------------

ROWS = ("foreground", "communication", "background")


def trace(run: ClusterRun) -> bytes:
    """A process for each class of devices, and in it a track for each of ``ROWS``."""
    return encode_trace(
        TraceProcess(devices_of(one.devices), list(_tracks(run, one))) for one in run.classes
    )


def devices_of(devices: tuple[int, ...]) -> str:
    """Numbers of devices in few words."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1:
        return f"device {first}"
    dense = last - first + 1 == len(devices)
    return f"devices {first} to {last}" + ("" if dense else f" ({len(devices)} of them)")


def _tracks(run: ClusterRun, one: DeviceClass) -> Iterator[TraceTrack]:
    for name, found in zip(ROWS, (one.computing, one.communicating), strict=False):
        spans = [
            TraceSpan(
                f"{busy.phase} {run.steps[job].units[busy.unit]}", low, high,
                {"job": run.foregrounds[job].name},
            )
            for (low, high), job, busy in found
        ]  # fmt: skip
        yield TraceTrack(name, spans)
    filled: list[TraceSpan] = []
    if one.background is not None:
        mine = run.backgrounds[one.background]
        filled = [
            TraceSpan(mine.name, f.start_s, f.end_s, {"pieces": f.pieces, "batch": mine.batch})
            for f in one.filled
            if f.pieces
        ]
    yield TraceTrack(ROWS[-1], filled)
