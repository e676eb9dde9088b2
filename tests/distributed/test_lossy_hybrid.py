"""Top-k and layer dropping where units are divided within groups: beside one process that does the
same, group by group, member by member."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.parallel import exchange_state_dict, full_state_dict
from meshwright.planner.schema.plan import ExchangePolicy, FeedbackPolicy, Plan
from plans import plan, scheduled, unit
from torch import Tensor, nn
from torch.nn import functional as F

DEGREE, WORLD, PLACEMENT = 2, 4, (2, 0, 3, 1)
COUNTS = (3, 1, 0, 4)
"""The samples of each position: shares are uneven, and one is empty."""
CUT = {"2.weight": 0, "2.bias": 0, "4.weight": 1}
"""The dim in which members have slices."""
RATE, MOMENTUM, RATIO = 0.05, 0.9, 0.3
LOSSY = Lossy(patience=3, first_ratio=0.6, stages=2, stage_backwards=3)
STEPS = 14


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(),
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.LayerNorm(24),
        nn.Linear(24, 4),
    ).double()  # fmt: skip


def hybrid(exchange: ExchangePolicy, feedback: FeedbackPolicy) -> Plan:
    """The second and the third layer divided over pairs, by columns and by rows."""
    styles = {"2": "column", "4": "row"}
    with scheduled("priority"):
        units = [
            unit(name, DEGREE if name in styles else 1, styles.get(name, "none"), WORLD)
            for name in ("0", "2", "4", "5", "6")
        ]
        how = {"exchange": exchange, "exchange_ratio": RATIO, "feedback": feedback}
        units = [msgspec.structs.replace(u, **how) for u in units]
        return plan(WORLD, units, placement=PLACEMENT, message_bytes=1500)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(sum(COUNTS), 8, generator=generator, dtype=torch.float64)
    return inputs, (inputs[:, :4].abs() + inputs[:, 4:]).argmax(1)


def share(position: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, target = batch(step)
    start = sum(COUNTS[:position])
    bounds = slice(start, start + COUNTS[position])
    return inputs[bounds], target[bounds]


# -- one process ------------------------------------------------------------------------------


class Holder(NamedTuple):
    """One member of one group: whose samples its gradient is of, and which slice it has."""

    name: str
    positions: tuple[int, ...]
    member: int

    def of(self, whole: Tensor) -> Tensor:
        """Its slice of a parameter's tensor; a view."""
        return whole.chunk(DEGREE, CUT[self.name])[self.member] if self.name in CUT else whole


def holders_of(name: str) -> list[Holder]:
    if name not in CUT:
        return [Holder(name, (p,), 0) for p in range(WORLD)]
    groups = [tuple(range(g, g + DEGREE)) for g in range(0, WORLD, DEGREE)]
    return [Holder(name, positions, m) for positions in groups for m in range(DEGREE)]


class Alone:
    """The same training in one process. ``sent`` says what leaves of a holder's gradient."""

    def __init__(self) -> None:
        self.model = net()
        self.named = dict(self.model.named_parameters())
        self.small = {n for n, p in self.named.items() if p.ndim == 1}
        self.holders = [h for name in self.named for h in holders_of(name)]
        self.residuals = {h: torch.zeros_like(h.of(self.named[h.name])) for h in self.holders}
        self.buffers = {n: torch.zeros_like(p) for n, p in self.named.items()}

    def computed(self, step: int) -> dict[Holder, Tensor]:
        """What each holder computes: the part of its group's samples in the gradient of the whole
        batch, such that the mean over those who hold the same slice is that gradient."""
        parts = []
        for position, count in enumerate(COUNTS):
            inputs, target = share(position, step)
            loss = F.cross_entropy(self.model(inputs), target, reduction="sum")
            loss = loss * (WORLD / sum(COUNTS)) if count else self.model(batch(step)[0]).sum() * 0
            parts.append(torch.autograd.grad(loss, list(self.named.values())))
        place = {name: i for i, name in enumerate(self.named)}
        return {
            h: h.of(sum(parts[p][place[h.name]] for p in h.positions)) / len(h.positions)
            for h in self.holders
        }

    def step(self, step: int) -> None:
        averages = {n: torch.zeros_like(p) for n, p in self.named.items()}
        corrected = set()
        computed = self.computed(step)
        sent = list(self.sent(computed))
        moved = {holder.name for holder, _ in sent}
        for holder, (message, has_momentum) in sent:
            peers = WORLD if holder.name not in CUT else WORLD // DEGREE
            holder.of(averages[holder.name]).add_(message / peers)
            if has_momentum:
                corrected.add(holder.name)
        with torch.no_grad():
            for name in moved:
                update = averages[name]
                if name not in corrected:
                    update = self.buffers[name].mul_(MOMENTUM).add_(update)
                self.named[name].sub_(RATE * update)

    def sent(self, computed: dict[Holder, Tensor]) -> Iterator[tuple[Holder, tuple[Tensor, bool]]]:
        """(what a holder sends, whether momentum is in it already); nothing for what waits."""
        raise NotImplementedError


