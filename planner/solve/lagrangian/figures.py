"""What the options of units amount to, one by one or all states of a unit together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ...cost.compute import busiest_samples
from ...cost.ownership import group_samples
from ...cost.step_time import LINKS
from ...memory.rows import AT, FIGURES
from ...memory.unit_memory import MemoryModel
from ...schema.layout import Layout
from ...schema.options import Option, allowed
from ..choices import STYLES
from ..heuristic.space import Space
from .curves import Reader
from .tables import Block, Policy, Reals, State


class Figures:
    """The figures of a space's options, for the position that is judged (by default the first).
    ``exchanges`` remembers the exchange policies of units that are alike in all that matters."""

    def __init__(self, space: Space, memory: MemoryModel, position: int = 0) -> None:
        self.space, self.model, self.memory = space, space.model, memory
        self.position = position
        self.exchanges: dict[object, Block] = {}
        self._samples: dict[Layout, int | None] = {}
        self._states: dict[object, tuple[State, ...]] = {}
        self._shapes: dict[object, Reals] = {}
        self._reading: dict[tuple[State, ...], tuple[Reader, Reader]] = {}

    def samples(self, layout: Layout) -> int | None:
        """Samples of the judged position's group, None where it takes no part."""
        if layout not in self._samples:
            counts = self.model.counts
            self._samples[layout] = group_samples(counts, layout)[self.position]
        return self._samples[layout]

    @cached_property
    def energy(self) -> Reals:
        """The share of the whole gradient's energy in each unit (see ``budget.lost_energy``)."""
        units = self.model.profile.units
        energy = np.array([u.gradient_energy for u in units])
        if not energy.any():
            owned = self.model.owned
            energy = np.array([float(sum(p.bytes for p in o if p.trainable)) for o in owned])
        return energy / max(float(energy.sum()), 1e-300)

    def states_of(self, k: int) -> tuple[State, ...]:
        """The states that unit ``k`` may have."""
        unit = self.model.profile.units[k]
        cuts = tuple((s.style, s.parts, s.uneven) for s in unit.splits)
        pins = tuple(pin for pin in self.model.goal.pins if pin.unit == unit.name)
        key = (unit.fixed, unit.batch_statistics, cuts, pins)
        if key not in self._states:
            capability = self.space.capability
            every = [
                (layout, style)
                for layout in self.space.layouts
                for style in STYLES
                if (style == "none") == (layout.degree == 1)
            ]
            self._states[key] = tuple(
                state
                for state in every
                if allowed(unit, Option(*state), self.model.goal, capability, self.model.world_size)
            )
        return self._states[key]

    def plain(self, k: int, states: tuple[State, ...]) -> Reals:
        """[state, figure] without policies. Units of one shape differ in what was measured only."""
        key = states, self.shape(k)
        if key not in self._shapes:
            self._shapes[key] = np.array([self.figures(k, Option(*state)) for state in states])
            return self._shapes[key]
        unit, found = self.model.profile.units[k], self._shapes[key].copy()
        busiest, judged = self.readers(states)
        for name, reader, quantity in (
            ("forward", busiest, lambda s: s.forward),
            ("backward", busiest, lambda s: s.backward),
            ("saved", judged, lambda s: s.saved),
            ("map_gradients", judged, lambda s: s.gradient),
            ("workspace", judged, lambda s: s.workspace),
            ("never_together", judged, lambda s: s.spared),
        ):
            column = reader.values(unit, quantity, divides=reader is busiest)
            found[:, AT[name]] = column
        times = self.model.micro_batches
        took = times * (found[:, AT["forward"]] + found[:, AT["backward"]])
        free = self.model.world_size - np.array([layout.size for layout, _ in states])
        found[:, AT["idle"]] = free * (took + found[:, AT["update"]])
        idle = [self.samples(layout) is None for layout, _ in states]
        found[:, AT["saved"]] += self.gathered(k, states)
        new = [self.memory.makes_new(layout) for layout, _ in states]
        summed = np.array([self.memory.summed_bytes(k, layout) for layout, _ in states])
        fresh = judged.values(unit, lambda s: s.fresh, divides=False)
        shaped = found[:, AT["new_grad"]] - summed  # not measured: by its shape
        found[:, AT["new_grad"]] = np.where(new, np.where(fresh > 0, fresh, shaped), 0.0) + summed
        measured = [
            AT[name]
            for name in ("saved", "map_gradients", "workspace", "never_together", "new_grad")
        ]
        found[np.ix_(idle, measured)] = 0.0
        return found

    def gathered(self, k: int, states: Sequence[State]) -> Reals:
        """What divided units keep of their input, by state."""
        options = [Option(*state) for state in states]
        found: Reals = np.array(
            [self.memory.gathered_bytes(k, o, self.samples(o.layout)) for o in options]
        )
        return found

    def shape(self, k: int) -> tuple[object, ...]:
        """All of a unit that its figures depend on, but for its curves."""
        unit, owned = self.model.profile.units[k], self.model.owned[k]
        divided = [{name for name, _ in s.sharded} for s in unit.splits]
        sizes = tuple((p.bytes, p.trainable, *(p.shared in d for d in divided)) for p in owned)
        out = self.model.output_bytes_per_sample(k)
        summed = self.model.summed_bytes[k]
        return sizes, unit.state_bytes, unit.batch_statistics, unit.statistics_bytes, out, summed

    def readers(self, states: tuple[State, ...]) -> tuple[Reader, Reader]:
        """Readers of curves at the busiest group's samples, and at the judged position's."""
        if states not in self._reading:
            counts = self.model.counts
            busiest = [float(busiest_samples(counts, layout)) for layout, _ in states]
            judged = [float(self.samples(layout) or 0) for layout, _ in states]
            self._reading[states] = Reader(states, busiest), Reader(states, judged)
        return self._reading[states]

    def lost(self, k: int, policies: Sequence[Policy]) -> Reals:
        """The share of the whole gradient's energy that each policy of unit ``k`` leaves."""
        unit, found = self.model.profile.units[k], []
        for policy in policies:
            fields = dict(policy)
            kept = unit.kept(fields.get("exchange", "dense"), fields.get("ratio", 1.0))
            found.append(0.0 if kept is None else 1.0 - kept)
        lost: Reals = np.array(found) * self.energy[k]
        return lost

    def figures(self, k: int, option: Option) -> list[float]:
        """What unit ``k`` costs by itself, in the order of ``FIGURES`` (energy lost left out)."""
        cost, layout = self.model.unit(k, option), option.layout
        found = [0.0] * len(FIGURES)
        found[:3] = cost.forward_s, cost.backward_s, cost.update_s
        for name, on in (
            ("inner_forward", cost.inner_forward),
            ("inner_backward", cost.inner_backward),
            ("inner_backward", cost.released),
            ("exchange", cost.exchange),
        ):
            found[AT[f"{name}.{LINKS[on.link]}"]] += on.seconds
        found[AT[f"slice.{LINKS[cost.exchange.link]}"]] = cost.slice_s
        held = self.memory.unit(k, option, self.samples(layout)).figures
        found[AT["persistent"] : AT["persistent"] + len(held)] = held
        took = self.model.micro_batches * (cost.forward_s + cost.backward_s) + cost.update_s
        found[AT["idle"]] = (self.model.world_size - layout.size) * took
        return found
