"""Ranks agree on a device: a GPU for each, or the CPU for all."""

from __future__ import annotations

import os
import warnings
from unittest.mock import patch

import torch
from meshwright.executor.launch import devices

WORLD = 2
GPU = torch.device("cuda", 0)


def agree(rank: int) -> None:
    with patch.object(devices, "device_identity", lambda device: f"GPU-{rank}"):
        assert devices.agreed_device(GPU) == GPU
    assert devices.ranks_on(GPU) == 1
    with (
        patch.object(devices, "device_identity", lambda device: "GPU-0"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error" if rank else "ignore")  # one rank tells for all
        assert devices.agreed_device(GPU).type == "cpu"
        assert devices.local_device().type == "cpu"
        assert devices.ranks_on(GPU) == 1
        with patch.dict(os.environ, {devices.SHARING: "1"}):
            assert devices.agreed_device(GPU) == GPU
        assert devices.ranks_on(GPU) == WORLD
    devices._agreed.clear()


def test_ranks_of_one_gpu_compute_on_the_cpu(ranks):
    ranks(WORLD)(agree)
