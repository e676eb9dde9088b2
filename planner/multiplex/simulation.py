"""An event simulation of a cluster: jobs come and go, backgrounds fill what these leave.

Foregrounds take whole devices, those of higher priority first; one that finds too few waits, and
smaller ones may go before it. Backgrounds are dealt to the devices that are idle most.

A gap is a longest stretch in which the foreground does not compute. The background gets its device
back ``switch_s`` after the gap begins, then runs pieces one after another, each ``piece_s`` of its
own time, slower while the foreground communicates; it starts none that would not end in the gap.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import floor
from typing import NamedTuple

import msgspec

from ..cost.cost import CostModel
from ..explain.why import check_belongs
from ..schema.cluster import Cluster, check_ranks
from ..schema.errors import InputError
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..simulate.events import Interval, gaps
from ..solve.device_timelines import Busy, DeviceTimeline, StepTimelines
from ..solve.evaluate import decisions_of
from .jobs import (
    Assumptions,
    BackgroundJob,
    ForegroundJob,
    best_background,
    foreground,
)

# Steps of the longest job that are simulated where nothing else is asked.
STEPS = 8
# Steps of one job that may be simulated: beyond, seconds become minutes.
MOST_STEPS = 2_000
# A piece that passes the end of its gap by this share of itself still fits: sums of floats.
ROUNDING = 1e-9

# -- gaps of one device ----------------------------------------------------------------------------


class FilledGap(NamedTuple):
    """A gap with ``pieces`` of a background in it, at work from ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float
    pieces: int


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as few intervals, in order and apart."""
    found: list[Interval] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        elif high > low:
            found.append((low, high))
    return found


def fill(gap: Interval, communicating: Sequence[Interval], assumptions: Assumptions) -> FilledGap:
    """What a background does in one gap, in which ``communicating`` (in order, apart, of this gap
    or of more) says when its device takes part in communication."""
    start_s = min(gap[0] + assumptions.switch_s, gap[1])
    stretches = _speeds((start_s, gap[1]), communicating, assumptions)
    own_s = sum((high - low) * speed for low, high, speed in stretches)
    pieces = floor(own_s / assumptions.piece_s + ROUNDING)
    if not pieces:
        return FilledGap(start_s, start_s, 0)
    left_s = pieces * assumptions.piece_s
    for low, high, speed in stretches:
        done = (high - low) * speed
        # A stretch at speed 0 is passed even where nothing is left to do: it divides by nothing.
        if speed > 0 and left_s <= done:
            return FilledGap(start_s, min(low + left_s / speed, high), pieces)
        left_s -= done
    return FilledGap(start_s, gap[1], pieces)


def _speeds(
    gap: Interval, communicating: Sequence[Interval], assumptions: Assumptions
) -> list[tuple[float, float, float]]:
    """(from, to, speed of the background) through a gap, in order."""
    communication = [(max(low, gap[0]), min(high, gap[1])) for low, high in communicating]
    communication = [(low, high) for low, high in communication if low < high]
    slower = [(low, high, assumptions.communicating_speed) for low, high in communication]
    return sorted(
        slower + [(low, high, assumptions.idle_speed) for low, high in gaps(communication, *gap)]
    )


def _at_full_speed(assumptions: Assumptions) -> Assumptions:
    """The assumptions for devices on which a foreground never computes."""
    return msgspec.structs.replace(assumptions, idle_speed=1.0)


def background_share(kind: DeviceTimeline, step_s: float, assumptions: Assumptions) -> float:
    """The share of its speed alone that a background has in the gaps of a step that goes on and on;
    a gap at the step's end continues in the next."""
    communication = merged((b.start_s, b.end_s) for b in kind.communicating)
    # Where nothing ever computes there are no gaps: no piece is cut off at the end of one.
    if not kind.computing:
        speeds = _speeds((0.0, step_s), communication, _at_full_speed(assumptions))
        return sum((high - low) * speed for low, high, speed in speeds) / step_s
    # The step is turned to begin where it first computes, so that no gap lies across its end.
    turn_s = kind.computing[0].start_s
    computing = [(b.start_s, b.end_s) for b in kind.computing]
    both = merged([*communication, *((low + step_s, high + step_s) for low, high in communication)])
    found = (
        fill(gap, both, assumptions).pieces for gap in gaps(computing, turn_s, turn_s + step_s)
    )
    return sum(found) * assumptions.piece_s / step_s


