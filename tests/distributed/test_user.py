"""What a user of DistributedDataParallel expects, and gets."""

from __future__ import annotations

import copy
import gc
import io
import math
import time
import weakref

import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.micro import join, micro_batches
from meshwright.executor.parallel import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    loss_weight,
)
from meshwright.executor.redistribution.shards import LocalShard
from meshwright.models.replay import copied
from meshwright.models.workload import Batch
from meshwright.models.zoo.gpt import Attention
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from reference import twin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import prune


def net() -> nn.Module:
    """Two divided layers between two that are not."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3)
    ).double()


def layouts(world: int, degree: int = 2) -> list:
    return [unit(("2", "3"), degree, "column", world), unit("4", degree, "row", world)]


def both(world: int, **options) -> list:
    """Plain data parallelism, and a hybrid plan."""
    return [
        plan(world, message_bytes=200, **options),
        plan(world, layouts(world), message_bytes=200, **options),
    ]


def data(size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 4, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(3, (size,), generator=generator)


def part(rank: int, counts: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    inputs, target = data(sum(counts), seed)
    start = sum(counts[:rank])
    return inputs[start : start + counts[rank]], target[start : start + counts[rank]]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    run = model._meshwright_run
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            shard = run.divided_parameters.get(parameter)
            plain = parameter.grad.detach().as_subclass(Tensor)
            found[name] = shard.gather(plain, run.watch) if shard else plain.clone()
    return found


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10, msg=name)


def broadcasts_rank_zero(rank: int) -> None:
    for chosen in both(2):
        torch.manual_seed(100 + rank)
        model = nn.Sequential(
            nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 3)
        )
        model.register_buffer("offset", torch.full((3,), float(rank)))
        mine = twin(model)
        apply(model, None, chosen)
        state = full_state_dict(model)
        sent = [mine.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(sent, src=0)
        assert list(state) == list(sent[0])
        for name, tensor in sent[0].items():
            assert torch.equal(state[name], tensor), name


def keeps_names_and_objects(rank: int) -> None:
    for chosen in both(2):
        model = net()
        names, parameters = [n for n, _ in model.named_parameters()], list(model.parameters())
        cls = type(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        same, as_well = apply(model, optimizer, chosen)
        assert same is model
        assert as_well is optimizer
        assert isinstance(model, cls)
        assert type(model).__name__ == cls.__name__
        assert [n for n, _ in model.named_parameters()] == names
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert list(full_state_dict(model)) == list(twin(net()).state_dict())


def saves_on_rank_zero_alone(rank: int) -> None:
    for chosen in both(2):
        model = net()
        expected = {k: v.clone() for k, v in model.state_dict().items()}
        apply(model, None, chosen)
        if rank == 0:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            assert file.getbuffer().nbytes > 0
            assert list(model.state_dict()) == list(expected)
            for name, value in model.state_dict().items():
                assert value.shape == expected[name].shape, name
        close(full_state_dict(model), expected)
        alone = full_state_dict(model, rank0_only=True)
        assert bool(alone) == (rank == 0)
        # A whole state, and a rank's own, load into a model under another or the same plan.
        other = twin_of(expected, scale=2.0)
        model.load_state_dict(other)
        close(full_state_dict(model), other)
        mine = {
            k: v.clone() if not hasattr(v, "placements") else v
            for k, v in model.state_dict().items()
        }
        model.load_state_dict(mine)
        close(full_state_dict(model), other)


def twin_of(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {k: v * scale for k, v in state.items()}


def accumulates_without_sync(rank: int) -> None:
    for chosen in both(2):
        model = net()
        alone = twin(model)
        apply(model, None, chosen)
        for counts, seed, synchronise in (
            ([3, 1], 1, False),
            ([1, 2], 2, False),
            ([2, 2], 3, True),
        ):
            inputs, target = part(rank, counts, seed)
            if synchronise:
                F.cross_entropy(model(inputs), target).backward()
            else:
                with model.no_sync():
                    F.cross_entropy(model(inputs), target).backward()
            whole, expected = data(sum(counts), seed)
            F.cross_entropy(alone(whole), expected).backward()
        close(whole_gradients(model), gradients(alone))


def no_sync_keeps_gradients_local(rank: int) -> None:
    model = net()
    local = twin(model)
    apply(model, None, plan(2))
    inputs, target = part(rank, [2, 2])
    with model.no_sync():
        F.cross_entropy(model(inputs), target).backward()
    F.cross_entropy(local(inputs), target).backward()
    close(gradients(model), gradients(local))


def two_backwards(rank: int) -> None:
    for chosen in both(2):
        for set_to_none in (True, False):
            model = net()
            alone = twin(model)
            apply(model, None, chosen)
            for step in range(2):
                for seed in (1, 2):
                    counts = [3, 2]
                    inputs, target = part(rank, counts, seed + 10 * step)
                    F.cross_entropy(model(inputs), target).backward()
                    whole, expected = data(5, seed + 10 * step)
                    F.cross_entropy(alone(whole), expected).backward()
                close(whole_gradients(model), gradients(alone))
                model.zero_grad(set_to_none=set_to_none)
                alone.zero_grad(set_to_none=set_to_none)


class Branching(nn.Module):
    """Uses ``left`` or ``right`` or neither, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, x: Tensor, side: str) -> Tensor:
        return getattr(self, side)(self.base(x))


