"""Every exchange, layout, memory policy and place of feedback, on streams, against one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from collectives import told
from meshwright.executor.apply import apply
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.memory import offload
from meshwright.executor.micro import micro_batches
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.local_steps import LocalSteps
from meshwright.planner.schema.plan import Plan, UnitPlan
from plans import plan, scheduled, unit
from streams import (
    COLLECTIVES,
    GATHERS,
    SCATTERS,
    Issued,
    check_one_order,
    of_streams,
    on_streams,
    recorded,
)
from test_local_steps import AT_ONCE, STREAMED, Alone, alike, apart, my_part, of_host, slower
from test_sharded import OPTIMIZERS, loss_of, net
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F
from waits import waits_return_at_once

POLICIES = ("sharded", "fully_sharded", "topk", "dropped", "int8", "low_rank")
FEEDBACK = ("in_place", "mirror", "host_mirror")
MEMORY = ("recompute", "offload")
BY_PRIORITY = ("priority", "early", "bf16", *POLICIES)
LOSSY = ("topk", "dropped", "int8", "low_rank", "bf16")
LAYOUTS = ("", "divided", "burst")
EXCHANGES = (
    "", "priority", "early", "sharded", "fully_sharded", "bf16", "sharded+bf16",
    "fully_sharded+bf16", "topk", "topk+in_place", "topk+mirror", "topk+host_mirror",
    "topk+half", "topk+in_place+half", "topk+mirror+half", "topk+host_mirror+half",
    "dropped", "int8", "low_rank",
)  # fmt: skip
POLICIES_OF_MEMORY = ("", "recompute", "segments", "offload")
# Steps of micro-batches, and with a loss that is scaled.
WITH_PIECES = ("", "priority", "sharded", "fully_sharded", "topk", "topk+mirror", "dropped")
WITH_SCALER = ("", "priority", "sharded", "fully_sharded", "topk", "topk+in_place")


on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="there are streams")


def named(*parts: str) -> str:
    return "+".join(filter(None, parts)) or "barrier"


EVERY = [named(*parts) for parts in product(LAYOUTS, EXCHANGES, POLICIES_OF_MEMORY)]
EVERY += [named(*parts, "pieces") for parts in product(LAYOUTS, WITH_PIECES, ("", "recompute"))]
EVERY += [named(*parts, "scaler") for parts in product(LAYOUTS, WITH_SCALER, ("", "offload"))]
# Both of one look at all that a forward saves; idle ranks would not run a segment again.
CANNOT_BE = ({"fully_sharded", "offload"}, {"burst", "segments"})
REFUSED = [kind for kind in EVERY if any(each <= set(kind.split("+")) for each in CANNOT_BE)]
KINDS = [kind for kind in EVERY if kind not in REFUSED]
STEPS = 5
State = dict[str, Tensor]


class Net(nn.Module):
    """Linear units, of which two can be divided, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 128)
        self.n = nn.BatchNorm1d(128)
        self.c, self.d = nn.Linear(128, 128), nn.Linear(128, 10)
        # In units, which offload what they have made themselves.
        self.after_a, self.after_c = nn.ReLU(), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.n(torch.tanh(self.b(self.after_a(self.a(x))))))
        return self.d(self.after_c(self.c(inner)))


def made(kind: str) -> Plan:
    """The plan for two ranks that ``kind`` names."""
    parts = kind.split("+")
    divided = {"a": "column", "b": "row", "c": "column"} if "divided" in parts else {}
    units = [
        unit(modules, 2 if modules[0] in divided else 1, divided.get(modules[0], "none"), 2)
        for modules in (("a", "after_a"), ("b",), ("n",), ("c", "after_c"), ("d",))
    ]
    if "burst" in parts:
        for k in (1, 3):
            units[k] = msgspec.structs.replace(units[k], layout=Layout(groups=1))
    more: dict[str, Any] = {}
    for field, values in (("exchange", POLICIES), ("feedback", FEEDBACK), ("memory", MEMORY)):
        chosen = next((value for value in values if value in parts), None)
        more |= {field: chosen} if chosen else {}
    if "topk" in parts or "dropped" in parts:
        more["exchange_ratio"] = 0.5 if "half" in parts or "dropped" in parts else 1.0
    more |= {"wire": "bf16"} if "bf16" in parts else {}
    more |= {"early_release": True} if "early" in parts else {}
    units = [msgspec.structs.replace(u, **_suited(u, more)) for u in units]
    if "segments" in parts:
        for k, u in enumerate(units):
            segment = ("a", "after_a", "b") if k < 2 else ("c", "after_c", "d") if k > 2 else ()
            units[k] = msgspec.structs.replace(u, memory="recompute", segment=segment)
    sliced = any(part in BY_PRIORITY for part in parts)
    with scheduled("priority" if sliced else "barrier"):
        return plan(2, units, message_bytes=2**14, micro_batches=_pieces(parts))


