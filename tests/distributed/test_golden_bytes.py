"""What ranks really send must stay as it is: the collectives that a few plans hand to torch, with
their sizes, are held against what they were.

Collectives are counted where they enter ``torch.distributed``, which no change of the package
moves, and the run's own meter beside them. Where what is sent is meant to change,
``python tests/distributed/test_golden_bytes.py`` writes what is sent now.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import meshwright as mw
import msgspec
import pytest
import torch
import torch.distributed as dist
from collectives import told
from meshwright.executor.apply import apply
from meshwright.executor.parallel import run_of
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan, UnitPlan
from plans import plan, scheduled, unit
from torch import Tensor, nn

GOLDEN = Path(__file__).with_name("golden_bytes.json")
WORLD, STEPS, SAMPLES, WIDTH = 2, 3, 13, 48
SENDS = {
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_reduce": 0,
    "all_to_all": 1,
    "all_to_all_single": 1,
    "broadcast": 0,
    "isend": 0,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
}
"""The collectives of torch, and which argument holds what this rank gives. Not ``send``, by which
each pair of a group is connected: the cases use groups of those before."""
Counts = dict[str, int]


def network() -> nn.Module:
    """Layers of several sizes, one with batch statistics and one without a bias."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.BatchNorm1d(2 * WIDTH),
        nn.Linear(2 * WIDTH, WIDTH, bias=False),
        nn.ReLU(),
        nn.Linear(WIDTH, 3 * WIDTH),
        nn.Linear(3 * WIDTH, 10),
    )


# -- plans ---------------------------------------------------------------------------------------


def units(*styles: str, **decided: Any) -> list[UnitPlan]:
    """The linear layers in those styles (undivided without any), each with what is decided."""
    chosen = styles or ("none",) * 4
    found = [
        unit(name, 1 if style == "none" else WORLD, style, WORLD)
        for name, style in zip("0245", chosen, strict=True)
    ]
    return [msgspec.structs.replace(u, **decided) for u in found]


def planned(schedule: str, of: list[UnitPlan], message_bytes: int = 2**13, **how: Any) -> Plan:
    with scheduled(schedule):
        return plan(WORLD, of, message_bytes=message_bytes, **how)


def with_an_idle_rank() -> Plan:
    alone = units()
    alone[1] = msgspec.structs.replace(alone[1], layout=Layout(groups=1, first=1))
    return planned("barrier", alone, statistics="local")


DIVIDED = ("column", "row", "column", "row")
PLANS: dict[str, Callable[[], Plan]] = {
    "buckets": lambda: planned("barrier", units()),
    "one bucket": lambda: planned("barrier", units(), 2**22, statistics="local"),
    "slices": lambda: planned("priority", units()),
    "micro-batches": lambda: planned("barrier", units(), micro_batches=2),
    "sharded": lambda: planned("priority", units(exchange="sharded")),
    "fully sharded": lambda: planned("priority", units(exchange="fully_sharded")),
    "released early": lambda: planned("priority", units(early_release=True)),
    "top-k": lambda: planned("priority", units(exchange="topk", exchange_ratio=0.1)),
    "divided": lambda: planned("barrier", units(*DIVIDED)),
    "divided, recomputed": lambda: planned("barrier", units(*DIVIDED, memory="recompute")),
    "divided, in slices": lambda: planned("priority", units("row", "column", "none", "column")),
    "an idle rank": with_an_idle_rank,
}


DESCRIPTION = 256
"""What a description of a tensor takes at most, pickled."""


# -- counting ------------------------------------------------------------------------------------


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the collectives that begin inside: kind, elements, type, and ranks of the group."""
    found: Counter[str] = Counter()

    def count(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[described(name, args, kwargs)] += 1

    with told(SENDS, count):
        yield found


def described(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = args[SENDS[name]]
    tensors: list[Tensor] = [given] if isinstance(given, Tensor) else list(given)
    elements = "+".join(str(t.numel()) for t in tensors)
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    if name == "broadcast" and dtype == "uint8" and tensors[0].numel() < DESCRIPTION:
        elements = "some"  # pickled: as long as the names of the modules in it
    return f"{name} of {elements} {dtype} among {dist.get_world_size(kwargs.get('group'))}"


def sent(rank: int, name: str) -> dict[str, Counts]:
    """What this rank sends: when the plan is applied, and in a few steps of training."""
    model, made = network(), PLANS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with counting() as applying:
        apply(model, optimizer, made, timeout_s=20)
    run = run_of(model)
    with counting() as training:
        for _ in range(STEPS):
            step(model, optimizer, rank, made.micro_batches)
        run.finish_steps()
    names = ("moves", "sent_bytes", "moved_bytes", "exchanged_bytes")
    meter = {n: getattr(run.meter, n) for n in names}
    return {"apply": ordered(applying), "steps": ordered(training), "meter": meter}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, parts: int) -> None:
    """One step on this rank's samples, of which the first rank has one more."""
    mine = SAMPLES // WORLD + (rank < SAMPLES % WORLD)
    x = (torch.randn(mine, WIDTH),)
    for (part,) in mw.micro_batches(model, x, parts) if parts > 1 else [x]:
        model(part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def ordered(counts: Counter[str]) -> Counts:
    return dict(sorted(counts.items()))


@pytest.mark.parametrize("name", PLANS)
def test_what_is_sent_is_what_it_was(ranks, name):
    assert ranks(WORLD)(sent, name) == json.loads(GOLDEN.read_text())[name]


def rewrite() -> None:
    """Writes what is sent now."""
    from harness import Ranks

    pool = Ranks(WORLD)
    found = {name: pool(sent, name) for name in PLANS}
    pool.stop()
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    rewrite()
