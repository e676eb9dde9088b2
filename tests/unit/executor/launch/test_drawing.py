"""The global batches that a plan's own workload is trained on."""

from __future__ import annotations

import torch
from meshwright.executor.launch.train import drawing
from meshwright.models.workload import Batch, Workload
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
