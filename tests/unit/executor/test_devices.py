"""Which device a rank takes, by what it sees and is told; GPUs are pretended."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.launch import devices
from meshwright.executor.launch.devices import RankDevice, local_device, why_on_cpu
from meshwright.planner.schema.errors import InputError


def device(monkeypatch, gpus: int, **told: str) -> str:
    for name in (*devices.LOCAL_NUMBERS, devices.SHARING, "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "_agreed", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(devices, "_nccl_version", lambda: devices.SHARING_SINCE)
    return str(local_device())


@pytest.mark.parametrize(
    ("gpus", "told", "expected"),
    [
        (0, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "cpu"),
        (4, {}, "cuda:0"),
        (4, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:3"),
        (4, {"SLURM_LOCALID": "2", "WORLD_SIZE": "8", "RANK": "6"}, "cuda:2"),
        (4, {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "WORLD_SIZE": "8"}, "cuda:1"),
        (2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "cpu"),
        # Several may work on one.
        (2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", devices.SHARING: "1"}, "cuda:0"),
        (2, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", devices.SHARING: "1"}, "cuda:1"),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", devices.SHARING: "1"}, "cuda:0"),
        # Each rank is shown one GPU: its own, as far as it can know by itself.
        (1, {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, "cuda:0"),
        (1, {"WORLD_SIZE": "4", "RANK": "3"}, "cuda:0"),
    ],
)
def test_a_rank_takes_its_own_gpu(monkeypatch, gpus, told, expected):
    assert device(monkeypatch, gpus, **told) == expected


def test_several_gpus_need_the_ranks_number(monkeypatch):
    with pytest.raises(InputError, match=r"sees 4 GPUs and LOCAL_RANK is not set.*set it to"):
        device(monkeypatch, 4, RANK="1", WORLD_SIZE="8")


def test_ranks_that_see_one_gpu_are_told():
    own = [RankDevice("a", "GPU-1"), RankDevice("a", "GPU-2"), RankDevice("b", "GPU-3")]
    assert why_on_cpu(own, sharing=False) is None
    assert why_on_cpu([RankDevice("a", "")] * 2, sharing=False) is None
    # Where torch has no identities, numbers are told; they are each host's own.
    assert why_on_cpu([RankDevice("a", "0"), RankDevice("b", "0")], sharing=False) is None
    twice = [*own, RankDevice("b", "GPU-3")]
    assert str(why_on_cpu(twice, sharing=False)).startswith("2 ranks of host b see the same one")
    assert why_on_cpu(twice, sharing=True) is None
    reason = why_on_cpu([*own, RankDevice("c", "")], sharing=True)
    assert str(reason).startswith("rank 0 sees a GPU and rank 3 has none for it: all compute on")


@pytest.mark.parametrize(
    ("gpus", "ranks", "sharing", "version", "expected"),
    [
        (0, 1, "1", (2, 30), False), (4, 4, "", (2, 30), True), (4, 8, "", (2, 30), False),
        (4, 8, "1", (2, 30, 7), True), (1, 2, "1", (2, 30), True), (1, 2, "1", (2, 29), False),
    ],
)  # fmt: skip
def test_where_ranks_of_a_host_compute_is_known_before_they_start(
    monkeypatch, gpus, ranks, sharing, version, expected
):
    monkeypatch.setenv(devices.SHARING, sharing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(devices, "_nccl_version", lambda: version)
    assert devices.on_gpus(ranks) == expected
