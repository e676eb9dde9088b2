"""Bytes of parameters that are whole only while they are used (exchange ``fully_sharded``).

Each rank keeps its chunk of them. While a unit works, forward or backward, its own are whole, and
those of the unit that comes next are on their way. In backward, the gradients of the two units
after it are on their way too, what belongs to others as sent and as received; the executor waits
before there are those of a third. An embedding's backward does not use its parameters: the unit
that comes next there is the one before it.

The neighbours (of units with such parameters) count whatever their own exchange is, so that a
unit's bytes depend on its own decision alone: an upper bound. Tied parameters count as whole
throughout: in backward they are, from their first use to their last. With micro-batches gradients
are added up whole.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from ..schema.options import Option
from .compute import shard_bytes
from .structure import Structure

ARRIVING = 2
"""So many times what others own of a gradient it takes, besides this rank's own chunk, until it has
arrived: what is sent, what is received."""


class Gathered(NamedTuple):
    """Bytes of one unit: ``saved`` of parameters, and as many of their gradients, that this rank
    need not keep between uses; ``at_work`` of parameters that are whole in its forward, ``before``
    of others in its backward, ``behind`` of what its backward has more than its forward; ``whole``
    its own while they are, ``underway`` of its gradients on their way, ``meanwhile`` of the next
    unit's as its own leave."""

    saved: int = 0
    at_work: int = 0
    before: int = 0
    behind: int = 0
    whole: int = 0
    underway: int = 0
    meanwhile: int = 0


def gathered(structure: Structure, k: int, option: Option) -> Gathered:
    """What unit ``k`` keeps and holds where its parameters are fully sharded; nothing elsewhere."""
    groups, degree = option.layout.groups, option.layout.degree
    if not option.gathers or groups == 1:
        return Gathered()
    own = own_bytes(structure, k, option)
    plain = Option(option.layout) if degree == 1 else option
    before, after, beyond = (
        0 if near is None else own_bytes(structure, near, plain) for near in _near(structure, k)
    )
    saved, *later = (bytes_ - ceil(bytes_ / groups) for bytes_ in (own, after, beyond))
    return Gathered(
        saved=saved,
        at_work=own + after,
        before=before,
        behind=before + ARRIVING * sum(later) - after,
        whole=own,
        underway=ARRIVING * saved,
        meanwhile=ARRIVING * later[0],
    )


def neighbours(structure: Structure, k: int) -> tuple[int, ...]:
    """All of a unit and its neighbours that ``gathered`` depends on."""
    near = (k, *_near(structure, k))
    return tuple(0 if i is None else own_bytes(structure, i) for i in near)


def _near(structure: Structure, k: int) -> tuple[int | None, int | None, int | None]:
    """The unit before ``k`` and the two after it that stand beside it."""
    after = whole_after(structure, k)
    beyond = None if after is None else whole_after(structure, after)
    return whole_before(structure, k), after, beyond


def whole_before(structure: Structure, k: int) -> int | None:
    """The last unit before ``k`` whose parameters backward uses, and which may gather them."""
    units = structure.profile.units
    earlier = (i for i in reversed(range(k)) if units[i].kind != "embedding")
    return next((i for i in earlier if own_bytes(structure, i)), None)


def whole_after(structure: Structure, k: int) -> int | None:
    """The first unit after ``k`` that may gather parameters."""
    later = range(k + 1, len(structure.profile.units))
    return next((i for i in later if own_bytes(structure, i)), None)


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
