"""An event simulation of a cluster: jobs come and go, backgrounds fill what these leave.

Foregrounds take whole devices, those of higher priority first; one that finds too few waits, and
smaller ones may go before it. Devices with the same past are one class and are simulated once, so
that thousands cost no more than a few. Backgrounds are dealt to the devices that are idle most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..explain.why import check_belongs
from ..schema.cluster import Cluster
from ..schema.errors import InputError
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..solve.evaluate import decisions_of
from .gaps import Filled, Interval, fill, gaps, merged, undisturbed
from .jobs import Assumptions, Background, Foreground, best_background, foreground_of
from .timeline import Busy, StepTimelines

# Steps of the longest job that are simulated where nothing else is asked.
STEPS = 8
# Steps of one job that may be simulated: beyond, seconds become minutes.
MOST_STEPS = 2_000


class Visit(NamedTuple):
    """A stay of a foreground on a device: as which kind of it, from when to when."""

    job: int
    kind: int
    start_s: float
    end_s: float


class Run(NamedTuple):
    """A foreground as it ran: on ``devices`` from ``start_s`` to ``end_s``."""

    job: int
    devices: tuple[int, ...]
    start_s: float
    end_s: float


class DeviceClass(NamedTuple):
    """Devices that see the same: the foregrounds' computing and communication as (interval, job,
    unit, phase), and the background in their gaps, an index or None."""

    devices: tuple[int, ...]
    visits: tuple[Visit, ...]
    computing: tuple[tuple[Interval, int, Busy], ...]
    communicating: tuple[tuple[Interval, int, Busy], ...]
    background: int | None
    filled: tuple[Filled, ...]

    @property
    def foreground_s(self) -> float:
        """Seconds in which such a device computes for foregrounds."""
        return sum(high - low for (low, high), _, _ in self.computing)

    @property
    def background_s(self) -> float:
        """Seconds in which it runs its background."""
        return sum(each.background_s for each in self.filled)

    @property
    def pieces(self) -> int:
        """Pieces of its background that were done."""
        return sum(each.pieces for each in self.filled)


class ClusterRun(NamedTuple):
    """All that was simulated of ``devices`` from 0 to ``horizon_s``; ``waiting`` are foregrounds
    that never got their devices."""

    devices: int
    horizon_s: float
    given: Assumptions
    foregrounds: tuple[Foreground, ...]
    backgrounds: tuple[Background, ...]
    runs: tuple[Run, ...]
    waiting: tuple[int, ...]
    classes: tuple[DeviceClass, ...]

    def steps_of(self, job: int) -> StepTimelines:
        """The step that a foreground has here: beside backgrounds where there are any."""
        one = self.foregrounds[job]
        return one.shared if self.backgrounds else one.unshared


def simulate_cluster(
    devices: int,
    foregrounds: Sequence[Foreground],
    backgrounds: Sequence[Background] = (),
    given: Assumptions | None = None,
    horizon_s: float | None = None,
) -> ClusterRun:
    """Runs the jobs for ``horizon_s`` (default: eight steps of the longest). Raises ``InputError``
    for a job that needs more devices than there are."""
    given = given or Assumptions()
    _check(devices, foregrounds, horizon_s)
    steps = [one.shared if backgrounds else one.unshared for one in foregrounds]
    horizon_s = horizon_s or STEPS * max((s.step_s for s in steps), default=1.0)
    _check_length(foregrounds, steps, horizon_s)
    runs, waiting = _placed(devices, foregrounds, steps, horizon_s)
    classes = []
    for members, visits in _histories(devices, runs, steps):
        classes.append(_foreground_class(members, visits, steps))
    dealt = _dealt(classes, backgrounds, horizon_s)
    return ClusterRun(
        devices,
        horizon_s,
        given,
        tuple(foregrounds),
        tuple(backgrounds),
        tuple(runs),
        waiting,
        tuple(_with_background(each, given, horizon_s) for each in dealt),
    )


def _check(devices: int, foregrounds: Sequence[Foreground], horizon_s: float | None) -> None:
    if devices < 1:
        raise InputError(f"a cluster of {devices} devices runs nothing: give at least 1")
    for one in foregrounds:
        if one.devices > devices:
            raise InputError(
                f"the plan of {one.name} is for {one.devices} devices and the cluster has "
                f"{devices}: give it at least as many"
            )
    if horizon_s is not None and not 0 < horizon_s < float("inf"):
        raise InputError(f"a horizon of {horizon_s:g} s shows nothing: give more than 0")


def _check_length(
    foregrounds: Sequence[Foreground], steps: Sequence[StepTimelines], horizon_s: float
) -> None:
    for one, step in zip(foregrounds, steps, strict=True):
        if step.step_s <= 0:
            raise InputError(f"a step of {one.name} takes no time: its profile says nothing")
        if horizon_s / step.step_s > MOST_STEPS:
            raise InputError(
                f"{horizon_s:g} s are {horizon_s / step.step_s:,.0f} steps of {one.name}: ask for "
                f"at most {MOST_STEPS * step.step_s:.3g} s, a cluster in the steady state repeats"
            )


def _placed(
    devices: int,
    foregrounds: Sequence[Foreground],
    steps: Sequence[StepTimelines],
    horizon_s: float,
) -> tuple[list[Run], tuple[int, ...]]:
    """When and where each job runs: at every arrival and end those that wait start, as far as
    there are devices."""
    runs: list[Run] = []
    order = sorted(
        range(len(foregrounds)),
        key=lambda i: (-foregrounds[i].priority, foregrounds[i].arrival_s, i),
    )
    waiting, events = order, {one.arrival_s for one in foregrounds}
    while waiting and events:
        now_s = min(events)
        events.discard(now_s)
        if now_s >= horizon_s:
            break
        taken = {d for run in runs if run.end_s > now_s for d in run.devices}
        free = [d for d in range(devices) if d not in taken]
        for i in list(waiting):
            one = foregrounds[i]
            if one.arrival_s > now_s or one.devices > len(free):
                continue
            took = float("inf") if one.steps is None else one.steps * steps[i].step_s
            end_s = min(now_s + took, horizon_s)
            runs.append(Run(i, tuple(free[: one.devices]), now_s, end_s))
            events.add(end_s)
            free = free[one.devices :]
            waiting = [j for j in waiting if j != i]
    return runs, tuple(waiting)


def _histories(
    devices: int, runs: Iterable[Run], steps: Sequence[StepTimelines]
) -> Iterator[tuple[tuple[int, ...], tuple[Visit, ...]]]:
    """Devices with equal visits together."""
    visits: list[list[Visit]] = [[] for _ in range(devices)]
    for run in sorted(runs, key=lambda r: r.start_s):
        for number, kind in enumerate(steps[run.job].kinds):
            for position in kind.positions:
                visit = Visit(run.job, number, run.start_s, run.end_s)
                visits[run.devices[position]].append(visit)
    alike: dict[tuple[Visit, ...], list[int]] = {}
    for device, past in enumerate(visits):
        alike.setdefault(tuple(past), []).append(device)
    for history, members in alike.items():
        yield tuple(members), history


def _foreground_class(
    members: tuple[int, ...], visits: tuple[Visit, ...], steps: Sequence[StepTimelines]
) -> DeviceClass:
    """The class before it has a background."""
    computing: list[tuple[Interval, int, Busy]] = []
    communicating: list[tuple[Interval, int, Busy]] = []
    for visit in visits:
        step = steps[visit.job]
        kind = step.kinds[visit.kind]
        computing += _repeated(visit, step.step_s, kind.computing)
        communicating += _repeated(visit, step.step_s, kind.communicating)
    communicating.sort(key=lambda each: each[0])
    return DeviceClass(members, visits, tuple(computing), tuple(communicating), None, ())


def _repeated(
    visit: Visit, step_s: float, pieces: Sequence[Busy]
) -> Iterator[tuple[Interval, int, Busy]]:
    """A step again and again from a visit's start to its end, where the last may be cut."""
    number, at_s = 0, visit.start_s
    while at_s < visit.end_s:
        for busy in pieces:
            low, high = at_s + busy.start_s, min(at_s + busy.end_s, visit.end_s)
            if high > low:
                yield (low, high), visit.job, busy
        number += 1
        at_s = visit.start_s + number * step_s


