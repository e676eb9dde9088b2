"""Two divided units that take one tensor alike: it is gathered once, as the planner has it."""

from __future__ import annotations

import torch
from meshwright.executor.apply import apply
from meshwright.executor.parallel import full_state_dict, run_of
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from plans import plan_for
from reference import assert_equal, train_alone, train_together, twin
from torch import Tensor, nn
from torch.nn import functional as F

from tests.wire import moved_bytes

COUNTS = (3, 2)


class Gated(nn.Module):
    """Two linear layers over the same input, multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.sigmoid(self.left(h)) * self.right(h))


def made():
    torch.manual_seed(1)
    model = Gated().double()
    found = discover(model, Batch((torch.randn(2, 6).double(),), torch.zeros(2)))
    divided = {"left", "right"}
    chosen = plan_for(
        found, 2, lambda unit: (2, "column") if unit.name in divided else (1, "none"),
        message_bytes=400,
    )  # fmt: skip
    return model, found, chosen


def data(count: int) -> list[Batch]:
    return [
        Batch((torch.randn(sum(COUNTS), 6).double(),), torch.randint(3, (sum(COUNTS),)))
        for _ in range(count)
    ]


def gathers_once(rank: int) -> None:
    model, found, chosen = made()
    mine = COUNTS[rank]
    there = COUNTS[1 - rank]
    apply(model, torch.optim.SGD(model.parameters(), lr=0.1), chosen, timeout_s=20)
    for _ in range(3):
        before = run_of(model).meter.moved_bytes
        model(torch.randn(mine, 6).double()).square().sum().backward()
        sent = run_of(model).meter.moved_bytes - before
        # h once (6 numbers of 8 bytes for each of my samples), two of four features of each output
        # for the other's samples; then the gradients of these come back, to whoever sent them
        forward = 8 * (6 * mine + 2 * (2 * there))
        backward = 8 * (6 * there + 2 * (2 * mine))
        assert sent == forward + backward, f"{sent} bytes sent, {forward + backward} by hand"
        assert sent == moved_bytes(chosen, found.edges, COUNTS)[rank]
    with torch.no_grad():
        before = run_of(model).meter.moved_bytes
        model(torch.randn(mine, 6).double())
        assert run_of(model).meter.moved_bytes - before == forward + 8 * 6 * mine


def trains_as_one_process(rank: int) -> None:
    model, _, chosen = made()
    torch.manual_seed(5)
    batches = data(3)
    expected = train_alone(twin(model), "sgd", batches, F.cross_entropy)
    found = train_together(rank, model, "sgd", batches, F.cross_entropy, chosen, COUNTS)
    assert_equal(found, expected)
    full_state_dict(model)


def crosses_once(rank: int) -> None:
    """Columns in two groups, then rows in one: features go from slice to slice, not home first."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3)).double()
    found = discover(model, Batch((torch.randn(2, 6).double(),), torch.zeros(2)))
    styles = {"0": (2, "column"), "1": (4, "row")}
    chosen = plan_for(found, 4, lambda unit: styles.get(unit.name, (1, "none")), message_bytes=400)
    counts = (2, 1, 0, 3)
    batches = [Batch((torch.randn(6, 6).double(),), torch.randint(3, (6,))) for _ in range(3)]
    expected = train_alone(twin(model), "sgd", batches, F.cross_entropy)
    trained = train_together(rank, model, "sgd", batches, F.cross_entropy, chosen, counts)
    assert_equal(trained, expected)
    before = run_of(model).meter.moved_bytes
    model(torch.randn(counts[rank], 6).double()).square().sum().backward()
    sent = run_of(model).meter.moved_bytes - before
    predicted = moved_bytes(chosen, found.edges, counts)[rank]
    assert sent == predicted, f"{sent} bytes sent, {predicted} predicted"


def test_features_cross_straight_from_one_division_to_another(ranks):
    ranks(4)(crosses_once)


def test_what_two_units_take_alike_is_gathered_once(ranks):
    ranks(2)(gathers_once)


def test_that_changes_no_result(ranks):
    ranks(2)(trains_as_one_process)
