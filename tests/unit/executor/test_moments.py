"""Moments of a run, with a device's events stood for by ours."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.launch import moments
from meshwright.executor.launch.moments import now, seconds_between


def test_on_a_cpu_it_is_the_hosts_clock() -> None:
    start = now(torch.device("cpu"))
    assert 0 <= seconds_between(start, now(torch.device("cpu"))) < 10


class Stream:
    """A device that works behind its host: what is launched takes its time there."""

    def __init__(self) -> None:
        self.launched_s = self.waited = 0.0

    def launch(self, seconds: float) -> None:
        self.launched_s += seconds


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        self.stream, self.at_s = stream, stream.launched_s

    def synchronize(self) -> None:
        self.stream.waited += 1

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_on_streams_it_is_what_was_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(moments.torch.cuda, "Event", Event)
    monkeypatch.setattr(moments.torch.cuda, "current_stream", lambda device: stream)
    device = torch.device("cuda", 0)
    start = now(device)
    stream.launch(0.25)
    end = now(device)
    stream.launch(4.0)
    # The host waits when it asks, not when it notes a moment.
    assert stream.waited == 0
    assert seconds_between(start, end) == pytest.approx(0.25)
    assert stream.waited == 1
