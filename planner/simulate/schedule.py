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
from ..cost.step_time import LINKS, Chain, LinkMatrix
from ..schema.layout import Layout
from ..schema.options import Option
from ..schema.plan import ScheduleName as ScheduleName

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
    """Gradients that travel together: of parameters with one layout, hence the same peers, and one
    exchange policy; ``option`` stands for both.

    ``full_bytes`` is their size undivided, ``gradient_bytes`` that of a member's payloads.
    """

    option: Option
    units: tuple[int, ...]
    full_bytes: int = 0
    gradient_bytes: int = 0

    @property
    def layout(self) -> Layout:
        """The layout that all of them have."""
        return self.option.layout


def buckets(model: CostModel, decisions: Sequence[Option]) -> list[Bucket]:
    """Gradients gathered parameter by parameter in the order of backward, each layout's and
    policy's by themselves. A bucket that one more parameter would fill beyond the model's
    ``bucket_bytes`` (undivided, so that all ranks agree) is closed. In the order in which their
    last gradients get ready, so that none holds back another that is.
    """
    open_: dict[Option, Bucket] = {}
    closed: list[Bucket] = []
    for k in reversed(range(len(decisions))):
        key = _together(decisions[k])
        for full, shard in model.gradients(k, decisions[k]):
            bucket = open_.get(key)
            if bucket is not None and bucket.full_bytes + full > model.bucket_bytes:
                closed.append(open_.pop(key))
                bucket = None
            units, before, mine = bucket[1:] if bucket else ((), 0, 0)
            units = units if k in units else (k, *units)
            open_[key] = Bucket(key, units, before + full, mine + shard)
    return sorted([*closed, *open_.values()], key=lambda b: min(b.units), reverse=True)


def _together(option: Option) -> Option:
    """What options whose gradients may share a bucket have in common."""
    return Option(option.layout, exchange=option.exchange)


def bucket_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """The buckets as messages, each one collective."""
    messages = []
    for bucket in buckets(model, decisions):
        on = model.exchange(bucket.option, bucket.gradient_bytes)
        messages.append(Message(bucket.units, LINKS[on.link], on.seconds, 0.0, on.sent_bytes))
    return tuple(messages)


def bucketed_s(model: CostModel, decisions: Sequence[Option]) -> LinkMatrix:
    """Seconds of the buckets, each at the unit with which it gets ready: with these as exchange,
    ``barrier_step`` is the simulation of the buckets (without interference), in less time."""
    found = np.zeros((len(LINKS), len(decisions)))
    open_: dict[Option, list[int]] = {}  # undivided bytes, a member's bytes, first unit

    def close(key: Option, payload_bytes: int, first: int) -> None:
        on = model.exchange(key, payload_bytes)
        found[on.link, first] += on.seconds

    for k in reversed(range(len(decisions))):
        key = _together(decisions[k])
        for full, shard in model.gradients(k, decisions[k]):
            bucket = open_.get(key)
            if bucket is None or bucket[0] + full > model.bucket_bytes:
                if bucket is not None:
                    close(key, *bucket[1:])
                bucket = open_[key] = [0, 0, k]
            bucket[0] += full
            bucket[1] += shard
            bucket[2] = k
    for key, bucket in open_.items():
        close(key, *bucket[1:])
    return found


def slice_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """Each unit's gradients in equal slices of at most ``bucket_bytes``, each one collective (two
    where the exchange is sharded), as the step formulas have them (the executor packs small ones
    together: ``grad_groups``); none of those that are waited for in backward."""
    found = []
    for k in reversed(range(len(decisions))):
        size = model.unit(k, decisions[k]).gradient_bytes
        pieces = ceil(size / model.bucket_bytes)
        if pieces and not decisions[k].early_release:
            on = model.exchange(decisions[k], size / pieces)
            found += [Message((k,), LINKS[on.link], on.seconds, k, on.sent_bytes)] * pieces
    return tuple(found)
