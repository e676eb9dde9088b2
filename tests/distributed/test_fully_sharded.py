"""Fully sharded exchange: parameters are whole only while they are used, and nobody notices."""

from __future__ import annotations

import copy
import gc
import io
import time
import weakref
from typing import Any

import pytest
import test_sharded
import torch
from meshwright.executor.apply import apply
from meshwright.executor.gradients.fully_sharded import FullyShardedGradGroup
from meshwright.executor.gradients.reshard import LocalChunk
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.models.units.storages import peak_bytes
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.errors import InputError, RunError
from plans import plan, unit
from reference import twin
from test_equality import BLOCKS, Case, equals_one_process
from test_sharded import (
    Pair,
    shards,
    sharing,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.sampling import sampled


def slowly(value: Any) -> Any:
    """A case of the slow tests only."""
    return pytest.param(value, marks=pytest.mark.slow)


WORLDS = [2, slowly(4)]


def under(rank: int, check: str, *args: Any) -> None:
    """A check of sharded exchange with parameters sharded too."""
    with sharing("fully_sharded"):
        getattr(test_sharded, check)(rank, *args)


@pytest.mark.parametrize(
    ("optimizer", "world"),
    [("sgd", 2), *sampled([("adamw", 2), ("adagrad", 2), ("sgd", 4), ("adamw", 4)], 2)],
)
def test_equals_one_process(ranks, world, optimizer):
    ranks(world)(under, "equals_one_process", world, optimizer, 5)


MODELS = [
    Case("gpt-tiny", 2, counts=(1, 2)),  # tied
    *sampled(
        [
            Case("seq2seq-tiny", 2, 2, ("linear", "embedding"), counts=(2, 1)),
            Case("cnn-digits", 2),
            Case("gpt-tiny", 4, 2, BLOCKS, (3, 0, 2, 1)),
            Case("bert-tiny", 4, 2, BLOCKS),
            Case("resnet50-32", 2, steps=1),
        ],
        3,
    ),
]


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models_equal_one_process(ranks, case):
    asked = case, "adamw", "float64", ["fully_sharded"]
    ranks(case.world)(equals_one_process, *asked, limit_s=100)


@pytest.mark.parametrize(
    "check",
    [
        "steps_without_waiting",
        "changes_gradients_after_a_step",
        "keeps_old_graphs_from_new_weights",
    ],
)
def test_a_step_does_not_wait(ranks, check):
    ranks(2)(under, check)


def test_what_fails_after_a_step_is_said_where_parameters_are_touched(ranks):
    for outcome in ranks(2).outcomes(under, "fails_in_its_step"):
        assert (outcome.kind, outcome.error) == ("ValueError", "this one is lost")


QUICK = ["clips_by_norm", "accumulates", "resumes", "steps_with_a_closure"]
MORE = [
    "clips_by_value",
    "shows_gradients",
    "zeroes",
    "follows_schedulers",
    "scaler_skips_everywhere",
]


@pytest.mark.parametrize(
    ("check", "world"),
    [
        *((check, 2) for check in QUICK),
        *sampled([*((check, 2) for check in MORE), *((check, 4) for check in QUICK + MORE)], 6),
    ],
)
def test_user(ranks, check, world):
    ranks(world)(under, check, world)


def bits_of(rank: int, policy: Any, world: int) -> dict[str, Tensor]:
    with sharing(policy):
        pair = Pair(rank, shards(world, hybrid=world > 2), "adamw")
    for seed in range(4):
        pair.backward(seed)
        nn.utils.clip_grad_norm_(pair.model.parameters(), 0.05)
        pair.step()
    return full_state_dict(pair.model)


def equals_the_first_stage(rank: int, world: int) -> None:
    """The same sums in the same order: the same bits."""
    first, second = (bits_of(rank, policy, world) for policy in ("sharded", "fully_sharded"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("world", WORLDS)
def test_equals_sharded_exchange_bit_for_bit(ranks, world):
    ranks(world)(equals_the_first_stage, world)


WIDTH = 256
LAYER_BYTES = 4 * WIDTH * WIDTH
"""More than units that share a message have."""


class Deep(nn.Module):
    """Equal layers of 256 KiB; ``twice`` runs the third again at the end, ``segments`` recomputes
    in pairs, ``functional`` uses the weights by another way than their modules, ``short`` leaves
    every other layer out."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.twice = self.segments = self.functional = self.short = False

    def forward(self, x: Tensor) -> Tensor:
        if self.segments:
            for i in range(0, len(self.layers), 2):
                pair = nn.Sequential(*self.layers[i : i + 2], nn.Tanh())
                x = checkpoint(pair, x, use_reentrant=False)
            return x
        for layer in list(self.layers)[:: 2 if self.short else 1]:
            x = torch.tanh(x @ layer.weight.t() if self.functional else layer(x))
        return self.layers[2](x) if self.twice else x


def deep_plan(world: int, policy: Any = "fully_sharded", layers: int = 6, **options: Any) -> Any:
    units = [unit(f"layers.{i}", 1, "none", world) for i in range(layers)]
    return with_exchange(plan(world, units, message_bytes=2**17, **options), policy)


def input_of(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


class Training:
    """Deep under a plan on this rank, and in one process on all ranks' samples."""

    def __init__(self, rank: int, world: int, policy: Any = "fully_sharded") -> None:
        self.rank, self.world = rank, world
        self.model = Deep()
        self.alone = twin(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.other = torch.optim.SGD(self.alone.parameters(), lr=0.1, momentum=0.9)
        apply(self.model, self.optimizer, deep_plan(world, policy), timeout_s=20)

    def together(self, seed: int = 0) -> None:
        self.model(input_of(seed + self.rank)).square().sum(1).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed: int = 0) -> None:
        self.backward(seed)
        self.update()

    def backward(self, seed: int) -> None:
        self.model(input_of(seed + self.rank)).square().sum(1).mean().backward()
        whole = torch.cat([input_of(seed + r) for r in range(self.world)])
        self.alone(whole).square().sum(1).mean().backward()

    def update(self) -> None:
        for optimizer in (self.optimizer, self.other):
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        expected = dict(self.alone.state_dict())
        for name, found in full_state_dict(self.model).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


def weight_bytes(model: nn.Module) -> int:
    """The memory of the parameters as such on this rank now."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(p.data.untyped_storage().nbytes() for p in model.parameters())


def holds_little(rank: int, world: int) -> None:
    """At most two layers are whole at a time, none between steps; chunks and state are a share."""
    training = Training(rank, world)
    model, seen = training.model, []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append(weight_bytes(model)))
        layer.weight.register_hook(lambda _: seen.append(weight_bytes(model)))
    for seed in range(3):
        training.step(seed)
        assert weight_bytes(model) == 0
    training.check()
    assert len(seen) == 3 * 2 * 6
    assert max(seen) == 2 * LAYER_BYTES  # the one at work, and the next
    grad_groups = [
        p for p in run_of(model).priority.grad_groups if isinstance(p, FullyShardedGradGroup)
    ]
    chunks = [c for grad_group in grad_groups for c in grad_group.chunks.values()]
    assert sum(c.untyped_storage().nbytes() for c in chunks) == 6 * LAYER_BYTES // world
    training.optimizer.state_dict()
    state = [s["momentum_buffer"] for s in training.optimizer.state.values()]
    assert sum(s.untyped_storage().nbytes() for s in state) == 6 * LAYER_BYTES // world


@pytest.mark.parametrize("world", WORLDS)
def test_parameters_are_whole_only_while_used(ranks, world):
    ranks(world)(holds_little, world)


def peak_of(rank: int, world: int, policy: Any) -> int:
    """Tracked bytes at the highest point of a step, with what stands throughout."""
    training = Training(rank, world, policy)
    for seed in range(2):
        training.together(seed)
    training.optimizer.state_dict()
    with torch._C.DisableTorchFunctionSubclass():
        standing = [p.data for p in training.model.parameters()]
    standing += [s["momentum_buffer"] for s in training.optimizer.state.values()]
    for grad_group in run_of(training.model).priority.grad_groups:
        standing += getattr(grad_group, "chunks", {}).values()
    peak = peak_bytes(lambda: training.together(3), standing, torch.device("cpu"))
    training.optimizer.state_dict()
    return peak


def peak_falls(rank: int, world: int) -> None:
    """By the weights, gradients and state of other ranks, but for two layers' weights, a fresh
    gradient, and one on its way, as sent and as received."""
    dense, first, second = (
        peak_of(rank, world, policy) for policy in ("dense", "sharded", "fully_sharded")
    )
    share = 6 * LAYER_BYTES * (world - 1) // world
    assert second <= dense - 3 * share + 5 * LAYER_BYTES
    assert second < first - share


@pytest.mark.parametrize("world", WORLDS)
def test_peak_memory_falls(ranks, world):
    ranks(world)(peak_falls, world)


def other_ways_of_use(rank: int) -> None:
    """A unit that runs twice, segments that recompute, weights used outside their modules."""
    for way in ("twice", "segments", "functional", "short"):
        training = Training(rank, 2)
        setattr(training.model, way, True)
        setattr(training.alone, way, True)
        for seed in range(3):
            training.step(seed)
        training.check()
        assert weight_bytes(training.model) == 0


def evaluates_and_reads(rank: int) -> None:
    """Evaluation between backward and step and after it; reading, changing and averaging
    parameters on all ranks; a copy."""
    training = Training(rank, 2)
    model, alone = training.model, training.alone
    moving = [torch.zeros(WIDTH, WIDTH) for _ in range(6)]
    theirs = [torch.zeros(WIDTH, WIDTH) for _ in range(6)]
    for seed in range(3):
        training.step(seed)
        with torch.no_grad():
            torch.testing.assert_close(model(input_of(9)), alone(input_of(9)))
            with torch.inference_mode():
                torch.testing.assert_close(model(input_of(8)), alone(input_of(8)))
            model.layers[1].weight.clamp_(-0.05, 0.05)
            alone.layers[1].weight.clamp_(-0.05, 0.05)
            for averages, trained in ((moving, model), (theirs, alone)):
                torch._foreach_lerp_(averages, [p.detach() for p in trained.parameters()], 0.3)
            norms = torch._foreach_norm(list(model.parameters()))
            torch.testing.assert_close(norms, torch._foreach_norm(list(alone.parameters())))
        held = model.layers[0].weight.data
        kept = held.clone()
        training.step(seed)
        assert torch.equal(held, kept)  # what somebody holds stays as it was
    torch.testing.assert_close(moving, theirs)
    training.check()
    plain = copy.deepcopy(model)
    assert type(plain) is Deep
    for p, q in zip(plain.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert type(p) is nn.Parameter
    torch.save(list(model.parameters()), io.BytesIO())


def regularises(rank: int) -> None:
    """The loss reads parameters outside the model's forward, some twice, views among them; and
    backward comes long after they were freed."""
    training = Training(rank, 2)
    for seed in range(3):
        losses = []
        inputs = [input_of(seed + rank), torch.cat([input_of(seed), input_of(seed + 1)])]
        for model, x in zip((training.model, training.alone), inputs, strict=True):
            loss = model(x).square().sum(1).mean()
            for p in model.parameters():
                loss = loss + 1e-2 * (p**2).sum() + 1e-3 * (p.t() @ p[:2].t()).abs().sum()
            loss = loss + 1e-2 * model.layers[1](x).square().mean()
            sum(q.norm() for q in model.parameters())
            losses.append(loss)
        for loss in losses:
            loss.backward()
        for optimizer in (training.optimizer, training.other):
            optimizer.step()
            optimizer.zero_grad()
    training.check()


def freezes_and_thaws(rank: int) -> None:
    training = Training(rank, 2)
    for seed in range(4):
        for model in (training.model, training.alone):
            model.layers[3].requires_grad_(seed % 2 == 0)
        training.step(seed)
        training.check()
    for _ in range(3):  # one that is frozen between two backwards keeps what the first has left
        for seed in range(2):
            for model in (training.model, training.alone):
                model.layers[3].requires_grad_(seed == 0)
            training.backward(seed)
        training.update()
        training.check()


def saves_and_loads(rank: int) -> None:
    """``state_dict`` on one rank sends nothing; this rank's chunks, whole tensors and a file are
    loaded into the same plan, whole tensors into a plain model."""
    training = Training(rank, 2)
    training.step(0)
    if rank == 0:
        training.model.state_dict()
    training.step(1)
    state = training.model.state_dict()
    assert list(state) == list(training.alone.state_dict())
    half = WIDTH * WIDTH // 2
    assert all(isinstance(v, LocalChunk) and v.numel() == half for v in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    saved = torch.load(file)
    whole = {name: value.clone() for name, value in full_state_dict(training.model).items()}
    momenta = copy.deepcopy(training.optimizer.state_dict())
    only = full_state_dict(training.model, rank0_only=True)
    assert (rank == 0) == bool(only)
    plain = Deep()
    plain.load_state_dict(whole)
    training.step(2)
    for given in (saved, whole):
        again = Training(rank, 2)
        again.model.load_state_dict(copy.deepcopy(given))
        again.optimizer.load_state_dict(copy.deepcopy(momenta))
        again.together(2)
        first, second = full_state_dict(training.model), full_state_dict(again.model)
        assert all(torch.equal(first[name], second[name]) for name in first)
    strange = next(iter(saved.values()))
    strange.slot = 1 - strange.slot
    with pytest.raises(InputError, match="load a full_state_dict"):
        again.model.load_state_dict(saved)


def loads_between_forward_and_backward(rank: int) -> None:
    """Backward needs the values of its forward: torch says so for a plain model, and so it is here,
    whole tensors or chunks."""
    training = Training(rank, 2)
    training.step(0)
    chunks = copy.deepcopy(training.model.state_dict())
    whole = {name: value.clone() for name, value in full_state_dict(training.model).items()}
    loss = training.alone(input_of(0)).sum()
    training.alone.load_state_dict(whole)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    for given in (whole, chunks):
        again = Training(rank, 2)
        loss = again.model(input_of(0)).sum()
        again.model.load_state_dict(copy.deepcopy(given))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Branching(nn.Module):
    """Layers with two large weights, of which the second is left out by what a rank's data are."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH, bias=False) for n in ("main", "more")})
            for _ in range(layers)
        )

    def forward(self, x: Tensor, more: bool) -> Tensor:
        for layer in self.layers:
            main = layer["main"](x)
            x = torch.tanh(main + layer["more"](x) if more else main)
        return x


def parameters_unused(rank: int) -> None:
    """Peers do not wait in backward for what a rank does not compute; what none computes stays."""
    model = Branching()
    alone = twin(model)
    units = [unit(f"layers.{i}", 1, "none", 2) for i in range(len(model.layers))]
    chosen = with_exchange(plan(2, units, message_bytes=2**17), "fully_sharded")
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, alone))
    apply(model, ours, chosen, timeout_s=5)
    for step, uses in enumerate([(True, False), (False, True), (False, False), (True, True)] * 2):
        model(input_of(2 * step + rank), uses[rank]).square().sum(1).mean().backward()
        loss = sum(alone(input_of(2 * step + r), uses[r]).square().sum(1).mean() for r in range(2))
        (loss / 2).backward()
        unused = [p.grad is None for layer in model.layers for p in layer["more"].parameters()]
        assert all(unused) is not any(uses)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        expected = alone.state_dict()
        for name, found in full_state_dict(model).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-5, atol=1e-6)