def parameters_unused(rank: int) -> None:
    torch.manual_seed(2)
    model = Branching().double()
    alone = twin(model)
    apply(model, None, plan(2, message_bytes=1))
    counts = [2, 3]
    inputs, target = part(rank, counts)
    side = ("left", "right")[rank]
    F.cross_entropy(model(inputs, side), target).backward()
    whole, labels = data(5)
    first = F.cross_entropy(alone(whole[:2], "left"), labels[:2], reduction="sum")
    second = F.cross_entropy(alone(whole[2:], "right"), labels[2:], reduction="sum")
    ((first + second) / 5).backward()
    assert model.never.weight.grad is None
    close(gradients(model), gradients(alone))
    # A gradient that was there stays when no rank has a new one.
    model.zero_grad()
    model.never.weight.grad = torch.ones_like(model.never.weight)
    F.cross_entropy(model(inputs, "left"), target).backward()
    assert torch.equal(model.never.weight.grad, torch.ones_like(model.never.weight))
    assert model.right.weight.grad is None


class Between(nn.Module):
    """Parameters that no unit has, computed ones and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cdouble))
        self.last = prune.l1_unstructured(nn.Linear(8, 3), "weight", 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.filter, n=8)
        return self.last(x * self.scale)


def parameters_between_units(rank: int) -> None:
    torch.manual_seed(2)
    model = Between().double()
    alone = copied(model)
    named = [unit("first", 1, "none", 2), unit("last", 1, "none", 2)]
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone))
    apply(model, optimizer, plan(2, named))
    counts = [2, 3]
    for step in range(3):
        inputs, target = part(rank, counts, step)
        whole, labels = data(5, step)
        F.cross_entropy(model(inputs), target).backward()
        F.cross_entropy(alone(whole), labels).backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    close(full_state_dict(model), alone.state_dict())


def frozen_and_thawed(rank: int) -> None:
    for chosen in both(2):
        model = net()
        model[2].weight.requires_grad_(False)
        alone = twin(model)
        apply(model, None, chosen)
        for step in range(2):
            for m, (inputs, target) in ((model, part(rank, [2, 1])), (alone, data(3))):
                m.zero_grad()
                F.cross_entropy(m(inputs), target).backward()
            close(whole_gradients(model), gradients(alone))
            assert (model[2].weight.grad is None) == (step == 0)
            for m in (model, alone):
                m[2].weight.requires_grad_(True)
                m[0].bias.requires_grad_(False)


def batches_of_changing_size(rank: int) -> None:
    for chosen in both(2):
        model = net()
        alone = twin(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        other = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        apply(model, optimizer, chosen)
        for step, counts in enumerate(([2, 2], [5, 1], [0, 3], [4, 0], [1, 1])):
            inputs, target = part(rank, counts, step)
            F.cross_entropy(model(inputs), target).backward()
            whole, labels = data(sum(counts), step)
            F.cross_entropy(alone(whole), labels).backward()
            close(whole_gradients(model), gradients(alone))
            for o in (optimizer, other):
                o.step()
                o.zero_grad()
        close(full_state_dict(model), dict(alone.state_dict()))


def ends_together(rank: int) -> None:
    for chosen in both(2):
        model = net()
        alone = twin(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        apply(model, optimizer, chosen)
        lengths = [3, 1]
        mine = [part(rank, [2, 2], seed) for seed in range(lengths[rank])]
        seen = 0
        for inputs, target in join(model, mine):
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += 1
        assert seen == 3
        for seed in range(3):
            whole, labels = data(4, seed)
            if seed:
                whole, labels = whole[:2], labels[:2]
            F.cross_entropy(alone(whole), labels).backward()
            other.step()
            other.zero_grad()
        close(full_state_dict(model), dict(alone.state_dict()))


def schedulers(rank: int) -> None:
    for chosen in both(2):
        for before in (True, False):
            model = net()
            alone = twin(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            other = torch.optim.AdamW(alone.parameters(), lr=0.1)
            theirs = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
            if before:
                ours = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            apply(model, optimizer, chosen)
            if not before:
                ours = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for step in range(3):
                inputs, target = part(rank, [2, 1], step)
                F.cross_entropy(model(inputs), target).backward()
                whole, labels = data(3, step)
                F.cross_entropy(alone(whole), labels).backward()
                for o, s in ((optimizer, ours), (other, theirs)):
                    o.step()
                    s.step()
                    o.zero_grad()
            assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
            close(full_state_dict(model), dict(alone.state_dict()))


def optimizer_with_state(rank: int) -> None:
    """State from before is sliced; a whole state is gathered, and loads into another."""
    for chosen in both(2):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        whole, labels = data(3, 0)
        F.cross_entropy(model(whole), labels).backward()
        optimizer.step()
        alone = twin(model)
        other = torch.optim.AdamW(alone.parameters(), lr=0.1)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()
        apply(model, optimizer, chosen)
        for step in (1, 2):
            inputs, target = part(rank, [2, 1], step)
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            whole, labels = data(3, step)
            other.zero_grad()
            F.cross_entropy(alone(whole), labels).backward()
            other.step()
            close(full_state_dict(model), dict(alone.state_dict()))
            found = full_optimizer_state_dict(model, optimizer)
            for index, state in other.state_dict()["state"].items():
                close(found["state"][index], state)
            state = copy.deepcopy(other.state_dict())
            load_full_optimizer_state_dict(model, optimizer, state)


def clips_as_one_process(rank: int) -> None:
    for chosen in both(2):
        for foreach in (None, True, False):
            for order in (2.0, math.inf, 1.0):
                model = net()
                alone = twin(model)
                apply(model, None, chosen)
                inputs, target = part(rank, [3, 2])
                F.cross_entropy(model(inputs), target).backward()
                whole, labels = data(5)
                F.cross_entropy(alone(whole), labels).backward()
                ours, theirs = (
                    nn.utils.clip_grad_norm_(m.parameters(), 0.01, order, foreach=foreach)
                    for m in (model, alone)
                )
                assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
                close(whole_gradients(model), gradients(alone))
                for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                    assert p.grad.norm().item() == pytest.approx(q.grad.norm().item(), rel=1e-12)


def evaluates_between_steps(rank: int) -> None:
    for chosen in both(2):
        model = net()
        alone = twin(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        other = torch.optim.SGD(alone.parameters(), lr=0.1)
        apply(model, optimizer, chosen)
        for step in range(2):
            model.train()
            inputs, target = part(rank, [2, 1], step)
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            whole, labels = data(3, step)
            F.cross_entropy(alone(whole), labels).backward()
            other.step()
            other.zero_grad()
            model.eval()
            with torch.no_grad():
                mine = model(part(rank, [3, 1], 9)[0])
                expected = alone(data(4, 9)[0])[slice(0, 3) if rank == 0 else slice(3, 4)]
            torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-10)


def evaluates_on_one_rank(rank: int) -> None:
    """Data parallel: no communication at all without gradients."""
    model = net()
    apply(model, None, plan(2), timeout_s=5)
    if rank == 0:
        with torch.no_grad():
            model.eval()
            model(data(3)[0])
            model.train()
            model(data(3)[0])
    for seed in range(2):
        inputs, _ = part(rank, [1, 2], seed)
        model(inputs).sum().backward()


def weighs_by_tokens(rank: int) -> None:
    for chosen in both(2):
        model = net()
        alone = twin(model)
        apply(model, None, chosen)
        inputs, target = part(rank, [3, 2])
        ignored = target.clone()
        if rank == 0:
            ignored[:2] = -100
        whole, labels = data(5)
        labels[:2] = -100
        output = model(inputs)
        loss_weight(int((ignored != -100).sum()))
        F.cross_entropy(output, ignored).backward()
        F.cross_entropy(alone(whole), labels).backward()
        close(whole_gradients(model), gradients(alone))


def cuts_into_micro_batches(rank: int) -> None:
    for chosen in both(2):
        model = net()
        alone = twin(model)
        apply(model, None, chosen)
        for counts in ([5, 4], [3, 0], [1, 4]):
            model.zero_grad()
            alone.zero_grad()
            batch = Batch((part(rank, counts)[0],), part(rank, counts)[1])
            for piece in micro_batches(model, batch, 3):
                F.cross_entropy(model(*piece.args), piece.target).backward()
            whole, labels = data(sum(counts))
            F.cross_entropy(alone(whole), labels).backward()
            close(whole_gradients(model), gradients(alone))


def changes_output_in_place(rank: int) -> None:
    model = net()
    alone = twin(model)
    apply(model, None, plan(2))
    counts = [3, 1]
    output = model(part(rank, counts)[0])
    output *= 2
    F.cross_entropy(output, part(rank, counts)[1]).backward()
    other = alone(data(4)[0])
    other *= 2
    F.cross_entropy(other, data(4)[1]).backward()
    close(gradients(model), gradients(alone))


def watched_in_backward(rank: int) -> None:
    """Hooks of modules see the gradients of this rank's own samples, whatever units have left."""
    divided = [unit(("1.0", "1.1"), 2, "column", 2), unit("2.0", 2, "row", 2)]
    whole = unit(("1.0", "1.1"), 1, "none", 2)
    alone = msgspec.structs.replace(whole, layout=Layout(groups=1, degree=1))
    seen = [gradients_seen(rank, plan(2, units)) for units in ([], divided, [alone])]
    assert len(seen[0]) == 6
    for other in seen[1:]:
        close(other, seen[0])


