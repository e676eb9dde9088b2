"""What the options of units and the edges between them amount to, as ``rows.FIGURES``: one by one,
or all states together.

``UnitFigures.of`` states them for one option, by calls of the cost model and the memory model. For
1,000 units with times of their own on 1,024 ranks that would take minutes. So what differs between
units of one shape (the curves that were measured), and what memory policies make of it, is stated
once more on arrays over states: ``plain``, ``recomputed`` and ``offloaded``. A property test
(tests/property/planner/test_lagrangian.py) holds these to ``of`` for every option. Edges are stated
between all states of their ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.budget import idle_s
from ..cost.collectives import Fabric
from ..cost.compute import Quantity
from ..cost.cost import CostModel
from ..cost.ownership import TensorPlacement, group_samples, input_placement, output_placement
from ..cost.redistribution import (
    SharedRedistribution,
    Traffic,
    edge_redistribution,
    edge_tensors,
    traffic,
)
from ..cost.step_time import LINKS
from ..memory.rows import AT, ENTRY, FIGURES, KEPT_INPUT, OWN_BYTES, RECEIVED, RETURNING
from ..memory.unit_memory import MemoryModel
from ..schema.curve import Curve
from ..schema.layout import Layout, Style
from ..schema.options import Option
from ..schema.plan import MemoryPolicy
from ..schema.profile import UnitProfile

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
State = tuple[Layout, Style]
"""What the neighbours of a unit see of its decision."""

SUMMED: tuple[int, ...] = (*ENTRY, KEPT_INPUT)
"""Of an edge's figures those that its target has the sum of: seconds, then bytes."""
EDGE_FIGURES: tuple[int, ...] = (*SUMMED, RETURNING, RECEIVED)
"""The figures of an edge; of the last two the largest of several edges counts: bytes that stand
side by side at its source as the gradient comes back, and those that its target receives."""
Sizes = tuple[float, float, int]
"""An edge's bytes per sample, those of its gradient, and its features."""

_MEASURED_SECONDS: tuple[tuple[str, Quantity], ...] = (
    ("forward", lambda s: s.forward),
    ("backward", lambda s: s.backward),
)
_MEASURED_BYTES: tuple[tuple[str, Quantity], ...] = (
    ("saved", lambda s: s.saved),
    ("map_gradients", lambda s: s.gradient),
    ("workspace", lambda s: s.workspace),
    ("never_together", lambda s: s.never_together),
)


class _OfShape(NamedTuple):
    """What units of one shape have in common: the first one's figures, bytes of a member's
    gradients and whether they are exchanged, and what hosts take for collectives, all by state."""

    first: Reals
    trained: list[tuple[int, bool]]
    sent_s: Reals


