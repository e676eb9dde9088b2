"""Sentences about ranks, from what was heard of them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch.distributed as dist
from meshwright.executor.comm import watchdog
from meshwright.executor.comm.collective_log import CollectiveLog, _ordinal
from meshwright.executor.comm.groups import Group
from meshwright.executor.comm.heartbeat import Heartbeat, HeartbeatStatus, within
from meshwright.executor.comm.watchdog import Watchdog, where_all_are


class Hosts:
    """What a heartbeat says of ranks that have a host each, or share one."""

    alarm = None

    def __init__(self, size: int, *, one_host: bool = False) -> None:
        self.rank, self.size, self.one_host = 0, size, one_host

    def name(self, rank: int) -> str:
        return f"rank {rank}" if self.one_host else f"rank {rank} on h{rank}"


def said_of(size: int, *heard: object, one_host: bool = False) -> str:
    """The sentence of rank 0 of so many; ``heard`` as ``where_all_are`` takes it."""
    return where_all_are(Hosts(size, one_host=one_host), *heard)  # type: ignore[arg-type]


def test_who_is_silent_comes_first_and_changes_the_remedy() -> None:
    heard = [
        HeartbeatStatus("waits in forward 2", True),
        HeartbeatStatus("waits in forward 2", True),
        HeartbeatStatus("is in forward 2", False),
    ]
    assert said_of(3, "forward 2 since 5 s", heard) == (
        "rank 0 on h0 waits in forward 2 since 5 s; rank 2 on h2 is not heard of any more (its "
        "last word: it is in forward 2); rank 1 on h1 waits in forward 2: a rank that is not heard "
        "of has stalled or ended, or its link is cut; look at its host"
    )


def test_a_rank_that_ended_is_not_silent() -> None:
    heard = [
        HeartbeatStatus(None, True),
        HeartbeatStatus("has ended (it last is in forward 1)", False),
    ]
    sentence = said_of(2, "forward 2 since 5 s", heard)
    assert "rank 1 on h1 has ended (it last is in forward 1)" in sentence
    assert "not heard of" not in sentence
    assert "every rank must call the model" in sentence


def test_a_silent_rank_is_listed_among_many() -> None:
    heard = [HeartbeatStatus("waits", rank != 60) for rank in range(64)]
    sentence = said_of(64, "forward 2 since 5 s", heard)
    assert "rank 60 on h60 is not heard of any more" in sentence
    assert "55 more ranks are not listed" in sentence


def test_a_store_that_does_not_answer() -> None:
    sentence = said_of(12, "forward 2 since 5 s", None)
    assert "nothing is heard of rank 1 on h1, rank 2 on h2" in sentence
    assert "rank 8 on h8 and 3 more: the link" in sentence
    sentence = said_of(2, "forward 2 since 5 s", None, one_host=True)
    assert "nothing is heard of rank 1: the launcher or rank 0" in sentence


def test_on_one_host_no_link_is_blamed() -> None:
    gone = [HeartbeatStatus(None, True), HeartbeatStatus("is in forward 1", False)]
    said = said_of(2, "forward 1 since 0.3 s", gone, "Connection closed", one_host=True)
    assert said.startswith(
        "rank 0 waits in forward 1 since 0.3 s and lost the connection to another rank "
        "(Connection closed); rank 1 is not heard of any more"
    )
    assert "printed last" in said
    assert "host" not in said.replace("other", "")
    there = [HeartbeatStatus(None, True), HeartbeatStatus("is in forward 1", True)]
    said = said_of(2, "forward 1 since 0.3 s", there, "Connection closed", one_host=True)
    assert "all ranks still run" in said
    assert "link" not in said


def test_what_a_library_says_of_a_lost_connection_is_told_without_its_source_and_advice() -> None:
    said = (
        "[/a/b/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:30875: Connection reset by "
        "peer. This is typically caused by a remote worker hanging. Check its logs.\nmore"
    )
    assert watchdog._what_failed(said) == "Read error [10.77.0.2]:30875: Connection reset by peer"
    assert watchdog._what_failed("NCCL error [2]: remote") == "NCCL error [2]: remote"


class Collective:
    """One that completes, with an ``error`` or not, in the moment between the end of a piece of the
    wait for it and the look whether it has."""

    def __init__(self, pieces: int, error: str = "") -> None:
        self.left, self.error = pieces, error

    def wait(self, limit: timedelta) -> None:
        if not self.is_completed():
            self.left -= 1
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(f"{self.error}\nat some line")

    def is_completed(self) -> bool:
        return self.left == 0


class GaveUpError(Exception):
    pass


def waits_for(work: Collective, monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(doing: str, waited_s: float, failure: str = "", *, also: str = "") -> NoReturn:
        raise GaveUpError(failure)

    made = Watchdog(0, 1, 5.0)
    made.heartbeat = Hosts(2)  # type: ignore[assignment]
    monkeypatch.setattr(made, "_give_up", give_up)
    group = Group(ranks=(0, 1), member=0, handle=None, label="world")
    made.wait(work, group, "forward 1")  # type: ignore[arg-type]


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_collective_that_completes_late_is_no_lost_peer(pieces, monkeypatch) -> None:
    waits_for(Collective(pieces), monkeypatch)
    with pytest.raises(GaveUpError, match=r"^Connection closed by peer$"):
        waits_for(Collective(pieces, "Connection closed by peer"), monkeypatch)


class Beating(Hosts):
    """One that beats, and hears that rank 1 is elsewhere."""

    beats = True

    def __init__(self) -> None:
        super().__init__(2)
        self.gave_up = threading.Event()

    def give_up(self) -> None:
        self.gave_up.set()

    def ask(self, keys: list[str]) -> list[HeartbeatStatus]:
        return [HeartbeatStatus(None, True), HeartbeatStatus("is in forward 3", True)]

    def part(self, alive: object) -> None:
        pass


def test_a_device_that_a_collective_holds_is_told_of(monkeypatch, capsys) -> None:
    """The host knows nothing of it: it is held in code of the user's, where it asks for a value."""
    come: list[object] = []
    monkeypatch.setattr(watchdog, "now", lambda device: object())
    monkeypatch.setattr(watchdog, "has_come", lambda moment: moment in come)
    made, beating = Watchdog(0, 1, 0.2), Beating()
    made.heartbeat = beating  # type: ignore[assignment]
    group = Group((0, 1), 0, None, "exchange", on_stream=True)
    for name in "ab":
        made.wait(SimpleNamespace(wait=lambda: None), group, f"the exchange of {name}")  # type: ignore[arg-type]
    made.look()
    time.sleep(0.25)
    come.append(made._on_stream[0].moment)
    made.look()  # it has come past one
    assert not beating.gave_up.wait(0.1)
    time.sleep(0.2)
    made.look()
    assert beating.gave_up.wait(5)
    made.look()
    for thread in threading.enumerate():
        if thread.name == "meshwright stream wait":
            thread.join(5)
    (said,) = capsys.readouterr().err.splitlines()  # once
    assert "rank 0 on h0 waits in the exchange of b since 0." in said
    assert "rank 1 on h1 is in forward 3" in said


