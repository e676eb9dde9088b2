"""Exchanges with a process group for each way: what arrives is what one group brings."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks
from meshwright.executor.comm.buffers import release_comm_buffers
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
        in_place = torch.zeros(size, 6, dtype=dtype)
        standing = in_place[group.group_ranks[me]].copy_(own)
        gather_rows(in_place, standing, group)[0].wait()
        assert torch.equal(in_place, rows)
    return found


def both(_: int) -> tuple[list[Row], list[Row]]:
    group = two_way_group()
    return everything(group), everything(replace(group, opposite=None))


@pytest.mark.parametrize("size", [2, 3])
def test_both_ways_bring_the_same(ranks: Callable[[int], Ranks], size: int) -> None:
    for found, expected in ranks(size)(both):
        assert found == expected


def late_messages(rank: int) -> list[object]:
    """What a rank that asks early knows of messages that the other sends late."""
    group, found = two_way_group(), []
    other = [0 if r == rank else 3 for r in range(2)]
    rows = [(torch.zeros(3), torch.full((3,), float(n))) for n in range(20)]
    if rank == 1:
        time.sleep(1.0)
    works = [all_to_all(into, out, other, other, group)[0] for into, out in rows]
    if rank == 0:
        found.append(works[0].is_completed())
        with pytest.raises(RuntimeError):
            works[0].wait(timedelta(seconds=0.1))
    until = time.monotonic() + 20
    while not works[-1].is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    # Nobody has waited for any of them.
    return [*found, all(work.is_completed() for work in works), [r[0].tolist() for r in rows]]


def test_messages_arrive_in_order_whoever_waits(ranks: Callable[[int], Ranks]) -> None:
    arrived = [[float(n)] * 3 for n in range(20)]
    assert ranks(2)(late_messages) == [[False, True, arrived], [True, arrived]]


def held_when_told(_: int) -> list[bool]:
    """Whether tensors are alive when an exchange says that it has ended."""
    group, found = two_way_group(), []
    counts = [0 if r == group.member else 4 for r in range(2)]
    for _ in range(20):
        into, out = torch.zeros(4), torch.ones(4)
        alive = [weakref.ref(t.untyped_storage()) for t in (into, out)]
        work, held = all_to_all(into, out, counts, counts, group)
        work.wait()
        release_comm_buffers(held)
        del into, out, held
        found.append(any(ref() is not None for ref in alive))
    return found


def test_an_exchange_that_has_ended_holds_no_memory(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(held_when_told) == [[False] * 20] * 2


GIVES_UP = """
import atexit, os, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from meshwright.executor.comm import worker_threads
from meshwright.executor.comm.groups import make_world
from meshwright.executor.comm.two_way import all_to_all

rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
group = make_world(range(3), [], torch.device("cpu"), 60.0, gathered=[1]).gradients[1]
atexit.register(lambda: print(threading.active_count(), "alive", flush=True))
worker_threads.LEAVE_S = 0.3

def swapped(*others):
    counts = [4 * (r in others) for r in range(3)]
    total = sum(counts)
    return all_to_all(torch.zeros(total), torch.ones(total), counts, counts, group)[0]

def give_up(work):
    try:
        work.wait(timedelta(seconds=0.5))
    except RuntimeError as error:
        print("late" if "still under way" in str(error) else "lost", flush=True)

swapped(*{0, 1, 2} - {rank}).wait()
if how == "neighbour lost" and rank == 1:
    os._exit(0)
if rank > 0:
    sys.stdin.read()  # lives, and sends nothing more
    sys.exit()
if how == "neighbour lost":
    time.sleep(1)
    give_up(swapped(1, 2))
give_up(swapped(2))
if how == "destroys":
    dist.destroy_process_group()
sys.exit(3)
"""


@contextmanager
def three_processes(script: str, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Each runs the script with its rank and the arguments, and is killed at the end."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=60)


@pytest.mark.parametrize("how", ["stays", "destroys", "neighbour lost"])
def test_a_process_that_gives_up_ends_with_no_thread_in_a_wait(tmp_path: Path, how: str) -> None:
    # One that came out of its wait while the interpreter ends would abort the process.
    with three_processes(GIVES_UP, str(tmp_path / "store"), how) as started:
        out, err = started[0].communicate(timeout=60)
    assert started[0].returncode == 3, err
    told = ["lost"] if how == "neighbour lost" else []  # where it is waited for, not where issued
    assert out.splitlines() == [*told, "late", "1 alive"]


EXCHANGES = """
import sys
import torch
import torch.distributed as dist
from meshwright.executor.comm.groups import make_world
from meshwright.executor.comm.two_way import all_to_all

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
send, tags = dist.isend, []
dist.isend = lambda *a, tag, **k: (tags.append(tag), send(*a, tag=tag, **k))[1]
counts = [0 if r == rank else 2 for r in range(3)]
for limit_s in range(60, 66):  # each is a group of its own, with ports of its own
    group = make_world(range(3), [], torch.device("cpu"), limit_s, gathered=[1]).gradients[1]
    into = torch.zeros(4)
    for _ in range(2):
        all_to_all(into, torch.full((4,), float(rank)), counts, counts, group)[0].wait()
    print(into.tolist(), tags)
    tags.clear()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("interfaces", [1, 2])
def test_ranks_that_connect_at_their_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interfaces: int
) -> None:
    # Else two ranks that ask each other first, each in another group, mostly wait for ever.
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    # The same name twice is two for torch, of which a message's tag takes one.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ",".join(["lo"] * interfaces))
    with three_processes(EXCHANGES, str(tmp_path / "store")) as started:
        found = [process.communicate(timeout=60) for process in started]
    others = [[1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 1.0, 1.0]]
    tags = [0, 0, 0, 0] if interfaces == 1 else [1, 1, 0, 0]
    expected = [[f"{row} {tags}"] * 6 for row in others]
    assert [out.splitlines() for out, _ in found] == expected, found


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
