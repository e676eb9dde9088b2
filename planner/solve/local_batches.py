"""How many samples of the batch each rank gets where devices are unequal.

[Note: Shares of unequal devices]
Under plain data parallelism a rank waits for the others only where gradients are exchanged. So the
step takes as long as it takes the slowest rank by itself, T = max over p of T_p(n_p), where T_p is
the step formula of the schedule on rank p's own times for its n_p samples, with the exchange, which
all have in common (docs/planner.md has the proof). What is wanted are whole n_p that add up to the
batch, fit in each device's memory, and make T least.

T_p does not fall as n_p grows. So the most samples with T_p(n_p) <= t are found by halving, for any
t, and t can be reached exactly if these add up to the batch or more. The least such t is one of the
values that the T_p take, and is found by halving too. There every rank has the samples that keep it
below t, and what is left goes to ranks that are at t then. Fewer seconds cannot be: below t all
ranks together take too few samples.

Of shares whose T is within ``NEAR`` of the least those come first of which no rank computes long:
the same search, with the seconds of computing for T and no more samples than that T allows. Where
little but the exchange is waited for, T hardly depends on the shares, and the last of what it gains
is less than it is known to; a plan that divides units then waits for what is computed.

Plain data parallelism decides the shares, and the search for layouts keeps them: a group of a
divided unit has the samples of its members. A plan that divides units is compared with other shares
afterwards (``with_quicker_shares``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil, floor

import numpy as np

from ..cost.compute import backward_s, forward_s
from ..cost.cost import CostModel
from ..cost.device_kinds import DeviceKind
from ..cost.step_time import barrier_step, compute_s, priority_step
from ..memory.timeline import peak_bytes
from ..memory.unit_memory import memory_of
from ..schema.local_batches import local_batches
from ..schema.plan import ScheduleName
from ..schema.profile import ModelProfile
from .evaluate import limits_bytes

Key = tuple[float, ...]
"""What is to be least at its largest: the first entry, and as far as that allows the second."""
KeyOf = Callable[[int], Key]
"""The key of a rank with so many samples."""
Rank = tuple[KeyOf, int, int]
"""What decides of a rank: its key, the fewest samples that it may have, and the most."""
ROUNDING = 1e-9
NEAR = 0.01
"""A step that is longer by so much is as good: curves are not measured more closely."""


def with_balanced_batches(model: CostModel, schedule: ScheduleName) -> CostModel:
    """The costs with the batch shared out so that plain data parallelism is quickest within each
    device's memory; the model itself where even shares are as good. See [Note: Shares of unequal
    devices]."""
    sizes = balanced_batches(model, schedule)
    return model if sizes is None else model.with_local_batches(sizes)


def balanced_batches(
    model: CostModel, schedule: ScheduleName, *, computing: bool = False
) -> tuple[int, ...] | None:
    """The samples of each position; None where even shares are as good. ``computing`` leaves out
    what the exchange takes: the longest computing is least."""
    limits = limits_bytes(model)
    if len(model.kinds) == 1 and len(set(limits)) == 1:
        return None
    batch, ranks, times = model.goal.batch, model.world_size, model.micro_batches
    even, over = local_batches(batch, ranks), _over_bytes(model, limits)
    fits = all(over(p)(n) <= (0,) for p, n in enumerate(even))
    if len(model.kinds) == 1 and fits:
        return None  # devices compute alike, and none lacks memory
    # A rank without samples has nothing to normalise by, and no micro-batch may be empty.
    low = times if batch >= ranks * times else 0
    least = (low,) * ranks
    by_limit = {limit: _most(over(p), low, batch, (0,)) for p, limit in enumerate(limits)}
    most = [by_limit[limit] for limit in limits]
    keys = _seconds(model, schedule)
    if computing:
        keys = _entries_of(keys, 1)
    if sum(most) < batch:
        # Too little memory without policies such as recomputing: what they must free is made small.
        keys, most = [over(p) for p in range(ranks)], [batch] * ranks
    found = least_in_turn(batch, keys, least, most)
    good = fits and _as_good(_largest(keys, even), _largest(keys, found))
    return None if good or found == even else found


def least_in_turn(
    batch: int, keys: Sequence[KeyOf], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...]:
    """The shares whose largest first entry is least, and of those near it the ones with the least
    of the next."""
    found: tuple[int, ...] = ()
    for entry in range(len(keys[0](least[0]))):
        each = _entries_of(keys, entry)
        found = least_largest(batch, each, least, most)
        limit = tuple(x * (1 + NEAR) for x in _largest(each, found))
        bounds = zip(each, least, most, strict=True)
        most = [_most(key, low, high, limit) for key, low, high in bounds]
    return found


def _entries_of(keys: Sequence[KeyOf], entry: int) -> list[KeyOf]:
    """One entry of each key."""

    def entry_of(key: KeyOf) -> KeyOf:
        return lambda n: (key(n)[entry],)

    # One function for equal keys: equal ranks are looked at once.
    made = {key: entry_of(key) for key in keys}
    return [made[key] for key in keys]


def _largest(keys: Sequence[KeyOf], sizes: Sequence[int]) -> Key:
    """The largest of each entry."""
    found = (key(n) for key, n in zip(keys, sizes, strict=True))
    return tuple(map(max, zip(*found, strict=True)))


def _as_good(one: Key, other: Key) -> bool:
    """Whether a key is not above another, but for rounding."""
    for a, b in zip(one, other, strict=True):
        if abs(a - b) > ROUNDING * max(a, b):
            return a < b
    return True


# -- the least of the largest --------------------------------------------------------------------


def least_largest(
    total: int, keys: Sequence[KeyOf], least: Sequence[int], most: Sequence[int]
) -> tuple[int, ...]:
    """Whole numbers from ``least`` to ``most`` that add up to ``total``, of which the largest
    ``keys[p](n)`` is as small as it can be. A key must not fall as n grows. Of numbers that are
    alike those are taken that differ least, the first ones larger."""
    assert sum(least) <= total <= sum(most), "no such numbers"
    ranks = list(zip(keys, least, most, strict=True))
    # Ranks that are alike are looked at once.
    alike = Counter(ranks)

    def up_to(limit: Key) -> dict[Rank, int]:
        """The most numbers whose keys are at most the limit."""
        return {rank: _most(*rank, limit) for rank in alike}

    def below(limit: Key) -> dict[Rank, int]:
        """The most whose keys are below it, but no less than the least."""
        return {rank: _below(*rank, limit) for rank in alike}

    def together(numbers: dict[Rank, int]) -> int:
        return sum(count * numbers[rank] for rank, count in alike.items())

    first = {rank: rank[0](rank[1]) for rank in alike}
    limit = max(first.values())
    if together(below(limit)) >= total:
        # Ranks that reach the limit with the least that they may have keep that; the others share
        # out the rest.
        others = [rank for rank in ranks if first[rank] < limit]
        left = total - sum(rank[1] for rank in ranks if first[rank] == limit)
        rest = iter(least_largest(left, *zip(*others, strict=True)) if others else ())
        return tuple(next(rest) if first[rank] < limit else rank[1] for rank in ranks)
    if together(up_to(limit)) < total:
        reached = []
        for key, low, high in alike:
            n = _first(lambda n, key=key: together(up_to(key(n))) >= total, low, high + 1)  # type: ignore[misc]
            reached += [key(n)] if n <= high else []
        limit = min(reached)
    numbers, room = below(limit), up_to(limit)
    return _filled([numbers[rank] for rank in ranks], [room[rank] for rank in ranks], total)


def _filled(numbers: list[int], most: Sequence[int], total: int) -> tuple[int, ...]:
    """The numbers with what lacks of the total, one by one in turns."""
    left = total - sum(numbers)
    while left:
        for p, room in enumerate(most):
            if left and numbers[p] < room:
                numbers[p] += 1
                left -= 1
    return tuple(numbers)


def _most(key: KeyOf, low: int, high: int, limit: Key) -> int:
    """The most from ``low`` to ``high`` whose key is at most the limit; ``low`` if none is."""
    return max(_first(lambda n: key(n) > limit, low, high + 1) - 1, low)


def _below(key: KeyOf, low: int, high: int, limit: Key) -> int:
    """The same for keys below the limit."""
    return max(_first(lambda n: key(n) >= limit, low, high + 1) - 1, low)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The least number from ``low`` for which it holds, as it does for all after that; ``high`` if
    for none below that."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


# -- what a rank takes with so many samples ------------------------------------------------------


def _seconds(model: CostModel, schedule: ScheduleName) -> list[KeyOf]:
    """For each position the seconds of a step of data parallelism in which it is the slowest, and
    of those the seconds in which it computes."""
    keys: dict[int, KeyOf] = {}
    for kind in model.kinds:
        key = _kind_seconds(model, kind, schedule)
        keys.update(dict.fromkeys(kind.positions, key))
    return [keys[p] for p in range(model.world_size)]


def _kind_seconds(model: CostModel, kind: DeviceKind, schedule: ScheduleName) -> KeyOf:
    there, layout, units = model.of_kind(kind), model.baseline[0].layout, kind.profile.units
    formula = barrier_step if schedule == "barrier" else priority_step
    chain = there.chain(there.baseline)

    def computing(samples: int) -> tuple[list[float], list[float]]:
        forward = [forward_s(unit, "none", 1, samples) for unit in units]
        return forward, [backward_s(unit, "none", 1, samples) for unit in units]

    # What the executor itself adds to a backward does not depend on the samples.
    own_s = chain.backward_s - computing(there.samples_by_kind(layout)[0])[1]

    def key(samples: int) -> Key:
        forward, backward = map(np.array, computing(samples))
        alone = chain._replace(forward_s=forward, backward_s=backward + own_s)
        return formula(alone, model.micro_batches), compute_s(alone)

    return _growing(key, kind.profile, model.micro_batches)


def _over_bytes(model: CostModel, limits: Sequence[int]) -> Callable[[int], KeyOf]:
    """For a position the bytes that it is over its limit under data parallelism."""
    memory, layout = memory_of(model), model.baseline[0].layout

    def peak(samples: int) -> Key:
        return (ceil(peak_bytes(memory.position(model.baseline, {layout: samples}))[0]),)

    grown = _growing(peak, model.profile, model.micro_batches)

    def over(limit: int) -> KeyOf:
        return lambda n: (grown(n)[0] - limit,)

    # One function for equal limits: equal ranks are looked at once.
    by_limit = {limit: over(limit) for limit in limits}
    return lambda p: by_limit[limits[p]]


def _growing(key: KeyOf, profile: ModelProfile, micro_batches: int) -> KeyOf:
    """The largest that each entry of ``key``, of the samples of a micro-batch, is for up to so many
    samples of a step: noise may let measured curves fall."""
    # Between the sizes that were measured curves are straight, and a key is the largest of some
    # sums of them: convex, so that of what lies between it is nowhere larger than at both ends.
    sizes = {
        at
        for unit in profile.units
        for x in (*unit.whole.forward.x, *unit.whole.backward.x, *unit.whole.saved.x)
        for at in (floor(x), ceil(x))
    }
    known = cache(key)

    def grown(samples: int) -> Key:
        count = ceil(samples / micro_batches)
        below = (known(at) for at in (count, *(x for x in sizes if 0 < x < count)))
        return tuple(map(max, zip(*below, strict=True)))

    return cache(grown)
