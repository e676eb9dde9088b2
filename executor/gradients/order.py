"""In which order slices leave: from the plan at first, then from what is measured.

See [Note: The order of slices] in planner/simulate/slicing.py.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import torch

from ...planner.schema.plan import Plan
from ...planner.simulate.slicing import ReadyGroup, SendSlot, send_order
from ..comm.control import Control, PendingGather
from .release import place_released
from .slices import GradGroup

FIRST = (2, 4, 8, 16)
EVERY = 50
"""The backwards after which ranks agree on new times: soon, and then now and then."""
KEPT = 5
"""So many backwards are remembered: a median over them is the time of a unit."""
MANY = 4
"""So many slices must be under way for the link's rate to be read off their time."""
# Of fewer, too large a part may have been carried before backward was over.
LATE = 1.1
"""Gradients are taken to be ready by so much later than measured."""
# One that is later than its turn leaves the link idle, for good; one that is earlier waits for a
# slice or two.


@dataclass(frozen=True)
class Orders:
    """How to find the order. Without ``urgent`` slices go first come, first served; without
    ``measured`` the plan's order stays."""

    plan: Plan
    urgent: bool = True
    measured: bool = True


class SendOrder:
    """The order that is in force, the same on all ranks."""

    def __init__(self, orders: Orders, grad_groups: Sequence[GradGroup], control: Control) -> None:
        self._orders, self._grad_groups, self._control = orders, grad_groups, control
        self._seconds = _planned_seconds(orders.plan, grad_groups)
        sizes = sum(one.shared_bytes for g in grad_groups for one in g.slices)
        self._rate_s = sum(map(sum, self._seconds)) / max(sizes, 1)
        """Seconds for a byte by which the slots were found."""
        self._ready: deque[list[float]] = deque(maxlen=KEPT)
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._at_most: deque[float] = deque(maxlen=KEPT)
        """Of the last backwards, seconds for a byte that the link takes no more than."""
        self._coming: PendingGather | None = None
        self._number = 0
        self._left: dict[GradGroup, int] = {}
        self._end_s = 0.0
        self._most = (0, 0.0)
        self._arriving = threading.Lock()
        self.slots = self._find(_planned_ready(orders.plan, grad_groups))

    def _find(self, ready_s: Sequence[float]) -> list[SendSlot]:
        ready_groups = [
            ReadyGroup(at * LATE, group.unit, () if group.released else tuple(seconds))
            for at, group, seconds in zip(ready_s, self._grad_groups, self._seconds, strict=True)
        ]
        return place_released(
            send_order(ready_groups, urgent=self._orders.urgent), self._grad_groups
        )

    def begin(self) -> None:
        """Before a backward: changes to the order that ranks have agreed on, if there is one."""
        if self._coming is None:
            return
        # Every rank comes here after the same number of backwards: all swap at the same step.
        (agreed,) = self._coming.rows()
        self._coming = None
        rate_s, ready_s = agreed[0], agreed[1:]
        if rate_s > 0:
            self._rate_s = rate_s
            self._seconds = [[s.shared_bytes * rate_s for s in g.slices] for g in self._grad_groups]
        self.slots = self._find(ready_s)

    def end(self, grad_groups: Sequence[GradGroup], start_s: float) -> None:
        """After a backward that began at ``start_s``."""
        if not self._orders.measured:
            return
        self._number += 1
        self._ready.append(_measured_ready(grad_groups))
        first_s = min((g.ready_s for g in grad_groups if g.ready_s > 0), default=0.0)
        self._count_left(start_s + first_s)
        if self._number in FIRST or self._number % EVERY == 0:
            # A link that was idle in between seems slower than it is, never quicker. One that has
            # carried more than it was believed to can is quicker than that, however idle.
            quicker = (rate_s for rate_s in self._at_most if rate_s < self._rate_s)
            rate_s = min((*self._rates, *quicker), default=0.0)
            times = [median(row) for row in zip(*self._ready, strict=True)]
            vector = torch.tensor([rate_s, *times], dtype=torch.float64, device="cpu")
            # The latest of all ranks: a slice is ready when the last rank has it.
            self._coming = self._control.all_reduce_max(
                vector, "the agreement on the order of slices"
            )

    def _count_left(self, first_s: float) -> None:
        """What is under way, and what has been carried since the first slice left."""
        if self._most[0]:
            self._rates.append(self._most[1])
        self._end_s, self._left, self._most = time.perf_counter(), {}, (0, 0.0)
        ahead, number, done = 0, 0, 0
        for slot in self.slots:
            grad_group = self._grad_groups[slot.group]
            one = grad_group.slices[slot.number]
            if not one.is_completed:
                ahead, number = ahead + one.bytes, number + 1
            elif one.work is not None:
                done += one.bytes
            if number >= MANY:
                self._left[grad_group] = ahead
        if done:
            self._at_most.append((self._end_s - first_s) / done)

    def arrived(self, grad_group: GradGroup, waited_s: float) -> None:
        """Estimates the links' rate from a wait for a group: they were busy until now."""
        with self._arriving:  # the sharded step's thread calls it too
            # Of a step's waits the one with most bytes ahead counts: others measure the forward.
            ahead = self._left.pop(grad_group, 0)
            if waited_s > 0 and ahead > self._most[0]:
                self._most = ahead, (time.perf_counter() - self._end_s) / ahead


def _measured_ready(grad_groups: Sequence[GradGroup]) -> list[float]:
    """When this rank has had the gradients of each group; those of a unit that leaves it idle, not
    before those of the units behind it."""
    # As ranks begin their backwards at different times, such a unit could else seem to be ready
    # before units whose gradients peers wait for in backward, and these would wait for what comes
    # after them.
    behind: dict[int, float] = {}
    latest = 0.0
    for grad_group in sorted(grad_groups, key=lambda g: -g.unit):
        if not grad_group.absent:
            latest = max(latest, grad_group.ready_s)
        behind[grad_group.unit] = latest
    return [behind[g.unit] if g.absent else g.ready_s for g in grad_groups]


def _planned_ready(plan: Plan, grad_groups: Sequence[GradGroup]) -> list[float]:
    """When backward is over for each group's unit, in the plan's prediction."""
    after = list(accumulate(unit.backward_s for unit in reversed(plan.units)))[::-1]
    if any(after):
        return [after[min(g.unit, len(after) - 1)] for g in grad_groups]
    last = max((g.unit for g in grad_groups), default=0)
    # A plan without times: in the order of backward.
    return [float(last - g.unit) for g in grad_groups]


def _planned_seconds(plan: Plan, grad_groups: Sequence[GradGroup]) -> list[list[float]]:
    """What each slice takes in the plan's prediction: its part of its unit's exchange."""
    whole: dict[int, int] = {}
    for grad_group in grad_groups:
        sizes = sum(one.shared_bytes for one in grad_group.slices)
        whole[grad_group.unit] = whole.get(grad_group.unit, 0) + sizes
    found = []
    for grad_group in grad_groups:
        known = grad_group.unit < len(plan.units) and whole[grad_group.unit]
        each = plan.units[grad_group.unit].exchange_s / whole[grad_group.unit] if known else 0.0
        found.append([one.shared_bytes * each for one in grad_group.slices])
    return found
