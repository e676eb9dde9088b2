"""Every exchange, layout, memory policy and place of feedback, on streams, against one process."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from collectives import told
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from streams import COLLECTIVES, GATHERS, SCATTERS, Issued, check_one_order, on_streams, recorded
from torch import Tensor, nn
from torch.nn import functional as F

POLICIES = ("sharded", "fully_sharded", "topk", "dropped", "int8", "low_rank")
FEEDBACK = ("in_place", "mirror", "host_mirror")
MEMORY = ("recompute", "offload")
BY_PRIORITY = ("priority", "early", "bf16", *POLICIES)
LOSSY = ("topk", "dropped", "int8", "low_rank", "bf16")
KINDS = (
    "barrier", "priority", "sharded", "fully_sharded", "recompute", "priority+recompute", "early",
    "divided", "divided+priority", "divided+sharded", "divided+fully_sharded", "divided+early",
    "divided+recompute", "divided+priority+recompute", "burst", "burst+priority", "burst+sharded",
    "topk", "topk+in_place", "topk+mirror", "dropped", "int8", "low_rank", "bf16",
    "divided+bf16",    "sharded+bf16", "fully_sharded+bf16",
)  # fmt: skip
# What needs memory of a device's own.
ON_DEVICE = ("offload", "divided+offload", "priority+offload", "topk+host_mirror")


class Net(nn.Module):
    """Linear units, of which two can be divided, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 128)
        self.n = nn.BatchNorm1d(128)
        self.c, self.d = nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.n(torch.tanh(self.b(torch.relu(self.a(x))))))
        return self.d(torch.tanh(self.c(inner)))


def made(kind: str) -> Plan:
    """The plan for two ranks that ``kind`` names."""
    parts = kind.split("+")
    units = [unit(name, 1, "none", 2) for name in "abncd"]
    if "divided" in parts:
        units[0], units[1] = unit("a", 2, "column", 2), unit("b", 2, "row", 2)
        units[3] = unit("c", 2, "column", 2)
    if "burst" in parts:
        for k in (1, 3):
            units[k] = msgspec.structs.replace(units[k], layout=Layout(groups=1))
    more: dict[str, object] = {}
    for policy in POLICIES:
        if policy in parts:
            more |= {"exchange": policy}
    if "topk" in parts or "dropped" in parts:
        more["exchange_ratio"] = 1.0 if "topk" in parts else 0.999
    for field, values in (("feedback", FEEDBACK), ("memory", MEMORY)):
        chosen = next((value for value in values if value in parts), None)
        more |= {field: chosen} if chosen else {}
    more |= {"wire": "bf16"} if "bf16" in parts else {}
    more |= {"early_release": True} if "early" in parts else {}
    sliced = any(part in BY_PRIORITY for part in parts)
    with scheduled("priority" if sliced else "barrier"):
        return plan(2, [msgspec.structs.replace(u, **more) for u in units], message_bytes=2**14)


def data(size: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 64, generator=generator).double()
    return inputs.to(device), torch.randint(10, (size,), generator=generator).to(device)


def trains(rank: int, kind: str) -> Issued:
    """Five steps beside one process on the whole batch, shares of ranks changing; what was issued
    in them."""
    parts = kind.split("+")
    exact = not any(part in LOSSY for part in parts)
    with on_streams() as device:
        # Rounding to bfloat16 is for gradients of 32 bits.
        dtype = torch.float32 if "bf16" in parts else torch.float64
        model = Net().to(device, dtype)
        alone = copy.deepcopy(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone)]
        apply(model, optimizers[0], made(kind), timeout_s=30)
        assert run_of(model).on_stream
        with recorded() as issued:
            for step in range(5):
                shares = [data(4 + r * (step % 2), 10 * step + r, device) for r in range(2)]
                whole = tuple(map(torch.cat, zip(*shares, strict=True)))
                pairs = (model, shares[rank]), (alone, whole)
                for (one, (x, y)), optimizer in zip(pairs, optimizers, strict=True):
                    F.cross_entropy(one(x.to(dtype)), y).backward()
                    if exact and "early" not in parts:
                        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
        found, expected = full_state_dict(model), alone.state_dict()
    start = Net().to(device, dtype).state_dict()
    # Top-k at a ratio of one sends all; others round, or leave a little behind.
    most = 0.0 if exact or "topk" in parts else 0.1
    # Directions that nobody has turned yet are any.
    most = 0.8 if "low_rank" in parts else most
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            moved = (tensor - start[name]).norm()
            assert (found[name] - tensor).norm() <= most * moved + 1e-9, name
    return issued


