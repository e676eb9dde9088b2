"""A step as data: what a rank computes in order, and what gradient messages its links carry.

Two schedules. ``barrier``: gradients leave in buckets, first in, first out, as backward frees them;
all are waited for, then every unit is updated (what the executor runs). ``priority``: gradients
leave in slices, the unit that forward needs first goes first; each unit's next forward waits for
its own slices and update only (P3, Jayarajan et al., arXiv 1905.03960).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from ..cost.cost import CostModel
from ..cost.exchange import Gradient
from ..cost.step_time import LINKS, Chain, LinkMatrix
from ..schema.options import Option
from ..schema.plan import ScheduleName as ScheduleName
from . import slicing
from .slicing import SliceSpec, Travelling

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
    (the last to have it) is over. Low ``urgency`` goes first."""

    units: tuple[int, ...]
    link: str
    seconds: float
    urgency: float = 0.0
    sent_bytes: float = 0.0

    @property
    def ready(self) -> int:
        """The unit with whose backward the message becomes ready."""
        return min(self.units)


class Step(NamedTuple):
    """One step. Under the barrier messages go as they get ready; else by urgency, and
    with ``preempt`` a more urgent one stops one under way."""

    work: tuple[Work, ...]
    messages: tuple[Message, ...]
    schedule: ScheduleName
    preempt: bool = False


def _blocking(seconds: LinkMatrix, unit: int, phase: str) -> list[Work]:
    return [
        Work(link, unit, phase, float(seconds[i, unit]))
        for i, link in enumerate(LINKS)
        if seconds[i, unit] > 0
    ]


def _forward(chain: Chain, k: int, gate: bool) -> list[Work]:
    awaits = (k,) if gate else ()
    work = _blocking(chain.entry_forward_s, k, "redistribute")
    if gate:
        work.append(Work(COMPUTE, k, "update", float(chain.update_s[k]), awaits))
    work.append(Work(COMPUTE, k, "forward", float(chain.forward_s[k])))
    return work + _blocking(chain.inner_forward_s, k, "reduce")


def _backward(chain: Chain, k: int, last: bool) -> list[Work]:
    work = _blocking(chain.inner_backward_s, k, "gather gradient")
    work.append(Work(COMPUTE, k, "backward", float(chain.backward_s[k]), frees=last))
    return work + _blocking(chain.entry_backward_s, k, "redistribute gradient")


def work_of(chain: Chain, micro_batches: int, schedule: ScheduleName) -> tuple[Work, ...]:
    """What a rank does in one step, in order."""
    units = range(len(chain.forward_s))
    work: list[Work] = []
    for m in range(micro_batches):
        for k in units:
            work += _forward(chain, k, gate=schedule == "priority" and m == 0)
        for k in reversed(units):
            work += _backward(chain, k, last=m == micro_batches - 1)
    if schedule == "barrier":
        everything = tuple(units)
        for k in units:  # the first waits for all
            awaits = everything if k == 0 else ()
            work.append(Work(COMPUTE, k, "update", float(chain.update_s[k]), awaits))
    return tuple(work)


def plain_messages(chain: Chain) -> tuple[Message, ...]:
    """One message for each unit and link, as the step formulas have it."""
    return tuple(
        Message((k,), link, float(chain.exchange_s[i][k]), k)
        for k in reversed(range(len(chain.forward_s)))
        for i, link in enumerate(LINKS)
        if chain.exchange_s[i][k] > 0
    )


class GradGroup(NamedTuple):
    """Gradients of one kind in the order of backward, and the slices in which they are sent: a
    bucket has one, which holds all of them.

    It leaves when all of its gradients are there, and whoever needs one of its units waits for all
    of it.
    """

    gradients: tuple[Gradient, ...]
    cuts: tuple[SliceSpec, ...]

    @property
    def kind(self) -> Option:
        """What they have in common."""
        return self.gradients[0].kind

    @property
    def units(self) -> tuple[int, ...]:
        """The units that wait for it, in forward order."""
        return tuple(sorted({g.unit for g in self.gradients}))