class UnitFigures:
    """The figures of a model's options; bytes are those at ``position``."""

    def __init__(self, model: CostModel, memory: MemoryModel, position: int) -> None:
        self.model, self.memory, self.position = model, memory, position
        self._samples: dict[Layout, int | None] = {}
        self._of_shape: dict[object, _OfShape] = {}
        self._readers: dict[tuple[State, ...], tuple[list[CurveReader], CurveReader]] = {}

    def samples(self, layout: Layout) -> int | None:
        """Samples of the position's group, None where it takes no part."""
        if layout not in self._samples:
            counts = self.model.counts
            self._samples[layout] = group_samples(counts, layout)[self.position]
        return self._samples[layout]

    def of(self, k: int, option: Option) -> Reals:
        """What unit ``k`` costs by itself, in the order of ``FIGURES`` (energy lost left out)."""
        cost, found = self.model.unit(k, option), np.zeros(len(FIGURES))
        found[AT["forward"]], found[AT["backward"]] = cost.forward_s, cost.backward_s
        found[AT["update"]], found[AT["idle"]] = cost.update_s, idle_s(self.model, k, option)
        for name, on in (
            ("inner_forward", cost.inner_forward),
            ("inner_backward", cost.inner_backward),
            ("inner_backward", cost.released),
            ("exchange", cost.exchange),
        ):
            found[AT[f"{name}.{LINKS[on.link]}"]] += on.seconds
        found[AT[f"slice.{LINKS[cost.exchange.link]}"]] = cost.slice_s
        found[AT["host"]] = cost.host_s
        found[OWN_BYTES] = self.memory.unit(k, option, self.samples(option.layout)).figures
        return found

    def plain(self, k: int, states: tuple[State, ...]) -> Reals:
        """[state, figure] without policies."""
        # The first unit of a shape is worked out option by option. The others begin with a copy of
        # its figures, over which is written what their own curves say.
        key = states, self.shape(k)
        if key not in self._of_shape:
            first = np.array([self.of(k, Option(*state)) for state in states])
            sent_s = first[:, AT["host"]] - self.model.working_host_s(k)
            self._of_shape[key] = _OfShape(first, self._trained_bytes(k, states), sent_s)
            return first
        first, trained, sent_s = self._of_shape[key]
        unit, found = self.model.profile.units[k], first.copy()
        busiest, here = self._readers_of(states)
        there = [kind.profile.units[k] for kind in self.model.kinds]
        for name, seconds in _MEASURED_SECONDS:
            read = (r.values(u, seconds) for r, u in zip(busiest, there, strict=True))
            found[:, AT[name]] = reduce(np.maximum, read)
        # Curves say nothing of the executor's own work.
        own_s = {
            one: self.model.own_backward_s(k, one[0], exchanged=one[1]) for one in set(trained)
        }
        found[:, AT["backward"]] += [own_s[one] for one in trained]
        for name, quantity in _MEASURED_BYTES:
            found[:, AT[name]] = here.values(unit, quantity, divides=False)
        self._write_idle(found, states)
        found[:, AT["host"]] = self.model.working_host_s(k) + sent_s
        found[:, AT["saved"]] += self._gathered(k, states)
        new = [self.memory.makes_new(layout) for layout, _ in states]
        summed = np.array([self.memory.summed_bytes(k, layout) for layout, _ in states])
        new_grad = here.values(unit, lambda s: s.new_grad, divides=False)
        # Where it was not measured it follows from the shape alone, and is in the copied figures.
        shaped = found[:, AT["new_grad"]] - summed
        found[:, AT["new_grad"]] = (
            np.where(new, np.where(new_grad > 0, new_grad, shaped), 0.0) + summed
        )
        # A position that takes no part in a layout holds nothing of a unit there, whatever curves
        # say of no samples.
        absent = [self.samples(layout) is None for layout, _ in states]
        measured = [*(AT[name] for name, _ in _MEASURED_BYTES), AT["new_grad"]]
        found[np.ix_(absent, measured)] = 0.0
        return found

    def _trained_bytes(self, k: int, states: tuple[State, ...]) -> list[tuple[int, bool]]:
        """Bytes of a member's gradients and whether they are exchanged, by state."""
        return [
            (self.model.unit_sizes(k, Option(*state)).trained_bytes, state[0].groups > 1)
            for state in states
        ]

    def recomputed(self, k: int, states: tuple[State, ...], plain: Reals) -> Reals:
        """``plain`` with feature maps that are made again in backward."""
        found = plain.copy()
        found[:, AT["backward"]] += plain[:, AT["forward"]] + self.model.rerun_s(k)
        found[:, AT["host"]] += self._more_host_s(k, "recompute")
        again_s = plain[:, [AT[f"inner_forward.{link}"] for link in LINKS]].sum(axis=1)
        found[:, AT["host"]] += self.model.move_host_s(again_s)
        for link in LINKS:
            found[:, AT[f"inner_backward.{link}"]] += plain[:, AT[f"inner_forward.{link}"]]
        # What stays is ``MemoryModel._resident`` and the unit's gathered input.
        gathered = self._gathered(k, states)
        resident = self._kept_output(k, states, plain[:, AT["saved"]] - gathered) + gathered
        found[:, AT["recomputed"]] = plain[:, AT["saved"]] - resident
        found = self._with_resident(found, resident, states)
        found[:, AT["saved"]] += [
            self.memory.unsaved_input_bytes(k, Option(*state), self.samples(state[0]))
            for state in states
        ]
        return found

    def offloaded(self, k: int, states: tuple[State, ...], plain: Reals) -> Reals:
        """``plain`` with feature maps that are copied to the host and back."""
        found, unit = plain.copy(), self.model.profile.units[k]
        host_bytes_per_s = self.model.host_bytes_per_s
        assert host_bytes_per_s is not None, "offered only where the rate is known"
        busiest, _ = self._readers_of(states)
        # Of those of all kinds of devices the one with most samples copies most.
        saved = (reader.values(unit, lambda s: s.saved, divides=False) for reader in busiest)
        copy_s = reduce(np.maximum, saved) / host_bytes_per_s
        found[:, AT["forward"]] += copy_s
        found[:, AT["backward"]] += copy_s
        found[:, AT["host"]] += self._more_host_s(k, "offload")
        found[:, AT["offloaded"]] = plain[:, AT["saved"]]
        found[:, AT["offloaded_output"]] = self._kept_output(k, states, plain[:, AT["saved"]])
        return self._with_resident(found, np.zeros(len(states)), states)

    def _more_host_s(self, k: int, memory: MemoryPolicy) -> float:
        return self.model.working_host_s(k, memory) - self.model.working_host_s(k)

    def _kept_output(self, k: int, states: Sequence[State], saved: Reals) -> Reals:
        """``MemoryModel._kept_output`` by state."""
        kept = self.model.profile.units[k].output_kept
        whole = self.model.output_bytes_per_sample(k)[0] * kept
        output = [whole * (self.samples(layout) or 0) / layout.degree for layout, _ in states]
        found: Reals = np.minimum(np.array(output), saved)
        return found

    def _with_resident(self, found: Reals, resident: Reals, states: Sequence[State]) -> Reals:
        """The figures where only ``resident`` bytes of feature maps stay until backward."""
        found[:, AT["workspace"]] += found[:, AT["saved"]] - resident
        found[:, AT["saved"]] = resident
        self._write_idle(found, states)
        return found

    def _write_idle(self, found: Reals, states: Sequence[State]) -> None:
        free = self.model.world_size - np.array([layout.size for layout, _ in states])
        took = self.model.micro_batches * (found[:, AT["forward"]] + found[:, AT["backward"]])
        found[:, AT["idle"]] = free * (took + found[:, AT["update"]])

    def _gathered(self, k: int, states: Sequence[State]) -> Reals:
        """What divided units keep of their input, by state."""
        found: Reals = np.array([
            self.memory.own_input_bytes(k, Option(*state), self.samples(state[0]))
            for state in states
        ])  # fmt: skip
        return found

    def shape(self, k: int) -> tuple[object, ...]:
        """All of a unit that its figures depend on, but for its curves."""
        unit, owned = self.model.profile.units[k], self.model.owned[k]
        divided = [{name for name, _ in s.sharded} for s in unit.splits]
        # By their dimensions, and in a norm, parameters are sent whole.
        sizes = tuple(
            (p.bytes, p.trainable, len(p.shape), *(p.shared in d for d in divided)) for p in owned
        )
        out = self.model.output_bytes_per_sample(k)
        added = tuple(self.model.partial_sums_per_sample(k, s.style) for s in unit.splits)
        statistics = unit.state_bytes, unit.batch_statistics, unit.statistics_bytes
        return sizes, unit.kind == "norm", statistics, out, added, self.model.summed_bytes[k]

    def _readers_of(self, states: tuple[State, ...]) -> tuple[list[CurveReader], CurveReader]:
        """Readers of curves at the samples of the busiest group of each kind of device, and at this
        position's."""
        if states not in self._readers:
            by_state = (self.model.samples_by_kind(layout) for layout, _ in states)
            busiest = [CurveReader(states, each) for each in zip(*by_state, strict=True)]
            here = [float(self.samples(layout) or 0) for layout, _ in states]
            self._readers[states] = busiest, CurveReader(states, here)
        return self._readers[states]