def test_each_beat_looks_as_long_as_there_is_somebody_to_look() -> None:
    class Looking:
        looked = 0

        def look(self) -> None:
            Looking.looked += 1
            raise RuntimeError("CUDA error: unspecified launch failure")

    heartbeat, looking = object.__new__(Heartbeat), Looking()
    heartbeat._beaten = []
    heartbeat.tell_of_beats(looking.look)
    heartbeat.beaten()
    heartbeat.beaten()
    del looking
    heartbeat.beaten()
    assert Looking.looked == 2


def test_a_read_that_never_returns_is_left_behind() -> None:
    never = threading.Event()
    start = time.monotonic()
    assert within(never.wait, 0.2) is None
    assert time.monotonic() - start < 2
    never.set()
    assert within(lambda: 7, 5.0) == 7


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (112, "112th"), (121, "121st")],
)
def test_ordinals(number: int, text: str) -> None:
    assert _ordinal(number) == text


def test_groups_of_one_label_are_compared_each_by_itself() -> None:
    """As two layouts have that leave ranks idle: the same label, and the same first rank."""
    store = dist.TCPStore("localhost", 0, is_master=True)
    heartbeats = [Hosts(3) for _ in range(3)]
    logs = []
    for rank, heartbeat in enumerate(heartbeats):
        heartbeat.rank = rank
        logs.append(CollectiveLog(store, heartbeat, 0))  # type: ignore[arg-type]
    pair, three = (Group(tuple(range(n)), 0, object(), "exchange in parts") for n in (2, 3))
    for log in logs[:2]:
        log.note(pair, "slice 0 of 'a'")
    for log in logs:
        log.note(three, "slice 0 of 'b'")
    assert all(log.compared(pair) for log in logs[:2])
    assert all(log.compared(three) for log in logs)
