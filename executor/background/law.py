"""How much of the time a background job may have, from the foreground's step times alone.

No processes, no clocks: told what a step took and whether the background ran in it,
``ShareController`` says what share it may have next.
"""

# [Note: The background's share]
# A step's *slowdown* is its time over the undisturbed time, which is the median of steps during
# which the background is held; which steps these are follows from their number alone, so that all
# hosts of a run hold theirs in the same steps without a word.
#
# Two rules together. The share falls at once in proportion to the excess (harm is taken to grow
# with the share) and rises slowly, so that it settles where the limit is nearly reached. And what a
# step took beyond the limit is a debt: until steps below the limit have paid it, the background is
# held. So for any background, however it behaves, over any window of n steps
#
#     mean slowdown ≤ limit + (worst - limit) / n
#
# with ``worst`` the largest slowdown that one step can suffer, as long as steps without it take
# their undisturbed time. ``overdue_s`` bounds the worst: a step that is past the limit while it
# runs goes on undisturbed, so it takes at most limit + 1 times its undisturbed time. One that takes
# much longer contains something else (an evaluation, a checkpoint) and is not counted.

from collections import deque
from statistics import median
from typing import NamedTuple

# Equal to ``BACKGROUND_LIMIT`` of the planner's goal, which the pacer does not load, as that would
# load the planner with it.
LIMIT = 1.1
"""Default of what the foreground's step may be slowed by."""
FIRST_HELD = 8
"""So many steps at the beginning the background is held."""
WARM_UP = 3
"""So many of these do not count: they allocate and fill caches."""
REFRESH_EVERY, REFRESH_HELD = 100, 5
"""Of so many later steps, the last so many are held again; the first of these does not count, as
the background's data is still in the caches."""
REMEMBERED = 10
"""The undisturbed time is the median of so many held steps."""
START_SHARE = 0.5
"""All of the gaps, and nothing else: see ``gate``."""
RISE = 0.05
"""What a good step adds to the share."""
CALM = 0.7
"""A step that takes more than this part of the allowed excess adds nothing."""
LEAST_FACTOR, MOST_FACTOR = 0.1, 0.8
"""What one bad step leaves of the share, at least and at most."""
PAUSE = 2.0
"""A step that is slowed by so much more than the limit contains a pause of the user's script."""


def is_held(number: int) -> bool:
    """Whether the background is held in the foreground's step of that number, the first being 1."""
    if number <= FIRST_HELD:
        return True
    return (number - FIRST_HELD - 1) % REFRESH_EVERY >= REFRESH_EVERY - REFRESH_HELD


def is_measured(number: int) -> bool:
    """Whether that step's time is an undisturbed one."""
    if number <= FIRST_HELD:
        return number > WARM_UP
    return (number - FIRST_HELD - 1) % REFRESH_EVERY > REFRESH_EVERY - REFRESH_HELD


class Summary(NamedTuple):
    """What the foreground went through: steps that count, those of them in which the background
    might run, its undisturbed seconds, and the mean slowdown over the steps that count, held ones
    included, and over the disturbed."""

    steps: int
    disturbed: int
    undisturbed_s: float
    slowdown: float
    disturbed_slowdown: float


class ShareController:
    """The feedback for one foreground. ``share`` is what the background may have now, 0 to 1."""

    def __init__(self, limit: float = LIMIT) -> None:
        assert limit > 1
        self.limit = limit
        self.debt = 0.0
        self._share = START_SHARE
        self._number = 0
        self._undisturbed: deque[float] = deque(maxlen=REMEMBERED)
        self._all: list[float] = [0, 0.0]  # steps, sum of slowdowns
        self._disturbed: list[float] = [0, 0.0]

    @property
    def undisturbed_s(self) -> float | None:
        """Seconds of a step without the background; None before any was measured."""
        return median(self._undisturbed) if self._undisturbed else None

    @property
    def share(self) -> float:
        """The share of the time that the background may have in the step that runs now."""
        return 0.0 if self.learns or self.debt > 0 else self._share

    @property
    def learns(self) -> bool:
        """Whether the background is held in the step that runs now to measure the undisturbed
        time."""
        return is_held(self._number + 1) or not self._undisturbed

    def passed(self, number: int) -> None:
        """The foreground made its step of that number, of which nothing can be learned."""
        self._number = number

    def stepped(self, number: int, seconds: float, held: bool = False) -> None:
        """The foreground's step of that number took so long; ``held`` says that the background was
        held throughout it from outside, whatever its share."""
        free = self.share > 0 and not held
        self._number = number
        if number > WARM_UP and (held or (is_measured(number) and not free)):
            self._undisturbed.append(seconds)
        undisturbed_s = self.undisturbed_s
        if undisturbed_s is None or number <= WARM_UP:
            return
        slowdown = seconds / undisturbed_s
        if slowdown > self.limit + PAUSE:
            return
        _count(self._all, slowdown)
        if free:
            _count(self._disturbed, slowdown)
            self._adapt(slowdown)
            self.debt = max(0.0, slowdown - self.limit)
        else:  # what is slow without the background is not its debt
            self.debt = max(0.0, self.debt - max(0.0, self.limit - slowdown))

    def _adapt(self, slowdown: float) -> None:
        allowed, excess = self.limit - 1, slowdown - 1
        if excess > allowed:
            self._share *= min(max(allowed / excess, LEAST_FACTOR), MOST_FACTOR)
        elif excess <= CALM * allowed:
            self._share = min(1.0, self._share + RISE)

    def overdue_s(self) -> float | None:
        """So long after its beginning a step is past the limit, and its rest must be undisturbed;
        None where that is not known yet."""
        undisturbed_s = self.undisturbed_s
        return None if undisturbed_s is None else self.limit * undisturbed_s

    def paused_s(self) -> float | None:
        """So long after its beginning a step contains something else; None where that is not known
        yet."""
        undisturbed_s = self.undisturbed_s
        return None if undisturbed_s is None else (self.limit + PAUSE) * undisturbed_s

    def summary(self) -> Summary:
        """What has happened so far; slowdowns are 1 where nothing was counted."""
        return Summary(
            int(self._all[0]),
            int(self._disturbed[0]),
            self.undisturbed_s or 0.0,
            _mean(self._all),
            _mean(self._disturbed),
        )


def _count(total: list[float], value: float) -> None:
    total[0] += 1
    total[1] += value


def _mean(total: list[float]) -> float:
    return total[1] / total[0] if total[0] else 1.0