def grad_groups(
    model: CostModel, decisions: Sequence[Option], schedule: ScheduleName
) -> list[GradGroup]:
    """The gradients of a step as the executor packs them, those that get ready first in front."""
    gradients = _in_backward(model, decisions)
    if schedule == "barrier":
        return [
            GradGroup(tuple(gradients[i] for i in bucket), (SliceSpec(tuple(range(len(bucket)))),))
            for bucket in _buckets(model, gradients)
        ]
    packed = slicing.pack_units(Travelling(g.kind, g.unit, g.shared_bytes) for g in gradients)
    found = [tuple(gradients[i] for i in numbers) for numbers in packed]
    made = [GradGroup(group, _cuts(group, model.message_bytes)) for group in found]
    return sorted(made, key=lambda group: group.units[0], reverse=True)


def _in_backward(model: CostModel, decisions: Sequence[Option]) -> list[Gradient]:
    return [g for k in reversed(range(len(decisions))) for g in model.gradients(k, decisions[k])]


def _buckets(model: CostModel, gradients: Sequence[Gradient]) -> list[list[int]]:
    """By undivided sizes, so that all ranks agree."""
    travelling = (Travelling(g.kind, g.unit, g.full_bytes) for g in gradients)
    return slicing.pack_buckets(travelling, model.message_bytes)


def _cuts(gradients: Sequence[Gradient], message_bytes: int) -> tuple[SliceSpec, ...]:
    kind, sizes = gradients[0].kind, [g.shared_bytes for g in gradients]
    if not kind.lossy:
        return slicing.cut(sizes, message_bytes)
    return slicing.cut_lossy(kind.exchange, sizes, [g.whole for g in gradients], message_bytes)


def messages_of(
    model: CostModel, decisions: Sequence[Option], schedule: ScheduleName
) -> tuple[Message, ...]:
    """Every bucket or slice as a message, each one collective (two where the exchange is sharded);
    none of those that are waited for in backward."""
    messages = []
    for group in grad_groups(model, decisions, schedule):
        if group.kind.early_release:
            continue
        for one in group.cuts:
            mine, kind = [group.gradients[i] for i in one.parameters], group.kind
            if mine[0].whole and kind.lossy:
                kind = Option(kind.layout)
            size = sum(g.shared_bytes for g in mine) / one.parts
            on = model.exchange(kind, model.payload_bytes(kind, ceil(size)) if kind.lossy else size)
            messages.append(
                Message(group.units, LINKS[on.link], on.seconds, group.units[0], on.sent_bytes)
            )
    return tuple(messages)


def step_of(
    model: CostModel,
    decisions: Sequence[Option],
    chain: Chain,
    schedule: ScheduleName,
) -> Step:
    """The step that the executor runs under those decisions; the model's ``message_bytes`` is the
    size of a slice under priority."""
    work = work_of(chain, model.micro_batches, schedule)
    return Step(work, messages_of(model, decisions, schedule), schedule)


def bucketed_s(model: CostModel, decisions: Sequence[Option]) -> LinkMatrix:
    """Seconds of the buckets, each at the unit with which it gets ready: with these as exchange,
    ``barrier_step`` is the simulation of the buckets (without interference), in less time."""
    found = np.zeros((len(LINKS), len(decisions)))
    gradients = _in_backward(model, decisions)
    for bucket in _buckets(model, gradients):
        last = gradients[bucket[-1]]
        on = model.exchange(last.kind, sum(gradients[i].payload_bytes for i in bucket))
        found[on.link, last.unit] += on.seconds
    return found


def slice_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """Each unit's gradients in equal slices of at most ``message_bytes``, each one collective (two
    where the exchange is sharded), as the step formulas have them (the executor packs small ones
    together: ``grad_groups``); none of those that are waited for in backward."""
    found = []
    for k in reversed(range(len(decisions))):
        size = model.unit(k, decisions[k]).gradient_bytes
        pieces = ceil(size / model.message_bytes)
        if pieces and not decisions[k].early_release:
            on = model.exchange(decisions[k], size / pieces)
            found += [Message((k,), LINKS[on.link], on.seconds, k, on.sent_bytes)] * pieces
    return tuple(found)
