"""What every edge costs between every two states, from the flows of all pairs of layouts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ...cost.collectives import Fabric
from ...cost.cost import CostModel
from ...cost.ownership import TensorPlacement, input_placement, output_placement
from ...cost.redistribution import Reals, Traffic, traffic
from ...cost.step_time import LINKS
from ...memory.rows import ENTRY
from ...schema.layout import Layout, Style

State = tuple[Layout, Style]
Sizes = tuple[float, float, int]
"""An edge's bytes per sample, those of its gradient, and its features."""


class _Nodes:
    """A fabric as far as flows depend on it: equal where every position is on an equal node, and
    where no pairs were measured."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        measured = fabric.pair_bytes_per_s is not None
        self.key = id(fabric) if measured else fabric.node_of.tobytes()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nodes) and self.key == other.key


@lru_cache(maxsize=64)
def _flows(
    nodes: _Nodes,
    counts: tuple[int, ...],
    sources: tuple[TensorPlacement, ...],
    targets: tuple[TensorPlacement, ...],
    features: int,
) -> Traffic:
    """Remembered: a cluster is asked several questions, and on a thousand ranks the flows of an
    edge take a quarter of a second."""
    return traffic(nodes.fabric, counts, sources, targets, features)


class EdgeFigures:
    """The tables of edges, each kind of edge worked out once."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._nodes = _Nodes(model.fabric)
        self._edges: dict[tuple[Sizes, tuple[State, ...], tuple[State, ...]], Reals] = {}

    def of(self, e: int, sources: tuple[State, ...], targets: tuple[State, ...]) -> Reals:
        """[figure, source's state, target's state] of edge ``e``: the figures of ``rows.ENTRY`` in
        their order, then the bytes received."""
        edge = self.model.profile.edges[e]
        sizes = edge.bytes_per_sample, edge.gradient_bytes_per_sample, edge.features
        key = sizes, sources, targets
        if key not in self._edges:
            self._edges[key] = self._between(sizes, sources, targets)
        return self._edges[key]

    def _between(self, sizes: Sizes, sources: Sequence[State], targets: Sequence[State]) -> Reals:
        made, taken = (
            [output_placement(*s) for s in sources],
            [input_placement(*t) for t in targets],
        )
        out, into = list(dict.fromkeys(made)), list(dict.fromkeys(taken))
        every = range(len(ENTRY) + 1)
        figures = np.zeros((len(every), len(out), len(into)))
        for form in ("batch_shard", "feature_shard"):
            for sliced in (False, True):
                rows = [i for i, h in enumerate(out) if h.form == form]
                cols = [
                    i for i, h in enumerate(into) if ("feature_shard" in (form, h.form)) == sliced
                ]
                if rows and cols:
                    features = sizes[2] if sliced else 1
                    flow = self._flow([out[i] for i in rows], [into[i] for i in cols], features)
                    part = self._seconds(flow, sizes[0] / features, sizes[1] / features)
                    figures[np.ix_(every, rows, cols)] = part
        where = [out.index(h) for h in made], [into.index(h) for h in taken]
        return figures[np.ix_(every, *where)]

    def _flow(
        self, sources: Sequence[TensorPlacement], targets: Sequence[TensorPlacement], features: int
    ) -> Traffic:
        return _flows(self._nodes, self.model.counts, tuple(sources), tuple(targets), features)

    def _seconds(self, flow: Traffic, element: float, back: float) -> Reals:
        """The figures for a tensor whose elements have so many bytes, and so many in backward."""
        ahead, behind = (self.model.move_s(flow, size) for size in (element, back))
        on = [flow.level == i for i in range(len(LINKS))]
        rows = [*(ahead * link for link in on), *(behind * link for link in on)]
        return np.stack([*rows, flow.received * element])