def gradients_seen(rank: int, chosen: Plan) -> dict[str, Tensor]:
    """What hooks before and after the backward of each part are given of its output."""
    torch.manual_seed(7)
    parts = ((nn.Linear(4, 6), nn.Tanh()), (nn.Linear(6, 8), nn.ReLU()), (nn.Linear(8, 3),))
    model = nn.Sequential(*(nn.Sequential(*part) for part in parts)).double()
    found: dict[str, Tensor] = {}
    for name, module in model.named_children():
        module.register_full_backward_pre_hook(
            lambda _, given, name=name: found.update({f"{name} before": given[0].clone()})
        )
        module.register_full_backward_hook(
            lambda _, __, given, name=name: found.update({f"{name} after": given[0].clone()})
        )
    apply(model, None, chosen)
    inputs, target = part(rank, [3, 1])
    F.cross_entropy(model(inputs), target).backward()
    return found


def describes_slices(rank: int) -> None:
    """Divided entries are DTensors that torch can put together; where it cannot, they say so."""
    attention = Attention(8, 4)
    expected = {k: v.clone() for k, v in attention.state_dict().items()}
    model = nn.Sequential(attention, nn.Linear(8, 5), nn.Linear(5, 7))
    units = [unit("0", 2, "pair", 2), unit("1", 2, "column", 2), unit("2", 2, "row", 2)]
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    apply(model, None, plan(2, units))
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), wanted[name]), name
    divided = {n for n, v in model.state_dict().items() if isinstance(v, DTensor)}
    assert divided == set(model._meshwright_run.shards)
    assert "0.c_attn.weight" in divided
    whole = {k: model[0].state_dict()[k].full_tensor() for k in ("c_attn.weight", "c_proj.weight")}
    close(whole, {k: expected[k] for k in whole})
    torch.manual_seed(4)
    swapped = nn.Sequential(nn.Linear(4, 5))
    wanted = {k: v.clone() for k, v in swapped.state_dict().items()}
    apply(swapped, None, plan(2, [unit("0", 2, "column", 2)], placement=[1, 0]))
    state = swapped.state_dict()
    assert isinstance(state["0.weight"], LocalShard)
    assert state["0.weight"].place == (0, 1, 2, 1 - rank, (5, 4))
    swapped.load_state_dict(state)
    close(full_state_dict(swapped), wanted)


