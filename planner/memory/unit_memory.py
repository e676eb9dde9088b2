"""How many bytes the units of a cost model hold under their decisions, and a position with all.

``timeline`` says what is alive when; here are the bytes.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import numpy as np

from ..cost.compute import Quantity, shard_bytes, share_of
from ..cost.cost import CostModel
from ..schema.goal import OPTIMIZERS
from ..schema.layout import Layout, Style
from ..schema.options import Option
from ..schema.plan import AT_ONCE
from ..schema.profile import ParameterProfile
from .checkpoint_segments import write_segments
from .gradient_buffers import (
    comm_buffer_bytes,
    feedback_bytes,
    received_elements_bytes,
    topk_choice_bytes,
    wide_bytes,
)
from .prefetch_overlap import PrefetchOverlap, UnshardedBytes, gathered, prefetch_overlaps
from .timeline import (
    FIELD,
    FIELDS,
    OWN_BACKWARD,
    UNIT_FIELDS,
    Neighbours,
    PerPhase,
    Persistent,
    PositionMemory,
    Table,
    UnitBytes,
    indicator,
    points,
    returned_bytes,
)

MAIN_COPIES = 2
"""Bytes of float32 for each byte of a parameter of 16 bits."""

_QUANTITIES: tuple[Quantity, ...] = (
    lambda s: s.saved,
    lambda s: s.gradient,
    lambda s: s.workspace,
    lambda s: s.new_grad,
    lambda s: s.never_together,
)


class _Entering(NamedTuple):
    """Bytes of a sample of a unit's input: the ``whole``, what it saves of it, and the share of the
    whole that no other unit may share. What may be shared is counted once for all of them
    (``moved``)."""

    whole: float
    saved: float
    unshared: float


class MemoryModel:
    """What the units of a cost model hold, remembered by unit, option and samples."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._units: dict[tuple[int, Option, int | None], UnitBytes] = {}
        # A unit's many policies in one layout are of the same measured share.
        self._measured: dict[tuple[int, Style, int, int], tuple[float, ...]] = {}
        self._entering: dict[int, _Entering] = {}
        self._sizes: dict[tuple[int, Style, int], list[tuple[ParameterProfile, int]]] = {}

    @cached_property
    def overlaps(self) -> tuple[PrefetchOverlap, ...]:
        """Which units' bytes are there while which others work."""
        return prefetch_overlaps(self.model)

    # -- one unit --------------------------------------------------------------------------------

    def unit(self, k: int, option: Option, samples: int | None) -> UnitBytes:
        """What unit ``k`` holds on a position whose group has ``samples``, or which takes no part
        (None)."""
        if samples is None:
            return UnitBytes()
        key = (k, option, samples)
        if key not in self._units:
            found = self._unit(k, option, samples)
            self._units[key] = found.released_early() if option.early_release else found
        return self._units[key]

    def _unit(self, k: int, option: Option, samples: int) -> UnitBytes:
        unit, own = self.model.profile.units[k], self.model.unit_sizes(k, option)
        sliced, many = self.model.sliced, self.model.micro_batches > 1
        saved, maps, workspace, new_grad, never_together = self._share(k, option, samples)
        resident = self._resident(k, option, samples, saved)
        own_input = self.own_input_bytes(k, option, samples)
        saved += own_input
        if option.memory != "offload":
            resident += own_input
        gone = saved - resident
        if option.memory == "recompute" and not option.segment:
            resident += self.unsaved_input_bytes(k, option, samples)
        trained, sizes = own.trained_bytes, self.sizes_bytes(k, option)
        largest = max((size for _, size in sizes), default=0)
        # Where nobody has measured what is new at once. What is not reached is never new: its zeros
        # are made where they are sent.
        new = new_grad or max((size for p, size in sizes if p.reached), default=0)
        choice = topk_choice_bytes(self.model, option, largest)
        feedback = feedback_bytes(self.model, option, trained, largest, choice)
        if sliced and option.exchange == "topk" and option.feedback in AT_ONCE and never_together:
            # ``never_together`` was measured with all gradients there until the end. Top-k takes
            # them in one by one, so only those that one operator computes are there at once.
            feedback = feedback._replace(computed=max(feedback.computed, trained - never_together))
            never_together = max(never_together - trained, 0.0)
        part = gathered(self.model, k, option)
        sharded = 0 if many else part.saved  # a gradient of which the rank's part alone stays
        summed = self.summed_bytes(k, option.layout)
        away = gone if option.memory == "offload" else 0.0
        segment_input = output_gradients = 0.0
        if option.segment:
            # What enters a unit and nobody saves for backward: a segment that begins there does.
            segment_input = self.unsaved_input_bytes(k, option, samples)
            after = self.model.passing_bytes[k + 1 : k + 2]  # none after the last unit
            output_gradients = samples * sum(after)
        return UnitBytes(
            Persistent(
                weights=own.shard_bytes + unit.state_bytes - part.saved,
                optimizer=self._state_bytes(k, option, trained),
                residual=feedback.always,
            ),
            PerPhase(
                gradients=feedback.gradients - sharded,
                comm_buffers=comm_buffer_bytes(self.model, k, option),
                saved=resident,
                map_gradients=maps
                + (feedback.computed if sliced else feedback.moment)
                + part.backward_more
                + sharded,
                new_grad=(new if self.makes_new(option.layout) else 0.0) + summed,
                never_together=never_together,
                workspace=workspace + gone + part.forward,
                bucketed=own.gradient_bytes,
                exchange_temp=self._exchange_temp(
                    k, option, samples, trained, feedback.moment, part
                ),
                update_temp=self._update_temp(k, option, trained),
                recomputed=gone if option.memory == "recompute" else 0.0,
                segment_input=segment_input,
                output_gradients=output_gradients,
            ),
            Neighbours(
                unsharded=part.unsharded,
                gradients_sent=part.gradients_sent,
                offloaded=away,
                offloaded_output=self._kept_output(k, option, samples, away),
            ),
        )

    def _share(self, k: int, option: Option, samples: int) -> tuple[float, ...]:
        """The quantities measured of a member's share."""
        key = (k, option.style, option.layout.degree, samples)
        if key not in self._measured:
            unit = self.model.profile.units[k]
            self._measured[key] = tuple(
                share_of(unit, *key[1:3], quantity, samples, divides=False)
                for quantity in _QUANTITIES
            )
        return self._measured[key]

    def _exchange_temp(
        self,
        k: int,
        option: Option,
        samples: int,
        trained: float,
        moment: float,
        part: UnshardedBytes,
    ) -> float:
        """What there is besides as the unit's gradients leave, where that takes anything."""
        by_host = option.peers_per_host > 1
        plain = option.exchange == "dense" and not option.early_release and not by_host
        if plain or not self.model.sliced:
            return 0.0
        taken = moment
        if part.unsharded:
            # Its own parameters are gone by then, those before are whole, and the gradients of the
            # unit after it may be on their way.
            many = self.model.micro_batches > 1  # then gradients are whole, else this rank's part
            taken += part.before + part.unsharded + part.next_gradients
            taken += 0.0 if many else part.saved
        elif option.exchange == "sharded":
            # The gradient stands beside the copies of what will be sent and of this rank's own
            # elements, before anything is received.
            own = 1 / option.layout.groups
            taken += trained * (own + (1 - own) * (1 - self.model.wire_share(option.wire)))
        elif by_host:
            # One slice is added up and one put together, each in a buffer of its size.
            taken += 2 * min(trained, self.model.message_bytes)
        if option.shards and not option.rounded and self.model.profile.device_type == "cuda":
            # NCCL adds up what is sent, the rank's own elements among it: see [Note: Sums and rows
            # on a device's streams] in executor/gradients/sharded.py.
            taken += trained / option.layout.groups
        return taken + self.model.passing_bytes[k] * samples

    def own_input_bytes(self, k: int, option: Option, samples: int | None) -> float:
        """The input of a divided unit, which its members have put together (or a slice of it) and
        keep for backward, instead of what the whole unit keeps of the rank's own samples."""
        # An upper bound: more than there is where the input comes in that form already.
        unit, degree = self.model.profile.units[k], option.layout.degree
        if degree == 1 or samples is None:
            return 0.0
        entering = self._entering_bytes(k)
        whole = entering.saved * samples * self._input_part(k, option)
        # Counted to the units that made it, as if somebody kept it.
        return max(whole - unit.input_kept * samples / degree, 0.0) * entering.unshared

    def _entering_bytes(self, k: int) -> _Entering:
        if k not in self._entering:
            edges, into = self.model.profile.edges, self.model.edges_into[k]
            saved = self.model.profile.units[k].input_saved
            whole = sum(edges[e].bytes_per_sample for e in into)
            unshared = sum(edges[e].bytes_per_sample for e in into if not self.model.sharable[e])
            self._entering[k] = _Entering(
                whole, whole if saved is None else saved, unshared / whole if whole else 0.0
            )
        return self._entering[k]

    def sizes_bytes(self, k: int, option: Option) -> list[tuple[ParameterProfile, int]]:
        """The unit's parameters that are trained, each with the bytes of a member's shard."""
        key = (k, option.style, option.layout.degree)
        if key not in self._sizes:
            unit, trained = self.model.profile.units[k], self.model.owned[k]
            self._sizes[key] = [
                (p, shard_bytes(unit, *key[1:], (p,))) for p in trained if p.trainable
            ]
        return self._sizes[key]

    def makes_new(self, layout: Layout) -> bool:
        """Whether new gradients do not stay as they are: they are copied into a bucket, divided,
        or added to others."""
        # Slices are cut from gradients where they lie. A burst's gradient is divided by another
        # number than others are; that of a divided unit where it lies.
        sent = layout.groups > 1 and not self.model.sliced
        divided = layout.degree == 1 and layout.groups != self.model.world_size
        return sent or divided or self.model.micro_batches > 1

    def summed_bytes(self, k: int, layout: Layout) -> float:
        """What gradients of tied parameters take until they are one."""
        # What others hold is taken to be whole, as their layout is not known here.
        own, others = self.model.summed_bytes[k]
        return own / layout.degree + others

    def _state_bytes(self, k: int, option: Option, trained_bytes: int) -> int:
        """What the optimizer keeps for the unit, main weights included."""
        copies = self.model.goal.state_copies
        if not option.shards:
            return copies * trained_bytes
        more = (MAIN_COPIES * (1 + copies) - copies) * self._half_bytes(k, option)
        return ceil((copies * trained_bytes + more) / option.layout.groups)

    def _half_bytes(self, k: int, option: Option) -> int:
        """Bytes of the unit's parameters that have main weights where their exchange is sharded."""
        return sum(size for p, size in self.sizes_bytes(k, option) if p.is_half)

    def _update_temp(self, k: int, option: Option, trained_bytes: int) -> float:
        """Temporaries of the update."""
        if option.shards and self._half_bytes(k, option):
            return self._main_update_temp(k, option)
        if option.exchange == "sharded":
            return 0.0  # less than the copies that were sent, which have gone
        sizes = [size for _, size in self.sizes_bytes(k, option)]
        copies = self._optimizer_copies(sizes)
        if option.exchange == "low_rank":
            copies = max(copies, wide_bytes(self.model, max(sizes, default=0)))
        if option.exchange != "topk":
            return copies / (option.layout.groups if option.gathers else 1)
        if option.feedback == "in_place":
            # The dense average of what came. Of residuals it takes the gradient's place.
            copies += trained_bytes
        if option.feedback in AT_ONCE:
            copies += received_elements_bytes(self.model, option, trained_bytes)
        # What top-k has sent is copied out of its messages before the update is at work, and the
        # messages are gone by then.
        first = received_elements_bytes(self.model, option, max(sizes, default=0))
        return max(first, copies - comm_buffer_bytes(self.model, k, option))

    def _main_update_temp(self, k: int, option: Option) -> float:
        """Temporaries of the update of main weights: the unit's gradients in float32, and one
        parameter's weights beside what they round to and where that differs. Less what is counted
        there and has gone: the gradients, and the copies of sharded ones that were exchanged."""
        sizes = [size for p, size in self.sizes_bytes(k, option) if p.is_half]
        wide = [MAIN_COPIES * size for size in sizes]
        checked = max((MAIN_COPIES + 1.5) * size for size in sizes)
        groups, half = option.layout.groups, sum(sizes)
        gone = half / groups if option.gathers else half * (2 - 1 / groups)
        taken = (sum(wide) + max(self._optimizer_copies(wide), checked)) / groups
        return max(taken - gone, 0.0)

    def _optimizer_copies(self, sizes: Sequence[int]) -> float:
        """What an optimizer's step copies of parameters of these bytes."""
        optimizer = OPTIMIZERS[self.model.goal.optimizer]
        if self.model.profile.device_type == "cuda":
            return float(optimizer.update_copies_together * sum(sizes))
        if not optimizer.update_copies:
            return 0.0
        # One of the last parameter's copies stays until the next one's are made.
        own = (optimizer.update_copies * size + last for last, size in pairwise([0, *sizes]))
        return float(max(own, default=0))

    def _resident(self, k: int, option: Option, samples: int, saved: float) -> float:
        """Bytes of feature maps that stay from forward to backward."""
        if option.memory == "keep":
            return saved
        if option.memory == "offload":
            return 0.0
        return self._kept_output(k, option, samples, saved)

    def _kept_output(self, k: int, option: Option, samples: int, saved: float) -> float:
        """Of the ``saved`` bytes those of the unit's output."""
        # A feature map counts to the unit that made it, whoever saves it. What nobody saves is not
        # among them (``unsaved_input_bytes``).
        if not self.model.profile.units[k].output_kept:
            return 0.0
        whole = self.model.output_bytes_per_sample(k)[0] * samples
        return min(whole / option.layout.degree, saved)

    def unsaved_input_bytes(self, k: int, option: Option, samples: int | None) -> float:
        """What a unit that is recomputed keeps of its inputs beyond what is kept anyway: tensors
        that nobody saves (a shortcut's sum; under autocast what is cast before it is saved)."""
        # Of one that several units run again from, each counts all: more than there is, on the
        # safe side.
        if samples is None:
            return 0.0
        if option.layout.degree > 1:
            # It keeps its input as it came, whoever saves that: ``own_input_bytes`` has what it
            # would save of it.
            entering = self._entering_bytes(k)
            unsaved = max(entering.whole - entering.saved, 0.0) * samples
            return unsaved * self._input_part(k, option) * entering.unshared
        units, edges = self.model.profile.units, self.model.profile.edges
        sources = ((edges[e], units[self.model.ends[e][0]]) for e in self.model.edges_into[k])
        unsaved_edges = (edge for edge, source in sources if not source.output_kept)
        return samples * sum(edge.bytes_per_sample for edge in unsaved_edges)

    def _input_part(self, k: int, option: Option) -> float:
        """The part of its input that a divided unit's largest member needs."""
        split = self.model.profile.units[k].split(option.style)
        if option.style != "row" or split is None:
            return 1.0
        return ceil(split.features / option.layout.degree) / split.features

    # -- all units of a position -----------------------------------------------------------------

    @property
    def updates_together(self) -> bool:
        """Whether the update's temporaries are those of all units at once."""
        return self.model.profile.device_type == "cuda" and not self.model.sliced

    def position(
        self, decisions: Sequence[Option], samples: dict[Layout, int | None]
    ) -> PositionMemory:
        """What a position of a class holds."""
        columns = [self.unit(k, o, samples[o.layout]).column for k, o in enumerate(decisions)]
        moved = [self.moved(k, decisions, samples[o.layout]) for k, o in enumerate(decisions)]
        table = np.array(columns, dtype=np.float64).T
        return self.joined(table, np.array(moved).T, decisions)

    def joined(self, units: Table, moved: Table, decisions: Sequence[Option]) -> PositionMemory:
        """The table ``units`` [field of ``UNIT_FIELDS``, unit], and ``moved`` of each unit, with
        what concerns all of them."""
        table = np.zeros((len(FIELDS), units.shape[1]))
        table[: len(units)] = units
        table[FIELD["kept_input"]], table[FIELD["received"]] = moved[:2]
        own_backward = _IN_OWN_BACKWARD @ units
        table[FIELD["returned"]] = returned_bytes(moved[2], own_backward)
        if units[FIELD["unsharded"] :].any():
            for overlap in self.overlaps:
                table[FIELD[overlap.point]] += overlap.added(table[FIELD[overlap.field]])
        write_segments(self.model, table, decisions)
        if not self.model.sliced:
            self._write_buckets(table, decisions)
        stated = points(
            many=self.model.micro_batches > 1,
            sliced=self.model.sliced,
            together=self.updates_together,
        )
        return PositionMemory(table, stated, self.model.sliced)

    def _write_buckets(self, table: Table, decisions: Sequence[Option]) -> None:
        """The most that open buckets take: one for each layout that exchanges gradients, and no
        more than what is still to be exchanged; none before the first gradient."""
        size = float(self.model.message_bytes)
        all_open = size * len({o.layout for o in decisions if o.layout.groups > 1})
        closes = [self.model.closes_bucket(k, option) for k, option in enumerate(decisions)]
        closed = size * np.array(closes)
        own = table[FIELD["bucketed"]]
        to_come = own.cumsum()
        units, last = np.arange(len(own)), self.model.last_trained
        table[FIELD["open_buckets"]] = np.minimum(to_come, all_open) * (units < last)
        # A unit that works may have closed one: its gradient is larger than a bucket.
        table[FIELD["unfilled_buckets"]] = np.minimum(to_come - own, all_open - closed) * (
            units <= last
        )

    def moved(
        self, k: int, decisions: Sequence[Option], samples: int | None
    ) -> tuple[float, float, float]:
        """Bytes of the inputs that redistributions bring to unit ``k`` and others may share, of the
        largest tensor that it receives from one, and of all that stands side by side as its
        output's gradient comes back from one."""
        if samples is None:
            return 0.0, 0.0, 0.0
        into, back = (
            [self.model.arrival(e, decisions) for e in edges[k]]
            for edges in (self.model.edges_into, self.model.edges_from)
        )
        return (
            sum(c.kept_bytes for c in into),
            max((c.received_bytes for c in into), default=0.0),
            max((c.returning_bytes for c in back), default=0.0),
        )


_IN_OWN_BACKWARD = indicator(OWN_BACKWARD, UNIT_FIELDS)


def memory_of(model: CostModel) -> MemoryModel:
    """The memory model of a cost model, made once: it remembers what each option holds."""
    # Kept by the cost model itself: the two refer to each other, so a table of them, weak or not,
    # would keep both alive.
    memory: MemoryModel = vars(model).get("_memory") or MemoryModel(model)
    vars(model)["_memory"] = memory
    return memory
