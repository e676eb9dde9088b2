"""A step as data: what a rank computes in order, and what gradient messages its links carry.

Two schedules, and the executor runs both. ``barrier``: gradients leave in buckets, first in, first
out, as backward frees them; all are waited for, then every unit is updated. ``priority``: gradients
leave in slices, the unit that forward needs first goes first; each unit's next forward waits for
its own slices and update only (P3, Jayarajan et al., arXiv 1905.03960).
"""

from collections.abc import Iterator, Sequence
from math import ceil, sqrt
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from ..cost.cost import CostModel
from ..cost.exchange import Gradient
from ..cost.step_time import LINKS, Chain, LinkMatrix, Vector
from ..schema.options import Option
from ..schema.plan import ScheduleName as ScheduleName
from ..schema.plan import leave_after_backward
from . import slicing
from .dropping import Budget, expected_turns
from .slicing import GradientSize, SliceSpec

COMPUTE = "compute"


class Work(NamedTuple):
    """One piece of what a rank does in order; ``resource`` is compute or a link it waits on.

    ``awaits`` are the units whose messages must have arrived before it starts; ``frees`` says that
    its unit's gradients are ready when it ends.
    """

    resource: str
    unit: int
    phase: str
    seconds: float
    awaits: tuple[int, ...] = ()
    frees: bool = False


class Message(NamedTuple):
    """Gradients of ``units`` that cross ``link`` together, once the backward of the first of them
    (the last to have it) is over, or all of backward (``after_backward``). Low ``urgency`` goes
    first. With ``turns`` it goes in some steps only, which repeat: ``seconds`` and ``sent_bytes``
    are then those of a mean step. Its units wait for it, or all of the next forward
    (``holds_forward``)."""

    units: tuple[int, ...]
    link: str
    seconds: float
    urgency: float = 0.0
    sent_bytes: float = 0.0
    turns: tuple[bool, ...] = ()
    after_backward: bool = False
    holds_forward: bool = False

    def goes(self, step: int) -> bool:
        """Whether it is sent in that step."""
        return not self.turns or self.turns[step % len(self.turns)]

    @property
    def whole_s(self) -> float:
        """Seconds in a step in which it is sent."""
        return self.seconds / fmean(self.turns) if self.turns else self.seconds

    @property
    def first(self) -> int:
        """The first unit of those whose gradients it has."""
        return min(self.units)

    @property
    def ready(self) -> int:
        """The unit with whose backward the message becomes ready."""
        return 0 if self.after_backward else self.first

    @property
    def awaited_by(self) -> tuple[int, ...]:
        """The units that wait for it in the next step, by themselves or before all others."""
        return (0, *self.units) if self.holds_forward and self.first else self.units


class Step(NamedTuple):
    """One step. Under the barrier messages go as they get ready; else by urgency, and
    with ``preempt`` a more urgent one stops one under way."""

    work: tuple[Work, ...]
    messages: tuple[Message, ...]
    schedule: ScheduleName
    preempt: bool = False


def work_of(chain: Chain, micro_batches: int, schedule: ScheduleName) -> tuple[Work, ...]:
    """What a rank does in one step, in order."""
    units = range(len(chain.forward_s))
    work: list[Work] = []

    def compute(k: int, phase: str, seconds: Vector, **how: Any) -> None:
        work.append(Work(COMPUTE, k, phase, float(seconds[k]), **how))

    def wait(k: int, phase: str, seconds: LinkMatrix) -> None:
        for link, row in zip(LINKS, seconds, strict=True):
            if row[k] > 0:
                work.append(Work(link, k, phase, float(row[k])))

    for m in range(micro_batches):
        for k in units:
            wait(k, "redistribute", chain.entry_forward_s)
            if schedule == "priority" and m == 0:
                compute(k, "update", chain.update_s, awaits=(k,))
            compute(k, "forward", chain.forward_s)
            wait(k, "reduce", chain.inner_forward_s)
        for k in reversed(units):
            wait(k, "gather gradient", chain.inner_backward_s)
            # Micro-batches add their gradients up: none may leave before the last one's.
            compute(k, "backward", chain.backward_s, frees=m == micro_batches - 1)
            wait(k, "redistribute gradient", chain.entry_backward_s)
    if schedule == "barrier":
        for k in units:  # the first update waits for all, so the others need not ask
            compute(k, "update", chain.update_s, awaits=() if k else tuple(units))
    return tuple(work)


