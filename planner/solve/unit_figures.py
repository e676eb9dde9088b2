"""What the options of a unit amount to, as ``rows.FIGURES``: one by one, or all states together.

``UnitFigures.of`` states them for one option, by calls of the cost model and the memory model. For
1,000 units with times of their own on 1,024 ranks that would take minutes. So what differs between
units of one shape (the curves that were measured), and what memory policies make of it, is stated
once more on arrays over states: ``plain``, ``recomputed`` and ``offloaded``. A property test
(tests/property/planner/test_lagrangian.py) holds these to ``of`` for every option.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..cost.budget import idle_s
from ..cost.compute import Quantity, busiest_samples
from ..cost.cost import CostModel
from ..cost.ownership import group_samples
from ..cost.step_time import LINKS
from ..memory.rows import AT, FIGURES, OWN_BYTES
from ..memory.unit_memory import MemoryModel
from ..schema.curve import Curve
from ..schema.layout import Layout, Style
from ..schema.options import Option
from ..schema.profile import ShareProfile, UnitProfile

Reals = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]
State = tuple[Layout, Style]
"""What the neighbours of a unit see of its decision."""

_MEASURED_BYTES: tuple[tuple[str, Quantity], ...] = (
    ("saved", lambda s: s.saved),
    ("map_gradients", lambda s: s.gradient),
    ("workspace", lambda s: s.workspace),
    ("never_together", lambda s: s.spared),
)


class UnitFigures:
    """The figures of a model's options, their bytes as one position of the placement has them."""

    def __init__(self, model: CostModel, memory: MemoryModel, position: int) -> None:
        self.model, self.memory, self.position = model, memory, position
        self._samples: dict[Layout, int | None] = {}
        self._of_shape: dict[object, Reals] = {}
        self._readers: dict[tuple[State, ...], tuple[CurveReader, CurveReader]] = {}

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
        found[OWN_BYTES] = self.memory.unit(k, option, self.samples(option.layout)).figures
        return found

    def plain(self, k: int, states: tuple[State, ...]) -> Reals:
        """[state, figure] without policies."""
        key = states, self.shape(k)
        if key not in self._of_shape:
            self._of_shape[key] = np.array([self.of(k, Option(*state)) for state in states])
            return self._of_shape[key]
        unit, found = self.model.profile.units[k], self._of_shape[key].copy()
        busiest, here = self._readers_of(states)
        found[:, AT["forward"]] = busiest.values(unit, lambda s: s.forward)
        found[:, AT["backward"]] = busiest.values(unit, lambda s: s.backward)
        for name, quantity in _MEASURED_BYTES:
            found[:, AT[name]] = here.values(unit, quantity, divides=False)
        self._write_idle(found, states)
        found[:, AT["saved"]] += self._gathered(k, states)
        new = [self.memory.makes_new(layout) for layout, _ in states]
        summed = np.array([self.memory.summed_bytes(k, layout) for layout, _ in states])
        fresh = here.values(unit, lambda s: s.fresh, divides=False)
        # Where it was not measured it follows from the shape alone, and is in the copied figures.
        shaped = found[:, AT["new_grad"]] - summed
        found[:, AT["new_grad"]] = np.where(new, np.where(fresh > 0, fresh, shaped), 0.0) + summed
        absent = [self.samples(layout) is None for layout, _ in states]
        measured = [*(AT[name] for name, _ in _MEASURED_BYTES), AT["new_grad"]]
        found[np.ix_(absent, measured)] = 0.0
        return found

    def recomputed(self, k: int, states: tuple[State, ...], plain: Reals) -> Reals:
        """``plain`` with feature maps that are made again in backward."""
        found = plain.copy()
        found[:, AT["backward"]] += plain[:, AT["forward"]]
        for link in LINKS:
            found[:, AT[f"inner_backward.{link}"]] += plain[:, AT[f"inner_forward.{link}"]]
        whole = self.model.output_bytes_per_sample(k)[0]
        output = np.array([
            whole * (self.samples(layout) or 0) / (layout.degree if style == "column" else 1)
            for layout, style in states
        ])  # fmt: skip
        gathered = self._gathered(k, states)
        resident = np.minimum(output, plain[:, AT["saved"]] - gathered) + gathered
        found[:, AT["recomputed"]] = plain[:, AT["saved"]] - resident
        return self._with_resident(found, resident, states)

    def offloaded(
        self, k: int, states: tuple[State, ...], plain: Reals, host_bytes_per_s: float
    ) -> Reals:
        """``plain`` with feature maps that are copied to the host and back."""
        found, unit = plain.copy(), self.model.profile.units[k]
        busiest, _ = self._readers_of(states)
        copy_s = busiest.values(unit, lambda s: s.saved, divides=False) / host_bytes_per_s
        found[:, AT["forward"]] += copy_s
        found[:, AT["backward"]] += copy_s
        found[:, AT["offloaded"]] = plain[:, AT["saved"]]
        return self._with_resident(found, np.zeros(len(states)), states)

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
        sizes = tuple((p.bytes, p.trainable, *(p.shared in d for d in divided)) for p in owned)
        out = self.model.output_bytes_per_sample(k)
        summed = self.model.summed_bytes[k]
        return sizes, unit.state_bytes, unit.batch_statistics, unit.statistics_bytes, out, summed

    def _readers_of(self, states: tuple[State, ...]) -> tuple[CurveReader, CurveReader]:
        """Readers of curves at the busiest group's samples, and at this position's."""
        if states not in self._readers:
            counts = self.model.counts
            busiest = [float(busiest_samples(counts, layout)) for layout, _ in states]
            here = [float(self.samples(layout) or 0) for layout, _ in states]
            self._readers[states] = CurveReader(states, busiest), CurveReader(states, here)
        return self._readers[states]