def _suited(one: UnitPlan, more: dict[str, Any]) -> dict[str, Any]:
    """Of these decisions those that the unit may have: where ranks are idle they are fewer."""
    exchange = more.get("exchange", "dense")
    if CAPABILITY.suits(one.layout, 2, exchange, early_release="early_release" in more):
        return more
    return {k: more[k] for k in ("memory", "wire") if k in more}


def _pieces(parts: Sequence[str]) -> int:
    return 2 if "pieces" in parts else 1


def data(size: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 64, generator=generator).double()
    return inputs.to(device), torch.randint(10, (size,), generator=generator).to(device)


def trains_behind_the_host(rank: int, kind: str) -> Issued:
    """The same where waits for collectives return at once."""
    with waits_return_at_once(of_streams) as wire:
        issued = trains(rank, kind)
    assert wire.held  # or the host was never ahead
    return issued


def trains(rank: int, kind: str) -> Issued:
    """Five steps beside one process on the whole batch, by whose statistics all normalise, shares
    of ranks changing; what was issued in them.

    Where a part of each gradient is held back, one process takes each step from where the ranks
    are, and after as many steps without a gradient they have made all that it has."""
    parts = kind.split("+")
    exact = not any(part in LOSSY for part in parts)
    holds = "half" in parts or "dropped" in parts
    with on_streams() as device:
        # Rounding to bfloat16 is for gradients of 32 bits.
        dtype = torch.float32 if "bf16" in parts else torch.float64
        model = Net().to(device, dtype)
        alone, start = copy.deepcopy(model), copy.deepcopy(model.state_dict())
        momentum = 0.0 if holds else 0.9
        optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum) for m in (model, alone)]
        apply(model, optimizers[0], made(kind), timeout_s=30)
        assert run_of(model).on_stream
        # No lossy exchange is given what is infinite, as that costs it what it holds, too.
        scaled = "scaler" in parts
        scalers = [GradScaler(device.type, init_scale=4.0, enabled=scaled) for _ in optimizers]
        moved = {name: torch.zeros_like(t) for name, t in start.items()}
        with recorded() as issued:
            for step in range(2 * STEPS if holds else STEPS):
                before = copy.deepcopy(full_state_dict(model) if holds else alone.state_dict())
                alone.load_state_dict(before)
                if holds and step == STEPS:
                    assert _off(before, start, moved) > 0.01  # or nothing would be held
                shares = [data(4 + r * (step % 2), 10 * step + r, device) for r in range(2)]
                mine = _pieces_of(model, shares[rank], _pieces(parts))
                pairs = (model, mine), (alone, _whole(shares, _pieces(parts)))
                everything = zip(pairs, optimizers, scalers, strict=True)
                for (one, pieces), optimizer, scaler in everything:
                    for (x, y), weight in pieces:
                        loss = weight * F.cross_entropy(one(x.to(dtype)), y)
                        loss = loss * (step < STEPS)
                        # One step is left out, by the rank too whose own gradients are finite.
                        bad = scaled and exact and step == 2 and (one is alone or rank == 0)
                        scaler.scale(loss * (torch.inf if bad else 1.0)).backward()
                    if exact and "early" not in parts:
                        scaler.unscale_(optimizer)
                        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                for name, tensor in alone.state_dict().items():
                    moved[name] += tensor - before[name]
        off = _off(full_state_dict(model), start, moved)
        # Without a device all that is sent is counted.
        assert "offload" not in parts or getattr(offload.host_of(device), "sent_bytes", 1)
    # Top-k at a ratio of one sends all; others round, or leave a little behind.
    most = 0.0 if exact or holds or "topk" in parts else 0.1
    # Directions that nobody has turned yet are any.
    most = 0.8 if "low_rank" in parts else most
    assert off <= most + 1e-9
    return issued


def _off(found: State, start: State, moved: State) -> float:
    """By how much the state that ranks have ``found`` is off, in parts of how far it was to be
    ``moved`` from its ``start``; of the tensor that is furthest off."""
    floats = [name for name, tensor in start.items() if tensor.is_floating_point()]
    return max(float((found[n] - start[n] - moved[n]).norm() / moved[n].norm()) for n in floats)