# -- the cluster -----------------------------------------------------------------------------------


class DeviceStay(NamedTuple):
    """A stay of a foreground on a device: as which kind of it, from when to when."""

    job: int
    kind: int
    start_s: float
    end_s: float


class ForegroundRun(NamedTuple):
    """A foreground as it ran: on ``devices`` from ``start_s`` to ``end_s``."""

    job: int
    devices: tuple[int, ...]
    start_s: float
    end_s: float


class DeviceClass(NamedTuple):
    """Devices that see the same: the foregrounds' computing and communication as (interval, job,
    unit, phase), and the background in their gaps, an index or None."""

    devices: tuple[int, ...]
    visits: tuple[DeviceStay, ...]
    computing: tuple[tuple[Interval, int, Busy], ...]
    communicating: tuple[tuple[Interval, int, Busy], ...]
    background: int | None = None
    filled: tuple[FilledGap, ...] = ()

    @property
    def foreground_s(self) -> float:
        """Seconds in which such a device computes for foregrounds."""
        return sum(high - low for (low, high), _, _ in self.computing)

    @property
    def background_s(self) -> float:
        """Seconds in which it runs its background."""
        return sum(each.end_s - each.start_s for each in self.filled)

    @property
    def pieces(self) -> int:
        return sum(each.pieces for each in self.filled)


class ClusterRun(NamedTuple):
    """All that was simulated of ``devices`` from 0 to ``horizon_s``: the foregrounds, the step that
    each has here (beside backgrounds where there are any), when they ran, and those that never got
    their devices (``waiting``)."""

    devices: int
    horizon_s: float
    assumptions: Assumptions
    foregrounds: tuple[ForegroundJob, ...]
    backgrounds: tuple[BackgroundJob, ...]
    steps: tuple[StepTimelines, ...]
    runs: tuple[ForegroundRun, ...]
    waiting: tuple[int, ...]
    classes: tuple[DeviceClass, ...]


def simulate_cluster(
    devices: int,
    foregrounds: Sequence[ForegroundJob],
    backgrounds: Sequence[BackgroundJob] = (),
    assumptions: Assumptions | None = None,
    horizon_s: float | None = None,
) -> ClusterRun:
    """Runs the jobs for ``horizon_s`` (default: eight steps of the longest). Raises ``InputError``
    for a job that needs more devices than there are."""
    assumptions = assumptions or Assumptions()
    steps = tuple(one.shared if backgrounds else one.unshared for one in foregrounds)
    if horizon_s is None:
        horizon_s = STEPS * max((s.step_s for s in steps), default=1.0)
    _check(devices, foregrounds, steps, horizon_s)
    runs, waiting = _placed(devices, foregrounds, steps, horizon_s)
    # Devices with the same past are simulated once, so that thousands cost no more than a few.
    classes = [_foreground_class(*history, steps) for history in _histories(devices, runs, steps)]
    return ClusterRun(
        devices,
        horizon_s,
        assumptions,
        tuple(foregrounds),
        tuple(backgrounds),
        steps,
        tuple(runs),
        waiting,
        tuple(
            _with_background(each, assumptions, horizon_s) for each in _dealt(classes, backgrounds)
        ),
    )


