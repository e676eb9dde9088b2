"""A model that is random even without dropout, held to its own spread.

A plan's ranks draw for their own samples, so its steps never equal those of one process. What must
be equal is the mean: of the loss, of each parameter's gradient and of each buffer's change, over
draws. One process and the ranks take as many steps each, from the same state on the same batch,
every one with other random numbers, and the means are compared by a permutation test.

For each tensor two figures say how far the means are apart, in parts of their standard error: by
all elements together, and along the mean of all draws, where a gradient that is scaled (summed
instead of averaged, or missing) shows most and few of the noise's directions count. The labels "one
process" and "ranks" are then dealt anew, ``PERMUTATIONS`` times; the largest figure of any tensor
in each deal is what chance alone does, to all tensors together (Westfall and Young,
Resampling-Based Multiple Testing, 1993). As there are equally many draws of both, this also holds
where ranks spread less than one process (Romano, On the Behavior of Randomization Tests Without a
Group Invariance Assumption, JASA 1990): where a draw is of a batch, each rank makes its own. What
does not spread at all is allowed what rounding may do.
"""

import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import isfinite, sqrt
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

# So many steps are taken, as many as one process takes in so long.
LEAST_DRAWS, MOST_DRAWS, DRAWING_S = 8, 32, 30.0
# A right plan is called wrong so often: FALSE_ALARM = (1 + 1) / PERMUTATIONS, see ``_critical``.
PERMUTATIONS = 2000
FALSE_ALARM = 0.001
# The numbers that are kept of a tensor: its length to 6% (1.4 / √509). A prime number, or one
# column of a matrix could fall into one of them.
KEPT = 509
# An error of so many standard errors beyond what is allowed is found 39 times in 40.
SURELY = 2.0

Draw = Mapping[str, Tensor]
"""What one step did: ``sketch`` of the loss, of gradients and of changes of buffers, by name."""


def seed_all(seed: int) -> None:
    """Sets every generator that models draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    # Not imported here: a model that draws from it has done so.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts the states of these generators back at the end."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


def sketch(name: str, change: Tensor) -> Tensor:
    """At most ``KEPT`` numbers whose lengths and differences are, about, those of the tensor: sums
    of its elements with random signs, equal ones for equal names (Charikar, Chen and Farach-Colton,
    Finding Frequent Items in Data Streams, 2002). Many whole gradients would not fit in memory."""
    flat = change.detach().to("cpu")
    flat = torch.view_as_real(flat) if flat.is_complex() else flat
    flat = flat.to(torch.float64).flatten()
    if flat.numel() <= KEPT:
        return flat.clone()
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    signs = torch.randint(2, flat.shape, generator=generator, dtype=torch.int8)
    flat = torch.where(signs.bool(), flat, -flat)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % KEPT))
    return padded.reshape(-1, KEPT).sum(0)


def draws_in(step_s: float) -> int:
    """How many draws are made of a step that takes so long."""
    return int(min(max(DRAWING_S / step_s, LEAST_DRAWS), MOST_DRAWS))


class MeanDistance(NamedTuple):
    """How far the mean over the ranks' draws is from the mean over one process's: ``away`` is |Δ|;
    ``of_allowed`` the same over what is allowed (at most 1 is equal); ``found_from`` the smallest
    error that this comparison finds, relative to the mean."""

    away: float
    of_allowed: float
    found_from: float


class _Pair(NamedTuple):
    """All draws of one tensor, one process's first: their products with each other, whole and along
    their mean, and the square of what rounding may do."""

    whole: Tensor
    along: Tensor
    rounding: float
    length: float


def compare_draws(
    ours: Sequence[Draw], theirs: Sequence[Draw], rounding: Mapping[str, float]
) -> dict[str, MeanDistance]:
    """How far each tensor of ``ours`` is from ``theirs``, of which there are as many draws;
    ``rounding`` is what its mean may be off by (L2) where nothing spreads."""
    assert len(ours) == len(theirs) > 1
    far = MeanDistance(sys.float_info.max, sys.float_info.max, 0.0)
    names = list(dict.fromkeys([*theirs[0], *ours[0]]))
    pairs = {name: _pair(ours, theirs, name, rounding.get(name, 0.0)) for name in names}
    known = {name: pair for name, pair in pairs.items() if pair is not None}
    deals = _deals(len(ours))
    # Each is judged by the largest of all; the first deal is what was measured.
    figures = {
        name: [_figures(products, deals, pair.rounding) for products in (pair.whole, pair.along)]
        for name, pair in known.items()
    }
    critical = _critical(figures.values())
    found = {}
    for name in names:
        pair = known.get(name)
        found[name] = far if pair is None else _apart(pair, figures[name], deals, critical)
    return found


def _pair(ours: Sequence[Draw], theirs: Sequence[Draw], name: str, rounding: float) -> _Pair | None:
    """None where a side lacks it, or has another size or values that are no numbers."""
    rows = [draw.get(name) for draw in (*theirs, *ours)]
    tensors = [row for row in rows if row is not None]
    if len(tensors) < len(rows) or len({t.shape for t in tensors}) > 1:
        return None
    stacked = torch.stack(tensors)
    if not bool(stacked.isfinite().all()):
        return None
    mean = stacked.mean(0)
    length = float(mean.norm())
    # From the mean on, or the spread of what hardly spreads would be lost in its own rounding.
    centred = stacked - mean
    along = centred @ (mean / length) if length else centred.new_zeros(len(centred))
    return _Pair(centred @ centred.T, torch.outer(along, along), rounding**2, length)


@cache
def _deals(each: int) -> Tensor:
    """Weights of all draws in the difference of means, a row for each deal of labels."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.full((each,), -1.0), torch.ones(each)]).to(torch.float64)
    deals = [labels]
    while len(deals) < PERMUTATIONS:
        dealt = labels[torch.randperm(2 * each, generator=generator)]
        # Of eight draws there are few enough deals that the measured one, or its mirror, may come.
        if abs(float(dealt @ labels)) < 2 * each:
            deals.append(dealt)
    return torch.stack(deals) / each


