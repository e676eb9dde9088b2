"""A simulated cluster as a trace that Perfetto and chrome://tracing open.

The Trace Event Format (complete events, phase ``X``): times in microseconds, one process for each
class of devices, with a row for what the foregrounds compute, one for their communication and one
for the background.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from .simulation import ClusterRun, DeviceClass

ROWS = ("foreground", "communication", "background")
MICRO = 1e6
Event = dict[str, Any]


def trace(run: ClusterRun) -> bytes:
    """The trace as JSON."""
    events: list[Event] = []
    for number, one in enumerate(run.classes):
        events += _names(number, one)
        events += _spans(run, number, one)
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def devices_of(devices: tuple[int, ...]) -> str:
    """Numbers of devices in few words."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1:
        return f"device {first}"
    dense = last - first + 1 == len(devices)
    return f"devices {first} to {last}" + ("" if dense else f" ({len(devices)} of them)")


def _names(process: int, one: DeviceClass) -> Iterator[Event]:
    def named(what: str, thread: int, name: str) -> Event:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}

    yield named("process_name", 0, devices_of(one.devices))
    yield {
        "ph": "M", "name": "process_sort_index", "pid": process, "tid": 0,
        "args": {"sort_index": process},
    }  # fmt: skip
    for thread, name in enumerate(ROWS):
        yield named("thread_name", thread, name)


def _spans(run: ClusterRun, process: int, one: DeviceClass) -> Iterator[Event]:
    for row, found in enumerate((one.computing, one.communicating)):
        for (low, high), job, busy in found:
            name = f"{busy.phase} {run.steps_of(job).units[busy.unit]}"
            about: Event = {"job": run.foregrounds[job].name}
            yield _span(process, row, name, low, high, about)
    for filled in one.filled:
        if filled.pieces and one.background is not None:
            background = run.backgrounds[one.background]
            about = {"pieces": filled.pieces, "batch": background.batch}
            yield _span(process, 2, background.name, filled.start_s, filled.end_s, about)


def _span(
    process: int, thread: int, name: str, low: float, high: float, about: dict[str, Any]
) -> Event:
    return {
        "ph": "X", "name": name, "pid": process, "tid": thread, "ts": low * MICRO,
        "dur": (high - low) * MICRO, "args": about,
    }  # fmt: skip