def _dealt(
    classes: Sequence[DeviceClass], backgrounds: Sequence[Background], horizon_s: float
) -> list[DeviceClass]:
    """Classes with their backgrounds: each job takes the devices that are idle most and have none;
    a class that it takes only a part of becomes two."""
    left = sorted(classes, key=lambda c: (c.foreground_s, c.devices))
    done: list[DeviceClass] = []
    order = sorted(range(len(backgrounds)), key=lambda i: (-backgrounds[i].priority, i))
    for i in order:
        wanted = backgrounds[i].copies
        while left and wanted != 0:
            one = left.pop(0)
            count = len(one.devices) if wanted is None else min(wanted, len(one.devices))
            done.append(one._replace(devices=one.devices[:count], background=i))
            if count < len(one.devices):
                left.insert(0, one._replace(devices=one.devices[count:]))
            wanted = None if wanted is None else wanted - count
    return sorted([*done, *left], key=lambda c: c.devices)


def _with_background(one: DeviceClass, given: Assumptions, horizon_s: float) -> DeviceClass:
    if one.background is None:
        return one
    computing = [interval for interval, _, _ in one.computing]
    talking = merged(interval for interval, _, _ in one.communicating)
    found, at = [], 0
    given = given if computing else undisturbed(given)
    for gap in gaps(merged(computing), 0.0, horizon_s):
        while at < len(talking) and talking[at][1] <= gap[0]:
            at += 1
        until = at
        while until < len(talking) and talking[until][0] < gap[1]:
            until += 1
        found.append(fill(gap, talking[at:until], given))
    return one._replace(filled=tuple(found))


