"""Profiles of whole workloads: complete, consistent, and without a trace left behind."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.executor.comm.setups import device_name
from meshwright.models import zoo as models
from meshwright.models.spec import UnitSpec
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch, Workload
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import decode, encode
from meshwright.profiler import sessions
from meshwright.profiler.estimate import estimate
from meshwright.profiler.memory import SavedTensors, measure_footprint
from meshwright.profiler.model import profile
from meshwright.profiler.shares import ShareMeter
from meshwright.profiler.timing import Timeline
from torch import Tensor, nn
from torch.nn import functional as F

SMALL = ("cnn-digits", "gpt-tiny", "seq2seq-tiny", "gpt2-tiny", "bert-tiny", "vit-tiny")


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@cache
def profiled(name: str) -> ModelProfile:
    return profile(models.build(name), batches=(2, 4), degrees=(2,), repeats=2, budget_s=10)


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that profiling could change."""
    return {
        "weights": {n: p.detach().clone() for n, p in model.named_parameters()},
        "buffers": {n: b.detach().clone() for n, b in model.named_buffers()},
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "training": [m.training for m in model.modules()],
        "hooks": sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        ),
        "random": torch.get_rng_state(),
    }


def assert_same_state(before: dict[str, object], after: dict[str, object]) -> None:
    for kind in ("weights", "buffers"):
        one, two = before[kind], after[kind]
        assert one.keys() == two.keys()  # type: ignore[attr-defined]
        for name, tensor in one.items():  # type: ignore[attr-defined]
            assert torch.equal(tensor, two[name]), f"{kind} {name}"  # type: ignore[index]
    for name, gradient in before["gradients"].items():  # type: ignore[attr-defined]
        assert after["gradients"][name] is gradient  # type: ignore[index]
    assert before["training"] == after["training"]
    assert before["hooks"] == after["hooks"]
    assert torch.equal(before["random"], after["random"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SMALL)
def test_the_units_are_the_discovered_ones_in_order(name: str) -> None:
    workload = models.build(name)
    found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
    result = profiled(name)
    assert [u.name for u in result.units] == [u.name for u in found.units]
    assert [(e.source, e.target) for e in result.edges] == [
        (e.source, e.target) for e in found.edges
    ]
    assert result.model == found.fingerprint


@pytest.mark.parametrize("name", SMALL)
def test_units_take_time_and_add_up_to_the_step(name: str) -> None:
    result = profiled(name)
    for unit in result.units:
        if unit.modules:
            assert all(s > 0 for s in unit.whole.forward.y), unit.name
        # Parameters between units are the input's, whose time is the glue's.
        if unit.modules and any(p.trainable for p in unit.parameters):
            assert all(s > 0 for s in unit.whole.backward.y), unit.name
    assert result.step is not None
    for batch, step in zip(result.step.x, result.step.y, strict=True):
        parts = sum(u.whole.forward(batch) + u.whole.backward(batch) for u in result.units)
        assert parts == pytest.approx(step, rel=1e-9)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_counts_once(name: str) -> None:
    model = models.build(name).model
    result = profiled(name)
    assert result.parameter_bytes == sum(p.nbytes for p in model.parameters())
    names = [p.shared for u in result.units for p in u.parameters]
    assert set(names) == {n for n, _ in model.named_parameters()}


class WithTables(nn.Module):
    """Buffers of its own (one under two names, one that is a parameter's memory), and those of a
    module that has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.tables = nn.Linear(8, 8), nn.Linear(8, 8), nn.Module()
        self.register_buffer("scale", torch.ones(100_000))
        self.register_buffer("start", self.scale[:8])
        self.register_buffer("weight", self.first.weight.detach())
        self.tables.register_buffer("shift", torch.ones(8))
        self.first.register_buffer("own", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.start + self.tables.shift)


def test_buffers_that_no_unit_has_count_to_the_input() -> None:
    workload = Workload(
        "tables", WithTables(), lambda size: Batch((torch.randn(size, 8),), torch.randn(size, 8)),
        F.mse_loss,
    )  # fmt: skip
    result = profile(workload, batches=(2, 4), degrees=(2,), repeats=1, budget_s=2)
    found = {unit.name: unit.state_bytes for unit in result.units if unit.state_bytes}
    assert found == {"@input": 4 * (100_000 + 8), "first": 4 * 8}
    t4s = mw.describe_cluster(device="t4", nodes=2, devices_per_node=1, inter_gbit_s=10)
    plan = mw.plan(estimate(workload, "t4"), t4s, mw.Goal(batch=8))
    assert min(plan.prediction.peak_bytes) > 4 * (100_000 + 8)


@pytest.mark.parametrize("name", SMALL)
def test_json_round_trip_byte_for_byte(name: str) -> None:
    data = encode(profiled(name))
    assert encode(decode(ModelProfile, data)) == data


@pytest.mark.parametrize("name", SMALL)
def test_saved_bytes_grow_with_the_batch(name: str) -> None:
    result = profiled(name)
    small, large = (sum(u.whole.saved(b) for u in result.units) for b in (2, 4))
    assert small > 0
    assert 1.2 * small < large <= 2.0 * small  # what does not depend on the batch is a small part


def test_shares_are_measured_for_every_split_and_degree() -> None:
    result = profile(
        models.build("cnn-digits"), batches=(4,), degrees=(2, 4), repeats=1, budget_s=30
    )
    linear = [u for u in result.units if u.kind == "linear"]
    assert linear
    for unit in linear:
        measured = {(s.style, s.degree) for s in unit.shares[1:]}
        assert measured == {(s.style, d) for s in unit.splits for d in (2, 4) if s.parts >= d}
        for share in unit.shares[1:]:
            assert share.forward(4) > 0
            assert share.parameter_bytes < unit.whole.parameter_bytes
    half = {s.style: s.parameter_bytes for s in linear[0].shares if s.degree == 2}
    weight, bias = sorted(p.bytes for p in linear[0].parameters)[::-1]
    assert half["column"] == (weight + bias) // 2
    assert half["row"] == weight // 2 + bias  # the bias of a row linear stays whole


def test_without_time_the_units_with_most_parameters_are_divided_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    ordinary = ShareMeter.shares

    def shares(self: ShareMeter, unit: UnitSpec, *rest: Any) -> Any:
        asked.append(unit.name)
        return ordinary(self, unit, *rest)

    monkeypatch.setattr(ShareMeter, "shares", shares)
    with pytest.warns(UserWarning, match="time ran out before 6 units were measured divided"):
        result = profile(models.build("cnn-digits"), degrees=(2,), repeats=1, budget_s=0.0)
    assert len(result.batches) == 2  # one size alone makes no curve
    sizes = [result.unit(name).parameter_bytes for name in asked]
    assert len(sizes) > 3
    assert sizes == sorted(sizes, reverse=True)


def normalised() -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    return Workload(
        "normalised",
        model,
        lambda n: Batch((torch.randn(n, 3, 8, 8),), torch.zeros(n, 4)),
        F.mse_loss,
    )


@pytest.mark.parametrize(
    "name", ["gpt-tiny", "normalised", pytest.param("resnet50-32", marks=pytest.mark.slow)]
)
def test_nothing_is_changed(name: str) -> None:
    """Weights, running statistics, gradients, flags, hooks and random state stay."""
    workload = normalised() if name == "normalised" else models.build(name)
    model = workload.model
    model.train()
    next(model.children()).eval()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = state_of(model)
    result = profile(workload, batches=(2,), degrees=(2,), repeats=1, budget_s=3)
    assert_same_state(before, state_of(model))
    assert all(p.grad is not None and (p.grad == 0.5).all() for p in model.parameters())
    assert any(u.batch_statistics for u in result.units) == (name != "gpt-tiny")


def test_nothing_is_changed_by_a_model_that_fails() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise RuntimeError("no such luck")

    model = Fails()
    workload = Workload(
        "fails", model, lambda n: Batch((torch.randn(n, 4),), torch.zeros(n, 4)), F.mse_loss
    )
    before = state_of(model)
    with pytest.raises(InputError, match="no such luck"):
        profile(workload, batches=(2,))
    assert_same_state(before, state_of(model))


def test_sizes_are_checked() -> None:
    with pytest.raises(InputError, match="batch size 0 cannot be measured"):
        profile(models.build("mlp"), batches=(0, 2))


def test_progress_rises_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    profile(
        models.build("mlp"),
        batches=(2,),
        degrees=(),
        repeats=1,
        progress=lambda done, total, doing: seen.append((done, total)),
    )
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert seen[-1][0] == seen[-1][1]


def test_a_slow_unit_gets_its_own_time() -> None:
    """A unit that does twenty times the work of its twin is charged for it, both ways."""

    class Repeats(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256) / 16)
            self.times = times

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                x = torch.tanh(x @ self.weight)
            return x

    model = nn.Sequential(nn.Linear(256, 256), Repeats(1), Repeats(20), nn.Linear(256, 4))
    workload = Workload(
        "repeats",
        model,
        lambda n: Batch((torch.randn(n, 256),), torch.zeros(n, 4)),
        F.mse_loss,
    )
    found = discover(model, workload.make_batch(3), workload.make_batch(2))
    batch = workload.make_batch(64)
    with Timeline(model, found.units, torch.device("cpu")) as timeline:
        steps = [timeline.step(batch, workload.loss) for _ in range(60)]

    def least(direction: str, name: str) -> float:
        return min(getattr(s, direction)[name] for s in steps)

    for direction in ("forward", "backward"):
        ratio = least(direction, "2") / least(direction, "1")
        assert 6 < ratio < 60, (direction, ratio)


def test_footprint_of_a_model_counted_by_hand() -> None:
    """Linear saves its input, ReLU its output, which the next Linear saves too: counted once, at
    the unit that made it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    workload = Workload(
        "hand", model, lambda n: Batch((torch.randn(n, 8),), torch.randn(n, 4)), F.mse_loss
    )
    found = discover(model, workload.make_batch(3), workload.make_batch(2))
    size = 5
    batch = workload.make_batch(size)
    footprint = measure_footprint(model, found.units, batch, workload.loss, torch.device("cpu"))
    first, second = (next(u.name for u in found.units if m in u.modules) for m in ("0", "2"))
    batch_bytes = size * (8 + 4) * 4
    assert footprint.saved[found.units[0].name] == batch_bytes
    assert footprint.saved[first] == size * 16 * 4  # ReLU's output
    assert footprint.saved[second] == size * 4 * 4  # the loss's input
    assert footprint.workspace[first] == size * 16 * 4  # Linear's output, until ReLU has it
    # In the second's backward: gradients of its output and of its input, besides its weights'.
    assert size * 16 * 4 < footprint.gradient[second] <= size * (16 + 4) * 4 + 8


def test_saved_tensors_are_those_that_torch_saves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4))
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    counted = SavedTensors([*model.parameters(), x], lambda: "here")
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda t: t):
        model(x).sum()
    packed: dict[int, int] = {}
    known = {p.untyped_storage().data_ptr() for p in (*twin.parameters(), x)}
    kept: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        if t.untyped_storage().data_ptr() not in known:
            packed[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        twin(x).sum()
    assert counted.bytes == {"here": sum(packed.values())}


@pytest.mark.parametrize(
    ("room_bytes", "budget_s", "expected"),
    [
        (1e12, 1e6, (16, 64)),
        (4e6, 1e6, (16, 32)),
        (1e12, 1e-6, (1, 2)),
        (1.0, 1e6, (1, 2)),
    ],
)
def test_batches_that_do_not_fit_are_halved(room_bytes, budget_s, expected, monkeypatch):
    """Down to two, and where one size alone is left, half of it makes the curve."""
    asked = []

    def measure(job, found, batches, repeats):
        asked.append(tuple(batches))
        raise StopIteration

    monkeypatch.setattr("meshwright.profiler.model._measure", measure)
    workload = models.build("cnn-digits")
    standing = 3 * sum(p.numel() * p.element_size() for p in workload.model.parameters())
    with pytest.raises(StopIteration):
        profile(workload, batches=(16, 64), budget_s=budget_s, room_bytes=room_bytes + standing)
    (found,) = asked
    assert found == expected


def one_pixel() -> Workload:
    """Batch normalisation of one pixel, which refuses a batch of one."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8),
        nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
    return Workload(
        "one-pixel",
        model,
        lambda n: Batch((torch.randn(n, 3, 4, 4),), torch.zeros(n, dtype=torch.long)),
        F.cross_entropy,
    )


class LittleMemory(nn.Linear):
    """A layer on a device that has room for four samples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x)


