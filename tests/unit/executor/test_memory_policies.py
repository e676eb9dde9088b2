"""Recompute and offload of one model's regions: the same numbers from fewer bytes."""

import copy
import gc
import itertools
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from meshwright.executor.memory import offload
from meshwright.executor.memory.install import check_memory, install_memory
from meshwright.executor.memory.regions import OfThisModel
from meshwright.models.compiled import CompiledRegions, Uncompiled
from meshwright.models.units.storages import peak_bytes
from meshwright.planner.schema.errors import InputError, RunError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import UnitPlan
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.copying_host import CopyingHost

CPU = torch.device("cpu")


class Plan:
    world_size = 1

    def __init__(self, units):
        self.units = units


def unit(modules, memory="recompute", segment=()):
    return UnitPlan(
        name=modules[0],
        kind="other",
        modules=modules,
        layout=Layout(groups=1, degree=1),
        memory=memory,
        segment=segment,
    )


def network():
    """Two units of a convolution with what follows it, one of a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16, momentum=None),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
        nn.LogSoftmax(1),
    )


UNITS = (("0", "1", "2", "3"), ("4", "5", "6", "7"), ("9", "10"))


def nothing():
    class As:
        def __enter__(self):
            return None

        def __exit__(self, *_):
            return None

    return As


def install(model, units):
    plan = Plan(units)
    check_memory(model, plan, CPU)
    regions, open_ = install_memory(model, plan, CPU, lambda: 0, nothing), []

    def enter(*_):
        open_.append(regions.around())
        open_[-1].__enter__()

    def leave(*_):
        open_.pop().__exit__(None, None, None)

    model.register_forward_pre_hook(OfThisModel(enter), prepend=True)
    model.register_forward_hook(OfThisModel(leave), always_call=True)
    return regions


@pytest.fixture
def host(monkeypatch):
    host = CopyingHost()
    monkeypatch.setattr("meshwright.executor.memory.offload.host_of", lambda device: host)
    return host


def trained(model, steps=3, samples=4, autocast=False):
    """Everything that training leaves: parameters, their last gradients, buffers, random state."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = model(torch.randn(samples, 3, 8, 8))
        out.float().square().mean().backward()
        optimizer.step()
    return {
        **{n: p.detach().clone() for n, p in model.named_parameters()},
        **{f"grad {n}": p.grad for n, p in model.named_parameters()},
        **dict(model.named_buffers()),
        "random": torch.get_rng_state(),
    }


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_are_those_of_keep(policy, autocast, host):
    kept = network()
    model = copy.deepcopy(kept)
    install(model, [unit(m, policy) for m in UNITS])
    same(trained(model, autocast=autocast), trained(kept, autocast=autocast))
    assert bool(host.sent_bytes) == (policy == "offload")


def test_a_segment_is_run_again_as_one():
    kept = network()
    model = copy.deepcopy(kept)
    whole = tuple(str(i) for i in range(11))
    calls = []
    install(model, [unit(m, segment=whole) for m in UNITS])
    model[5].register_forward_hook(lambda *_: calls.append(5))
    same(trained(model, steps=2), trained(kept, steps=2))
    assert len(calls) == 4  # forward and again, in two steps


def scaled(result):
    return result * 3 if isinstance(result, torch.Tensor) else (result[0] * 3,)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("modules", [("0", "1", "2"), ("3",)])
@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("kind", ["before", "before, first", "after", "after, first"])
def test_hooks_at_the_ends_of_a_region_run_again(policy, after, modules, end, kind, host):
    """Of its first and of its last module, before or after the plan is applied: what they change is
    inside, outside, or on either side."""
    kept = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh())
    model = copy.deepcopy(kept)

    def hook(of):
        place = of[int(modules[end])]
        if kind.startswith("before"):
            place.register_forward_pre_hook(lambda m, args: scaled(args), prepend="first" in kind)
        else:
            place.register_forward_hook(lambda m, args, out: scaled(out), prepend="first" in kind)

    hook(kept)
    if not after:
        hook(model)
    install(model, [unit(modules, policy)])
    if after:
        hook(model)
    x = torch.randn(5, 6)
    found = []
    for one in (kept, model):
        one(x).square().mean().backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    same(*found)


