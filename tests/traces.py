"""The rules of Chrome's Trace Event Format, as far as traces here use it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Event = Mapping[str, Any]
REQUIRED = {"ph", "name", "pid", "tid", "ts"}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def check_trace(events: Iterable[Event]) -> None:
    """Fails unless all events are complete or metadata, have what these need, and those of one
    thread are apart or inside each other."""
    found = list(events)
    assert found, "a trace of nothing"
    threads = defaultdict(list)
    named = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    processes = {e["pid"] for e in found if e["name"] == "process_name"}
    for event in found:
        assert event.keys() >= REQUIRED, event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert all(type(event[key]) is int and event[key] > 0 for key in ("pid", "tid")), event
        assert event["pid"] in processes, event
        assert event["ph"] in ("X", "M"), event
        if event["ph"] == "M":
            field, kind = METADATA[event["name"]]
            assert type(event["args"][field]) is kind, event
            continue
        assert min(event["ts"], event["dur"]) >= 0, event
        assert isinstance(event["args"], dict), event
        assert (event["pid"], event["tid"]) in named, event
        threads[event["pid"], event["tid"]].append(event)
    for spans in threads.values():
        _check_nested(spans)
    # To readers that number threads through the whole system, one of two processes is one thread.
    assert len({tid for _, tid in named}) == len(named)


def _check_nested(spans: Iterable[Event]) -> None:
    """Each begins and ends inside the one that is open, or after it."""
    open_ends: list[int] = []
    for span in sorted(spans, key=lambda s: (_nanos(s["ts"]), -_nanos(s["dur"]))):
        start = _nanos(span["ts"])
        end = start + _nanos(span["dur"])
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{span} overlaps what began before it"
        open_ends.append(end)


def _nanos(micros: float) -> int:
    """The times as readers take them, in whole nanoseconds."""
    nanos = micros * 1e3
    assert abs(nanos - round(nanos)) < 1e-3 * max(1.0, abs(nanos) * 1e-9), micros
    return round(nanos)


def tracks(events: Iterable[Event]) -> dict[tuple[str, str], list[Event]]:
    """The spans by the names of their process and thread."""
    found = list(events)
    process = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    thread = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    by_name: dict[tuple[str, str], list[Event]] = {
        (process[e["pid"]], thread[e["tid"]]): [] for e in found if e["name"] == "thread_name"
    }
    for event in found:
        if event["ph"] == "X":
            by_name[process[event["pid"]], thread[event["tid"]]].append(event)
    return by_name


def durations(events: Iterable[Event]) -> dict[tuple[str, str], float]:
    """Microseconds of each track's spans."""
    return {name: sum(e["dur"] for e in spans) for name, spans in tracks(events).items()}