def _check(
    devices: int,
    foregrounds: Sequence[ForegroundJob],
    steps: Sequence[StepTimelines],
    horizon_s: float,
) -> None:
    if devices < 1:
        raise InputError(f"a cluster of {devices} devices runs nothing: give at least 1")
    check_ranks(devices)
    for one, step in zip(foregrounds, steps, strict=True):
        if one.devices > devices:
            raise InputError(
                f"the plan of {one.name} is for {one.devices} devices and the cluster has "
                f"{devices}: give it at least as many"
            )
        if step.step_s <= 0:
            raise InputError(f"a step of {one.name} takes no time: its profile says nothing")
    if not 0 < horizon_s < float("inf"):
        raise InputError(f"a horizon of {horizon_s:g} s shows nothing: give more than 0")
    for one, step in zip(foregrounds, steps, strict=True):
        if horizon_s / step.step_s > MOST_STEPS:
            raise InputError(
                f"{horizon_s:g} s are {horizon_s / step.step_s:,.0f} steps of {one.name}: ask for "
                f"at most {MOST_STEPS * step.step_s:.3g} s, a cluster in the steady state repeats"
            )


def _placed(
    devices: int,
    foregrounds: Sequence[ForegroundJob],
    steps: Sequence[StepTimelines],
    horizon_s: float,
) -> tuple[list[ForegroundRun], tuple[int, ...]]:
    """When and where each job runs, and which never do."""
    runs: list[ForegroundRun] = []
    # At every arrival and every end those that wait may start; between these nothing changes.
    jobs = range(len(foregrounds))
    waiting = sorted(jobs, key=lambda i: (-foregrounds[i].priority, foregrounds[i].arrival_s, i))
    events = {one.arrival_s for one in foregrounds}
    while waiting and events:
        now_s = min(events)
        events.discard(now_s)
        if now_s >= horizon_s:
            break
        taken = {d for run in runs if run.end_s > now_s for d in run.devices}
        free = [d for d in range(devices) if d not in taken]
        # A job that needs more devices than are free does not hold up smaller ones behind it.
        for i in list(waiting):
            one = foregrounds[i]
            if one.arrival_s > now_s or one.devices > len(free):
                continue
            took = float("inf") if one.steps is None else one.steps * steps[i].step_s
            end_s = min(now_s + took, horizon_s)
            runs.append(ForegroundRun(i, tuple(free[: one.devices]), now_s, end_s))
            events.add(end_s)
            free = free[one.devices :]
            waiting.remove(i)
    return runs, tuple(waiting)


def _histories(
    devices: int, runs: Iterable[ForegroundRun], steps: Sequence[StepTimelines]
) -> Iterator[tuple[tuple[int, ...], tuple[DeviceStay, ...]]]:
    """Devices with equal visits together."""
    visits: list[list[DeviceStay]] = [[] for _ in range(devices)]
    for run in sorted(runs, key=lambda r: r.start_s):
        for number, kind in enumerate(steps[run.job].kinds):
            visit = DeviceStay(run.job, number, run.start_s, run.end_s)
            for position in kind.positions:
                visits[run.devices[position]].append(visit)
    alike: dict[tuple[DeviceStay, ...], list[int]] = {}
    for device, past in enumerate(visits):
        alike.setdefault(tuple(past), []).append(device)
    for history, members in alike.items():
        yield tuple(members), history


def _foreground_class(
    members: tuple[int, ...], visits: tuple[DeviceStay, ...], steps: Sequence[StepTimelines]
) -> DeviceClass:
    """The class before it has a background."""
    computing: list[tuple[Interval, int, Busy]] = []
    communicating: list[tuple[Interval, int, Busy]] = []
    for visit in visits:
        step = steps[visit.job]
        kind = step.kinds[visit.kind]
        computing += _repeated(visit, step.step_s, kind.computing)
        communicating += _repeated(visit, step.step_s, kind.communicating)
    return DeviceClass(members, visits, tuple(computing), tuple(communicating))