class LossInside(nn.Module):
    """Computes its own loss, as transformers' models do with labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def loss_inside_the_model(rank: int) -> None:
    for counts in ([3, 1], [4, 0]):
        model = LossInside()
        alone = twin(model)
        apply(model, None, plan(2))
        model(*part(rank, counts))["loss"].backward()
        alone(*data(4))["loss"].backward()
        close(gradients(model), gradients(alone))


def copies_are_plain(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    apply(model, None, plan(2))
    plain = copy.deepcopy(model)
    assert type(plain) is nn.Sequential
    close(dict(plain.state_dict()), dict(model.state_dict()))
    before = model[1].running_mean.clone()
    if rank == 0:
        plain(data(3)[0]).sum().backward()
    assert torch.equal(model[1].running_mean, before)
    assert model[0].weight.grad is None
    model(part(rank, [2, 1])[0]).sum().backward()
    divided = net()
    apply(divided, None, both(2)[1])
    with pytest.raises(InputError, match="full_state_dict"):
        copy.deepcopy(divided)


def parts_are_copied_plain(rank: int) -> None:
    for statistics in ("local", "global"):
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3))
        chosen = plan(2)
        goal = msgspec.structs.replace(chosen.goal, batch_statistics=statistics)
        apply(model.double(), None, msgspec.structs.replace(chosen, goal=goal))
        model(part(rank, [2, 2])[0]).sum().backward()
        teacher = copy.deepcopy(model[0])
        again = copy.deepcopy(teacher)
        before = model[0][1].running_mean.clone()
        with torch.no_grad():
            for copied_part in (teacher, again):
                copied_part[1].weight.zero_()
        if rank == 0:  # alone, so nothing in it is collective
            assert not teacher(data(3)[0]).any()
            assert not torch.equal(teacher[1].running_mean, before)
            teacher.eval()
            kept = teacher[1].running_mean.clone()
            assert not teacher(data(5)[0]).any()
            assert torch.equal(teacher[1].running_mean, kept)
            assert not again(data(3)[0]).any()
        assert torch.equal(model[0][1].running_mean, before)


class Remembers(nn.Module):
    """Puts a new tensor where its buffer was, as moving averages often do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.5 * self.seen + x.mean(0)
        return self.linear(x)


