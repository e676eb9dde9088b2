"""Probes on a device whose streams work behind the host, which ours stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.executor.launch import devices, start
from meshwright.models.replay import UnitCall
from meshwright.models.spec import UnitSpec
from meshwright.models.units.storages import peak_bytes
from meshwright.models.workload import Batch
from meshwright.planner.memory.reserved import fragments_bytes
from meshwright.planner.schema.cluster import Device
from meshwright.profiler import (
    collectives,
    compression,
    interference,
    links,
    shares,
    steps,
    timing,
)
from meshwright.profiler.collectives import MeasuredGroup, calls_at_once, time_once
from meshwright.profiler.compression import Coding
from meshwright.profiler.steps import StreamMeter
from torch import nn
from torch.nn import functional as F

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
GIB = 2**30


class Stream:
    """What is launched on it ends after all before, at ``end_s``."""

    def __init__(self, device: object = None) -> None:
        self.end_s = 0.0

    def launch(self, seconds: float, after: float = 0.0) -> None:
        self.end_s = max(self.end_s, after) + seconds

    def wait_stream(self, other: Stream) -> None:
        self.end_s = max(self.end_s, other.end_s)


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self.at_s = 0.0

    def record(self, stream: Stream) -> None:
        self.at_s = stream.end_s

    def synchronize(self) -> None:
        """The host waits; what the device does is known by then."""

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


class Streams:
    """A device with a stream that computes and one that communicates."""

    def __init__(self) -> None:
        self.current, self.communicating = Stream(), Stream()
        self.calls = 0

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def all_reduce(self, tensor: object, group: object = None, async_op: bool = False) -> Any:
        self.calls += 1
        self.communicating.launch(self.message_s, after=self.current.end_s)
        end_s = self.communicating.end_s

        def wait() -> None:
            self.current.end_s = max(self.current.end_s, end_s)

        work = SimpleNamespace(wait=wait, is_completed=lambda: True)
        return work if async_op else work.wait()

    message_s = 0.1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    found = Streams()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", found.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    for module in (interference, collectives):
        monkeypatch.setattr(module.dist, "all_reduce", found.all_reduce)
    monkeypatch.setattr(collectives.dist, "barrier", lambda: None)
    return found


@pytest.mark.parametrize("messages", [2, 30])
def test_computing_and_communicating_are_told_apart(streams: Streams, messages: int) -> None:
    """One is over after two seconds; to wait for both would give the longer one twice."""
    load = object.__new__(interference._Load)
    load.device, load.group = GPU, SimpleNamespace(handle=None)
    load.message, load.messages, load.pieces = None, messages, 4
    load.piece = lambda: streams.current.launch(0.5)
    assert load.compute() == pytest.approx(2.0)
    assert load.send() == pytest.approx(0.1 * messages)
    assert load.both() == (pytest.approx(2.0), pytest.approx(0.1 * messages))


@pytest.mark.parametrize(
    ("device", "name", "sizes"),
    [(GPU, collectives._SCATTER.__name__, [8, 16]), (CPU, "all_to_all_single", [8, 8])],
)
def test_sums_are_timed_as_the_executor_makes_them(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, name: str, sizes: list[int]
) -> None:
    given: list[int] = []

    def told(into: torch.Tensor, out: torch.Tensor, *_: Any, **__: Any) -> None:
        given.extend((len(into), len(out)))

    monkeypatch.setattr(dist, name, told)
    monkeypatch.setattr(collectives, "_SCATTER", getattr(dist, collectives._SCATTER.__name__))
    monkeypatch.setattr(MeasuredGroup, "_tensor", lambda self, use, count: torch.empty(count))
    group = MeasuredGroup(None, (0, 1), 0, device)  # type: ignore[arg-type]
    group.operation("reduce_scatter", 64)()
    assert given == sizes


@pytest.mark.parametrize(("size", "calls"), [(1 << 10, 16), (1 << 24, 4), (1 << 28, 2)])
def test_calls_are_timed_together_by_the_device(streams: Streams, size: int, calls: int) -> None:
    group = MeasuredGroup(None, (0, 1), 0, GPU)  # type: ignore[arg-type]
    group._space["out"] = torch.empty(0)
    group.operation = lambda *_: lambda: streams.all_reduce(None)  # type: ignore[method-assign]
    assert time_once(group, "all_reduce", size) == pytest.approx(0.1)
    assert streams.calls == calls == calls_at_once(GPU, size)
    assert calls_at_once(CPU, size) == 1


def test_what_a_gpu_holds_besides_tensors_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * GIB)
    monkeypatch.setattr(links, "memory_bytes", lambda device: 80 * GIB)
    taken = links.taken_bytes(GPU)
    assert taken == GIB
    assert links.reserve_bytes(GPU, taken) == GIB + fragments_bytes(80 * GIB) == 5 * GIB
    assert links.reserve_bytes(CPU, links.taken_bytes(CPU)) == 0
    # Libraries have a gibibyte of what the allocator has.
    assert links.taken_bytes(GPU, workspaces=GIB) == 2 * GIB


class Allocator:
    """A GPU's, of which each thread that makes products keeps a workspace until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors, self.workspaces = GIB, {"main": 3 * GIB}  # a product was made before
        self.trained = list[torch.dtype]()
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(
            torch._C, "_cuda_clearCublasWorkspaces", self.workspaces.clear, raising=False
        )
        monkeypatch.setattr(links, "_train_once", self.train)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    @property
    def allocated(self) -> int:
        return self.tensors + sum(self.workspaces.values())

    def train(self, device: torch.device, dtype: torch.dtype) -> None:
        self.trained.append(dtype)
        self.workspaces |= {"main": 3 * GIB, "backward": 2 * GIB}