Piece = tuple[tuple[Tensor, Tensor], float]
"""Samples, and what their loss counts."""


def _pieces_of(model: nn.Module, share: tuple[Tensor, Tensor], count: int) -> Iterator[Piece]:
    """This rank's share of a batch, in micro-batches if there are several."""
    pieces = micro_batches(model, share, count) if count > 1 else (share,)
    return ((piece, 1.0) for piece in pieces)


def _whole(shares: Sequence[tuple[Tensor, Tensor]], count: int) -> Iterator[Piece]:
    """The whole batch, in pieces of what ranks have in their micro-batches."""
    size = sum(len(y) for _, y in shares)
    for i in range(count):
        cut = [[t[len(t) * i // count : len(t) * (i + 1) // count] for t in s] for s in shares]
        x, y = map(torch.cat, zip(*cut, strict=True))
        yield (x, y), len(y) / size


def by_pace(kinds: Sequence[str]) -> list[Any]:
    """Those are slow that have a memory policy beside a choice of top-k's or another way to make a
    step, as there are many."""
    memory, others = set(POLICIES_OF_MEMORY), {*FEEDBACK, "half", "pieces", "scaler"}
    return [
        pytest.param(kind, marks=pytest.mark.slow if parts & memory and parts & others else ())
        for kind, parts in ((kind, set(kind.split("+"))) for kind in kinds)
    ]


@pytest.mark.parametrize("kind", by_pace(KINDS))
def test_training_equals_one_process(ranks, kind):
    rows = ranks(2)(trains, kind)
    assert all(rows)
    check_one_order(rows)


# Each exchange in each layout; what else there is to choose with one or two of them.
AHEAD = [kind for kind in KINDS if not set(kind.split("+")) & {*POLICIES_OF_MEMORY, "scaler"}]
AHEAD += [
    named(*parts)
    for parts in product(("", "divided"), ("priority", "sharded"), ("recompute", "segments"))
]


def reads_too_early(rank: int) -> None:
    with waits_return_at_once(lambda group: True) as wire:
        one, other = torch.ones(4), torch.ones(4)
        works = [
            dist.all_reduce(tensor, group=dist.group.WORLD, async_op=True)
            for tensor in (one, other[:2])
        ]
        works[0].wait()
        assert one.sum() == 8.0
        assert other[2:].sum() == 2.0  # of the same storage, and not under way
        with pytest.raises(AssertionError, match=r"add_ uses .* and nobody waited"):
            other.add_(1.0)
        works[1].wait()
        assert other.add_(1.0).tolist() == [3.0, 3.0, 2.0, 2.0]
    assert not wire.under_way


@on_cpus
def test_who_uses_what_is_under_way_is_found_out(ranks):
    ranks(2)(reads_too_early)


# A device's own waits return at once, in all other tests.
@on_cpus
@pytest.mark.parametrize("kind", by_pace(AHEAD))
def test_nothing_is_used_before_it_is_waited_for(ranks, kind):
    rows = ranks(2)(trains_behind_the_host, kind)
    assert all(rows)
    check_one_order(rows)


def refuses(rank: int, kinds: Sequence[str]) -> None:
    with on_streams() as device:
        for kind in kinds:
            model = Net().to(device)
            with pytest.raises(InputError, match=r"cannot be in one plan|is in the segment"):
                apply(model, torch.optim.SGD(model.parameters(), 0.1), made(kind), timeout_s=30)


def test_what_cannot_be_in_one_plan_is_refused(ranks):
    ranks(2)(refuses, REFUSED)


def trains_apart(rank: int, local: LocalSteps) -> Issued:
    """Hosts of two ranks each, beside one process that trains as each of them in turn."""
    with on_streams() as device:
        model = net().to(device)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        apply(model, optimizer, apart(local), timeout_s=30)
        assert run_of(model).on_stream
        alone, (host, place), schedule = Alone(local, "sgd"), divmod(rank, 2), slower(optimizer)
        with recorded() as issued:
            for step in range(2 * STEPS):
                batches = [of_host(each, step) for each in range(2)]
                alone.step(batches)
                mine = tuple(t.to(device) for t in my_part(batches[host], place, 2))
                loss_of(model, mine).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        found = {name: tensor.cpu() for name, tensor in full_state_dict(model).items()}
        alike(found, dict(alone.models[host].named_parameters()))
    return issued


@pytest.mark.parametrize("local", [AT_ONCE, STREAMED], ids=["at once", "streamed"])
def test_hosts_that_train_apart_equal_one_process(ranks, local):
    rows = ranks(4)(trains_apart, local)
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
