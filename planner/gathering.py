"""Bytes of parameters that are whole only while they are used (exchange ``fully_sharded``).

Each rank keeps its chunk of them. While a unit works, forward or backward, its own are whole, and
those of the unit that comes next are on their way. In backward, the gradients of the unit after it
are on their way too, as sent and as received; the executor waits before there are more of these
than the largest unit has.

The neighbours count whatever their own exchange is, so that a unit's bytes depend on its own
decision alone: an upper bound. Forward is taken to hold the smaller neighbour, as the backward of
the same unit holds more anyway. Tied parameters count as whole throughout: in backward they are,
from their first use to their last. With micro-batches gradients are added up whole.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from .options import Option
from .shares import shard_bytes
from .structure import Structure

ARRIVING = 2
"""So many times its size a gradient takes until it has arrived: what is sent, what is received."""


class Gathered(NamedTuple):
    """Bytes of one unit: ``saved`` of parameters, and as many of their gradients, that this rank
    need not keep between uses; ``at_work`` of parameters that are whole while it works, ``before``
    of more of them in its backward, and ``behind`` of these and the gradients on their way;
    ``whole`` its own while they are."""

    saved: int = 0
    at_work: int = 0
    before: int = 0
    behind: int = 0
    whole: int = 0


def gathered(structure: Structure, k: int, option: Option) -> Gathered:
    """What unit ``k`` keeps and holds where its parameters are fully sharded; nothing elsewhere."""
    groups, degree = option.layout.groups, option.layout.degree
    if not option.gathers or groups == 1:
        return Gathered()
    own = own_bytes(structure, k, option)
    last = len(structure.profile.units) - 1
    plain = Option(option.layout) if degree == 1 else option
    after = own_bytes(structure, k + 1, plain) if k < last else 0
    before = own_bytes(structure, k - 1, plain) if k else 0
    least = min(before, after)
    behind = before - least + ARRIVING * after
    return Gathered(own - ceil(own / groups), own + least, before - least, behind, own)


def neighbours(structure: Structure, k: int) -> tuple[int, ...]:
    """All of a unit and its neighbours that ``gathered`` depends on."""
    known = range(len(structure.profile.units))
    return tuple(own_bytes(structure, i) if i in known else 0 for i in (k - 1, k, k + 1))


def own_bytes(structure: Structure, k: int, option: Option | None = None) -> int:
    """A member's parameters of a unit that are trained, and nobody else's; without an ``option``
    those of the whole unit."""
    unit, tied = structure.profile.units[k], set[str]()
    for other in structure.ties[k]:
        if other != k:
            tied |= {p.shared for p in structure.profile.units[other].parameters}
    alone = tuple(p for p in structure.owned[k] if p.trainable and p.shared not in tied)
    if option is None:
        return sum(p.bytes for p in alone)
    return shard_bytes(unit, option.style, option.layout.degree, alone)