# Which points of a unit's curves matter for a layout depends on the sizes that were measured and on
# the layouts only. So these are worked out once, as weights, for all units that were measured at
# the same sizes, and reading a unit's curve is a few products of small arrays.


class _Position(NamedTuple):
    """How sizes are read from curves with the same x: y[left] + (y[right] - y[left]) · part, the
    slope not falling where ``beyond``, nothing where ``empty``; a single point is in proportion."""

    left: Numbers
    right: Numbers
    part: Reals
    beyond: npt.NDArray[np.bool_]
    empty: npt.NDArray[np.bool_]
    single: bool


class _Blend(NamedTuple):
    """How degrees are read from measured ones: share · value[near] + (1 - share) · value[far], not
    under value[near] · ``perfect`` where ``beyond``."""

    near: Numbers
    far: Numbers
    share: Reals
    beyond: npt.NDArray[np.bool_]
    perfect: Reals


class CurveReader:
    """Reads units' curves for a list of states with so many samples each."""

    def __init__(self, states: Sequence[State], samples: Sequence[float]) -> None:
        self.states = states
        self.samples = np.array(samples, dtype=np.float64)
        self._positions: dict[tuple[float, ...], _Position] = {}
        self._blends: dict[tuple[tuple[int, ...], Style], _Blend] = {}
        styles = [style for _, style in states]
        self._of_style: dict[Style, Numbers] = {
            style: np.array([i for i, s in enumerate(styles) if s == style])
            for style in dict.fromkeys(styles)
        }

    def values(self, unit: UnitProfile, quantity: Quantity, *, divides: bool = True) -> Reals:
        """``share_of(unit, style, degree, quantity, samples, divides=divides)`` for each state."""
        found = np.zeros(len(self.states))
        for style, where in self._of_style.items():
            known: list[ShareProfile] = [
                s for s in unit.shares if s.style == style and s.degree > 1
            ]
            known.sort(key=lambda s: s.degree)
            points = [unit.whole, *known]
            table = np.stack([self._curve(quantity(p))[where] for p in points])
            degrees = tuple(p.degree for p in points)
            found[where] = self._blended(table, degrees, style, where, divides)
        return found

    def _blended(
        self, table: Reals, degrees: tuple[int, ...], style: Style, where: Numbers, divides: bool
    ) -> Reals:
        """[state] from [measured degree, state]."""
        key = degrees, style
        if key not in self._blends:
            self._blends[key] = _blend(degrees, [self.states[i][0].degree for i in where])
        blend, at = self._blends[key], np.arange(table.shape[1])
        near, far = table[blend.near, at], table[blend.far, at]
        straight: Reals = blend.share * near + (1.0 - blend.share) * far
        if len(degrees) == 1:
            return near * blend.perfect if divides else near
        lifted = np.maximum(straight, near * blend.perfect)
        return np.where(blend.beyond, lifted, straight)

    def _curve(self, curve: Curve) -> Reals:
        """The curve at each state's samples."""
        if curve.x not in self._positions:
            self._positions[curve.x] = _position(curve.x, self.samples)
        at, y = self._positions[curve.x], np.array(curve.y)
        if at.single:
            proportional: Reals = y[0] * at.part
            return proportional
        rise = y[at.right] - y[at.left]
        rise = np.where(at.beyond, np.maximum(rise, 0.0), rise)
        found = np.maximum(y[at.left] + rise * at.part, 0.0)
        return np.where(at.empty, 0.0, found)


def _position(x: tuple[float, ...], sizes: Reals) -> _Position:
    places, empty = np.array(x), sizes <= 0
    none = np.zeros(len(sizes), dtype=np.int64)
    if len(x) == 1:
        part = np.where(empty, 0.0, sizes / x[0])
        return _Position(none, none, part, empty, empty, True)
    right = np.clip(np.searchsorted(places, sizes), 1, len(x) - 1)
    left = right - 1
    beyond = sizes > x[-1]
    part = (sizes - places[left]) / (places[right] - places[left])
    return _Position(left, right, part, beyond, empty, False)


def _blend(degrees: tuple[int, ...], asked: Sequence[int]) -> _Blend:
    inverse = np.array([1.0 / d for d in degrees])
    near, far, share, beyond, perfect = [], [], [], [], []
    for degree in asked:
        x = 1.0 / degree
        above = [i for i, d in enumerate(degrees) if d <= degree]
        i = above[-1]
        last = i == len(degrees) - 1
        j = i if degrees[i] == degree else (max(i - 1, 0) if last else i + 1)
        near.append(i)
        far.append(j)
        share.append(1.0 if i == j else (x - inverse[j]) / (inverse[i] - inverse[j]))
        beyond.append(last and degrees[i] != degree)
        perfect.append(x / inverse[i])
    return _Blend(
        np.array(near), np.array(far), np.array(share), np.array(beyond), np.array(perfect)
    )
