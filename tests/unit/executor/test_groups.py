"""Which backends carry what, without any process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.executor.comm import groups
from meshwright.executor.comm.groups import make_world

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BOTH = "cpu:gloo,cuda:nccl"


class Handle:
    def __init__(self, config: str) -> None:
        self.config = config


@pytest.mark.parametrize(
    ("device", "default", "host_tensors", "backend", "on_stream"),
    [
        (GPU, BOTH, False, "nccl", True),
        (GPU, BOTH, True, None, True),
        (GPU, "gloo", False, None, False),
        (CPU, BOTH, False, None, False),
    ],
)
def test_sockets_are_for_control_and_for_tensors_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    default: str,
    host_tensors: bool,
    backend: str | None,
    on_stream: bool,
) -> None:
    made: list[str | None] = []
    connected: list[Handle] = []

    def new_group(ranks: list[int], backend: str | None = None, **_: Any) -> Handle:
        made.append(backend)
        return Handle(backend or default)

    def config(handle: Handle | None = None) -> str:
        return handle.config if handle is not None else default

    monkeypatch.setattr(groups, "_connect", lambda handle, device: connected.append(handle))
    both_ways: list[tuple[Handle, Handle]] = []
    monkeypatch.setattr(groups, "connect", lambda *ways: both_ways.append(ways))
    monkeypatch.setattr(groups.dist, "new_group", new_group)
    monkeypatch.setattr(groups.dist, "get_backend_config", config)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Handle(default)))
    world = make_world(
        range(4), [2], device, 5.0, [1, 2], [1], crossing=True, host_tensors=host_tensors
    )
    first, *others = made
    assert first == "gloo"
    assert len(others) > 8
    assert set(others) == {backend}
    assert not world.control.on_stream
    for group in (*world.gradients.values(), *world.redistribution.values()):
        assert group.on_stream == on_stream
        assert group.device == (device if on_stream else CPU)
    # Each communicator of this rank is made at once, before memory is looked at and steps begin.
    own = [*world.gradients.values(), *world.redistribution.values(), *world.unshards.values()]
    assert all((group.handle in connected) == on_stream for group in own)
    assert len(set(map(id, connected))) == len(connected)
    # Ranks that send each other messages are connected beforehand, too.
    assert bool(both_ways) == (not on_stream)
    assert {group.ways for group in own} - {None} <= set(both_ways)