@pytest.mark.parametrize(("native", "half"), [(True, torch.bfloat16), (False, torch.float16)])
def test_workspaces_of_libraries_are_no_tensors(
    monkeypatch: pytest.MonkeyPatch, native: bool, half: torch.dtype
) -> None:
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert links.workspace_bytes(GPU) == links.workspace_bytes(GPU) == 5 * GIB
    assert {torch.float32, half} == set(allocator.trained)
    assert links.workspace_bytes(CPU) == 0
    # Nor are they of what a step is measured to take.
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * GIB)
    allocator.workspaces["main"] = 3 * GIB
    assert peak_bytes(lambda: None, [], GPU) == 4 * GIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspaces_are_those_of_a_step(dtype: torch.dtype) -> None:
    """Of products and convolutions, and of their backward, also where nothing asks for one."""
    with torch.profiler.profile() as found, torch.no_grad():
        links._train_once(CPU, dtype)
    names = {event.key for event in found.key_averages()}
    assert {"aten::convolution", "aten::addmm", "aten::mm"} <= names
    assert {"aten::convolution_backward", "MmBackward0", "AddmmBackward0"} <= names


@pytest.mark.parametrize(("ranks", "groups"), [(2, 3), (3, 3), (4, 5), (6, 5)])
def test_a_run_has_several_communicators(
    monkeypatch: pytest.MonkeyPatch, ranks: int, groups: int
) -> None:
    """All of them are there, and used, when it is looked what is taken."""
    open_groups: list[Any] = []
    done: list[str] = []

    def join(sets: links.GroupSets, device: torch.device) -> Any:
        assert sets == [tuple(range(ranks))]
        used: list[tuple[str, int]] = []
        made = SimpleNamespace(
            used=used,
            meet=lambda: done.append("met"),
            operation=lambda collective, size: lambda: used.append((collective, size)),
        )
        open_groups.append(made)
        return made

    def taken(device: torch.device, workspaces: int) -> int:
        every = [(name, 4096) for name in collectives.COLLECTIVES]
        assert all(one.used == every for one in open_groups)
        done.append("looked")
        return workspaces + len(open_groups)

    monkeypatch.setattr(links.dist, "get_world_size", lambda: ranks)
    monkeypatch.setattr(links, "workspace_bytes", lambda device: GIB)
    monkeypatch.setattr(links, "synchronise", lambda device: None)
    monkeypatch.setattr(links, "join", join)
    monkeypatch.setattr(links, "taken_bytes", taken)
    monkeypatch.setattr(links, "_leave", open_groups.remove)
    assert links.taken_in_a_run(GPU, 4096) == GIB + groups
    assert (done, open_groups) == (["met", "looked", "met"], [])
    assert links.taken_in_a_run(CPU, 4096) == 0