# Which points of a unit's curves matter for a layout depends on the sizes that were measured and on
# the layouts only. So these are worked out once, as functions of the measured values, for all units
# that were measured at the same sizes; reading a unit's curve is then a few products of small
# arrays.
class CurveReader:
    """Reads units' curves for a list of states with so many samples each."""

    def __init__(self, states: Sequence[State], samples: Sequence[float]) -> None:
        self.states = states
        self.samples = np.array(samples, dtype=np.float64)
        self._at_samples: dict[tuple[float, ...], Callable[[Reals], Reals]] = {}
        self._at_degrees: dict[tuple[tuple[int, ...], Style], Callable[[Reals, bool], Reals]] = {}
        styles = [style for _, style in states]
        self._of_style: dict[Style, Numbers] = {
            style: np.array([i for i, s in enumerate(styles) if s == style])
            for style in dict.fromkeys(styles)
        }

    def values(self, unit: UnitProfile, quantity: Quantity, *, divides: bool = True) -> Reals:
        """``share_of(unit, style, degree, quantity, samples, divides=divides)`` for each state."""
        found = np.zeros(len(self.states))
        for style, where in self._of_style.items():
            known = [s for s in unit.shares if s.style == style and s.degree > 1]
            points = [unit.whole, *sorted(known, key=lambda s: s.degree)]
            table = np.stack([self._curve(quantity(p))[where] for p in points])
            key = tuple(p.degree for p in points), style
            if key not in self._at_degrees:
                asked = np.array([self.states[i][0].degree for i in where])
                self._at_degrees[key] = _at_degrees(np.array(key[0]), asked)
            found[where] = self._at_degrees[key](table, divides)
        return found

    def _curve(self, curve: Curve) -> Reals:
        if curve.x not in self._at_samples:
            self._at_samples[curve.x] = _at_sizes(np.array(curve.x), self.samples)
        return self._at_samples[curve.x](np.array(curve.y))


