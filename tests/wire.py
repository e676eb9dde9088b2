"""What each position sends in a step, in bytes: what the executor counts can be held against it.

The pieces are those of ``tests.transfers``. A tensor that several units need in one placement moves
once (``planner.cost.redistribution``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, prod
from typing import NamedTuple

from meshwright.planner.cost.ownership import feature_bounds, input_placement, output_placement
from meshwright.planner.cost.redistribution import SharedRedistribution, edge_redistribution
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan, UnitPlan
from meshwright.planner.schema.profile import EdgeProfile

from tests.transfers import sample_bounds, transfers

SUMMED = ("row", "pair")
"""The styles of units that end in partial sums."""


def moved_bytes(plan: Plan, edges: Iterable[EdgeProfile], counts: Sequence[int]) -> list[float]:
    """What each position sends by redistribution in one forward and backward, where positions feed
    ``counts`` samples: between units along ``edges``, and for the partial sums inside them."""
    sent = [0.0] * plan.world_size
    units = {unit.name: unit for unit in plan.units}
    leaving: dict[str, tuple[float, float]] = {}
    seen: set[SharedRedistribution] = set()
    for edge in edges:
        source, target = units[edge.source], units[edge.target]
        before = leaving.get(edge.source, (0.0, 0.0))
        mine = edge.bytes_per_sample, edge.gradient_bytes_per_sample
        leaving[edge.source] = max(before[0], mine[0]), max(before[1], mine[1])
        held, wanted = (
            output_placement(source.layout, source.style),
            input_placement(target.layout, target.style),
        )
        taken = edge_redistribution(edge, held, wanted)
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


class ExchangedParam(NamedTuple):
    """A parameter whose gradient is exchanged: the first unit that uses it, its shape, the bytes of
    an element, and where members divide it the dim and of how many equal blocks that is made."""

    unit: str
    shape: tuple[int, ...]
    width_bytes: int
    dim: int | None = None
    blocks: int = 1

    def share(self, degree: int, member: int) -> int:
        """The elements that a member has of it."""
        if self.dim is None:
            return prod(self.shape)
        length = self.shape[self.dim]
        left, right = feature_bounds(length // self.blocks, degree, member)
        return prod(self.shape) // length * (right - left) * self.blocks


def exchanged_bytes(
    plan: Plan, parameters: Iterable[ExchangedParam], backwards: int = 1
) -> list[float]:
    """What each position sends to exchange gradients in one step, of which so many ``backwards``
    exchange (micro-batches and what is under ``no_sync`` are one with the backward that does).

    Units are ``dense``, or ``sharded``: gradients to those who update them in each backward, and
    the parameters from them once; each peer's chunk is as long as the longest.
    """
    units = {unit.name: unit for unit in plan.units}
    sent = [0.0] * plan.world_size
    for param in parameters:
        unit = units[param.unit]
        layout = unit.layout
        if param.dim is None:  # held whole by every position, divided unit or not
            layout = Layout(groups=layout.size, first=layout.first)
        for position in layout.positions:
            numel = param.share(layout.degree, (position - layout.first) % layout.degree)
            if unit.exchange == "dense":
                payload = numel * param.width_bytes
                sent[position] += backwards * ring_bytes(payload, layout.groups)
                continue
            if unit.exchange != "sharded":
                raise ValueError(f"what {unit.exchange!r} sends depends on more than the plan")
            chunk = ceil(numel / layout.groups) * param.width_bytes
            sent[position] += (backwards + 1) * (layout.groups - 1) * chunk
    return sent


def ring_bytes(payload_bytes: float, peers: int) -> float:
    """What each of ``peers`` sends to average a gradient of that size, by a ring all-reduce; a
    reduce-scatter and an all-gather are as much (``collectives``)."""
    return 2 * (peers - 1) / peers * payload_bytes