def test_ranks_that_share_a_gpu_have_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other ranks' tensors take is not what is kept back."""
    monkeypatch.setattr(devices, "_agreed", [devices.Agreed(GPU, 2)])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (58 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * GIB)
    there = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    assert start.memory_bytes(GPU) == 40 * GIB
    assert links.taken_bytes(GPU) == 2 * GIB
    assert start.memory_bytes(torch.device("cuda", 1)) == 80 * GIB


def test_each_rank_s_own_reserve_and_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(rows: list[Any], mine: Any) -> None:
        rows[:] = [mine, (3 * GIB, 8 * GIB)]

    monkeypatch.setattr(links.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(links.dist, "all_gather_object", gather)
    device = Device(name="gpu", memory_bytes=80 * GIB)
    found, memories = links._with_reserves([device, device], CPU, 0)
    assert [each.reserve_bytes for each in found] == [0, 3 * GIB]
    assert memories == [None, 8 * GIB]


def test_one_gpu_s_link_to_its_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the workspaces of libraries."""
    monkeypatch.setattr(links, "workspace_bytes", lambda device: GIB * (device == GPU))
    monkeypatch.setattr(links, "taken_bytes", lambda device, workspaces: workspaces)
    monkeypatch.setattr(links, "copy_rate", lambda device: 2e10)
    monkeypatch.setattr(links, "device_name", lambda device: "gpu")
    monkeypatch.setattr(links, "memory_bytes", lambda device: 40 * GIB)
    found, memory = links.single_device(GPU)
    assert (found.host_bytes_per_s, found.reserve_bytes) == (2e10, 3 * GIB)
    assert memory == 40 * GIB
    assert links.single_device(CPU)[0].host_bytes_per_s is None


class Clock:
    """The host's clock, which stands still unless the host works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Launching(torch.autograd.Function):
    """Launches the layer's work, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Launched) -> torch.Tensor:
        ctx.layer = layer
        layer.launch(1.0)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.layer.launch(2.0)
        return gradient, None


class Launched(nn.Linear):
    """A layer whose operators the host issues in some seconds, and the device does in others."""

    host_s = device_s = 0.0
    streams: Streams
    clock: Clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Launching.apply(super().forward(x), self)

    def launch(self, times: float) -> None:
        self.clock.now_s += times * self.host_s
        # The device begins when it is told to.
        self.streams.current.launch(times * self.device_s, after=self.clock.now_s)


@pytest.fixture
def clock(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()

    def synchronise(device: torch.device) -> None:
        found.now_s = max(found.now_s, streams.current.end_s)

    def wait(event: Event) -> None:
        found.now_s = max(found.now_s, event.at_s)

    for module in (steps, timing, shares):
        monkeypatch.setattr(module.time, "perf_counter", found.perf_counter)
        monkeypatch.setattr(module, "synchronise", synchronise)
    monkeypatch.setattr(Event, "synchronize", wait)

    def keep_busy(device: torch.device, seconds: float) -> None:
        streams.current.launch(seconds, after=found.now_s)

    for module in (interference, timing, shares):
        monkeypatch.setattr(module, "keep_busy", keep_busy)
    return found


@pytest.mark.parametrize(
    ("host_s", "device_s"), [(1e-3, 5e-3), (5e-3, 1e-3), (2e-3, 2e-3), (4e-3, 0.0)]
)
def test_what_hosts_and_devices_take_is_told_apart(
    streams: Streams, clock: Clock, host_s: float, device_s: float
) -> None:
    """Whichever of them is slower."""
    model = nn.Sequential(Launched(2, 2), nn.Linear(2, 2), Launched(2, 2))
    for number, layer in enumerate(model):
        if isinstance(layer, Launched):
            layer.streams, layer.clock = streams, clock
            layer.host_s, layer.device_s = host_s, device_s * (1 + number)
    units = [
        UnitSpec(name=name, kind=kind, modules=modules)
        for name, kind, modules in [
            ("input", "input", ()), ("0", "linear", ("0",)), ("1", "linear", ("1",)),
            ("2", "linear", ("2",)), ("output", "output", ()),
        ]
    ]  # fmt: skip
    batch = Batch((torch.ones(3, 2),), torch.ones(3, 2))
    meter = StreamMeter(model, units, batch, F.mse_loss, GPU)
    for _ in range(3):
        meter.turn()
    found = meter.times()
    assert sum(found.issued_forward.values()) == pytest.approx(2 * host_s)
    assert sum(found.issued_backward.values()) == pytest.approx(4 * host_s)
    for unit, times in (("0", 1), ("2", 3)):
        assert found.forward.get(unit, 0.0) == pytest.approx(times * device_s, abs=1e-6)
        assert found.backward.get(unit, 0.0) == pytest.approx(2 * times * device_s, abs=1e-6)
    # In a row a step takes what the slower of both does.
    assert meter.whole_s[-1] == pytest.approx(max(6 * host_s, 12 * device_s), rel=0.3)


@pytest.mark.parametrize("host_s", [1e-5, 1e-3, 2e-2])
def test_shares_of_a_gpu_are_its_own(streams: Streams, clock: Clock, host_s: float) -> None:
    """However long its host takes to issue them."""
    runs = []
    for device_s in (4e-4, 1e-4):
        holder, unit = nn.Sequential(Launched(2, 2)), UnitSpec("0", "linear", ("0",))
        layer: Any = holder[0]
        layer.streams, layer.clock, layer.host_s, layer.device_s = streams, clock, host_s, device_s
        runs.append(partial(shares.cost_of, holder, unit, UnitCall((torch.ones(3, 2),), {}), GPU))
    for run in runs:
        run()
    rounds = shares.costs_in_turns(runs, GPU, 2)
    assert len(rounds) == 2
    for round_ in rounds:
        for cost, device_s in zip(round_, (4e-4, 1e-4), strict=True):
            assert cost.forward_s == pytest.approx(device_s)
            assert cost.backward_s == pytest.approx(2 * device_s)
            assert cost.issued_backward_s == pytest.approx(2 * host_s)


def test_updates_of_a_gpu_are_its_own(streams: Streams, clock: Clock) -> None:
    """What it waits for its host, which issues one operator after another, is the host's."""

    def update() -> None:
        for _ in range(3):
            clock.now_s += 1e-3
            streams.current.launch(1e-4, after=clock.now_s)

    alone, behind = timing.timed(update, GPU), timing.timed(update, GPU, ahead_s=3e-3)
    assert alone == (pytest.approx(3.1e-3), pytest.approx(3e-3))
    assert behind == (pytest.approx(3e-4), pytest.approx(3e-3))


MIB = 2**20


class Load(interference._Load):
    """A load whose kernels a host launches in some seconds each, and our streams work at."""

    clock: Clock
    streams: Streams
    host_s = 0.0
    smallest_s, smallest_bytes = 1e-5, MIB
    """Of a device, for the smallest piece."""
    times = 1

    def size(self, times: int) -> None:
        self.times = times
        self.image = SimpleNamespace(nbytes=times * self.smallest_bytes)
        self.matrix = SimpleNamespace(nbytes=0)

    def piece(self) -> None:
        self.clock.now_s += 2 * self.host_s
        self.streams.current.launch(self.times * self.smallest_s, after=self.clock.now_s)


@pytest.fixture
def loads(
    streams: Streams, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], SimpleNamespace]:
    """Makes a group on our streams; the argument is what its host takes to launch a kernel."""
    tensor, sent = torch.tensor, streams.all_reduce
    monkeypatch.setattr(
        torch, "zeros", lambda count, device: torch.empty(count, device="meta", dtype=torch.float32)
    )
    monkeypatch.setattr(torch, "tensor", lambda data, dtype, device: tensor(data, dtype=dtype))
    monkeypatch.setattr(interference, "_Load", Load)
    monkeypatch.setattr(Load, "clock", clock, raising=False)
    monkeypatch.setattr(Load, "streams", streams, raising=False)

    def all_reduce(tensor: torch.Tensor, op: object = None, **how: Any) -> Any:
        if tensor.device.type != "meta":
            return None  # a number on which members agree
        clock.now_s += Load.host_s
        streams.current.launch(0.0, after=clock.now_s)
        return sent(tensor, **how)

    monkeypatch.setattr(interference.dist, "all_reduce", all_reduce)

    def made(host_s: float) -> SimpleNamespace:
        monkeypatch.setattr(Load, "host_s", host_s)
        # A message takes 2.5 ms from 16 MiB on.
        seconds = {("all_reduce", size): [2.5e-3 * size / 2**24] for size in links.DEVICE_SIZES}
        streams.message_s = 2.5e-3
        return SimpleNamespace(
            device=GPU, handle=None, size=1, seconds=seconds, meet=lambda: timing.synchronise(GPU)
        )

    return made


