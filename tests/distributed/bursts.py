"""What must hold of a plan whose units take a part of the ranks, tried on real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from burst_models import build, draw
from burst_trials import Clip, Counts, Trial, piece_counts, pieces_of, samples_at
from meshwright.executor.apply import apply
from meshwright.executor.launch.yardstick import LOSS, STATE, Yardstick
from meshwright.executor.micro import micro_batches
from meshwright.executor.parallel import full_optimizer_state_dict, full_state_dict, run_of
from meshwright.models.units.discover import Discovery
from meshwright.models.workload import Batch
from reference import assert_equal, furthest, optimizer_of, twin, whole_gradients, whole_loss
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR

from tests.wire import ExchangedParam, exchanged_bytes, moved_bytes

CPU = torch.device("cpu")
LIMIT_S = 20
"""A rank waits so long for the others."""
Batches = Sequence[Sequence[Batch]]
"""The whole batch of each backward of each step."""


@dataclass
class Expected:
    """What one process computes. ``states`` and ``gradients`` are those before each step's update,
    ``outputs`` of the evaluation before the second step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: list[dict[str, Tensor]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    outputs: Tensor = field(default_factory=lambda: torch.empty(0))
    optimizer: dict[int, dict[str, Any]] = field(default_factory=dict)


def check(rank: int, text: str, device: torch.device = CPU) -> None:
    """The plan of a trial trains as one process does, and sends what it is said to send."""
    trial = Trial.read(text)
    model, found = build(trial.model, trial.dtype)
    model.to(device)
    torch.manual_seed(trial.seed)
    batches = [
        [draw(trial.model, sum(c), trial.dtype).to(device) for c in step] for step in trial.steps
    ]
    expected = alone(twin(model), trial, batches)
    Together(rank, model, found, trial, expected).train(batches)


def alone(model: nn.Module, trial: Trial, batches: Batches) -> Expected:
    """One process on whole batches, in the same micro-batches: batch statistics are of those."""
    optimizer = optimizer_of(trial.optimizer, model.parameters())
    scheduler = _scheduler(trial, optimizer)
    expected = Expected()
    for number, (step, counts) in enumerate(zip(batches, trial.steps, strict=True)):
        if number and trial.evaluates:
            with _evaluating(model):
                expected.outputs = model(*step[0].args)
        expected.states.append(_copied(model.state_dict()))
        for batch, fed in zip(step, counts, strict=True):
            expected.losses.append(_backward_alone(model, batch, fed, trial.parts))
        named = model.named_parameters()
        expected.gradients.append(_copied({n: p.grad for n, p in named if p.grad is not None}))
        expected.norms.append(_clip(model, trial.clip))
        _update(optimizer, scheduler)
    expected.states.append(_copied(model.state_dict()))
    expected.optimizer = optimizer.state_dict()["state"]
    return expected


def _backward_alone(model: nn.Module, batch: Batch, counts: Counts, parts: int) -> float:
    total = 0.0
    for piece in pieces_of(batch, counts, parts):
        if piece.size:
            loss = _loss(model, piece) * (piece.size / batch.size)
            loss.backward()
            total += loss.item()
    return total


class Together:
    """One rank's part in a trial."""

    def __init__(
        self, rank: int, model: nn.Module, found: Discovery, trial: Trial, expected: Expected
    ) -> None:
        self.trial, self.expected, self.found, self.model = trial, expected, found, model
        self.exchanged_params = exchanged_params(model, found, trial)
        self.optimizer = optimizer_of(trial.optimizer, model.parameters())
        apply(model, self.optimizer, trial.plan, timeout_s=LIMIT_S)
        self.position = trial.plan.placement.index(rank)
        self.scheduler = _scheduler(trial, self.optimizer)
        self.meter = run_of(model).meter
        self.losses: list[float] = []

    @property
    def by_gradients(self) -> bool:
        """Whether gradients from equal parameters are compared, and not parameters, as AdamW blows
        up what float32 rounds."""
        return self.trial.dtype == "float32" and self.trial.optimizer == "adamw"

    @property
    def yardstick(self) -> Yardstick:
        return STATE[getattr(torch, self.trial.dtype)]

    def train(self, batches: Batches) -> None:
        """All steps, each held against one process's."""
        for number, step in enumerate(batches):
            self.step(number, step)
        self._check_outcome()

    def step(self, number: int, batches: Sequence[Batch]) -> None:
        """One step's backwards and its update."""
        trial, counts = self.trial, self.trial.steps[number]
        if number and self.by_gradients:
            self.model.load_state_dict(self.expected.states[number])
        if number and trial.evaluates:
            self._evaluate(batches[0], counts[0])
        exchanged = self.meter.exchanged_bytes
        last = len(batches) - 1
        for i, (batch, fed) in enumerate(zip(batches, counts, strict=True)):
            no_sync = trial.no_sync and i < last
            with self.model.no_sync() if no_sync else nullcontext():
                self._backward(batch, fed)
        if self.by_gradients:
            off = furthest(whole_gradients(self.model), self.expected.gradients[number])
            assert off <= 1, f"gradients of step {number} are off by {off} of what may be"
        self._check_norm(number)
        _update(self.optimizer, self.scheduler)
        self._check_exchanged(self.meter.exchanged_bytes - exchanged, trial.exchanges[number])

    def _backward(self, batch: Batch, counts: Counts) -> None:
        """This rank's share of a batch, in micro-batches."""
        moved, total, parts = self.meter.moved_bytes, torch.zeros(()), self.trial.parts
        mine = batch.slice(*samples_at(counts, self.position))
        for piece in micro_batches(self.model, mine, parts) if parts > 1 else (mine,):
            value = _loss(self.model, piece)
            value.backward()
            if piece.size:
                total = total + value.detach() * (piece.size / mine.size)
        self.losses.append(whole_loss(total, mine.size, batch.size))
        sent = self.meter.moved_bytes - moved
        each = (self._moved(fed) for fed in piece_counts(counts, parts))
        predicted = sum(each)
        assert sent == predicted, f"{sent} bytes moved, {predicted} predicted"

    def _moved(self, counts: Counts) -> float:
        return moved_bytes(self.trial.plan, self.found.edges, counts)[self.position]

    def _evaluate(self, batch: Batch, counts: Counts) -> None:
        start, stop = samples_at(counts, self.position)
        with _evaluating(self.model):
            output = self.model(*batch.slice(start, stop).args)
        share = self.yardstick.share(output, self.expected.outputs[start:stop])
        assert share <= 1, f"the outputs are off by {share} of what may be"

    def _check_norm(self, number: int) -> None:
        """Unmodified clipping is right on every rank, those that a unit leaves idle too."""
        norm, expected = _clip(self.model, self.trial.clip), self.expected.norms[number]
        relative = self.yardstick.relative
        assert abs(norm - expected) <= relative * expected, f"norm {norm}, expected {expected}"

    def _check_exchanged(self, sent: int, backwards: int) -> None:
        """Gradients travel among those who computed them only: as much as rings send, rounded down
        for each message where a ring's share is not whole."""
        plan = self.trial.plan
        if any(unit.exchange not in ("dense", "sharded") for unit in plan.units):
            return  # what they put together depends on how often units use them
        predicted = exchanged_bytes(plan, self.exchanged_params, backwards)[self.position]
        largest = sum(
            1 + c.share(1, 0) * c.width_bytes // plan.message_bytes for c in self.exchanged_params
        )
        told = f"{sent} bytes exchanged, {predicted} predicted"
        assert predicted - backwards * largest <= sent <= predicted * (1 + 1e-12), told

    def _check_outcome(self) -> None:
        state = full_optimizer_state_dict(self.model, self.optimizer)["state"]
        assert state.keys() == self.expected.optimizer.keys()
        loss, final = LOSS[getattr(torch, self.trial.dtype)], self.expected.states[-1]
        for found, wanted in zip(self.losses, self.expected.losses, strict=True):
            assert abs(found - wanted) <= loss.relative * abs(wanted) + loss.absolute, (
                f"loss {found}, expected {wanted}"
            )
        if self.by_gradients:
            return
        assert_equal(([], full_state_dict(self.model)), ([], final), *self.yardstick)
        for index, entries in self.expected.optimizer.items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    share = self.yardstick.share(state[index][key], value)
                    assert share <= 1, f"{key} of parameter {index} is off by {share}"


def exchanged_params(model: nn.Module, found: Discovery, trial: Trial) -> list[ExchangedParam]:
    """The model's parameters, each at its first user, as the plan divides them."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    known: dict[nn.Parameter, ExchangedParam] = {}
    for unit in trial.plan.units:
        split = found.unit(unit.name).split(unit.style)
        cuts = {cut.name: cut for cut in split.cuts} if split is not None else {}
        for name, tensor in tensors.items():
            if any(name.startswith(f"{module}.") for module in unit.modules):
                shape, width = tuple(tensor.shape), tensor.element_size()
                cut = cuts.get(name)
                one = ExchangedParam(unit.name, shape, width)
                if cut is not None:
                    one = one._replace(dim=cut.dim, blocks=cut.blocks)
                known.setdefault(tensor, one)
    assert known.keys() == set(model.parameters())
    return list(known.values())


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(*batch.args), batch.target)


def _clip(model: nn.Module, clip: Clip) -> float:
    """Clips gradients; their norm, where that is asked for."""
    if clip == "value":
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
    if clip in ("none", "value"):
        return 0.0
    order = 2.0 if clip == "norm" else float("inf")
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=order).item()


def _scheduler(trial: Trial, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    return StepLR(optimizer, 1, gamma=0.5) if trial.decays else None


def _update(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> None:
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
