"""Ranks agree on a device: a GPU for each, or the CPU for all."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import torch
from meshwright.executor.launch import devices

WORLD = 2
GPU = torch.device("cuda", 0)


def agree(rank: int) -> None:
    with patch.object(devices, "_identity", lambda device: f"GPU-{rank}"):
        assert devices.agreed_device(GPU) == GPU
    with patch.object(devices, "_identity", lambda device: "GPU-0"), warnings.catch_warnings():
        warnings.simplefilter("error" if rank else "ignore")  # one rank tells for all
        assert devices.agreed_device(GPU).type == "cpu"
        assert devices.local_device().type == "cpu"
    devices._agreed.clear()


def test_ranks_of_one_gpu_compute_on_the_cpu(ranks):
    ranks(WORLD)(agree)