def test_a_weight_that_a_hook_computes_is_that_of_its_forward():
    """Each forward makes it anew, of another vector, and one backward comes after two of them."""
    kept = nn.Sequential(nn.Linear(6, 6), nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
    model = copy.deepcopy(kept)
    install(model, [unit(("1", "2"))])
    real, fake = torch.randn(2, 5, 6)
    found = []
    for one in (kept, model):
        (one(real).square().mean() - one(fake).mean()).backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    same(*found)


def test_a_parameter_that_is_changed_before_backward_is_told(host):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    install(model, [unit(("0", "1"), "offload"), unit(("2",), "offload")])
    loss = model(torch.randn(5, 6, requires_grad=True)).square().mean()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.drop(self.down(torch.relu(self.up(x))))


def peak(model, x):
    def work():
        model(x).square().mean().backward()

    work()  # gradients are there
    return peak_bytes(work, [x, *model.parameters(), *(p.grad for p in model.parameters())], CPU)


def blocks(number=6, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(number)))


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_peak_falls(policy, host):
    kept, x = blocks(), torch.randn(8, 32, 32)
    saving = copy.deepcopy(kept)
    leaves = ("norm", "attention", "up", "down")
    if policy == "offload":
        names = [f"{i}.{leaf}" for i in range(6) for leaf in leaves]
        install(saving, [unit((name,), policy) for name in names])
    else:
        segmented = [(f"{i}.{leaf}", (str(i),)) for i in range(6) for leaf in leaves]
        install(saving, [unit((name,), policy, segment) for name, segment in segmented])
    before, after = peak(kept, x), peak(saving, x)
    if policy == "offload":
        assert host.sent_bytes > 0.4 * before
    else:
        assert after < 0.5 * before


def test_memory_falls_with_what_is_recomputed():
    """Each block less that is kept saves what a block saves, less its input."""
    kept, x = blocks(), torch.randn(8, 32, 32)
    found = [peak(kept, x)]
    for number in (2, 4, 6):
        model = copy.deepcopy(kept)
        install(model, [unit((str(i),)) for i in range(number)])
        found.append(peak(model, x))
    assert found == sorted(found, reverse=True)
    steps = [a - b for a, b in itertools.pairwise(found)]
    assert steps[0] == pytest.approx(steps[1], rel=0.05)


OFF = "offload"


def chain(memory):
    """Units of which each makes two tensors that are saved, and their policies."""
    each = (nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid()) for _ in memory)
    units = [unit(tuple(f"{i}.{j}" for j in range(3)), policy) for i, policy in enumerate(memory)]
    return nn.Sequential(*each), units


def test_offload_calls_the_unit_before_back_early(host):
    model, units = chain([OFF] * 3)
    install(model, units)
    out = model(torch.randn(256, 64))
    assert host.told == []
    seen = []
    model[2][0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(host.told)))
    model[1][0].weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(host.told)))
    out.sum().backward()
    # The last unit's two had not left; those of the unit before it, then the next.
    assert seen == [2, 4]


def chained(host, memory):
    """What stays on the device as each unit's forward ends, and how many have come back as each
    gradient of a weight is there."""
    model, units = chain(memory)
    install(model, units)
    staying, back = [], []
    for one in model:
        one[2].register_forward_hook(lambda *_: staying.append(host.staying))
        one[0].weight.register_post_accumulate_grad_hook(lambda _: back.append(len(host.told)))
    model(torch.randn(256, 64)).sum().backward()
    return staying, back


def test_copies_of_one_unit_are_under_way_beside_the_one_at_work(host):
    staying, back = chained(host, [OFF] * 4)
    # After a unit its own are, and those of no other.
    assert staying == [2, 2, 2, 2]
    assert back == [2, 4, 6, 6]