class TopkAlone(Alone):
    """Each holder sends the largest elements of what it has gathered with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.velocity = {h: torch.zeros_like(v) for h, v in self.residuals.items()}
        self.backwards = 0

    def sent(self, computed):
        stage = min(self.backwards // LOSSY.stage_backwards, LOSSY.stages)
        ratio = LOSSY.first_ratio * (RATIO / LOSSY.first_ratio) ** (stage / LOSSY.stages)
        self.backwards += 1
        for holder, gradient in computed.items():
            if holder.name in self.small:
                yield holder, (gradient, False)
                continue
            waited = self.residuals[holder] != 0
            velocity = self.velocity[holder].mul_(MOMENTUM).add_(gradient)
            gathered = self.residuals[holder] + velocity
            count = ceil(round(ratio * gathered.numel(), 9))
            least = gathered.abs().flatten().sort(descending=True).values[count - 1]
            chosen = gathered.abs() >= least
            self.residuals[holder] = torch.where(chosen, 0, gathered)
            velocity[chosen & waited] = 0
            yield holder, (torch.where(chosen, gathered, 0), True)


class DroppedAlone(Alone):
    """All holders of a parameter send it whole, or all wait."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = [n for n in self.named if n not in self.small]
        self.due, self.credit = set(self.pieces), 0.0
        self.waited = dict.fromkeys(self.pieces, 0)
        self.patterns: set[frozenset[str]] = set()

    def sent(self, computed):
        self.patterns.add(frozenset(self.due))
        expected = dict.fromkeys(self.pieces, 0.0)
        for holder, gradient in computed.items():
            if holder.name in self.small:
                yield holder, (gradient, False)
                continue
            gathered, peers = self.residuals[holder] + gradient, len(holders_of(holder.name))
            goes = holder.name in self.due
            self.residuals[holder] = torch.zeros_like(gathered) if goes else gathered
            size = gradient.abs().sum() + (0 if goes else gathered.abs().sum())
            expected[holder.name] += size.item() / (peers * gradient.numel())
            if goes:
                yield holder, (gathered, False)
        self._decide(expected)

    def _decide(self, means: dict[str, float]) -> None:
        """The largest means are due in the next backward, and whatever has waited too long."""
        self.waited = {n: 0 if n in self.due else self.waited[n] + 1 for n in self.pieces}
        numels = {n: p.numel() for n, p in self.named.items()}
        self.credit += RATIO * sum(numels.values()) - sum(numels[n] for n in self.small)
        self.due = {n for n in self.pieces if self.waited[n] >= LOSSY.patience}
        self.credit -= sum(numels[n] for n in self.due)
        for name in sorted(set(self.pieces) - self.due, key=lambda n: -means[n]):
            if self.credit > 0:
                self.due.add(name)
                self.credit -= numels[name]


ALONE = {"topk": TopkAlone, "dropped": DroppedAlone}


# -- ranks ------------------------------------------------------------------------------------


def equals_one_process(
    rank: int, exchange: ExchangePolicy, feedback: FeedbackPolicy = "residual"
) -> None:
    alone, model, position = ALONE[exchange](), net(), PLACEMENT.index(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    apply(model, optimizer, hybrid(exchange, feedback), timeout_s=20, lossy=LOSSY)
    assert model[2].weight.shape == (20, 24)
    waiting = set()
    for step in range(STEPS):
        inputs, target = share(position, step)
        F.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        alone.step(step)
        found = full_state_dict(model)
        for name, expected in alone.named.items():
            torch.testing.assert_close(
                found[name], expected.detach(), rtol=1e-9, atol=1e-10, msg=f"{name} in step {step}"
            )
        residuals = exchange_state_dict(model)["residuals"]
        for holder in alone.holders:
            if holder.name in residuals and position in holder.positions:
                if holder.name in CUT and holder.member != position % DEGREE:
                    continue
                saved = residuals[holder.name]
                residual = saved["mirror"] / RATE if "mirror" in saved else saved["residual"]
                torch.testing.assert_close(residual, alone.residuals[holder], rtol=1e-9, atol=1e-10)
                waiting |= {holder.name} if residual.any() else set()
    assert {"2.weight", "4.weight"} <= waiting
    if isinstance(alone, DroppedAlone):
        assert len(alone.patterns) > 3, alone.patterns


@pytest.mark.parametrize("exchange", ["topk", "dropped"])
def test_divided_units_send_what_one_process_would(ranks, exchange):
    ranks(WORLD)(equals_one_process, exchange)


@pytest.mark.parametrize("feedback", ["in_place", "mirror"])
def test_divided_units_keep_the_rest_where_the_plan_says(ranks, feedback):
    ranks(WORLD)(equals_one_process, "topk", feedback)