def simulate_plans(
    plans: Sequence[tuple[Plan, ModelProfile, Cluster]],
    backgrounds: Sequence[ModelProfile],
    given: Assumptions,
    devices: int | None,
    horizon_s: float | None,
) -> ClusterRun:
    """The plans side by side on ``devices`` (default: as many as they need together), and the
    background models, dealt to all devices in turn, in what they leave idle."""
    if not plans:
        raise InputError("no plan to simulate: name at least one plan's file")
    slowdown = given.slowdown if backgrounds else 1.0
    jobs = []
    for plan, profile, cluster in plans:
        check_belongs(plan, profile, cluster)
        jobs.append(foreground_of(plan, profile, cluster, decisions_of(plan), slowdown))
    count = sum(job.devices for job in jobs) if devices is None else devices
    held = max(job.shared.peak_bytes for job in jobs)
    made = _backgrounds(plans, backgrounds, held, count)
    return simulate_cluster(count, jobs, made, given, horizon_s)


def _backgrounds(
    plans: Sequence[tuple[Plan, ModelProfile, Cluster]],
    models: Sequence[ModelProfile],
    held_bytes: int,
    devices: int,
) -> list[Background]:
    """Each model's job at its best batch on the device that has least memory; several of them share
    the devices evenly."""
    every = [device for _, _, cluster in plans for device in cluster.devices]
    device = min(every, key=lambda d: d.memory_bytes)
    least, more = divmod(devices, max(len(models), 1))
    made = []
    for i, model in enumerate(models):
        one = best_background(model, device, plans[0][0].goal.optimizer, held_bytes)
        copies = least + (i < more)
        made.append(one._replace(copies=copies if len(models) > 1 else None))
    return made
