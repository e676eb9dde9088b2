"""Where communication is exposed: which messages a rank waits for, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ..simulate.events import Simulation
from ..solve.evaluate import Evaluation

Part = Literal["compute", "blocking", "exchange"]


class Exposure(NamedTuple):
    """Seconds of a step that a rank waits for one message of gradients: the units whose gradients
    it carries, and the link."""

    units: tuple[str, ...]
    link: str
    seconds: float


def largest_part(simulation: Simulation) -> Part:
    """What a step takes longest for."""
    parts: dict[Part, float] = {
        "compute": simulation.compute_s,
        "blocking": simulation.blocking_s,
        "exchange": simulation.exposed_s,
    }
    return max(parts, key=lambda p: parts[p])


def exposures(done: Evaluation) -> Iterator[Exposure]:
    """Each message's part in the stalls of the step, those without one left out."""
    units = done.model.profile.units
    stalls = list(_stalls(done.simulation))
    for index, message in enumerate(done.step.messages):
        seconds = sum(
            max(min(span.end_s, end) - max(span.start_s, start), 0.0)
            for span in done.simulation.spans
            if span.message == index
            for start, end in stalls
        )
        if seconds > 0:
            yield Exposure(tuple(units[k].name for k in message.units), message.link, seconds)


def _stalls(simulation: Simulation) -> Iterator[tuple[float, float]]:
    """When the rank neither computes nor communicates for itself."""
    last = 0.0
    for span in simulation.spans:
        if span.phase == "exchange":
            continue
        if span.start_s > last:
            yield last, span.start_s
        last = max(last, span.end_s)
    end = max((s.end_s for s in simulation.spans), default=0.0)
    if end > last:  # no update follows the exchange
        yield last, end