def _repeated(
    visit: DeviceStay, step_s: float, pieces: Sequence[Busy]
) -> Iterator[tuple[Interval, int, Busy]]:
    """A step again and again from a visit's start to its end, where the last may be cut."""
    number, at_s = 0, visit.start_s
    while at_s < visit.end_s:
        for busy in pieces:
            low, high = at_s + busy.start_s, min(at_s + busy.end_s, visit.end_s)
            if high > low:
                yield (low, high), visit.job, busy
        # Multiplied, not added up: rounding must not grow with the number of steps.
        number += 1
        at_s = visit.start_s + number * step_s


def _dealt(
    classes: Sequence[DeviceClass], backgrounds: Sequence[BackgroundJob]
) -> list[DeviceClass]:
    """Classes with their backgrounds: each job takes the devices that are idle most and have none;
    a class that it takes only a part of becomes two."""
    # The idlest devices first, and of equal ones the lowest, so that a simulation repeats itself.
    left = sorted(classes, key=lambda c: (c.foreground_s, c.devices))
    done: list[DeviceClass] = []
    for i in sorted(range(len(backgrounds)), key=lambda i: (-backgrounds[i].priority, i)):
        wanted = backgrounds[i].copies
        while left and wanted != 0:
            one = left.pop(0)
            count = len(one.devices) if wanted is None else min(wanted, len(one.devices))
            done.append(one._replace(devices=one.devices[:count], background=i))
            if count < len(one.devices):
                left.insert(0, one._replace(devices=one.devices[count:]))
            wanted = None if wanted is None else wanted - count
    return sorted([*done, *left], key=lambda c: c.devices)


def _with_background(one: DeviceClass, assumptions: Assumptions, horizon_s: float) -> DeviceClass:
    if one.background is None:
        return one
    communication = merged(interval for interval, _, _ in one.communicating)
    found, at = [], 0
    assumptions = assumptions if one.computing else _at_full_speed(assumptions)
    # Gaps and communication both are in order, so one walk through both of them is enough.
    for gap in gaps(merged(interval for interval, _, _ in one.computing), 0.0, horizon_s):
        while at < len(communication) and communication[at][1] <= gap[0]:
            at += 1
        until = at
        while until < len(communication) and communication[until][0] < gap[1]:
            until += 1
        found.append(fill(gap, communication[at:until], assumptions))
    return one._replace(filled=tuple(found))


# -- plans on a cluster ----------------------------------------------------------------------------


def simulate_plans(
    plans: Sequence[tuple[Plan, ModelProfile, Cluster]],
    backgrounds: Sequence[ModelProfile],
    assumptions: Assumptions,
    devices: int | None,
    horizon_s: float | None,
) -> ClusterRun:
    """The plans side by side on ``devices`` (default: as many as they need together), and the
    background models, dealt to all devices in turn, in what they leave idle."""
    if not plans:
        raise InputError("no plan to simulate: name at least one plan's file")
    slowdown = assumptions.slowdown if backgrounds else 1.0
    jobs = []
    for plan, profile, cluster in plans:
        check_belongs(plan, profile, cluster)
        model = CostModel.of_plan(plan, profile, cluster)
        job = foreground(plan.target, model, decisions_of(plan), plan.schedule, slowdown)
        jobs.append(job._replace(data_parallel_samples_s=plan.baseline.samples_per_s))
    count = sum(job.devices for job in jobs) if devices is None else devices
    # A background may land on any device: it has the room that the fullest foreground leaves on
    # the device with least memory.
    every = [device for _, _, cluster in plans for device in cluster.devices]
    device = min(every, key=lambda d: d.usable_bytes)
    foreground_bytes = max(job.shared.peak_bytes for job in jobs)
    optimizer = plans[0][0].goal.optimizer
    made = [best_background(model, device, optimizer, foreground_bytes) for model in backgrounds]
    if len(made) > 1:
        least, more = divmod(count, len(made))
        made = [one._replace(copies=least + (i < more)) for i, one in enumerate(made)]
    return simulate_cluster(count, jobs, made, assumptions, horizon_s)