def buffers_assigned_anew_follow_rank_zero(rank: int) -> None:
    model = Remembers().double()
    apply(model, None, plan(2))
    expected = torch.ones(4, dtype=torch.float64)
    for _ in range(3):  # rank 0 sees nothing but zeros, and every forward begins with what it has
        x = torch.full((2, 4), float(rank), dtype=torch.float64)
        model(x).sum().backward()
        expected = 0.5 * expected
        assert torch.equal(model.seen, expected + rank)


def a_gradient_is_weighted_once_by_each_model(rank: int) -> None:
    torch.manual_seed(3)
    generator, judge = (nn.Linear(4, 4).double() for _ in range(2))
    pair = twin(generator), twin(judge)
    for model in (generator, judge):
        apply(model, None, plan(2))
    for counts in ([3, 1], [2, 0]):
        x, whole = part(rank, counts)[0], data(sum(counts))[0]
        # The judge twice, as a recurrent model is called on what it has returned.
        judge(judge(generator(x))).square().mean(1).mean().backward()
        pair[1](pair[1](pair[0](whole))).square().mean(1).mean().backward()
        for model, alone in zip((generator, judge), pair, strict=True):
            close(gradients(model), gradients(alone))
            model.zero_grad()
            alone.zero_grad()


def counts_of_pieces_are_for_micro_batches(rank: int) -> None:
    model = net()
    alone = twin(model)
    apply(model, None, plan(2))
    batch, (whole, labels) = part(rank, [4, 4]), data(8)
    labels[:3] = -100
    own = labels[4 * rank : 4 * rank + 4]
    for inputs, _ in micro_batches(model, batch, 2):
        model(inputs).sum().backward()
        with pytest.raises(InputError, match="counts="):
            loss_weight(1, model)
    model.zero_grad()
    tokens = [int((part != -100).sum()) for part in own.split(2)]
    pieces = micro_batches(model, (batch[0], own), 2, counts=tokens)
    for inputs, target in pieces:
        F.cross_entropy(model(inputs), target).nan_to_num().backward()
    F.cross_entropy(alone(whole), labels).backward()
    close(gradients(model), gradients(alone))
    for inputs, target in micro_batches(model, (batch[0], own), 1):  # one piece is a batch
        F.cross_entropy(model(inputs), target)
        loss_weight(1, model)