def test_units_that_keep_end_copies_too(host):
    """The plan counts what is under way at the next unit only, whatever becomes of that."""
    staying, back = chained(host, [OFF, "keep", "keep", OFF])
    assert staying == [2, 0, 0, 2]
    # As they are needed: what the first unit leaves by the one after it, too.
    assert back == [0, 0, 1, 2]


@pytest.mark.parametrize("after", ["keep", "recompute", OFF])
@pytest.mark.parametrize("before", ["keep", "recompute", OFF])
def test_what_becomes_of_a_feature_map_says_the_unit_that_made_it(before, after, host):
    """Whoever saves it: once on the host, and nowhere else, or not there at all."""
    model, units = chain([before, after])
    install(model, units)
    left, sent = [], []
    model[0].register_forward_hook(
        lambda m, a, out: left.append(weakref.ref(out.untyped_storage()))
    )
    model[1].register_forward_pre_hook(lambda *_: sent.append(host.sent_bytes))
    out = model(torch.randn(256, 64))
    gc.collect()
    one = 256 * 64 * 4
    assert sent == [2 * one * (before == OFF)]
    # The second unit has sent its own two, and not what enters it.
    assert host.sent_bytes == sent[0] + 2 * one * (after == OFF)
    assert (left[0]() is None) == (before == OFF)
    out.sum().backward()


class Between(nn.Module):
    """What units make is saved by functions between them, changed in place, and used far later."""

    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        y = self.norm(x)
        hidden = nn.functional.gelu(self.up(y))
        inner = self.drop(self.down(hidden)).relu_()
        return x + inner * self.gate(y).sigmoid()


@pytest.mark.parametrize("seed", range(12))
def test_numbers_are_those_of_keep_however_policies_are_mixed(seed, host):
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    kept = nn.Sequential(Between(), Between(), Between())
    model = copy.deepcopy(kept)
    leaves = [f"{i}.{leaf}" for i in range(3) for leaf in ("norm", "up", "down", "drop", "gate")]
    policies = random.choice(["keep", "recompute", OFF], len(leaves))
    units = [unit((leaf,), str(policy)) for leaf, policy in zip(leaves, policies, strict=True)]
    # One that is recomputed must not find its input changed in place.
    install(model, [u for u in units if not (u.name.endswith("drop") and u.memory != OFF)])
    found = []
    for one in (kept, model):
        torch.manual_seed(seed)
        x = torch.randn(64, 32, requires_grad=True)
        outs = [one(x), one(2 * x)]  # two forwards before their backwards
        for out in outs:
            out.square().mean().backward()
        found.append({"x": x.grad, **{name: p.grad for name, p in one.named_parameters()}})
    same(*found)
    assert host.sent_bytes


class Changed(nn.Module):
    """What a unit has made is saved, and changed in place before backward."""

    def __init__(self, after):
        super().__init__()
        self.a, self.b, self.after = nn.Linear(32, 32), nn.Linear(32, 32), after

    def forward(self, x):
        y = self.a(x)
        z = self.b(y) if self.after else y * y
        y.mul_(0.5)
        return z + y


@pytest.mark.parametrize("after", [None, "keep", "recompute"])
def test_what_is_changed_in_place_after_it_was_saved_is_told(after, host):
    """Whoever saved it; on the host are values that it no longer has, or never had."""
    model = Changed(after)
    units = [unit(("a",), OFF), *([unit(("b",), after)] if after == "recompute" else [])]
    install(model, units)
    loss = model(torch.randn(64, 32)).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|enters it was chang"):
        loss.backward()


class Conjugated(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x).conj()


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.weight).abs()


class Gates(nn.Module):
    """Parts of one memory that count their changes each by itself, and views of these."""

    def forward(self, x):
        a, b = torch.unsafe_chunk(2 * x, 2, dim=1)
        gated = a.sigmoid_() * b.tanh_()
        c, d = torch.unsafe_chunk(2 * x, 2, dim=1)
        c.sigmoid_()
        u = c.unsqueeze(0) * x[:, :32]
        d.tanh_()
        return gated + (u + d.unsqueeze(0) * x[:, 32:])[0]


