"""Moments of a run, with a device's events stood for by ours."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from meshwright.executor.comm import moments
from meshwright.executor.comm.groups import Group
from meshwright.executor.comm.moments import now, seconds_between
from meshwright.executor.comm.watchdog import Watchdog


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


class Device:
    """Two streams, of which the one that computes waits for the other; and the host's clock of
    neither."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.computing = Stream()
        monkeypatch.setattr(moments.torch.cuda, "Event", Event)
        monkeypatch.setattr(moments.torch.cuda, "current_stream", lambda device: self.computing)

    def collective(self, over_s: float) -> SimpleNamespace:
        """One that the other stream has done after so many seconds."""

        def wait() -> None:
            self.computing.launched_s = max(self.computing.launched_s, over_s)

        return SimpleNamespace(wait=wait)


def test_what_held_the_computing_stream_is_told_by_its_own_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, watch = Device(monkeypatch), Watchdog(0, 1, 10.0)
    place = torch.device("cuda", 0)

    def group(label: str) -> Group:
        return Group((0, 1), 0, None, label, on_stream=True, device=place)

    def wait(over_s: float, label: str) -> None:
        assert watch.wait(device.collective(over_s), group(label), "a test") == 0.0  # type: ignore[arg-type]

    wait(5.0, "exchange")
    assert watch.stream_waits.take() == ((), ())  # nobody measures
    watch.stream_waits.begin()
    device.computing.launch(1.0)
    wait(6.5, "exchange 2")  # held for half a second
    wait(6.0, "exchange")  # over already
    wait(8.5, "redistribution 2")
    wait(8.75, "statistics")
    device.computing.launch(1.0)
    wait(10.0, "unshards 1")
    wait(20.0, "full gradients 1")
    # Another thread's waits are the same run's.
    assert watch.for_thread().stream_waits is watch.stream_waits
    held = watch.stream_waits.take()
    assert device.computing.waited == 0
    assert held.exposed_s == pytest.approx(0.5 + 0.25)
    assert held.blocking_s == pytest.approx(2.0 + 0.25)
    assert watch.stream_waits.take() == ((), ())