def gradients_of_some(rank: int) -> None:
    """``torch.autograd.grad`` sends nothing, and the next step is right."""
    training = Training(rank, 2)
    first = training.model.layers[0].weight
    (found,) = torch.autograd.grad(training.model(input_of(rank)).sum(), first)
    (expected,) = torch.autograd.grad(
        training.alone(input_of(rank)).sum(), training.alone.layers[0].weight
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    training.step(0)
    training.check()


def skips_a_unit(rank: int) -> None:
    training = Training(rank, 2)
    run_of(training.model).watch.timeout_s = 2
    training.model.short = rank == 1
    for seed in range(3):
        training.together(seed)


def test_a_unit_skipped_on_one_rank_ends_in_a_sentence(ranks):
    outcomes = ranks(2).outcomes(skips_a_unit)
    assert [outcome.kind for outcome in outcomes] == ["RunError"] * 2
    said = " ".join(outcome.error for outcome in outcomes)
    assert "on all ranks" in said or "on every rank" in said


def is_freed_with_its_model(rank: int) -> None:
    training = Training(rank, 2)
    training.step(0)
    training.model(input_of(1)).sum().backward()
    run, weight = weakref.ref(training.model._meshwright_run), training.model.layers[0].weight
    del training
    gc.collect()
    assert run() is None
    with pytest.raises(RunError, match="whose model is gone"):
        weight.sum()


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(other_ways_of_use, marks=pytest.mark.slow),
        evaluates_and_reads,
        regularises,
        freezes_and_thaws,
        saves_and_loads,
        loads_between_forward_and_backward,
        parameters_unused,
        gradients_of_some,
        is_freed_with_its_model,
    ],
    ids=lambda check: check.__name__,
)
def test_what_users_do(ranks, check):
    ranks(2)(check)


