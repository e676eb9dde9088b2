"""What each position sends in a step, in bytes: what the executor counts can be held against it.

The pieces are those of ``ownership.transfers``. A tensor that several units need in one form
travels once (``taking``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .ownership import entry, exit_, sample_bounds, transfers
from .plan import Plan, UnitPlan
from .taking import Edge, Taking, taking

SUMMED = ("row", "pair")
"""The styles of units that end in partial sums."""


def moved_bytes(plan: Plan, edges: Iterable[Edge], counts: Sequence[int]) -> list[float]:
    """What each position sends by redistribution in one forward and backward, where positions feed
    ``counts`` samples: between units along ``edges``, and for the partial sums inside them."""
    sent = [0.0] * plan.world_size
    units = {unit.name: unit for unit in plan.units}
    leaving: dict[str, tuple[float, float]] = {}
    seen: set[Taking] = set()
    for edge in edges:
        source, target = units[edge.source], units[edge.target]
        before = leaving.get(edge.source, (0.0, 0.0))
        mine = edge.bytes_per_sample, edge.gradient_bytes_per_sample
        leaving[edge.source] = max(before[0], mine[0]), max(before[1], mine[1])
        held, wanted = exit_(source.layout, source.style), entry(target.layout, target.style)
        taken = taking(edge, held, wanted)
        if taken not in seen:
            seen.add(taken)
            for move in transfers(counts, held, wanted, taken.features):
                sent[move.source] += move.box.area * mine[0] / taken.features
                sent[move.target] += move.box.area * mine[1] / taken.features
    for unit in plan.units:
        if unit.style in SUMMED:
            _add_sums(sent, unit, leaving.get(unit.name, (0.0, 0.0)), counts)
    return sent


def _add_sums(
    sent: list[float], unit: UnitPlan, leaving: tuple[float, float], counts: Sequence[int]
) -> None:
    """Forward (and again where it is recomputed) a member sends others the sums of their samples,
    backward all others the gradient of its own."""
    times = 2 if unit.memory == "recompute" else 1
    layout = unit.layout
    for g in range(layout.groups):
        bounds = {p: sample_bounds(counts, layout, p) for p in layout.group(g)}
        own = {p: stop - start for p, (start, stop) in bounds.items()}
        for position, samples in own.items():
            sent[position] += times * (sum(own.values()) - samples) * leaving[0]
            sent[position] += samples * (layout.degree - 1) * leaving[1]


def ring_bytes(payload_bytes: float, peers: int) -> float:
    """What each of ``peers`` sends to average a gradient of that size, by a ring all-reduce; a
    reduce-scatter and an all-gather are as much (``collectives``)."""
    return 2 * (peers - 1) / peers * payload_bytes
