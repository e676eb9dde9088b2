"""Which parameters layer dropping sends in a step: what ranks agree on, and what a plan expects.

Lee et al., Applied Sciences 10(24):8846, 2020; the full text was not at hand, this follows the
abstract.
"""

from collections.abc import Sequence
from typing import NamedTuple

PATIENCE = 10
"""A parameter that was not sent in so many backwards is sent in the next, if not told otherwise."""

# A plan's mean step is that of so many, after as many others.
EXPECTED_STEPS = 32


class DropCandidate(NamedTuple):
    """A parameter that may be sent: its bytes, the mean absolute value that is expected of its
    accumulated gradient, and for how many backwards it has not been sent."""

    bytes: int
    mean: float
    waited: int


def choose(
    candidates: Sequence[DropCandidate], credit_bytes: float, patience: int
) -> tuple[list[bool], float]:
    """(which are sent, the credit that is left). Those that have waited too long go in any case,
    then the largest means while there is credit."""
    # The last may overdraw it, and the backwards after it pay for that, so that the share that is
    # sent is right over time whatever the sizes.
    sent = [one.waited >= patience for one in candidates]
    credit = credit_bytes - sum(p.bytes for p, stale in zip(candidates, sent, strict=True) if stale)
    for i in sorted(range(len(candidates)), key=lambda i: (-candidates[i].mean, i)):
        if credit <= 0:
            break
        if not sent[i]:
            sent[i] = True
            credit -= candidates[i].bytes
    return sent, credit


class Budget:
    """The parameters of one ratio, which share a budget: those that may be dropped, of so many
    bytes each, and others of ``fixed_bytes`` together that are sent in every backward."""

    def __init__(self, ratio: float, droppable_bytes: Sequence[int], fixed_bytes: int) -> None:
        self.droppable_bytes = tuple(droppable_bytes)
        self.credit_bytes = 0.0
        self._all = sum(droppable_bytes) + fixed_bytes
        self._each = ratio * self._all - fixed_bytes

    def choose(self, means: Sequence[float], waited: Sequence[int], patience: int) -> list[bool]:
        """Which parameters are sent in the next backward."""
        # Debts of stale parameters that no budget could pay must not grow for ever.
        credit = max(self.credit_bytes + self._each, -self._all)
        rows = map(DropCandidate, self.droppable_bytes, means, waited)
        sent, self.credit_bytes = choose(tuple(rows), credit, patience)
        return sent


def expected_turns(budget: Budget, means: Sequence[float]) -> list[tuple[bool, ...]]:
    """In which of ``EXPECTED_STEPS`` steps in the midst of training each parameter is sent, if each
    backward adds as much to what waits: ``means`` in the mean of its elements."""
    waited = [0] * len(means)
    turns: list[list[bool]] = []
    for _ in range(2 * EXPECTED_STEPS):
        expected = [mean * (steps + 1) for mean, steps in zip(means, waited, strict=True)]
        sent = budget.choose(expected, waited, PATIENCE)
        waited = [0 if goes else steps + 1 for goes, steps in zip(sent, waited, strict=True)]
        turns.append(sent)
    return list(zip(*turns[EXPECTED_STEPS:], strict=True))
