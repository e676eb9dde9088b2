"""How often a step makes the host wait for the device, to get a tensor's value or to set it:
counted on CPUs, and by torch on a device."""

from __future__ import annotations

import importlib
import io
import traceback
import warnings
from collections.abc import Iterator

import msgspec
import pytest
import streams
import torch
import torch.distributed as dist
from meshwright.executor import run
from meshwright.executor.apply import apply
from meshwright.executor.comm import groups, watchdog
from meshwright.executor.gradients.topk import SAMPLED_FROM, largest
from meshwright.executor.launch.training_progress import TrainingProgress
from meshwright.executor.parallel import run_of
from meshwright.executor.redistribution.statistics import Statistics
from meshwright.executor.step_clock import clock_of
from streams import on_streams
from synchronisations import counted
from test_exchanges import KINDS, Net, by_pace, data, made
from torch.nn import functional as F

EVERY = [kind for kind in KINDS if not {"pieces", "scaler"} & set(kind.split("+"))]
DROPPED = [kind for kind in EVERY if "dropped" in kind.split("+")]
# Idle ranks hear from others how many samples come, of which nobody is there where one is alone.
BURSTS = [kind for kind in EVERY if "burst" in kind.split("+")]
NONE = [kind for kind in EVERY if kind not in (*DROPPED, *BURSTS)]
MEASURED = 2
"""Steps that are counted, after as many that begin (top-k warms up, what is unused is asked)."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank of two whose collectives carry nothing: what is asked does not depend on values."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # names the backend
    # Of the control groups, too; and nobody is there to be heard of, or waited for at the end.
    for module in (groups, streams):
        monkeypatch.setattr(module, "CONTROL_BACKEND", "fake")
    monkeypatch.setattr(watchdog, "heartbeat_of", lambda *_: None)
    monkeypatch.setattr(run, "_let_finish", lambda _: None)
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def asks(kind: str, statistics: str = "local", screen: io.StringIO | None = None) -> list[str]:
    """Where the host waits in later steps, each of which is shown on a ``screen``, if there is
    one."""
    plan = made(kind)
    goal = msgspec.structs.replace(plan.goal, batch_statistics=statistics)
    plan = msgspec.structs.replace(plan, goal=goal)
    with on_streams(on_cpu=True) as device, counted() as places:
        model = Net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        apply(model, optimizer, plan, timeout_s=30)
        shown = None
        if screen is not None:
            mine = run_of(model)
            shown = TrainingProgress(mine, device, every_s=1e-9, screen=screen)
            clock_of(mine, model, optimizer).listeners.append(shown.noticed)
        for number in range(2 * MEASURED):
            x, y = data(4, number, device)
            if number == MEASURED:
                places.clear()
            loss = F.cross_entropy(model(x.float()), y)
            loss.backward()
            if shown is not None:
                shown.step(loss)
            optimizer.step()
            optimizer.zero_grad()
        model(x.float())  # what is on its way is waited for
        return list(places)


@pytest.mark.parametrize("kind", by_pace(NONE))
def test_the_host_never_waits(alone: None, kind: str) -> None:
    assert asks(kind) == []


@pytest.mark.parametrize("kind", ["barrier", "priority"])
def test_showing_each_step_and_its_loss_waits_for_nothing(alone: None, kind: str) -> None:
    screen = io.StringIO()
    assert asks(kind, screen=screen) == []
    lines = screen.getvalue().splitlines()
    # A step is from the end of one to that of the next.
    assert len(lines) == 2 * MEASURED - 1
    assert "loss" in lines[-1]


@pytest.mark.parametrize("kind", [kind for kind in DROPPED if kind not in BURSTS])
def test_dropping_asks_once_in_a_step(alone: None, kind: str) -> None:
    """For the sums of all gradients together, by which ranks agree on what is sent next."""
    _check_dropping(asks(kind))


def _check_dropping(places: list[str]) -> None:
    assert len(places) == MEASURED, places
    assert all("gradients/dropping.py" in place for place in places)


def asks_beside_another(rank: int, kind: str) -> list[str]:
    return asks(kind)


@pytest.mark.parametrize("kind", by_pace(BURSTS))
def test_where_ranks_are_idle_the_host_never_waits(ranks, kind: str) -> None:
    for places in ranks(2)(asks_beside_another, kind):
        if kind in DROPPED:
            _check_dropping(places)
        else:
            assert places == []


def waits(rank: int, kind: str) -> list[str]:
    """Where the host waits for the device in later steps, as torch tells: the calls that led
    there."""
    places: list[str] = []

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            places.append("".join(traceback.format_stack(limit=12)[:-1]))

    with on_streams() as device, warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = tell
        batches = [data(4, 10 * number + rank, device) for number in range(2 * MEASURED + 1)]
        model = Net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        apply(model, optimizer, made(kind), timeout_s=30)
        for number, (x, y) in enumerate(batches[:-1]):
            if number == MEASURED:
                torch.cuda.set_sync_debug_mode("warn")
            F.cross_entropy(model(x.float()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
        model(batches[-1][0].float())
    return places


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device that is waited for")
@pytest.mark.parametrize("kind", by_pace(EVERY))
def test_a_device_is_not_waited_for(ranks, kind: str) -> None:
    for places in ranks(2)(waits, kind):
        assert len(places) == (MEASURED if kind in DROPPED else 0), "\n".join(places)


def test_statistics_of_the_whole_batch_ask_for_nothing(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, before = [], Statistics.sum

    def add(self: Statistics, vector: torch.Tensor, doing: str) -> torch.Tensor:
        added.append(doing)
        return before(self, vector, doing)

    monkeypatch.setattr(Statistics, "sum", add)
    assert asks("barrier", "global") == []
    assert len(added) > 2 * 2 * MEASURED  # in each forward and backward


def test_topk_asks_once_for_a_large_gradient() -> None:
    """How many elements lie above the threshold that a sample tells."""
    gradient = torch.randn(SAMPLED_FROM)
    with counted() as places:
        largest(gradient, 8)
    assert len(places) == 1
    with counted() as places:
        largest(gradient[: SAMPLED_FROM - 1], 8)
    assert places == []


def test_what_asks_is_counted() -> None:
    tensor = torch.ones(3)
    with counted() as places:
        control = torch.zeros(2, device="cpu")
        control.tolist()
        torch.empty_like(control).tolist()
        int(control[0])
        assert places == []
        tensor.sum().item()
        if tensor.any():
            tensor.nonzero()
        float(tensor[0])
        torch.zeros(2, device=tensor.device).tolist()  # where another is, not by the host's name
        tensor[tensor > 0]
        tensor[torch.tensor([0])]
        tensor[:1] = 2
        tensor[0] = 2
        tensor[torch.tensor([0])] = 2
    names = [place.split()[0] for place in places]
    asked = ["item", "__bool__", "nonzero", "__float__", "tolist", "aten.index"]
    assert names == asked + ["__setitem__"] * 2
