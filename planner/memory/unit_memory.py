"""What the units of a cost model hold under their decisions, and a position with all of them.

``timeline`` says what is alive when; here are the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil

import numpy as np

from ..cost.compute import Quantity, shard_bytes, share_of
from ..cost.cost import CostModel
from ..cost.feedback import AT_ONCE, averaged_bytes, held_bytes
from ..cost.gathering import gathered
from ..cost.segment_memory import within_segments
from ..cost.step_time import Vector
from ..cost.unit_bytes import FIELD, UnitBytes
from ..schema.layout import Layout
from ..schema.options import Option
from .comm_buffers import arrived_bytes, chosen_bytes, travelling_bytes
from .timeline import Holding, Table

UPDATE_COPIES = {"sgd": (0, 0), "momentum": (0, 0), "adam": (2, 1), "adamw": (2, 1)}
"""How many copies of what it updates a step of torch's own optimizer makes (2.13): of one parameter
at a time on a CPU, of all parameters together (``foreach``) on CUDA. On a CPU one of the last
parameter's stays until the next one's are made."""

_QUANTITIES: tuple[Quantity, ...] = (
    lambda s: s.saved,
    lambda s: s.gradient,
    lambda s: s.workspace,
    lambda s: s.fresh,
    lambda s: s.spared,
)


class MemoryModel:
    """What the units of a cost model hold, remembered by unit, option and samples."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._units: dict[tuple[int, Option, int | None], UnitBytes] = {}

    def unit(self, k: int, option: Option, samples: int | None) -> UnitBytes:
        """What unit ``k`` holds on a position whose group has ``samples``, or which takes no part
        (None)."""
        if samples is None:
            return UnitBytes()
        key = (k, option, samples)
        if key not in self._units:
            self._units[key] = self._unit(k, option, samples)
        return self._units[key]

    def _unit(self, k: int, option: Option, samples: int) -> UnitBytes:
        unit, cost = self.model.profile.units[k], self.model.unit(k, option)
        degree, style = option.layout.degree, option.style
        saved, maps, workspace, fresh, spared = (
            share_of(unit, style, degree, q, samples, divides=False) for q in _QUANTITIES
        )
        sliced, resident = self.model.sliced, self._resident(k, option, samples, saved)
        entered = self.gathered_bytes(k, option, samples)
        if option.memory == "offload":
            saved += entered
        else:
            saved, resident = saved + entered, resident + entered
        largest = max(self._sizes_bytes(k, option), default=0)
        trained = cost.trained_bytes
        chosen = chosen_bytes(self.model, option, largest)
        held = held_bytes(option.exchange, option.feedback, trained, largest, chosen)
        if sliced and option.exchange == "topk" and option.feedback in AT_ONCE and spared:
            # What is never there together was measured with all of the gradients; these are taken
            # in one by one, and those that an operator computes at once are there at once.
            held = held._replace(computed=max(held.computed, trained - spared))
            spared = max(spared - trained, 0.0)
        part, many = gathered(self.model, k, option), self.model.micro_batches > 1
        taken = 0 if many else part.saved  # a gradient whose chunk alone stays
        new = (fresh or largest) if self.makes_new(option.layout) else 0.0
        found = UnitBytes(
            weights=cost.shard_bytes + unit.state_bytes - part.saved,
            optimizer=self._state_bytes(option, trained),
            residual=held.always,
            gradients=held.gradients - taken,
            travelling=travelling_bytes(self.model, k, option),
            saved=resident,
            map_gradients=maps + (held.computed if sliced else held.moment) + part.behind + taken,
            fresh=new + self.summed_bytes(k, option.layout),
            spared=spared,
            workspace=workspace + saved - resident + part.at_work,
            leaving=self._leaving_bytes(k, option, samples, trained, held.moment)
            if sliced
            else 0.0,
            exchanged=cost.gradient_bytes,
            renewed=self._renewed_bytes(k, option, trained),
            again=saved - resident if option.memory == "recompute" else 0.0,
            given=self._given_bytes(k, samples) if option.segment else 0.0,
            arriving=self._arriving_bytes(k, samples) if option.segment else 0.0,
            whole=part.whole,
            underway=part.underway,
            away=saved - resident if option.memory == "offload" else 0.0,
        )
        return found.released() if option.early_release else found

    def _leaving_bytes(
        self, k: int, option: Option, samples: int, trained: float, moment: float
    ) -> float:
        """What there is besides as the unit's gradients leave, where that takes anything. A sharded
        one stands beside the copies of what will be sent and of this rank's own elements, before
        anything is received. Where parameters are whole only while they are used, its own are gone
        by then, those before are whole, and the gradients of the unit after it may be on their way.
        """
        if option.exchange == "dense" and not option.early_release:
            return 0.0
        taken = moment
        part = gathered(self.model, k, option)
        if part.whole:
            many = self.model.micro_batches > 1  # then gradients are whole, else chunks
            taken += part.before + part.whole + part.meanwhile + (0.0 if many else part.saved)
        elif option.exchange == "sharded":
            taken += trained / option.layout.groups
        return taken + self.model.passing_bytes[k] * samples

    def gathered_bytes(self, k: int, option: Option, samples: int | None) -> float:
        """The input of a divided unit, which its members have put together (or a slice of it) and
        keep for backward. More than there is where it comes in that form already."""
        if option.layout.degree == 1 or samples is None:
            return 0.0
        edges = (self.model.profile.edges[e] for e in self.model.edges_into[k])
        whole = sum(edge.bytes_per_sample for edge in edges) * samples
        return whole / (option.layout.degree if option.style == "row" else 1)

    def _sizes_bytes(self, k: int, option: Option) -> list[int]:
        """A member's shards of the unit's parameters that have a gradient."""
        unit, degree = self.model.profile.units[k], option.layout.degree
        trained = (p for p in self.model.owned[k] if p.trainable)
        return [shard_bytes(unit, option.style, degree, (p,)) for p in trained]

    def makes_new(self, layout: Layout) -> bool:
        """Whether new gradients do not stand: one that is added to others, copied into a bucket
        (slices are cut from gradients where they lie), or of a burst, which is divided by another
        number than gradients otherwise are (that of a divided unit where it lies)."""
        sent = layout.groups > 1 and not self.model.sliced
        divided = layout.degree == 1 and layout.groups != self.model.world_size
        return sent or divided or self.model.micro_batches > 1

    def summed_bytes(self, k: int, layout: Layout) -> float:
        """What gradients of tied parameters take until they are one. What others hold is taken to
        be whole, as their layout is not known here."""
        own, others = self.model.summed_bytes[k]
        return own / layout.degree + others

    def _renewed_bytes(self, k: int, option: Option, trained_bytes: int) -> float:
        """Temporaries of the update. What top-k has sent is copied out of its messages before, and
        they are gone when the update is at work."""
        if option.exchange == "sharded":
            return 0.0  # of a chunk, and less than the copies that travelled, which have gone
        copies = self._copies_bytes(k, option, trained_bytes)
        if option.exchange != "topk":
            return copies / (option.layout.groups if option.gathers else 1)
        copies += averaged_bytes(option.exchange, option.feedback, trained_bytes)
        if option.feedback in AT_ONCE:
            copies += arrived_bytes(self.model, option, trained_bytes)
        largest = max(self._sizes_bytes(k, option), default=0)
        first = arrived_bytes(self.model, option, largest)
        return max(first, copies - travelling_bytes(self.model, k, option))

    def _copies_bytes(self, k: int, option: Option, trained_bytes: int) -> float:
        """What the optimizer's step copies: for one parameter after the other on a CPU, on CUDA for
        all of them at once."""
        one, together = UPDATE_COPIES[self.model.goal.optimizer]
        if self.model.profile.device_type == "cuda":
            return float(together * trained_bytes)
        if not one:
            return 0.0
        sizes = self._sizes_bytes(k, option)
        return float(max((one * own + last for last, own in pairwise([0, *sizes])), default=0))

    @property
    def updates_together(self) -> bool:
        """Whether the update's temporaries are those of all units at once."""
        return self.model.profile.device_type == "cuda" and not self.model.sliced

    def _state_bytes(self, option: Option, trained_bytes: int) -> float:
        """Optimizer state of a member's shard."""
        state = trained_bytes * self.model.goal.state_copies
        return ceil(state / option.layout.groups) if option.shards else state

    def _resident(self, k: int, option: Option, samples: int, saved: float) -> float:
        """Bytes of feature maps that stay from forward to backward."""
        if option.memory == "keep":
            return saved
        if option.memory == "offload":
            return 0.0
        # A feature map counts to the unit that made it. What the next unit needs to run again, or
        # has saved itself, is this unit's output.
        if not self._needed(k):
            return 0.0
        whole = self.model.output_bytes_per_sample(k)[0] * samples
        split = option.layout.degree if option.style == "column" else 1
        return min(whole / split, saved)

    def _needed(self, k: int) -> bool:
        """Whether a unit's output stays: somebody saves it, or may have to run again from it."""
        units = self.model.profile.units
        targets = (units[self.model.ends[e][1]] for e in self.model.edges_from[k])
        return units[k].output_kept or any(unit.modules for unit in targets)

    def _given_bytes(self, k: int, samples: int) -> float:
        """What enters a unit and nobody saves for backward: a segment that begins there does."""
        model, units = self.model, self.model.profile.units
        edges = [e for e in model.edges_into[k] if not units[model.ends[e][0]].output_kept]
        return sum(model.profile.edges[e].bytes_per_sample for e in edges) * samples

    def _arriving_bytes(self, k: int, samples: int) -> float:
        passing = self.model.passing_bytes
        return passing[k + 1] * samples if k + 1 < len(passing) else 0.0

    def held(self, decisions: Sequence[Option], samples: dict[Layout, int | None]) -> Holding:
        """What a position of a class holds."""
        rows = [self.unit(k, o, samples[o.layout]) for k, o in enumerate(decisions)]
        table = np.array(rows, dtype=np.float64).T
        received = np.array(
            [self.received(k, decisions, samples[o.layout]) for k, o in enumerate(decisions)]
        )
        return self.holding(table, received, decisions)

    def holding(self, table: Table, received: Vector, decisions: Sequence[Option]) -> Holding:
        """The ``table`` [field of ``UnitBytes``, unit] with what concerns all units."""
        table, segments = within_segments(self.model, table, decisions)
        beside = {name: np.zeros_like(received) for name in ("beside_forward", "beside_backward")}
        for one in self.model.besides if table[FIELD["whole"] :].any() else ():
            beside[one.point] += one.added(table[FIELD[one.figure]])
        return Holding(
            table=table,
            received=received,
            beside_forward=beside["beside_forward"],
            beside_backward=beside["beside_backward"],
            segments=segments,
            buckets_bytes=self.buckets_bytes(decisions),
            closed_bytes=self.closed_bytes(decisions),
            sliced=self.model.sliced,
            together=self.updates_together,
        )

    def received(self, k: int, decisions: Sequence[Option], samples: int | None) -> float:
        """Bytes of the largest tensor that unit ``k`` receives from a redistribution."""
        if samples is None:
            return 0.0
        costs = (self.model.arrival(e, decisions) for e in self.model.edges_into[k])
        return max((c.received_bytes for c in costs), default=0.0)

    def buckets_bytes(self, decisions: Sequence[Option]) -> float:
        """The most that open buckets take: one for each layout that exchanges gradients; none where
        gradients travel in slices."""
        if self.model.sliced:
            return 0.0
        kinds = len({o.layout for o in decisions if o.layout.groups > 1})
        return float(kinds * self.model.bucket_bytes)

    def closed_bytes(self, decisions: Sequence[Option]) -> Vector:
        """By unit what it takes off that while it works: the bucket that it closes."""
        closes = [self.model.closes_bucket(k, option) for k, option in enumerate(decisions)]
        found: Vector = np.array(closes, dtype=np.float64) * self.model.bucket_bytes
        return found
