"""A plan whose units take a part of the ranks, and a training under it: what is tried and told."""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import msgspec
import torch
from burst_models import DtypeName
from meshwright.models.workload import Batch
from meshwright.planner.schema.plan import Plan

Counts = tuple[int, ...]
"""The samples that each position feeds in one backward, its micro-batches together."""
Clip = Literal["none", "norm", "largest", "value"]
"""What becomes of gradients before a step: nothing, clipped by the norm of all of them (the L2
norm, the largest element), or element by element."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A plan for a model, and how it is trained under it.

    ``steps`` has the counts of each backward of each step; with ``no_sync`` all of a step's but the
    last are under ``no_sync``. ``plan.micro_batches`` says into how many pieces each is cut.
    ``decays`` halves the learning rate after each step, ``evaluates`` calls the model without
    gradients before the second one. ``seed`` is that of the data.
    """

    model: str
    plan: Plan
    steps: tuple[tuple[Counts, ...], ...]
    dtype: DtypeName = "float64"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    no_sync: bool = False
    clip: Clip = "norm"
    decays: bool = False
    evaluates: bool = False
    seed: int = 0

    @property
    def parts(self) -> int:
        """Into how many micro-batches each backward is cut."""
        return self.plan.micro_batches

    @property
    def exchanges(self) -> tuple[int, ...]:
        """How many backwards of each step exchange gradients."""
        return tuple(1 if self.no_sync else len(step) for step in self.steps)

    def tell(self) -> str:
        """The trial as JSON, by which ranks are told of it and which runs it again."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def read(text: str) -> Trial:
        """The trial of ``tell``."""
        return msgspec.json.decode(text, type=Trial)

    def __str__(self) -> str:
        plan = self.plan
        units = ", ".join(
            f"{u.name} {u.layout} {u.style} {u.memory} {u.exchange}"
            + (" released" if u.early_release else "")
            for u in plan.units
            if u.modules
        )
        flags = [f for f in ("no_sync", "decays", "evaluates") if getattr(self, f)]
        return (
            f"{self.model} in {self.dtype} {plan.schedule} at {plan.placement} with "
            f"{self.optimizer}, clipped by {self.clip}, {' '.join(flags)} {self.steps} samples in "
            f"{self.parts} pieces, slices of {plan.message_bytes}, data of {self.seed}: {units}"
        )

    __repr__ = __str__


def samples_at(counts: Counts, position: int) -> tuple[int, int]:
    """Which samples of the batch a position feeds."""
    starts = [0, *accumulate(counts)]
    return starts[position], starts[position + 1]


def piece_counts(counts: Counts, parts: int) -> list[Counts]:
    """The samples of each position in each micro-batch, as ``micro_batches`` cuts them."""
    return [tuple(n * (i + 1) // parts - n * i // parts for n in counts) for i in range(parts)]


def pieces_of(batch: Batch, counts: Counts, parts: int) -> list[Batch]:
    """What all positions together feed in each micro-batch, in the order of positions."""
    if parts == 1:
        return [batch]
    index = []
    for i in range(parts):
        mine = []
        for position, n in enumerate(counts):
            start = samples_at(counts, position)[0]
            mine += range(start + n * i // parts, start + n * (i + 1) // parts)
        index.append(torch.tensor(mine, dtype=torch.int64))
    return [batch.take(i) for i in index]