def _at_sizes(x: Reals, sizes: Reals) -> Callable[[Reals], Reals]:
    """Reads curves that were measured at ``x`` at the ``sizes``: ``Curve.__call__`` on arrays."""
    empty = sizes <= 0
    if len(x) == 1:
        part = np.where(empty, 0.0, sizes / x[0])
        return lambda y: y[0] * part
    right = np.clip(np.searchsorted(x, sizes), 1, len(x) - 1)
    left, below, beyond = right - 1, sizes < x[0], sizes > x[-1]
    part = (sizes - x[left]) / (x[right] - x[left])
    share = np.where(below, sizes / x[0], 0.0)

    def read(y: Reals) -> Reals:
        rise = y[right] - y[left]
        more = y[right] + np.maximum(rise, 0.0) * (part - 1.0)
        return np.where(
            empty, 0.0, np.where(beyond, more, np.maximum(y[left] + rise * part, y[0] * share))
        )

    return read


def _at_degrees(degrees: Numbers, asked: Numbers) -> Callable[[Reals, bool], Reals]:
    """Reads shares at the degrees ``asked``, one for each state, from [measured degree, state]:
    ``share_of`` on arrays."""
    at, last = np.arange(len(asked)), len(degrees) - 1
    near = np.searchsorted(degrees, asked, "right") - 1
    measured, beyond = degrees[near] == asked, (near == last) & (degrees[near] != asked)
    far = np.where(measured, near, np.where(near == last, np.maximum(near - 1, 0), near + 1))
    # Linear in 1/m between the degree at or below the one that is asked and the one next to it.
    x, inverse = 1.0 / asked, 1.0 / degrees
    apart = np.where(near == far, 1.0, inverse[near] - inverse[far])
    share = np.where(near == far, 1.0, (x - inverse[far]) / apart)
    perfect = x / inverse[near]

    def read(table: Reals, divides: bool) -> Reals:
        if last == 0:
            sole: Reals = table[0] * perfect if divides else table[0]
            return sole
        straight: Reals = share * table[near, at] + (1.0 - share) * table[far, at]
        lifted = np.maximum(straight, table[near, at] * perfect)
        found: Reals = np.where(beyond, lifted, straight)
        return found

    return read


# -- edges -----------------------------------------------------------------------------------------


class _Nodes:
    """A fabric as far as flows depend on it."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        # Without measured pairs a flow depends on the node of each position only. With them it
        # depends on the fabric itself, whose id stays unique while it is referred to here.
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
        self._edges: dict[tuple[object, ...], Reals] = {}

    def of(self, e: int, sources: tuple[State, ...], targets: tuple[State, ...]) -> Reals:
        """``EDGE_FIGURES`` of edge ``e``, [figure, source's state, target's state]."""
        edge = self.model.profile.edges[e]
        sizes = edge.bytes_per_sample, edge.gradient_bytes_per_sample, edge.features
        taken = [input_placement(*target) for target in targets]
        kept = tuple(self.model.kept_share(e, placement) for placement in taken)
        key = sizes, sources, targets, kept
        if key not in self._edges:
            made = [output_placement(*source) for source in sources]
            self._edges[key] = self._between(sizes, made, taken)
            self._edges[key][len(ENTRY)] *= kept
        return self._edges[key]

    def _between(
        self, sizes: Sizes, made: Sequence[TensorPlacement], taken: Sequence[TensorPlacement]
    ) -> Reals:
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
        ahead = self.model.move_s(flow, element)
        behind = self.model.move_s(flow, back, backward=True)
        on = [flow.level == i for i in range(len(LINKS))]
        seconds = [*(ahead * link for link in on), *(behind * link for link in on)]
        rows = *seconds, self.model.move_host_s(ahead, behind)
        sizes = flow.needed * element, flow.returning * back, flow.received * element
        return np.stack([*rows, *sizes])


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
