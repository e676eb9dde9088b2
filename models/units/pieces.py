"""Which stretches of a forward can run again as one: modules that are called one after another.

A segment that is recomputed is named by modules, each called with what the one before returned and
nothing else, while nothing is done between them: whatever autograd saves from the entry of the
first to the exit of the last is made again by calling them again. Its pieces are the units and the
modules that contain some; modules inside a unit are the unit's own.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from ...planner.schema.profile import PieceProfile
from .flow import GLUE
from .select import TracedUnit
from .trace import Event, Trace

# The calls of modules one after another.
_Calls = tuple[Event, ...]


def pieces_of(
    trace: Trace, traced: Sequence[TracedUnit], names: Mapping[str, str]
) -> tuple[PieceProfile, ...]:
    """The pieces of a forward in the order in which they begin. ``names`` are those of its units,
    and of its glue by the names that ``flow`` gives it; what is not there is no unit."""
    return _Forward(trace, traced, names).pieces()


class _Forward:
    def __init__(
        self, trace: Trace, traced: Sequence[TracedUnit], names: Mapping[str, str]
    ) -> None:
        self.trace, self.traced, self.names = trace, traced, names
        self.operations = [e.index for e in trace.events if e.module is None]

    def pieces(self) -> tuple[PieceProfile, ...]:
        # Of those that begin together the longest first: a container before what is in it.
        stretches = sorted(
            [*(unit.calls for unit in self.traced), *((call,) for call in self._containers())],
            key=lambda calls: (calls[0].index, -calls[-1].end),
        )
        makers: dict[int, list[_Calls]] = {}
        for calls in stretches:
            made = calls[-1].outputs[0] if calls[-1].makes_one else None
            if made is not None:
                makers.setdefault(made.key, []).append(calls)
        return tuple(self._piece(calls, makers) for calls in stretches)

    def _piece(self, calls: _Calls, makers: Mapping[int, list[_Calls]]) -> PieceProfile:
        first, last = self._units(calls[0].index, calls[-1].end)
        return PieceProfile(
            modules=tuple(call.module or "" for call in calls),
            first=first,
            last=last,
            follows=tuple(c[0].module or "" for c in self._predecessors(makers, calls)),
            opens=not self._changes_input(calls),
        )

    def _containers(self) -> list[Event]:
        """Calls of modules that are called once and lie in no unit; the model itself is none."""
        spans = [(unit.start, unit.end) for unit in self.traced]
        return [
            event
            for event in self.trace.events
            if event.module
            and len(self.trace.calls(event.module)) == 1
            and not any(start <= event.index < end for start, end in spans)
        ]

    def _done(self, start: int, end: int) -> int:
        """How many operations there are in a stretch of events."""
        return bisect_left(self.operations, end) - bisect_left(self.operations, start)

    def _units(self, start: int, end: int) -> tuple[str, str]:
        """The first and the last unit of which all lies in a stretch; empty where there is none."""
        inside: list[str] = []
        ends = [0, *(unit.end for unit in self.traced)]
        starts = [*(unit.start for unit in self.traced), len(self.trace.events)]
        for i, (left, right) in enumerate(zip(ends, starts, strict=True)):
            # Glue is what torch does between two units: it lies in the stretch if all of it does.
            glue = self._done(left, right)
            if glue and glue == self._done(max(left, start), min(right, end)):
                inside.append(f"{GLUE}{i}")
            if i < len(self.traced) and start <= right and self.traced[i].end <= end:
                inside.append(self.traced[i].name)
        known = [self.names[node] for node in inside if node in self.names]
        return (known[0], known[-1]) if known else ("", "")

    def _predecessors(self, makers: Mapping[int, list[_Calls]], after: _Calls) -> Iterator[_Calls]:
        """The stretches whose result is all that enters ``after``, nothing being done from one to
        the other."""
        first = after[0]
        given = first.inputs[0] if first.takes_one and len(first.inputs) == 1 else None
        for before in makers.get(given.key, ()) if given is not None else ():
            end = before[-1].end
            if end <= first.index and not self._done(end, first.index):
                yield before

    def _changes_input(self, calls: _Calls) -> bool:
        """Whether an operation in a piece returns, changed, memory that entered it."""
        entered = {seen.storage for seen in calls[0].given}
        return any(
            seen.storage in entered and any(seen.key == given.key for given in event.given)
            for event in self.trace.events[calls[0].index : calls[-1].end]
            if event.module is None
            for seen in event.made
        )