def test_where_memory_is_short_smaller_batches_are_measured() -> None:
    workload = Workload(
        "little",
        nn.Sequential(LittleMemory(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        lambda n: Batch((torch.randn(n, 4),), torch.zeros(n, dtype=torch.long)),
        F.cross_entropy,
    )
    with pytest.warns(UserWarning, match="without a batch of 8 with OutOfMemoryError"):
        found = profile(workload, batches=(4, 8), budget_s=2.0)
    assert found.batches == found.step.x == (2, 4)
    with pytest.raises(mw.InputError, match=r"refuses a batch of 8 with OutOfMemory.*--batch"):
        profile(workload, batches=(8,), budget_s=2.0)


def test_a_batch_that_the_model_refuses_is_left_out() -> None:
    assert profile(one_pixel(), budget_s=2.0).batches[0] == 2
    with pytest.warns(UserWarning, match="without a batch of 1 with ValueError: Expected more"):
        found = profile(one_pixel(), batches=(1, 4), budget_s=2.0)
    assert found.batches == (4, 8)
    with pytest.raises(mw.InputError, match=r"refuses a batch of 1 with ValueError.*--batches"):
        profile(one_pixel(), batches=(1,), budget_s=2.0)
    assert mw.profile(one_pixel(), device="a100-sxm-40gb").batches[0] == 1


def of_few_samples(most: int) -> Workload:
    """A make_batch that cuts its batches off a data set."""
    x, y = torch.randn(most, 8), torch.zeros(most, dtype=torch.long)
    return Workload("few", nn.Linear(8, 2), lambda n: Batch((x[:n],), y[:n]), F.cross_entropy)


def test_a_batch_shorter_than_asked_for_is_not_measured() -> None:
    with pytest.warns(UserWarning, match=r"without a batch of 32.*make_batch.* gave 16 samples"):
        found = profile(of_few_samples(16), batches=(8, 16, 32), budget_s=2.0)
    assert found.batches == (8, 16)


@pytest.mark.parametrize(("most", "expected"), [(8, (4, 8)), (11, (4, 8))])
def test_where_one_size_is_left_none_that_was_refused_is_tried_again(most, expected) -> None:
    """Of data for one batch, and of those where twice the size is refused as well."""
    with pytest.warns(UserWarning, match="measured without a batch of"):
        found = profile(of_few_samples(most), batches=(8, 16 if most == 8 else 12), budget_s=2.0)
    assert found.batches == expected


def test_where_no_other_size_is_taken_one_is_enough() -> None:
    def of_eight(output: Tensor, target: Tensor) -> Tensor:
        if len(target) != 8:
            raise ValueError("this loss is of eight")
        return F.cross_entropy(output, target)

    workload = replace(of_few_samples(64), loss=of_eight)
    with pytest.warns(UserWarning, match=r"without a batch of 12 .*of 16 .*of 4 with ValueError"):
        found = profile(workload, batches=(8, 12), budget_s=2.0)
    assert found.batches == (8,)


def test_a_loss_that_is_a_sum_is_told_before_training():
    def make_batch(size: int) -> Batch:
        return Batch((torch.randn(size, 8),), torch.randint(4, (size,)))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    summed = Workload("sums", nn.Linear(8, 4), make_batch, loss)
    with pytest.warns(UserWarning, match=r"is a sum over samples.*launch' will refuse it"):
        found = mw.profile(summed, batches=(2, 4))
    assert found.units[1].kind == "linear"


def test_every_unit_is_measured_divided_before_any_is_at_a_larger_degree(monkeypatch):
    asked: list[tuple[str, tuple[int, ...]]] = []
    ordinary = ShareMeter.shares

    def shares(
        self: ShareMeter, unit: UnitSpec, base: Any, call: Any, size: int, wanted: Sequence[int]
    ) -> Any:
        asked.append((unit.name, tuple(wanted)))
        return ordinary(self, unit, base, call, size, wanted)

    monkeypatch.setattr(ShareMeter, "shares", shares)
    found = profile(models.build("mlp"), batches=(4,), degrees=(2, 4), repeats=1, budget_s=20)
    first, then = ([name for name, wanted in asked if wanted == few] for few in ((2,), (2, 4)))
    assert first == then == [name for name, _ in asked][: len(first)]
    for name in first:
        assert {share.degree for share in found.unit(name).shares} == {1, 2, 4}


class Slow(nn.Module):
    """A layer that takes a twentieth of a second."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        return x


def test_dividing_has_a_part_of_the_time_although_it_was_spent_before():
    """Three steps of two sizes each take longer than a fifth of a second."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), Slow(), nn.Linear(64, 4))

    def make_batch(size: int) -> Batch:
        return Batch((torch.randn(size, 8),), torch.randint(4, (size,)))

    slow = Workload("slow", model, make_batch, F.cross_entropy)
    found = profile(slow, batches=(64, 128), degrees=(2,), repeats=1, budget_s=0.2)
    assert any(share.degree == 2 for unit in found.units for share in unit.shares)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pin_on_no_unit_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    device = Device(name=device_name(torch.device("cpu")), memory_bytes=2**30)
    links = (Level(name="intra", latency_s=0.0, bytes_per_s=1e9),) * (ranks > 1)
    nodes = (Node(name="host", devices=(device,) * ranks),)
    there = Cluster(name="here", nodes=nodes, levels=links)
    monkeypatch.setattr(sessions, "local_device", lambda: torch.device("cpu"))

    def measured(*_: object, **__: object) -> ModelProfile:
        raise RuntimeError("measured")

    monkeypatch.setattr(sessions, "_on_ranks", measured)
    monkeypatch.setattr(sessions, "profile_model", measured)

    def plan(*units: str) -> None:
        pins = tuple(Pin(unit=unit, only=(Layout(groups=ranks),)) for unit in units)
        mw.plan("mlp", there, Goal(batch=8, pins=pins))

    before = torch.get_rng_state()
    with pytest.raises(InputError, match=r"no unit is called '11', .*: try '1'"):
        plan("1", "11")
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="measured"):
        plan("1", "?")