@pytest.mark.parametrize("host_s", [1e-6, 2e-5, 1e-3, 4e-3])
def test_a_load_is_the_device_s_however_long_its_host_takes(
    loads: Callable[[float], SimpleNamespace], host_s: float
) -> None:
    group = loads(host_s)
    load = Load(group)
    assert 2 * load.pieces + load.messages <= 200
    assert load.times * load.smallest_s >= 1e-3
    assert load.message.nbytes == 16 * MIB
    computing_s, sending_s = load.pieces * load.times * load.smallest_s, 2.5e-3 * load.messages
    for _ in range(3):
        group.meet()
        assert load.compute() == pytest.approx(computing_s)
        group.meet()
        assert load.send() == pytest.approx(sending_s)
        group.meet()
        assert load.both() == (pytest.approx(computing_s), pytest.approx(sending_s))
    assert computing_s == pytest.approx(interference.LOAD_S, rel=0.1)


@pytest.mark.parametrize("host_s", [1e-6, 1e-3])
def test_a_slow_host_is_no_interference(
    loads: Callable[[float], SimpleNamespace], host_s: float
) -> None:
    """Streams of ours do not slow each other."""
    found = interference.measure_interference(loads(host_s))
    assert found.compute_slowdown == pytest.approx(1.0)
    assert found.communication_slowdown == pytest.approx(1.0)