def plain_messages(chain: Chain) -> tuple[Message, ...]:
    """One message for each unit and link, as the step formulas have it."""
    return tuple(
        Message((k,), link, float(chain.exchange_s[i][k]), k)
        for k in reversed(range(len(chain.forward_s)))
        for i, link in enumerate(LINKS)
        if chain.exchange_s[i][k] > 0
    )


class PackedGradients(NamedTuple):
    """Gradients of one kind in the order of backward, which leave when all of them are there, and
    the slices in which they are sent (a bucket is one slice). Whoever needs one of their units
    waits for all of them. The executor's ``GradGroup`` is one of these on a rank."""

    gradients: tuple[Gradient, ...]
    slices: tuple[SliceSpec, ...]

    @property
    def kind(self) -> Option:
        """What they have in common."""
        return self.gradients[0].kind

    @property
    def units(self) -> tuple[int, ...]:
        """The units that wait for it, in forward order."""
        return tuple(sorted({g.unit for g in self.gradients}))


def pack_gradients(
    model: CostModel, decisions: Sequence[Option], schedule: ScheduleName
) -> list[PackedGradients]:
    """The gradients of a step as the executor packs them, those that get ready first in front."""
    if schedule == "barrier":
        return [
            PackedGradients(bucket, (SliceSpec(tuple(range(len(bucket)))),))
            for bucket in _buckets(model, decisions)
        ]
    gradients, made = _in_backward(model, decisions), []
    for numbers in slicing.pack_units(
        GradientSize(g.kind, g.unit, g.packed_bytes) for g in gradients
    ):
        mine = tuple(gradients[i] for i in numbers)
        kind, sizes = mine[0].kind, [g.shared_bytes for g in mine]
        if kind.lossy:
            whole = [g.whole for g in mine]
            slices = slicing.cut_lossy(kind.exchange, sizes, whole, model.message_bytes)
        else:
            slices = slicing.cut(sizes, model.message_bytes)
        made.append(PackedGradients(mine, slices))
    return sorted(made, key=lambda packed: packed.units[0], reverse=True)


def _in_backward(model: CostModel, decisions: Sequence[Option]) -> list[Gradient]:
    return [g for k in reversed(range(len(decisions))) for g in model.gradients(k, decisions[k])]


def _buckets(model: CostModel, decisions: Sequence[Option]) -> list[tuple[Gradient, ...]]:
    gradients = _in_backward(model, decisions)
    # By undivided sizes: where shards are uneven, ranks would else pack different buckets.
    sizes = (GradientSize(g.kind, g.unit, g.full_bytes) for g in gradients)
    packed = slicing.pack_buckets(sizes, model.message_bytes)
    return [tuple(gradients[i] for i in numbers) for numbers in packed]


def messages_of(
    model: CostModel, decisions: Sequence[Option], schedule: ScheduleName
) -> tuple[Message, ...]:
    """Every bucket or slice as a message, each one collective (two where the exchange is sharded);
    none of those that are waited for in backward."""
    messages: list[Message] = []
    urgent = slicing.by_urgency(option.exchange for option in decisions)
    late = model.cluster.on_gpus and leave_after_backward(decisions, model.world_size)
    made = pack_gradients(model, decisions, schedule)
    dropped = _dropped_turns(model, made) if schedule == "priority" else {}
    for packed in made:
        if packed.kind.early_release:
            continue
        for one in packed.slices:
            mine, kind = [packed.gradients[i] for i in one.parameters], packed.kind
            turns = dropped.get(mine[0], ())
            if turns and not any(turns):
                continue
            if mine[0].whole and kind.lossy:
                kind = Option(kind.layout)  # what is sent whole is averaged like a dense gradient
            size = sum(g.shared_bytes for g in mine) / one.parts
            if kind.exchange == "low_rank":
                size = sum(g.payload_bytes for g in mine)
            elif kind.lossy and not turns:
                size = model.payload_bytes(kind, ceil(size))
            urgency = packed.units[0] if urgent else 0.0
            if kind.shards and model.cluster.on_gpus:
                messages += _sharded_on_streams(model, kind, size, packed.units, urgency, late=late)
                continue
            on, share = model.exchange(kind, size), fmean(turns or (1.0,))
            seconds, sent = share * on.seconds, share * on.sent_bytes
            link = LINKS[on.link]
            messages.append(Message(packed.units, link, seconds, urgency, sent, turns, late))
    return tuple(messages)


