"""The tables of units, edges and ties that a sheet is made of, as arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...memory.rows import FIGURES, LOST_FIGURE
from ...schema.layout import Layout, Style
from ...schema.options import Option

State = tuple[Layout, Style]
Numbers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Reals = npt.NDArray[np.float64]
Policy = tuple[tuple[str, Any], ...]
"""Fields of ``Option`` and their values."""


class Block(NamedTuple):
    """One of the choices of a unit: what each policy adds, [state, policy, figure], and where it
    may be had, [state, policy]. ``lost`` is the share of the whole gradient's energy that each
    policy leaves for later: the one thing in which units of the same shape differ here."""

    policies: tuple[Policy, ...]
    figures: Reals
    allowed: Mask
    lost: Reals

    @property
    def free(self) -> bool:
        """Whether every policy may be had in every state."""
        return bool(self.allowed.all())


class UnitTable(NamedTuple):
    """One unit. An option's number is (state · memory policies + memory) · exchange policies +
    exchange."""

    states: tuple[State, ...]
    memory: Block
    exchange: Block

    def split(self, number: int) -> tuple[int, int, int]:
        """(state, memory policy, exchange policy) of an option's number."""
        rest, exchange = divmod(int(number), len(self.exchange.policies))
        state, memory = divmod(rest, len(self.memory.policies))
        return state, memory, exchange

    def number(self, state: int, memory: int, exchange: int) -> int:
        """The option's number."""
        count = len(self.memory.policies)
        return (state * count + memory) * len(self.exchange.policies) + exchange

    def figures(self, number: int) -> Reals:
        """The option's figures."""
        state, memory, exchange = self.split(number)
        found: Reals = self.memory.figures[state, memory] + self.exchange.figures[state, exchange]
        found[LOST_FIGURE] = self.memory.lost[memory] + self.exchange.lost[exchange]
        return found

    def option(self, number: int) -> Option:
        """The option itself."""
        state, memory, exchange = self.split(number)
        fields = (*self.memory.policies[memory], *self.exchange.policies[exchange])
        return Option(*self.states[state])._replace(**dict(fields))

    def find(self, option: Option) -> int:
        """The option's number, -1 where it may not be had."""
        state = option.layout, option.style
        if state not in self.states:
            return -1
        at, fields = self.states.index(state), option._asdict()
        for memory, first in enumerate(self.memory.policies):
            for exchange, second in enumerate(self.exchange.policies):
                fits = all(fields[name] == value for name, value in (*first, *second))
                if fits and self.memory.allowed[at, memory] and self.exchange.allowed[at, exchange]:
                    return self.number(at, memory, exchange)
        return -1

    def may(self, state: int, memory: int, exchange: int) -> bool:
        """Whether the option may be had."""
        return bool(self.memory.allowed[state, memory] and self.exchange.allowed[state, exchange])

    def numbers(self) -> list[int]:
        """The numbers of all options."""
        pairs = self.memory.allowed[:, :, None] & self.exchange.allowed[:, None, :]
        return [int(n) for n in np.flatnonzero(pairs)]


class EdgeTable(NamedTuple):
    """Figures of ``rows.ENTRY`` and ``rows.RECEIVED``, [figure, source's state, target's state]."""

    source: int
    target: int
    figures: Reals


class TieTable(NamedTuple):
    """Which states of two tied units agree."""

    source: int
    target: int
    agree: Mask


def nothing(states: int) -> Block:
    """A choice of one policy that adds nothing."""
    figures = np.zeros((states, 1, len(FIGURES)))
    return Block(((),), figures, np.ones((states, 1), dtype=bool), np.zeros(1))
