"""Moments of a run: read at once on a CPU; on a GPU's streams, when what was launched is done."""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event
"""Seconds of the host's clock, or an event of the device's."""


def now(device: torch.device) -> Moment:
    """This moment of the device. The host goes on at once: to wait for what it has launched would
    keep gradients from travelling under the next forward."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def has_come(moment: Moment) -> bool:
    """Whether the device has come so far. Asks without waiting."""
    return isinstance(moment, float) or bool(moment.query())  # type: ignore[no-untyped-call]


def seconds_between(start: Moment, end: Moment) -> float:
    """Seconds from one moment to a later one of the same device. Waits until it has come."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert not isinstance(start, float)
    assert not isinstance(end, float)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
