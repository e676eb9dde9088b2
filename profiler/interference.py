"""How much computing and communicating slow each other down.

On a CPU the communication library's threads take cores and memory bandwidth from the computation;
on a GPU its kernels take multiprocessors. Three things are timed in turn, several rounds: a fixed
amount of computing, a fixed amount of communicating, and the computing while the communicating goes
on.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..planner.schema.cluster import Interference
from .collect import Group, synchronise

MESSAGE_BYTES = 4 * 2**20
ROUNDS = 5
LOAD_S = 0.06
BUDGET_S = 3.0
"""No further round is begun after so long."""


class _Load:
    """A piece of computing like training's: a convolution and a matrix product."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.image = torch.randn(4, 32, 32, 32, device=device)
        self.kernel = torch.randn(32, 32, 3, 3, device=device)
        self.matrix = torch.randn(384, 384, device=device)
        self.repeats = 1

    def run(self) -> float:
        """Seconds of the load."""
        start = time.perf_counter()
        with torch.no_grad():
            for _ in range(self.repeats):
                F.conv2d(self.image, self.kernel, padding=1)
                self.matrix @ self.matrix
        synchronise(self.device)
        return time.perf_counter() - start


def measure_interference(group: Group) -> Interference:
    """The slowdowns, as medians over rounds and the mean over ranks. Collective over the group."""
    load = _Load(group.device)
    load.run()
    load.repeats = _agreed(group, max(int(LOAD_S / max(load.run(), 1e-6)), 1))
    tensor = torch.zeros(MESSAGE_BYTES // 4, device=group.device)
    messages = _agreed(group, max(int(LOAD_S / max(_send(group, tensor, 1), 1e-6)), 2))
    rows = _rounds(group, load, tensor, messages)
    compute = median(together / max(alone, 1e-9) for alone, _, together, _ in rows)
    # Communicating goes on under computing for at most as long as that lasts.
    communicate = median(_stretch(sent, together, both) for _, sent, together, both in rows)
    slow = torch.tensor([compute, communicate], dtype=torch.float64, device=group.device)
    dist.all_reduce(slow, group=group.handle)
    compute, communicate = (slow / group.size).tolist()
    return Interference(
        compute_slowdown=max(compute, 1.0), communication_slowdown=max(communicate, 1.0)
    )


def _rounds(
    group: Group, load: _Load, tensor: torch.Tensor, messages: int
) -> list[tuple[float, float, float, float]]:
    """Rounds until there are enough or time is up, on all members alike."""
    start = time.perf_counter()
    rows: list[tuple[float, float, float, float]] = []
    while len(rows) < ROUNDS:
        rows.append(_round(group, load, tensor, messages))
        if _agreed(group, int(time.perf_counter() - start > BUDGET_S)):
            break
    return rows


def _agreed(group: Group, count: int) -> int:
    """The largest count of all members: all must do the same."""
    value = torch.tensor([count], dtype=torch.int64, device=group.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group.handle)
    return int(value)


def _send(group: Group, tensor: torch.Tensor, messages: int) -> float:
    start = time.perf_counter()
    for _ in range(messages):
        dist.all_reduce(tensor, group=group.handle)
    synchronise(group.device)
    return time.perf_counter() - start


def _round(
    group: Group, load: _Load, tensor: torch.Tensor, messages: int
) -> tuple[float, float, float, float]:
    """Seconds of computing alone, communicating alone, computing under communication, and until
    both are over."""
    dist.barrier(group=group.handle)
    alone = load.run()
    dist.barrier(group=group.handle)
    sent = _send(group, tensor, messages)
    dist.barrier(group=group.handle)
    start = time.perf_counter()
    works = [dist.all_reduce(tensor, group=group.handle, async_op=True) for _ in range(messages)]
    together = load.run()
    for work in works:
        if work is not None:
            work.wait()
    synchronise(group.device)
    return alone, sent, together, time.perf_counter() - start


def _stretch(sent: float, together: float, both: float) -> float:
    """How much slower communicating was while computing went on for ``together`` seconds.

    If it ended with the computing or before, all of it was slowed; else what was left ran alone:
    both = together + (sent - together / slowdown).
    """
    if both <= together * 1.02:
        return max(together / sent, 1.0)
    done_meanwhile = sent - (both - together)
    return together / done_meanwhile if done_meanwhile > 0.05 * together else 1.0
