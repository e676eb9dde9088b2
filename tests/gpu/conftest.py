"""Ranks that share a GPU and talk by NCCL; without one the same code on CPUs, where collectives are
treated as those of a device's streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "distributed"))
sys.path.insert(0, str(Path(__file__).parent))

from harness import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(2)(function)`` runs a function on two ranks."""
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        # From NCCL 2.30 on several ranks may work on one GPU.
        os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}
    started: dict[int, Ranks] = {}
    yield lambda size: started.setdefault(size, Ranks(size, backend))
    for pool in started.values():
        pool.stop()
