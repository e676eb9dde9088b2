"""Fully sharded exchange: parameters are whole only while they are used, and nobody notices."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from typing import Any

import msgspec
import pytest
import test_sharded
import torch
from meshwright.executor.apply import apply
from meshwright.executor.exchange.chunks import LocalChunk
from meshwright.executor.exchange.fully_sharded import FullyShardedParcel
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.planner.errors import InputError
from meshwright.planner.variants import with_exchange
from plans import plan, unit
from reference import twin
from test_sharded import (
    Pair,
    close,
    counts_of,
    data,
    layouts,
    loss_of,
    net,
    part,
    shards,
    sharing,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


def under(rank: int, check: str, *args: Any) -> None:
    """A check of sharded exchange with parameters sharded too."""
    with sharing("fully_sharded"):
        getattr(test_sharded, check)(rank, *args)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adagrad"])
@pytest.mark.parametrize("world", WORLDS)
def test_equals_one_process(ranks, world, optimizer):
    ranks(world)(under, "equals_one_process", world, optimizer, 5)


@pytest.mark.parametrize(
    "check",
    [
        "clips_by_norm",
        "clips_by_value",
        "shows_gradients",
        "accumulates",
        "zeroes",
        "follows_schedulers",
        "steps_with_a_closure",
        "resumes",
        "scaler_skips_everywhere",
    ],
)
@pytest.mark.parametrize("world", WORLDS)
def test_user(ranks, check, world):
    ranks(world)(under, check, world)