def _kinds() -> list[str]:
    return [*KINDS, *(ON_DEVICE if torch.cuda.is_available() else ())]


@pytest.mark.parametrize("kind", _kinds())
def test_training_equals_one_process(ranks, kind):
    rows = ranks(2)(trains, kind)
    assert all(rows)
    check_one_order(rows)


def carried(rank: int, kind: str) -> list[str]:
    """The collectives that carry gradients and parameters in two steps."""
    with on_streams() as device:
        dtype = torch.float32 if "bf16" in kind else torch.float64
        model = Net().to(device, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apply(model, optimizer, made(kind), timeout_s=30)
        world = run_of(model).world
        groups = [*world.gradients.values(), *world.updated_chunks.values()]
        groups += world.unshards.values()
        mine = {str(g.handle.group_name) for g in groups if g.handle is not None}
        found = []

        def note(name: str, args: object, kwargs: dict[str, Any]) -> None:
            if "group" in kwargs and str(kwargs["group"].group_name) in mine:
                found.append(name)

        with told(COLLECTIVES, note):
            for step in range(2):
                x, y = data(4, 10 * step + rank, device)
                F.cross_entropy(model(x.to(dtype)), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            model(x.to(dtype))
        return found


@pytest.mark.parametrize("kind", ["sharded", "divided+sharded", "fully_sharded"])
def test_the_library_adds_up_and_gathers_in_one_piece(ranks, kind):
    """No list of parts, of which NCCL's backend would copy each, and no all-to-all, which would
    send a host as many copies of a gradient as it has ranks."""
    for found in ranks(2)(carried, kind):
        assert set(found) == {*GATHERS, *SCATTERS}
        if kind == "sharded":
            # Sums by slice, so that what is urgent can overtake; parameters each as a whole.
            assert found.count(SCATTERS[0]) > found.count(GATHERS[0])


def test_what_is_rounded_is_added_up_where_it_arrives(ranks):
    for found in ranks(2)(carried, "sharded+bf16"):
        assert set(found) == {*GATHERS, "all_to_all_single"}


def leaves_in_backward(rank: int, kind: str) -> bool:
    """Whether gradients leave before the last redistribution of a backward."""
    with on_streams() as device:
        model = Net().double().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        apply(model, optimizer, made(kind), timeout_s=30)
        gradients = run_of(model).world.gradients[1].handle.group_name
        x, y = data(4, rank, device)
        loss = F.cross_entropy(model(x), y)
        with recorded() as issued:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x)
    names = [name for _, name, _ in issued]
    others = [i for i, name in enumerate(names) if name != gradients]
    return names.index(gradients) < max(others)


@pytest.mark.parametrize("kind", ["divided", "divided+priority"])
def test_gradients_leave_in_backward_of_divided_units(ranks, kind):
    assert all(ranks(2)(leaves_in_backward, kind))


@pytest.mark.parametrize(("kind", "early"), [("burst+priority", True), ("burst+sharded", False)])
def test_where_ranks_are_idle_they_leave_in_backward_unless_sharded(ranks, kind, early):
    assert ranks(2)(leaves_in_backward, kind) == [early, early]


def test_a_circle_of_orders_is_found():
    a, b, c = ((0, 1), "x", 0), ((1, 2), "y", 0), ((0, 2), "z", 0)
    check_one_order([[a, c], [a, b], [b, c]])
    with pytest.raises(AssertionError, match="different orders"):
        check_one_order([[c, a], [a, b], [b, c]])
