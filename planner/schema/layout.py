"""Layouts and the lattice of them: how a unit's batch and parameters are divided."""

from collections.abc import Iterator
from itertools import product
from typing import Literal

from .record import Count, Index, Record

Style = Literal["none", "column", "row", "pair"]
"""How a unit's parameters are divided over the members of a group.

``none``    not divided (degree 1).
``column``  by output features: every member needs the whole input of the group's samples and
            makes a slice of the output features.
``row``     by input features: every member needs a slice of the input features and makes partial
            sums, which are reduced so that each member keeps its own samples, whole.
``pair``    a column half followed by a row half inside one unit (attention, MLP): whole input,
            partial sums at the end, nothing in between.
"""


class Layout(Record, frozen=True, kw_only=True, order=True):
    """The batch divided over ``groups``, the parameters over the ``degree`` members of each.

    Positions ``first`` to ``first + groups·degree - 1`` take part; group ``g`` is made of the
    positions ``first + g·degree`` and the next ``degree - 1``.
    """

    groups: Count
    degree: Count = 1
    first: Index = 0

    @property
    def size(self) -> int:
        """How many positions take part."""
        return self.groups * self.degree

    @property
    def positions(self) -> range:
        """The positions that take part."""
        return range(self.first, self.first + self.size)

    def group(self, g: int) -> range:
        """The positions of group ``g``."""
        start = self.first + g * self.degree
        return range(start, start + self.degree)

    def place(self, position: int) -> tuple[int, int] | None:
        """(group, member) of a position, or None where it is idle."""
        if position not in self.positions:
            return None
        return divmod(position - self.first, self.degree)

    # Members of a group are neighbours, as they wait for each other in forward and backward; peers
    # are a group's length apart, as their exchange can hide behind computing.
    def peers(self, member: int) -> range:
        """The positions that hold the same shard: those that exchange its gradient."""
        return range(self.first + member, self.first + self.size, self.degree)

    def __str__(self) -> str:
        start = f"@{self.first}" if self.first else ""
        return f"({self.groups},{self.degree}){start}"


def data_parallel(world_size: int) -> Layout:
    """The layout of plain data parallelism, and of the model's input and output."""
    return Layout(groups=world_size)


def lattice(world_size: int, *, complete: bool = False, bursts: bool = True) -> Iterator[Layout]:
    """The layouts that start at position 0: group counts and degrees from divisors and powers
    of two of the world size, every number with ``complete``, those that leave positions idle only
    with ``bursts``.
    """
    # All numbers up to W would make about W ln W layouts, and search time grows with their square.
    every = range(1, world_size + 1)
    sizes = [n for n in every if complete or world_size % n == 0 or n.bit_count() == 1]
    for groups, degree in product(sizes, sizes):
        used = groups * degree
        if used == world_size or (bursts and used < world_size):
            yield Layout(groups=groups, degree=degree)