@dataclass
class Box:
    tensor: torch.Tensor


class Boxed(nn.Module):
    def forward(self, x):
        return Box(x + 1)


class Opened(nn.Module):
    def forward(self, box):
        return box.tensor.square()


@pytest.mark.parametrize(
    "units",
    [
        pytest.param((Conjugated(), Weighted()), id="conjugated"),
        pytest.param((Gates(), nn.Tanh()), id="parts"),
        pytest.param((Boxed(), Opened()), id="boxed"),
    ],
)
@pytest.mark.parametrize("after", ["keep", OFF])
def test_values_are_those_that_were_saved(units, after, host):
    kept = nn.Sequential(nn.Linear(64, 64), *copy.deepcopy(units))
    model = copy.deepcopy(kept)
    install(model, [unit(("1",), OFF), unit(("2",), after)])
    x, found = torch.randn(64, 64), []
    for one in (kept, model):
        one(x).square().mean().backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    same(*found)


def test_what_leaves_a_unit_in_an_object_is_its_own(host):
    model = nn.Sequential(Boxed(), Opened())
    install(model, [unit(("0",), OFF), unit(("1",), "keep")])
    model(torch.randn(64, 64, requires_grad=True))
    assert host.sent_bytes == 64 * 64 * 4


def test_parts_that_are_unchanged_travel_once(host):
    saver = offload.Offloaded(offload.Offload(host, lambda: 0))
    made = torch.randn(3, 4096)
    views = [saver.pack(part) for part in torch.unsafe_chunk(made, 3)]
    assert len(views) == 3
    assert host.sent_bytes == made.nbytes


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x):
        return torch.vmap(self.inner)(x)


def test_a_unit_may_be_called_for_each_of_many(host):
    kept = nn.Sequential(Mapped())
    model = copy.deepcopy(kept)
    install(model, [unit(("0.inner.0", "0.inner.1"), OFF)])
    x, found = torch.randn(4, 64, 32), []
    for one in (kept, model):
        one(x).square().mean().backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    same(*found)


class Vectors(nn.Module):
    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)


def test_what_cannot_be_together_with_offload_is_a_sentence(host):
    model = nn.Sequential(nn.Linear(32, 32), Vectors())
    regions = install(model, [unit(("0",), OFF)])
    with pytest.raises(InputError, match=r"torch\.func's.*--forbid offload"), regions.around():
        model.forward(torch.randn(64, 32))


def test_what_is_compiled_between_offloaded_units_is_compiled_once(host):
    kept, units = chain([OFF, "keep", OFF, "keep"])
    model = copy.deepcopy(kept)
    install(model, units)
    counter = CompileCounterWithBackend("aot_eager")
    for i in (1, 3):
        model[i].compile(backend=counter)
    x, graphs, found = torch.randn(256, 64), [], []
    for _ in range(3):
        model(x).square().mean().backward()
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1] > 0
    for one in (kept, model):
        one.zero_grad()
        one(x).square().mean().backward()
        found.append({name: p.grad for name, p in one.named_parameters()})
    same(*found)


def test_the_end_of_what_is_compiled_as_one_ends_copies(host):
    first, inner, last = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3))
    model = nn.Sequential(first, nn.Sequential(inner, nn.Sigmoid()), last)
    units = [("0.0", "0.1"), ("1.0.0", "1.0.1"), ("2.0", "2.1")]
    model[1].compile(backend="aot_eager")
    Uncompiled(model)
    regions = install(model, [unit(m, p) for m, p in zip(units, (OFF, "keep", OFF), strict=True)])
    compiled = CompiledRegions(model, {"", "0", "2"}).install()
    assert compiled.modules == (model[1],)
    regions.tell_as_one(model[1])
    staying = []
    for one in model[:2]:
        one.register_forward_hook(lambda *_: staying.append(host.staying))
    model(torch.randn(256, 64)).sum().backward()
    assert staying == [1, 0]


