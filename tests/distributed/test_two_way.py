"""Exchanges with a process group for each way: what arrives is what one group brings."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from meshwright.executor.comm.groups import Group, make_world
from meshwright.executor.comm.two_way import all_to_all, gather_rows
from torch import Tensor

Row = list[float]


def two_way_group() -> Group:
    world = make_world(range(dist.get_world_size()), [], torch.device("cpu"), 60.0, gathered=[1])
    group = world.gradients[1]
    assert group.opposite is not None
    return group


def everything(group: Group) -> list[Row]:
    """What this rank gets in exchanges of uneven rows, and in gathers of several types."""
    draw, found = random.Random(7), []
    me, size = group.member, group.size
    for _ in range(5):
        counts = [[draw.choice([0, 1, 2, 5]) for _ in range(size)] for _ in range(size)]
        sent, received = counts[me], [row[me] for row in counts]
        out = torch.arange(3.0 * sum(sent)).view(-1, 3) + 100 * me
        into = torch.full((sum(received), 3), -1.0)
        work, _ = all_to_all(into, out, received, sent, group)
        work.wait()
        assert work.is_completed()
        found.append(into.flatten().tolist())
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        rows, own = torch.zeros(size, 6, dtype=dtype), torch.arange(6).to(dtype) + me
        work, _ = gather_rows(rows, own, group)
        work.wait()
        found.append(rows.double().flatten().tolist())
    return found


def both(_: int) -> tuple[list[Row], list[Row]]:
    group = two_way_group()
    return everything(group), everything(replace(group, opposite=None))


@pytest.mark.parametrize("size", [2, 3])
def test_both_ways_bring_the_same(ranks: Callable[[int], Ranks], size: int) -> None:
    for found, expected in ranks(size)(both):
        assert found == expected


def held_by_others(_: int) -> list[int]:
    group = two_way_group()
    me = group.member
    into, out = torch.zeros(4), torch.ones(4)
    counts = [0 if m == me else 4 for m in range(2)]
    work, held = all_to_all(into, out, counts, counts, group)
    work.wait()
    return [tensor.numel() for tensor in held if _same_memory(tensor, into, out)]


def _same_memory(tensor: Tensor, *others: Tensor) -> bool:
    mine = tensor.untyped_storage().data_ptr()
    return any(mine == other.untyped_storage().data_ptr() for other in others)


def test_what_the_library_holds_is_handed_out(ranks: Callable[[int], Ranks]) -> None:
    # So that it can be taken away again: all of what was sent and received.
    assert [sum(found) for found in ranks(2)(held_by_others)] == [8, 8]
