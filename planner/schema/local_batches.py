"""How a batch is shared out over ranks: the one statement of it, for planner and executor."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def local_batches(batch: int, ranks: int, planned: Sequence[int] = ()) -> tuple[int, ...]:
    """The samples of each position in a ``batch``. Without ``planned`` sizes shares are even, and
    the first positions get one more where the batch does not divide. With them a batch of their sum
    is shared out as planned, and another one in the same proportion, to a sample; but none is left
    without a sample where there are as many as positions."""
    if not planned:
        least, more = divmod(batch, ranks)
        return tuple(least + (p < more) for p in range(ranks))
    # Bounds are rounded, not shares, so that these add up; up, as the first get one more.
    whole = sum(planned)
    bounds = [-(-batch * end // whole) for end in accumulate(planned, initial=0)]
    found = [b - a for a, b in pairwise(bounds)]
    # A loader has no batch of nothing, and normalisation no mean of it.
    while batch >= ranks and 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)
