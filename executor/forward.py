"""One forward of the model: how many samples each rank feeds, and how its output is weighted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..planner.schema.errors import InputError
from .comm.control import Gathered, Header


class Weight:
    """How much this rank's loss counts: its share of all ranks' counts, times the world size.

    Losses are means over each rank's own samples, gradients are averaged over ranks; with this
    factor the average is the gradient of the mean over the whole batch, however uneven the shares.
    """

    def __init__(self, mine: float, all_counts: Callable[[], Sequence[float]]) -> None:
        self._mine = mine
        self._all = all_counts

    def factor(self) -> float:
        """Exactly 1.0 for even shares; 0.0 where this rank has nothing. Waits for the counts."""
        counts = self._all()
        total = sum(counts)
        return self._mine * len(counts) / total if total else 0.0


class Forward:
    """What is known of one forward. ``synchronise`` is False inside ``no_sync``.

    ``number`` counts the forwards whose header is exchanged. ``begin`` starts that exchange; where
    nothing has needed it before, the backward does.
    """

    def __init__(self, samples: int, *, synchronise: bool, begin: Callable[[], Header]) -> None:
        self.samples = samples
        self.synchronise = synchronise
        self.weight: Weight | None = None
        self._begin = begin
        self._header: Header | None = None
        self._factor: float | None = None

    @property
    def announced(self) -> bool:
        """Whether the exchange of headers has started."""
        return self._header is not None

    def announce(self) -> Header:
        """Starts the exchange of headers if that has not happened yet."""
        if self._header is None:
            self._header = self._begin()
        return self._header

    def counts(self) -> tuple[int, ...]:
        """The samples of each rank, in rank order. Waits for the header."""
        return tuple(row.samples for row in self.announce().rows())

    def factor(self) -> float:
        """What the output's gradient is multiplied by. Waits for what it depends on."""
        if self._factor is None:
            weight = self.weight or Weight(self.samples, self.counts)
            self.announce().rows()
            self._factor = weight.factor()
        return self._factor

    def weigh(self, mine: float, gathered: Gathered) -> None:
        """Weights the loss by counts that the user gave instead of samples."""
        self.weight = Weight(mine, lambda: [row[0] for row in gathered.rows()])
        self._factor = None


def samples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Dim 0 of the first tensor among a call's inputs."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            return int(leaf.shape[0])
    raise InputError(
        "the model was called without a tensor that has a batch dim: pass the batch as a tensor "
        "with its samples in dim 0"
    )


def shapes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The inputs' shapes without the batch dim, as text that can be compared between ranks."""
    return ";".join(
        f"{tuple(leaf.shape[1:])}{leaf.dtype}{leaf.requires_grad}"
        for leaf in pytree.tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    )
