"""What every edge costs between every two states, and which edges share a redistribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..cost.collectives import Fabric
from ..cost.cost import CostModel
from ..cost.ownership import TensorPlacement, input_placement, output_placement
from ..cost.redistribution import (
    SharedRedistribution,
    Traffic,
    edge_redistribution,
    edge_tensors,
    traffic,
)
from ..cost.step_time import LINKS
from ..memory.rows import ENTRY, RECEIVED
from .unit_figures import Reals, State

EDGE_FIGURES: tuple[int, ...] = (*ENTRY, RECEIVED)
"""The figures that an edge adds to its target: seconds, then bytes received."""
Sizes = tuple[float, float, int]
"""An edge's bytes per sample, those of its gradient, and its features."""


class EdgeTable(NamedTuple):
    """One edge's ``EDGE_FIGURES``, [figure, source's state, target's state]."""

    source: int
    target: int
    figures: Reals


class _Nodes:
    """A fabric as far as flows depend on it."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        # Without measured pairs a flow depends on the node of each position only. With them it does
        # on which fabric it is, whose id is its own as long as it is held here.
        measured = fabric.pair_bytes_per_s is not None
        self.key = id(fabric) if measured else fabric.node_of.tobytes()

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nodes) and self.key == other.key


# A cluster is asked several questions, and on a thousand ranks the flows of an edge take a quarter
# of a second.
@lru_cache(maxsize=64)
def _flows(
    nodes: _Nodes,
    counts: tuple[int, ...],
    sources: tuple[TensorPlacement, ...],
    targets: tuple[TensorPlacement, ...],
    features: int,
) -> Traffic:
    return traffic(nodes.fabric, counts, sources, targets, features)


class EdgeFigures:
    """The figures of a model's edges, each kind of edge worked out once."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._nodes = _Nodes(model.fabric)
        self._edges: dict[tuple[Sizes, tuple[State, ...], tuple[State, ...]], Reals] = {}

    def of(self, e: int, sources: tuple[State, ...], targets: tuple[State, ...]) -> Reals:
        """``EDGE_FIGURES`` of edge ``e``, [figure, source's state, target's state]."""
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
        # Many states leave or need a tensor in the same place: each pair of places counts once.
        out, into = list(dict.fromkeys(made)), list(dict.fromkeys(taken))
        every = range(len(EDGE_FIGURES))
        figures = np.zeros((len(every), len(out), len(into)))
        # Flows are counted in elements of a sample: of one feature where an end slices features,
        # else of all of them at once.
        for form in ("batch_shard", "feature_shard"):
            rows = [i for i, h in enumerate(out) if h.form == form]
            for sliced in (False, True):
                cols = [
                    i for i, h in enumerate(into) if ("feature_shard" in (form, h.form)) == sliced
                ]
                if not (rows and cols):
                    continue
                features = sizes[2] if sliced else 1
                ends = tuple(out[i] for i in rows), tuple(into[i] for i in cols)
                flow = _flows(self._nodes, self.model.counts, *ends, features)
                part = self._seconds(flow, sizes[0] / features, sizes[1] / features)
                figures[np.ix_(every, rows, cols)] = part
        where = [out.index(h) for h in made], [into.index(h) for h in taken]
        return figures[np.ix_(every, *where)]

    def _seconds(self, flow: Traffic, element: float, back: float) -> Reals:
        """The figures for a tensor whose elements have so many bytes, and so many in backward."""
        ahead, behind = (self.model.move_s(flow, size) for size in (element, back))
        on = [flow.level == i for i in range(len(LINKS))]
        rows = [*(ahead * link for link in on), *(behind * link for link in on)]
        return np.stack([*rows, flow.received * element])


class SharedEdges:
    """The edges that may share a redistribution with others (``cost.redistribution``); unit k has
    the states ``states[k]``. ``same_tensors`` are for each edge those that carry the same tensors,
    itself among them."""

    def __init__(self, model: CostModel, states: Sequence[Sequence[State]]) -> None:
        self.model, self.states = model, states
        same: dict[object, list[int]] = {}
        for e, edge in enumerate(model.profile.edges):
            same.setdefault(edge_tensors(edge), []).append(e)
        self.same_tensors = tuple(tuple(same[edge_tensors(e)]) for e in model.profile.edges)

    def _redistribution(self, e: int, source: int, target: int) -> SharedRedistribution:
        """What edge ``e`` moves where its ends are in those states."""
        a, b = self.model.ends[e]
        made = output_placement(*self.states[a][source])
        wanted = input_placement(*self.states[b][target])
        return edge_redistribution(self.model.profile.edges[e], made, wanted)

    def redistributed_before(self, e: int, state: Callable[[int], int]) -> bool:
        """Whether an earlier unit needs what edge ``e`` moves; units are in ``state(unit)``."""
        earlier = self.model.same_tensors_before[e]
        if not earlier:
            return False
        mine, *others = (
            self._redistribution(edge, *(state(k) for k in self.model.ends[edge]))
            for edge in (e, *earlier)
        )
        return mine in others

    def states_that_share(self, e: int, other: int, source: int, target: int) -> list[int]:
        """The states of edge ``other``'s target in which it gets what edge ``e``, which carries the
        same tensors, moves from one state to another."""
        mine = self._redistribution(e, source, target)
        states = range(len(self.states[self.model.ends[other][1]]))
        return [state for state in states if self._redistribution(other, source, state) == mine]

    def sharers(self, e: int) -> Reals | None:
        """[source's state, target's state] how many edges could move what edge ``e`` does there;
        None where no other edge ever could."""
        edges, wanted = self.model.profile.edges, self._needed(e)
        made = [output_placement(*state) for state in self.states[self.model.ends[e][0]]]
        sliced = np.array([m.form == "feature_shard" for m in made])[:, None] | np.array(
            [w.form == "feature_shard" for w in wanted]
        )
        count = np.ones(sliced.shape)
        for other in self.same_tensors[e]:
            if other != e:
                theirs = set(self._needed(other))
                alike = np.array([w in theirs for w in wanted])
                # Sliced features are the same elements only where both edges have as many.
                count += alike & (~sliced | (edges[e].features == edges[other].features))
        return count if count.max() > 1 else None

    def _needed(self, e: int) -> list[TensorPlacement]:
        """What the target of edge ``e`` needs in each of its states."""
        return [input_placement(*state) for state in self.states[self.model.ends[e][1]]]
