"""Timelines in the Trace Event Format, which Perfetto and chrome://tracing open.

A process for each of some things (a rank, a class of devices) and in it a thread for each track.
All that happens is a complete event (phase ``X``); names and order are metadata (phase ``M``).
Times are in microseconds, the format's only unit.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

NANO = 1e9
TraceEvent = dict[str, Any]


class TraceSpan(NamedTuple):
    """Something that goes on from ``start_s`` to ``end_s``; ``about`` is told of it when asked."""

    name: str
    start_s: float
    end_s: float
    about: dict[str, object] | None = None


class TraceTrack(NamedTuple):
    """One row of a timeline. Spans that overlap are shown in further rows of the same name."""

    name: str
    spans: Sequence[TraceSpan]


class TraceProcess(NamedTuple):
    """Tracks that belong together, in the order in which they are shown."""

    name: str
    tracks: Sequence[TraceTrack]


def encode_trace(processes: Iterable[TraceProcess], **about: str) -> bytes:
    """The file of a trace; ``about`` says of what it is."""
    events: list[TraceEvent] = []
    thread = 0
    # From 1: to Perfetto thread 0 is the one that idles.
    for number, process in enumerate(processes, start=1):
        events.append(_named("process_name", number, thread + 1, name=process.name))
        events.append(_named("process_sort_index", number, thread + 1, sort_index=number))
        for track in process.tracks:
            for row, spans in enumerate(_rows(track.spans), start=1):
                thread += 1  # through all processes, as the system's are
                name = track.name if row == 1 else f"{track.name} ({row})"
                events.append(_named("thread_name", number, thread, name=name))
                events.append(_named("thread_sort_index", number, thread, sort_index=thread))
                events += (_complete(span, number, thread) for span in spans)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return msgspec.json.encode(document) + b"\n"


def _rows(spans: Iterable[TraceSpan]) -> list[list[TraceSpan]]:
    """The spans in as few rows as keep those of each apart, one at least."""
    rows: list[list[TraceSpan]] = [[]]
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        start = round(span.start_s * NANO)
        free = (r for r in rows if not r or round(r[-1].end_s * NANO) <= start)
        row = next(free, None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


def _named(what: str, process: int, thread: int, **args: object) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _complete(span: TraceSpan, process: int, thread: int) -> TraceEvent:
    # Both ends are rounded, not the duration: neighbours that touch still do.
    start, end = (round(s * NANO) for s in (span.start_s, span.end_s))
    return {
        "ph": "X", "name": span.name, "pid": process, "tid": thread, "ts": start / 1e3,
        "dur": (end - start) / 1e3, "args": span.about or {},
    }  # fmt: skip


def parts_within(
    spans: Iterable[TraceSpan], start_s: float, end_s: float, at_s: float = 0.0
) -> Iterator[TraceSpan]:
    """What of the spans lies between ``start_s`` and ``end_s``, moved so that ``start_s`` comes to
    lie at ``at_s``."""
    for span in spans:
        low, high = max(span.start_s, start_s), min(span.end_s, end_s)
        if high > low:
            yield span._replace(start_s=low - start_s + at_s, end_s=high - start_s + at_s)