def is_freed_with_its_model(rank: int) -> None:
    """Process groups keep threads and sockets: a model that is dropped takes its own along."""
    for chosen in both(2):
        model = net()
        apply(model, None, chosen)
        model(part(rank, [2, 2])[0]).sum().backward()
        run, body = weakref.ref(model._meshwright_run), model[0]
        del model
        gc.collect()
        assert run() is None
        apply(nn.Sequential(body), None, plan(2))  # no plan looks after it any more


def says_what_is_wrong(rank: int) -> None:
    """What apply refuses, before anything is changed."""
    bad = unit("2", 2, "pair", 2)
    missing = unit("9", 1, "none", 2)
    releasing = msgspec.structs.replace(unit("2", 1, "none", 1), early_release=True)
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True))
    lone = nn.Sequential(nn.Linear(4, 6))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    watched = net()
    watched[2].register_forward_hook(lambda *_: None)
    for model, optimizer, chosen, sentence in (
        (net(), None, plan(4), "a plan for 4 ranks was started on 2"),
        (net(), None, plan(2, [bad]), "cannot be divided in style 'pair'"),
        (net(), None, plan(2, [missing]), "no module '9'"),
        (sparse, None, plan(2), "sparse=False"),
        (nn.Sequential(nn.LazyLinear(3)), None, plan(2), "has no shape yet"),
        (nn.Linear(2, 2, device="meta"), None, plan(2), "meta device"),
        (tied, None, plan(2, [unit("0", 2, "column", 2)]), "'1.weight' whole"),
        (lone, None, plan(2, [unit("0", 2, "column", 2, ())]), "no input of it carries the batch"),
        (net(), None, plan(2, [releasing]), "leaves ranks idle"),
        (watched, None, both(2)[1], "the plan divides module '2', which has a hook"),
    ):
        before = {
            k: v.clone() for k, v in model.state_dict().items() if not v.is_meta and not lazy(v)
        }
        with pytest.raises(InputError, match=sentence):
            apply(model, optimizer, chosen)
        for name, value in before.items():
            assert torch.equal(model.state_dict()[name], value)
    model = net()
    factored = torch.optim.Adafactor(model.parameters())
    with pytest.raises(InputError, match="optimizer Adafactor looks at whole parameters"):
        apply(model, factored, both(2)[1])
    apply(model, factored, plan(2))
    with pytest.raises(InputError, match="already"):
        apply(model, factored, plan(2))
    both_heads = nn.ModuleDict({"body": model[0], "head": nn.Linear(6, 2)})
    with pytest.raises(InputError, match=r"'body.weight' is of another model.*one module"):
        apply(both_heads, None, plan(2))


def checks_each_optimizer(rank: int) -> None:
    """Of several optimizers the plan is told of one; what the others may not do is refused too."""
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    given = torch.optim.SGD([p for p in model.parameters() if p.ndim < 2], lr=0.1)
    whole, other = torch.optim.Muon(matrices, lr=0.1), torch.optim.SGD(matrices, lr=0.1)
    apply(model, given, both(2)[1])
    x, y = part(rank, [2, 2])
    F.cross_entropy(model(x), y).backward()
    before = [p.detach().clone() for p in matrices]
    with pytest.raises(InputError, match="optimizer Muon looks at whole parameters"):
        whole.step()
    assert all(torch.equal(p, old) for p, old in zip(matrices, before, strict=True))
    other.step()
    given.step()
    assert not any(torch.equal(p, old) for p, old in zip(matrices, before, strict=True))
    del model, given  # by priority its steps know the run
    gc.collect()
    whole.step()  # nothing is divided any more that anybody knows of


def lazy(tensor: Tensor) -> bool:
    return nn.parameter.is_lazy(tensor)


