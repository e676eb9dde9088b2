"""What a rank tells its pacer, and what the pacer makes of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from meshwright.executor.background import signals as told_from
from meshwright.executor.background.law import FIRST_HELD, REMEMBERED
from meshwright.executor.background.pacer import Foreground
from meshwright.executor.background.protocol import VARIABLE, Kind, PacerMessage, unpacked
from meshwright.executor.background.signals import GAP_S, Signals, tell_pacer
from meshwright.executor.comm.watchdog import Watchdog


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    yield read, write
    os.close(read)


def heard(read: int) -> list[PacerMessage]:
    try:
        return list(unpacked(os.read(read, 2**16)))
    except BlockingIOError:
        return []


class Clock:
    """Stands for ``time``: goes on as it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(told_from, "time", made)
    return made


def waits(clock: Clock, signals: Signals, *seconds: float) -> None:
    """One step with waits of so long."""
    for taken in seconds:
        goes_on = signals.waiting()
        clock.now_s += taken
        if goes_on is not None:
            goes_on()
    signals.stepped()


def test_only_waits_that_were_long_before_are_told(pipe, clock):
    read, write = pipe
    signals = Signals(write, 0, 0)
    waits(clock, signals, 0.01)  # before the first step nothing is known
    waits(clock, signals, 2 * GAP_S, 0.0)
    assert [r.kind for r in heard(read)] == [Kind.BEGAN, Kind.STEPPED]
    waits(clock, signals, 3 * GAP_S, 0.0)
    told = heard(read)
    assert [r.kind for r in told] == [Kind.WAITS, Kind.WORKS, Kind.STEPPED]
    assert told[0].seconds == pytest.approx(2 * GAP_S)
    assert told[-1].number == 2
    assert told[-1].seconds == pytest.approx(3 * GAP_S)


def test_another_thread_that_waits_leaves_no_gap(pipe, clock):
    read, write = pipe
    signals = Signals(write, 0, 0)
    for _ in range(3):
        waits(clock, signals, 2 * GAP_S)
    heard(read)
    found = []
    thread = threading.Thread(target=lambda: found.append(signals.waiting()))
    thread.start()
    thread.join()
    assert found == [None]
    assert heard(read) == []


def test_a_gpus_steps_are_told_when_it_has_made_them(pipe, monkeypatch):
    """Its host has launched four steps before the first is over; the pacer learns what they took
    there."""
    read, write = pipe
    launched, device_s = iter((0.0, 0.5, 1.1, 1.4)), 0.0
    monkeypatch.setattr(told_from, "now", lambda device: next(launched))
    monkeypatch.setattr(told_from, "has_come", lambda moment: moment <= device_s)
    signals = Signals(write, 0, 0, torch.device("cuda", 0))
    for _ in range(3):
        signals.stepped()
    assert [r.kind for r in heard(read)] == [Kind.BEGAN]
    device_s = 1.2
    signals.stepped()
    told = heard(read)
    assert [(r.kind, r.number) for r in told] == [(Kind.STEPPED, 1), (Kind.STEPPED, 2)]
    assert [r.seconds for r in told] == pytest.approx([0.5, 0.6])


def test_neither_a_full_pipe_nor_a_dead_pacer_holds_the_rank_up():
    read, write = os.pipe()
    os.set_blocking(write, False)
    signals = Signals(write, 0, 0)
    for _ in range(10_000):
        signals.stepped()
    os.close(read)
    signals.stepped()
    signals.stepped()
    assert signals.waiting() is None


@pytest.mark.parametrize("given", [True, False])
def test_a_step_is_told_once_however_it_is_applied(tmp_path, monkeypatch, given):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv(VARIABLE, str(path))
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    watch = Watchdog(0, 1, 10.0, run=5)
    tell_pacer(watch, model.parameters(), optimizer if given else None)
    assert watch.on_wait is not None
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        other.step()
    told = heard(read)
    os.close(read)
    assert [r.kind for r in told] == [Kind.BEGAN, Kind.STEPPED, Kind.STEPPED]
    assert {r.foreground for r in told} == {5}


def stepped(foreground: Foreground, count: int, now_s: float = 0.0) -> None:
    foreground.heard(PacerMessage(Kind.BEGAN, 0, 0), now_s)
    for number in range(1, count + 1):
        foreground.heard(PacerMessage(Kind.STEPPED, 0, 0, number, 0.1), now_s)


def test_the_background_runs_freely_before_and_after_the_foreground():
    foreground = Foreground(1.1)
    assert foreground.opening(0.0).runs
    stepped(foreground, FIRST_HELD)
    assert not foreground.opening(0.0).runs  # a share of a half is for gaps only
    foreground.left()
    assert foreground.opening(0.0).runs


def test_it_runs_in_gaps_and_never_past_the_limit():
    foreground = Foreground(1.1)
    stepped(foreground, FIRST_HELD)
    foreground.heard(PacerMessage(Kind.WAITS, 0, 1, seconds=0.05), 0.01)
    opened = foreground.opening(0.01)
    assert opened.runs
    assert opened.until_s == pytest.approx(0.059)
    foreground.heard(PacerMessage(Kind.WORKS, 0, 1), 0.05)
    assert not foreground.opening(0.05).runs
    foreground.heard(PacerMessage(Kind.WAITS, 0, 1, seconds=10.0), 0.06)
    assert foreground.opening(0.06).until_s == pytest.approx(0.11)  # of 0.1 s undisturbed
    assert not foreground.opening(0.111).runs


def test_a_foreground_that_begins_anew_is_measured_anew():
    foreground = Foreground(1.1)
    stepped(foreground, FIRST_HELD)
    foreground.left()
    foreground.heard(PacerMessage(Kind.BEGAN, 0, 0), 1.0)
    assert foreground.current.undisturbed_s is None
    assert not foreground.opening(1.0).runs


def test_steps_held_by_the_launcher_count_as_undisturbed_and_those_held_in_part_as_nothing():
    foreground = Foreground(1.1)
    stepped(foreground, FIRST_HELD)
    assert foreground.opening(0.0).runs is False
    share = foreground.current.share
    number, now_s = FIRST_HELD, 0.0

    def steps(seconds: float, count: int) -> None:
        nonlocal number, now_s
        for _ in range(count):
            number, now_s = number + 1, now_s + seconds
            foreground.heard(PacerMessage(Kind.STEPPED, 0, 0, number, seconds), now_s)

    foreground.hold(True, now_s + 0.05)
    steps(1.9, 1)  # held in part: neither a debt nor an undisturbed time
    assert foreground.current.debt == 0
    assert foreground.current.undisturbed_s == pytest.approx(0.1)
    steps(0.2, REMEMBERED)
    assert foreground.current.undisturbed_s == pytest.approx(0.2)
    assert foreground.current.share == share  # nothing was learned of what the background does
    foreground.hold(False, now_s + 0.05)
    steps(1.9, 1)
    assert foreground.current.debt == 0
    steps(0.21, 1)
    assert foreground.current.share > share
    assert foreground.summary().disturbed == 1