def _squares(products: Tensor, deals: Tensor) -> tuple[Tensor, Tensor]:
    """|Δ|² of the means in each deal, and its expectation were the true means equal."""
    each = len(products) // 2
    apart = ((deals @ products) * deals).sum(1).clamp(min=0)
    within = (products.diagonal().sum() - each / 2 * apart).clamp(min=0)
    return apart, within / (each * (each - 1))


def _figures(products: Tensor, deals: Tensor, rounding: float) -> Tensor:
    apart, expected = _squares(products, deals)
    # What is exactly equal is not apart, whatever is allowed.
    return torch.where(apart > 0, apart / (expected + rounding).clamp(min=1e-300), 0.0)


def _critical(figures: object) -> float:
    """The second largest among what deals make of the worst tensor: beyond it are one deal at most
    and the measured one."""
    largest = torch.zeros(PERMUTATIONS, dtype=torch.float64)
    for both in figures:  # type: ignore[attr-defined]
        for one in both:
            largest = torch.maximum(largest, one)
    # No less than what spread without dimensions would be allowed.
    return max(float(largest[1:].topk(2).values[1]), 1.0)


def _apart(pair: _Pair, figures: list[Tensor], deals: Tensor, critical: float) -> MeanDistance:
    measured = max(float(one[0]) for one in figures)
    away, _ = _squares(pair.whole, deals[:1])
    # Along the mean, as that is where a gradient of another size differs.
    _, expected = _squares(pair.along, deals[:1])
    standard_error = sqrt(float(expected[0]) + pair.rounding)
    found_from = (sqrt(critical) + SURELY) * standard_error / pair.length if pair.length else 0.0
    return MeanDistance(sqrt(float(away[0])), sqrt(measured / critical), found_from)


def power_in_words(found: Mapping[str, MeanDistance]) -> str:
    """From what size on an error of a tensor would have been found."""
    sizes = {n: a.found_from for n, a in found.items() if isfinite(a.found_from) and a.found_from}
    if not sizes:
        return ""
    blind = [name for name, size in sizes.items() if size >= 1]
    told = (
        f"an error of {median(sizes.values()):.2g} times the mean would be found in half of the "
        "tensors, "
    )
    if not blind:
        return told + f"one of {max(sizes.values()):.2g} times the mean in each"
    return told + (
        f"but in {len(blind)} of {len(sizes)} not even a missing gradient ({blind[0]!r}, say): a "
        "larger --batch shows more"
    )