def test_messages_and_pieces_are_issued_in_turns(
    loads: Callable[[float], SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(loads(1e-5))
    issued: list[str] = []
    monkeypatch.setattr(load, "piece", lambda: issued.append("piece"))
    monkeypatch.setattr(load, "_message", lambda: issued.append("message"))
    load.messages, load.pieces = 3, 2
    load.both()
    assert issued == ["message", "piece", "message", "piece", "message"]


def test_larger_pieces_are_more_work_of_both_kinds() -> None:
    pieces = interference._Pieces(CPU)
    assert (len(pieces.image), pieces.matrix.shape) == (4, (384, 384))
    pieces.size(8)
    assert (len(pieces.image), pieces.matrix.shape) == (32, (768, 768))
    pieces.piece()


def test_pieces_take_no_more_memory_than_they_may(
    loads: Callable[[float], SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image, what is made of it, and no more however quick the device is."""
    monkeypatch.setattr(Load, "smallest_s", 1e-9)
    load = Load(loads(1e-5))
    assert 2 * load.image.nbytes == interference.PIECE_BYTES
    assert load.pieces == interference.MOST_PIECES


@pytest.mark.parametrize(
    ("device", "seconds_per_byte", "size"),
    [
        (CPU, 1e-12, 4 * MIB),
        (GPU, 1e-12, 256 * MIB),  # none takes long enough
        (GPU, 1e-10, 64 * MIB),
        (GPU, 1e-9, 4 * MIB),
        (GPU, 1e-7, MIB // 2),  # one of 1 MiB takes more than half of a load
    ],
)
def test_between_gpus_few_messages_last_as_long_as_a_load(
    device: torch.device, seconds_per_byte: float, size: int
) -> None:
    sizes = sorted({*links.DEVICE_SIZES, MIB // 2})
    seconds = {("all_reduce", size): [size * seconds_per_byte] for size in sizes}
    group: Any = SimpleNamespace(device=device, seconds=seconds)
    assert interference._message_bytes(group) == size


@pytest.mark.parametrize("host_s", [1e-6, 1e-4, 5e-3])
def test_coding_on_a_gpu_is_the_device_s_own(
    streams: Streams, clock: Clock, monkeypatch: pytest.MonkeyPatch, host_s: float
) -> None:
    """Neither launches nor the wait for the device are seconds for each byte."""
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.zeros_like(torch.ones(4)))
    monkeypatch.setattr(compression.time, "sleep", lambda seconds: None)
    begun = [0]

    def part(kernels: int) -> Callable[[], object]:
        def launch() -> None:
            begun[0] += 1
            # The first of all finds libraries that nobody has used.
            clock.now_s += kernels * host_s + (1.0 if begun[0] <= 3 else 0.0)
            streams.current.launch(kernels * 1e-5, after=clock.now_s)

        return launch

    coding = Coding("int8", part(14), part(8), part(2))
    found = compression._medians(coding, GPU)
    assert found == (pytest.approx(14e-5), pytest.approx(8e-5), pytest.approx(2e-5))
    # Nor is the device kept busy for as long as libraries take to begin.
    assert clock.now_s < 3.0 + 3 * 8 * 24 * (2.5 * host_s + 3e-5)


def test_a_part_that_waits_for_the_device_does_not_take_longer_each_time(
    streams: Streams, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As top-k does. What the device then waits for its host is so in a step, too."""
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.zeros_like(torch.ones(4)))
    monkeypatch.setattr(compression.time, "sleep", lambda seconds: None)

    def choose() -> None:
        for _ in range(2):
            clock.now_s += 1e-4
            streams.current.launch(1e-3, after=clock.now_s)
            timing.synchronise(GPU)

    coding = Coding("topk", choose, choose, choose, 0.1)
    assert compression._medians(coding, GPU) == (pytest.approx(2.1e-3),) * 3
    assert clock.now_s < 0.2


def test_on_a_gpu_slices_are_as_large_as_what_is_turned_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a kernel's least time is little of a slice's; what is fixed a small one tells."""
    drawn: list[int] = []
    randn = torch.randn

    def told(count: int, **_: object) -> torch.Tensor:
        drawn.append(count)
        return randn(2**12)

    monkeypatch.setattr(torch, "randn", told)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=int))
    monkeypatch.setattr(compression, "part_codings", lambda gradient: ())
    monkeypatch.setattr(compression, "_medians", lambda coding, device: (1.0, 2.0, 1.0))
    for device in (CPU, GPU):
        (rate,) = compression.compression_rates(device, torch.float32)
        assert rate.exchange == "bf16"
    assert drawn == [2**19, 2**22, 2**16]


def test_what_coding_takes_however_small_a_gradient_is_is_told_apart(
    streams: Streams, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decomposition of a millisecond, and a kernel of as much for each MiB."""
    randn, fixed_s, byte_s = torch.randn, 1e-3, 1e-3 / 2**20
    size_bytes = [0]

    def drawn(count: int, **_: object) -> torch.Tensor:
        size_bytes[0] = 4 * count
        return randn(2**12)

    def coding(flat: torch.Tensor) -> list[Coding]:
        def launch(times: int) -> Callable[[], object]:
            return lambda: streams.current.launch(times * (fixed_s + byte_s * size_bytes[0]))

        return [Coding("low_rank", launch(1), launch(3), launch(1), 0.1)]

    monkeypatch.setattr(torch, "zeros", lambda *_, **__: randn(4))
    monkeypatch.setattr(torch, "randn", drawn)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=int))
    monkeypatch.setattr(compression.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(compression, "wire_codings", lambda gradient: ())
    monkeypatch.setattr(compression, "part_codings", coding)
    # Of what is drawn the bytes are not those that the slice is pretended to have.
    monkeypatch.setattr(torch.Tensor, "nbytes", property(lambda self: size_bytes[0]))
    (rate,) = compression.compression_rates(GPU, torch.float32)
    assert (rate.fixed_s, rate.received_fixed_s) == (
        pytest.approx(fixed_s), pytest.approx(2 * fixed_s)
    )  # fmt: skip
    assert rate.seconds_per_byte == pytest.approx(byte_s)
    assert rate.received_seconds_per_byte == pytest.approx(2 * byte_s)
    assert (rate.gathered_fixed_s, rate.gathered_seconds_per_byte) == (0.0, 0.0)