class Log(list):
    """What was asked of the device, in order; and the sizes of what was pinned."""

    def __init__(self):
        self.pinned = []

    def pinned_block(self, size):
        self.pinned.append(size)
        return torch.empty(size, dtype=torch.uint8)


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __eq__(self, other):
        return self.name == other.name

    __hash__ = None

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for copy {event}")

    def record_event(self):
        self.log.append("copy")
        return self.log.count("copy")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.fixture
def pinned(monkeypatch):
    """A device whose streams write down what is asked of them; and a host for it."""
    log = Log()
    cuda = offload.torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device: Stream("side", log))
    monkeypatch.setattr(cuda, "current_stream", lambda device: Stream("computing", log))
    monkeypatch.setattr(cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(offload, "pinned_block", log.pinned_block)
    return offload.PinnedHost(CPU), log


SENT = ["side waits for computing", "copy"]


def test_memory_is_free_again_when_the_computing_stream_has_waited(pinned):
    host, log = pinned
    flat = torch.arange(10, dtype=torch.uint8)
    there = weakref.ref(flat)
    copy = host.send(flat)
    expected = flat.clone()
    del flat
    assert there() is not None
    assert log == SENT
    copy.leave()
    # In this order: what is allocated next on the computing stream may be this memory.
    assert log == [*SENT, "computing waits for copy 1"]
    assert there() is None
    assert torch.equal(copy.wait(), expected)
    assert log[3:] == [*SENT, "computing waits for copy 2"]
    copy.wait()
    copy.leave()  # has come back: stays
    assert torch.equal(copy.wait(), expected)
    assert len(log) == 6


def test_what_has_not_left_is_read_where_it_is(pinned):
    host, log = pinned
    flat = torch.arange(10, dtype=torch.uint8)
    copy = host.send(flat)
    assert copy.wait() is flat
    assert log == SENT
    del copy, flat
    # Its memory must not be another's before it has been read.
    assert log == [*SENT, "computing waits for copy 1"]


def test_each_stream_that_reads_what_came_back_waits_for_it(pinned, monkeypatch):
    host, log = pinned
    copy = host.send(torch.arange(10, dtype=torch.uint8))
    copy.leave()
    copy.wait()
    monkeypatch.setattr(offload.torch.cuda, "current_stream", lambda device: Stream("own", log))
    before = len(log)
    copy.wait()
    copy.wait()
    assert log[before:] == ["own waits for copy 2"]


def test_a_copy_back_that_nobody_took_is_waited_for(pinned):
    host, log = pinned
    copy = host.send(torch.arange(10, dtype=torch.uint8))
    copy.leave()
    copy.prefetch()
    del copy
    assert log[-1] == "computing waits for copy 2"


def test_no_more_is_pinned_than_is_away_at_once(pinned):
    """However far the host is ahead: no copy is ever over here."""
    host, log = pinned
    for _ in range(5):
        sent = [torch.full((size,), size, dtype=torch.uint8) for size in (100, 120, 30)]
        copies = [host.send(flat) for flat in sent]
        for one in copies:
            one.leave()
        for one, flat in zip(copies, sent, strict=True):
            assert torch.equal(one.wait(), flat)
        dropped = host.send(torch.ones(70, dtype=torch.uint8))  # comes back never
        del dropped, one, copies
    assert log.pinned == [128, 128, 32]


def test_a_block_is_the_next_copys_only_when_its_own_has_been_started_back(pinned):
    host, log = pinned
    first = host.send(torch.full((64,), 1, dtype=torch.uint8))
    first.leave()
    second = host.send(torch.full((64,), 2, dtype=torch.uint8))
    assert log.pinned == [64, 64]
    first.prefetch()
    third = host.send(torch.full((50,), 3, dtype=torch.uint8))
    third.leave()
    assert log.pinned == [64, 64]
    assert [int(copy.wait()[0]) for copy in (first, second, third)] == [1, 2, 3]


def test_views_of_one_storage_travel_once_and_keep_their_strides(host):
    saver = offload.Offloaded(offload.Offload(host, lambda: 0))
    packed = torch.randn(32, 3, 64)
    q, k, v = packed.unbind(1)
    views = [saver.pack(t) for t in (q, k, v)]
    for view in views:
        view.copy.leave()
    assert host.sent_bytes == packed.numel() * 4
    for view, tensor in zip(views, (q, k, v), strict=True):
        back = saver.unpack(view)
        assert torch.equal(back, tensor)
        assert back.stride() == tensor.stride()
        assert back.data_ptr() != tensor.data_ptr()
    assert len(host.told) == 1


def test_two_forwards_before_their_backwards():
    kept = network()
    model = copy.deepcopy(kept)
    install(model, [unit(m) for m in UNITS])
    results = []
    for one in (kept, model):
        torch.manual_seed(3)
        outs = [one(torch.randn(4, 3, 8, 8)) for _ in range(2)]
        for out in outs:
            out.square().mean().backward()
        results.append(dict(one.named_buffers()))
        results[-1].update({n: p.grad for n, p in one.named_parameters()})
    same(*results)


def test_a_second_backward_and_evaluation():
    kept = network()
    model = copy.deepcopy(kept)
    install(model, [unit(m) for m in UNITS])
    x, grads = torch.randn(4, 3, 8, 8), []
    for one in (kept, model):
        torch.manual_seed(3)
        out = one(x).square().mean()
        one.eval()
        with torch.no_grad():
            one(x)
        out.backward(retain_graph=True)
        out.backward()
        grads.append({n: p.grad for n, p in one.named_parameters()})
    same(*grads)


def test_nothing_of_a_forward_is_left():
    model = network()
    install(model, [unit(m) for m in UNITS])
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    inside = weakref.ref(x)
    model(x).sum().backward()
    del x
    gc.collect()
    assert inside() is None


def test_a_failed_forward_leaves_no_hooks():
    model = network()
    regions = install(model, [unit(m) for m in UNITS])
    with pytest.raises(RuntimeError, match="expected"), regions.around():
        model[0](torch.randn(4, 5, 8, 8))
    a = torch.randn(3, requires_grad=True)
    b = a.exp()
    assert b.grad_fn._raw_saved_result is not None
    b.sum().backward()
    assert torch.equal(a.grad, b.detach())


def test_changes_in_place_are_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    install(model, [unit(("1", "2"))])
    with pytest.raises(InputError, match="unit '1' changes its input in place"):
        model(torch.randn(2, 4))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    install(model, [unit(("1",))])
    out = model(torch.randn(2, 4)).sum()
    with torch.no_grad():
        model[1].bias.add_(1)
    with pytest.raises(RunError, match=r"unit '1'.*its parameters were changed"):
        out.backward()


class Wandering(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x).tanh() if self.calls % 2 else self.inner(x)


def test_another_path_is_refused_by_name():
    model = nn.Sequential(Wandering())
    install(model, [unit(("0",))])
    with pytest.raises(RunError, match="unit '0' saves fewer tensors"):
        model(torch.randn(2, 4)).sum().backward()


def test_a_copy_is_plain():
    model = network()
    install(model, [unit(m) for m in UNITS])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    out = trained(twin, steps=1)
    assert all(v.isfinite().all() for n, v in out.items() if n != "random")


@pytest.mark.parametrize(
    ("units", "told"),
    [
        ([unit(("0",), "offload")], "unit '0' is planned with memory 'offload'.*--forbid offload"),
        ([unit(("0",), "keep", ("0", "1"))], "has memory 'keep'"),
        ([unit(("0",), segment=("1",))], "does not contain its module '0'"),
        ([unit(("0",), segment=("0", "x"))], "no module 'x'"),
        (
            [unit(("0",), segment=("0", "1")), unit(("4",)), unit(("1",), segment=("0", "1"))],
            "do not follow each other",
        ),
    ],
)
def test_what_cannot_be_is_refused(units, told):
    with pytest.raises(InputError, match=told):
        check_memory(network(), Plan(units), CPU)