def _sharded_on_streams(
    model: CostModel,
    kind: Option,
    payload_bytes: float,
    units: tuple[int, ...],
    urgency: float,
    *,
    late: bool,
) -> Iterator[Message]:
    """A sharded exchange as a device's streams have it."""
    # ``step()`` queues the updates of all chunks on the computing stream, which waits for every
    # sum before it goes on to the next forward: see [Note: Sharded steps pipeline] in
    # executor/gradients/sharded.py. Parameters are gathered behind that; where they are sharded
    # too, as often in backward.
    way, back = model.sharded_exchange(kind, payload_bytes)
    link = LINKS[way.link]
    yield Message(
        units, link, way.seconds, urgency, way.sent_bytes, after_backward=late, holds_forward=True
    )
    times = (late, True) if kind.gathers else (True,)
    for after_backward in times:
        seconds, sent_bytes = back.seconds / len(times), back.sent_bytes / len(times)
        yield Message(units, link, seconds, urgency, sent_bytes, after_backward=after_backward)


def _dropped_turns(
    model: CostModel, made: Sequence[PackedGradients]
) -> dict[Gradient, tuple[bool, ...]]:
    """The steps in which each gradient is sent that layer dropping leaves out of others."""
    # A step that sends a large one hides no more of it than any step could: the mean step is longer
    # than a step that sends the mean bytes.
    dropped = [g for packed in made if packed.kind.exchange == "dropped" for g in packed.gradients]
    turns: dict[Gradient, tuple[bool, ...]] = {}
    for ratio in sorted({g.kind.ratio for g in dropped}):
        same = [g for g in dropped if g.kind.ratio == ratio]
        mine = [g for g in same if not g.whole]
        fixed = sum(g.full_bytes for g in same if g.whole)
        budget = Budget(ratio, [g.full_bytes for g in mine], fixed)
        turns |= zip(mine, expected_turns(budget, [_mean_of(model, g) for g in mine]), strict=True)
    return turns


def _mean_of(model: CostModel, gradient: Gradient) -> float:
    """What a gradient's elements have in the mean, as far as the profile of its unit tells."""
    unit = model.profile.units[gradient.unit]
    size = sum(p.bytes for p in unit.parameters if p.trainable)
    return sqrt(unit.gradient_energy / size) if unit.gradient_energy else 1.0


def step_of(
    model: CostModel, decisions: Sequence[Option], chain: Chain, schedule: ScheduleName
) -> Step:
    """The step that the executor runs under those decisions."""
    work = work_of(chain, model.micro_batches, schedule)
    return Step(work, messages_of(model, decisions, schedule), schedule)


def bucketed_s(model: CostModel, decisions: Sequence[Option]) -> LinkMatrix:
    """Seconds of the buckets, each at the unit with which it gets ready: with these as exchange,
    ``barrier_step`` is the simulation of the buckets (without interference), in less time."""
    found = np.zeros((len(LINKS), len(decisions)))
    for bucket in _buckets(model, decisions):
        last = bucket[-1]
        on = model.exchange(last.kind, sum(g.payload_bytes for g in bucket))
        found[on.link, last.unit] += on.seconds
    return found


def slice_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """Each unit's gradients in equal slices of at most ``message_bytes``, each one collective (two
    where the exchange is sharded), as the step formulas have them (the executor packs small ones
    together: ``pack_gradients``); none of those that are waited for in backward."""
    found = []
    for k in reversed(range(len(decisions))):
        size = model.unit(k, decisions[k]).gradient_bytes
        count = ceil(size / model.message_bytes)
        if count and not decisions[k].early_release:
            on = model.exchange(decisions[k], size / count)
            found += [Message((k,), LINKS[on.link], on.seconds, k, on.sent_bytes)] * count
    return tuple(found)