def reads_on_one_rank(rank: int) -> None:
    training = Training(rank, 2)
    run_of(training.model).watch.timeout_s = 2
    training.together()
    if rank == 0:
        training.model.layers[0].weight.sum()
    else:
        time.sleep(3)


@pytest.mark.slow
def test_a_parameter_read_on_one_rank_ends_in_a_sentence(ranks):
    first, _ = ranks(2).outcomes(reads_on_one_rank)
    assert first.kind == "RunError"
    assert "putting 'layers.0.weight' together for a use (read parameters on all ranks)" in (
        first.error
    )


def passes_the_ledger(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_DEBUG", "1")
        training = Training(rank, 2)
        for seed in range(3):
            training.step(seed)
        training.check()


def uses_in_another_order(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_DEBUG", "1")
        training = Training(rank, 2)
    training.together()
    training.model.layers[rank].weight.sum()


def test_the_ledger_compares_uses(ranks):
    ranks(2)(passes_the_ledger)
    for outcome in ranks(2).outcomes(uses_in_another_order):
        assert outcome.kind == "RunError"
        assert "'layers.0.weight' for a use" in outcome.error
        assert "'layers.1.weight' for a use" in outcome.error


def gives_other_memory(rank: int) -> None:
    """Parameters whose memory is another after each step, as of those who write vectors to them."""
    model = Deep(4)
    alone = twin(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    apply(model, optimizer, deep_plan(2, layers=4), timeout_s=20)
    manager = run_of(model).priority.unshard_manager
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))
    both = torch.cat(
        [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    )
    for _ in range(3):
        for net, steps, samples in ((model, optimizer, x), (alone, other, both)):
            vector = nn.utils.parameters_to_vector(net.parameters()).detach()
            nn.utils.vector_to_parameters(0.9 * vector, net.parameters())
            net(samples).square().mean().backward()
            steps.step()
            steps.zero_grad()
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, alone.state_dict()[name])
    manager._reshard_all()
    assert manager._by_storage == {}  # or another tensor's memory would be taken for a parameter's


def test_other_memory_of_a_parameter_is_let_go(ranks):
    ranks(2)(gives_other_memory)
