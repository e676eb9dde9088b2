"""A step as data: what a rank computes in order, and what gradient messages its links carry.

Two schedules. ``barrier``: gradients leave in buckets, first in, first out, as backward frees them;
all are waited for, then every unit is updated (what the executor runs). ``priority``: gradients
leave in slices, the unit that forward needs first goes first; each unit's next forward waits for
its own slices and update only (P3, Jayarajan et al., arXiv 1905.03960).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal, NamedTuple

from .cost import CostModel, OnLink, Option
from .step import LINKS, Chain, LinkMatrix

ScheduleName = Literal["barrier", "priority"]
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
    """Gradients of ``units`` that cross ``link`` together, once the first of them (the last to
    finish its backward) is ready. The lowest ``urgency`` goes first."""

    units: tuple[int, ...]
    link: str
    seconds: float
    urgency: float = 0.0
    sent_bytes: float = 0.0


class Step(NamedTuple):
    """One step. ``fifo`` messages go in the order in which they get ready; else by urgency, and
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


class Bucket(NamedTuple):
    """Units whose gradients travel together: they have one layout, hence the same peers, and one
    exchange policy, here as an option that stands for theirs."""

    option: Option
    units: tuple[int, ...]
    gradient_bytes: int


def buckets(model: CostModel, decisions: Sequence[Option]) -> list[Bucket]:
    """Gradients gathered in backward order, layout by layout; a bucket is full once it holds
    the model's ``bucket_bytes`` or more (a unit is not cut), and what is left at the end travels
    as it is.
    """
    open_: dict[Option, Bucket] = {}
    full: list[Bucket] = []
    for k in reversed(range(len(decisions))):
        size = model.unit(k, decisions[k]).gradient_bytes
        if not size:
            continue
        key = Option(decisions[k].layout, exchange=decisions[k].exchange)
        last = open_.pop(key, Bucket(key, (), 0))
        bucket = Bucket(key, (k, *last.units), last.gradient_bytes + size)
        if bucket.gradient_bytes >= model.bucket_bytes:
            full.append(bucket)
        else:
            open_[key] = bucket
    return full + list(open_.values())


def _message(units: tuple[int, ...], on: OnLink, urgency: float = 0.0) -> Message:
    return Message(units, LINKS[on.link], on.seconds, urgency, on.sent_bytes)


def bucket_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """The buckets as messages, each one collective."""
    found = buckets(model, decisions)
    return tuple(_message(b.units, model.exchange(b.option, b.gradient_bytes)) for b in found)


def slice_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """Each unit's gradients in equal slices of at most ``bucket_bytes``, each one collective (two
    where the exchange is sharded); none of those that are waited for in backward."""
    found = []
    for k in reversed(range(len(decisions))):
        size = model.unit(k, decisions[k]).gradient_bytes
        pieces = ceil(size / model.bucket_bytes)
        if pieces and not decisions[k].early_release:
            on = model.exchange(decisions[k], size / pieces)
            found += [_message((k,), on, k)] * pieces
    return tuple(found)


def step_of(
    model: CostModel,
    decisions: Sequence[Option],
    chain: Chain,
    schedule: ScheduleName,
) -> Step:
    """The step that the executor runs under those decisions; the model's ``bucket_bytes`` is the
    size of a slice under priority."""
    if schedule == "barrier":
        messages = bucket_messages(model, decisions)
    else:
        messages = slice_messages(model, decisions)
    return Step(work_of(chain, model.micro_batches, schedule), messages, schedule)