def scaler_skips_everywhere(rank: int) -> None:
    """A value that is not finite in one member's shard makes every rank skip the step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply(model, optimizer, both(2)[1])
    before = {k: v.clone() for k, v in full_state_dict(model).items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    inputs, target = part(rank, [2, 2])
    scaler.scale(F.cross_entropy(model(inputs), target)).backward()
    if rank == 1:
        model[2].weight.grad[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    close(full_state_dict(model), before)


CHECKS = [
    broadcasts_rank_zero,
    keeps_names_and_objects,
    saves_on_rank_zero_alone,
    accumulates_without_sync,
    no_sync_keeps_gradients_local,
    two_backwards,
    parameters_unused,
    parameters_between_units,
    frozen_and_thawed,
    batches_of_changing_size,
    ends_together,
    schedulers,
    optimizer_with_state,
    clips_as_one_process,
    evaluates_between_steps,
    evaluates_on_one_rank,
    weighs_by_tokens,
    cuts_into_micro_batches,
    changes_output_in_place,
    watched_in_backward,
    scaler_skips_everywhere,
    describes_slices,
    loss_inside_the_model,
    copies_are_plain,
    parts_are_copied_plain,
    buffers_assigned_anew_follow_rank_zero,
    a_gradient_is_weighted_once_by_each_model,
    counts_of_pieces_are_for_micro_batches,
    is_freed_with_its_model,
    says_what_is_wrong,
    checks_each_optimizer,
]


def under(rank: int, check: str, schedule: str) -> None:
    with scheduled(schedule):
        globals()[check](rank)


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_user(ranks, check, schedule):
    ranks(2)(under, check.__name__, schedule)


def forward_alone(rank: int, divided: bool) -> None:
    model = net()
    apply(model, None, both(2)[divided], timeout_s=2)
    if rank == 0:
        model(data(3)[0]).sum().backward()
    else:
        time.sleep(3)


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
def test_a_forward_on_one_rank_ends_in_a_sentence(ranks, divided):
    first, _ = ranks(2).outcomes(forward_alone, divided)
    assert first.kind == "RunError"
    assert "rank 0 waits in forward 1" in first.error
    assert "rank 1 has not called the model yet" in first.error
    assert "empty batch" in first.error


def one_ends_early(rank: int) -> None:
    model = net()
    apply(model, None, plan(2), timeout_s=2)
    for step in range(2 if rank == 1 else 3):
        model(part(rank, [2, 2], step)[0]).sum().backward()
    if rank == 1:
        time.sleep(3)


@pytest.mark.slow
def test_a_rank_that_ends_early_is_named(ranks):
    first, _ = ranks(2).outcomes(one_ends_early)
    assert first.kind == "RunError"
    assert "rank 0 waits in forward 3" in first.error
    assert "rank 1 has finished backward after forward 2 and not begun the next" in first.error


def no_backward_on_one_rank(rank: int) -> None:
    model = net()
    apply(model, None, plan(2), timeout_s=2)
    output = model(part(rank, [2, 2])[0])
    if rank == 0:
        output.sum().backward()
    else:
        time.sleep(3)


@pytest.mark.slow
def test_a_rank_without_backward_is_named(ranks):
    first, _ = ranks(2).outcomes(no_backward_on_one_rank)
    assert first.kind == "RunError"
    assert "rank 0 waits in the end of backward after forward 1" in first.error
    assert "rank 1 has finished forward 1 and not begun its backward" in first.error


def one_more_forward(rank: int) -> None:
    model = net()
    apply(model, None, plan(2), timeout_s=2)
    if rank == 0:
        model(data(3)[0])
    model(part(rank, [2, 2])[0]).sum().backward()
    if rank == 1:
        time.sleep(3)


def test_one_more_forward_on_one_rank_never_passes(ranks):
    first, _ = ranks(2).outcomes(one_more_forward)
    assert first.kind == "RunError"
    assert "rank 0 waits in forward 2" in first.error


def shapes_differ(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    apply(model, None, plan(2, [unit("0", 2, "column", 2)]), timeout_s=2)
    model(torch.zeros(2, 3 + rank, 4))


def test_inputs_of_different_shapes_are_refused_where_units_are_divided(ranks):
    for outcome in ranks(2).outcomes(shapes_differ):
        assert outcome.kind == "RunError"
        assert "pad them to one shape" in outcome.error


def unscaled_loss(rank: int) -> None:
    model = net()
    apply(model, None, plan(2), timeout_s=2)
    model(part(rank, [3, 1])[0])
    model[0](part(rank, [3, 1])[0]).sum().backward()


def test_a_loss_beside_the_output_is_refused_for_uneven_shares(ranks):
    for outcome in ranks(2).outcomes(unscaled_loss):
        assert outcome.kind == "RunError"
        assert "not computed from the model's output" in outcome.error
