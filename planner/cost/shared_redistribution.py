"""Which units take one tensor alike: it travels once, to the first of them.

Edges of one source that carry the same tensors (``EdgeProfile.tensors``) to units that need them in
one form are one redistribution. Forward it is waited for by the first of these units, which the
others follow; backward the gradients of all of them have come together when the first one's
backward is over, and go back once. So an edge costs nothing where an earlier one has brought the
same. The executor does so (``executor/redistribution/bursts`` and ``boundary``), and counts its
bytes against ``wire.moved_bytes``, which has the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..schema.options import Option
from .ownership import TensorPlacement, input_placement, output_placement


class Edge(Protocol):
    """As ``EdgeProfile``."""

    @property
    def source(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def bytes_per_sample(self) -> float: ...
    @property
    def gradient_bytes_per_sample(self) -> float: ...
    @property
    def features(self) -> int: ...
    @property
    def tensors(self) -> int: ...


class Load(NamedTuple):
    """What an edge carries: edges of one source and one load carry the same tensors."""

    source: str
    tensors: int
    bytes_per_sample: float
    gradient_bytes_per_sample: float


def load_of(edge: Edge) -> Load:
    """What ``edge`` carries."""
    sizes = edge.bytes_per_sample, edge.gradient_bytes_per_sample
    return Load(edge.source, edge.tensors, *sizes)


class SharedRedistribution(NamedTuple):
    """A load and the form in which it is needed: what has one of these travels once. ``features``
    is the length of the dimension that is sliced at an end (1: none is)."""

    load: Load
    wanted: TensorPlacement
    features: int


def shared_redistribution(
    edge: Edge, held: TensorPlacement, wanted: TensorPlacement
) -> SharedRedistribution:
    """What ``edge`` brings from where its source leaves it to where its target needs it."""
    sliced = "features" in (held.form, wanted.form)
    return SharedRedistribution(load_of(edge), wanted, edge.features if sliced else 1)


def shared_redistributions(
    edges: Sequence[Edge], ends: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """For each edge those with the same load to units before its own (or to the same, listed
    before). ``ends`` are (source, target) of each as numbers in forward order."""
    same: dict[Load, list[int]] = {}
    for e in sorted(range(len(edges)), key=lambda e: (ends[e][1], e)):
        same.setdefault(load_of(edges[e]), []).append(e)
    found: list[tuple[int, ...]] = [()] * len(edges)
    for group in same.values():
        for i, e in enumerate(group):
            found[e] = tuple(group[:i])
    return tuple(found)


def brought_before(
    edges: Sequence[Edge],
    ends: Sequence[tuple[int, int]],
    earlier: Sequence[int],
    e: int,
    decisions: Sequence[Option],
) -> bool:
    """Whether one of the edges ``earlier`` (``shared_redistributions``) has brought what edge
    ``e`` does."""
    if not earlier:
        return False
    held = output_placement(*decisions[ends[e][0]][:2])

    def of(edge: int) -> SharedRedistribution:
        return shared_redistribution(
            edges[edge], held, input_placement(*decisions[ends[edge][1]][:2])
        )

    mine = of(e)
    return any(of(other) == mine for other in earlier)
