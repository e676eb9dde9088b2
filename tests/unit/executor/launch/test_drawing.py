"""The global batches that a plan's own workload is trained on."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.launch import train
from meshwright.executor.launch.train import drawing, whole_losses
from meshwright.models.workload import Batch, Workload
from meshwright.planner.schema.errors import RunError
from torch import nn

SAMPLES = 10


def numbered(batch: int):
    """Draws of a workload whose data are the numbers from 0 to 9."""
    data = Batch((torch.arange(SAMPLES),), torch.arange(SAMPLES))
    workload = Workload("numbers", nn.Identity(), lambda size: data, nn.MSELoss(), lambda _: data)
    return lambda number: drawing(workload, batch)(number).target.tolist()


def test_steps_pass_through_the_data_in_another_order_each_time():
    draw = numbered(5)
    first, second = draw(0) + draw(1), draw(2) + draw(3)
    assert sorted(first) == sorted(second) == list(range(SAMPLES))
    assert first != second
    assert draw(1) == first[5:]  # whatever was asked for before


def test_a_batch_larger_than_the_data_takes_samples_more_than_once():
    draw = numbered(25)
    batches = [draw(number) for number in range(2)]
    for batch in batches:
        assert len(batch) == 25
        counts = [batch.count(sample) for sample in range(SAMPLES)]
        assert {2, 3} == set(counts)
    assert batches[0] != batches[1]


def test_drawing_leaves_a_gpu_s_random_numbers_as_they_were(monkeypatch):
    gpu = torch.device("cuda", 1)
    states = {gpu: "as it was"}
    monkeypatch.setattr(train, "device_of", lambda model: gpu)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: states.update({gpu: seed}))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, device: states.update({device: s}))
    seen = []

    def make(size):
        seen.append(states[gpu])
        return Batch((torch.randn(size),), torch.randn(size))

    draw = drawing(Workload("random", nn.Identity(), make, nn.MSELoss()), 3)
    before = torch.get_rng_state()
    first = draw(7)
    assert seen == [7]  # all ranks draw the same there, too
    assert states == {gpu: "as it was"}
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw(7).target, first.target)


def test_the_loss_that_is_not_finite_is_told_by_its_number_in_the_training():
    inf = torch.inf
    with pytest.raises(RunError, match=r"^the loss of step 52 is inf: "):
        whole_losses([[1.0, 2.0, 3.0], [1.0, inf, 3.0]], start=50)
    assert whole_losses([[1.0, 2.0], [1.0, 0.0]], start=50) == (2.0, 2.0)


def test_a_scaler_leaves_out_steps_whose_losses_are_not_finite():
    inf = torch.inf
    assert whole_losses([[1.0, inf, 3.0]], scaled=True) == (1.0, 3.0)
    assert whole_losses([[1.0, 3.0, inf]], scaled=True) == (1.0, 3.0)
    with pytest.raises(RunError, match=r"^the loss of step 4 is inf: "):
        whole_losses([[1.0, inf, 3.0, inf, inf]], scaled=True)
