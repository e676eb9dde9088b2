"""What operators are seen to take of a device is what its allocator gives out."""

from __future__ import annotations

import pytest
import torch
from meshwright.models.units.storages import (
    LiveStorages,
    peak_bytes,
    release_workspaces,
    scratch_of,
)
from meshwright.models.zoo import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no allocator")


@pytest.mark.parametrize("name", ["vgg11-32", "resnet50-32", "gpt-mini"])
def test_storages_and_scratch_memory_make_the_peak(name: str) -> None:
    device = torch.device("cuda", 0)
    workload = build(name)
    model, batch = workload.model.to(device), workload.make_batch(32).to(device)
    inputs = [*model.parameters(), *model.buffers()]
    inputs += [t for t in (*batch.args, batch.target) if isinstance(t, torch.Tensor)]

    def step() -> None:
        workload.loss(model(*batch.args, **batch.kwargs), batch.target).backward()
        model.zero_grad()

    step()
    release_workspaces(device)  # they are no tensors
    others = torch.cuda.memory_allocated(device) - sum(t.nbytes for t in inputs)
    measured = peak_bytes(lambda: (step(), step()), inputs, device) - others
    with LiveStorages(scratch=scratch_of(device)) as live:
        live.add(inputs)
        step()
    assert live.peak == pytest.approx(measured, rel=0.03)
