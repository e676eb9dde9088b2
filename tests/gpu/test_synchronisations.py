"""How often a step asks a tensor of the device for its value, where the host has to wait for it."""

from __future__ import annotations

import pytest
import torch
from meshwright.executor.apply import apply
from streams import on_streams
from synchronisations import counted
from test_exchanges import Net, data, made
from torch.nn import functional as F

NONE = (
    "barrier", "priority", "sharded", "fully_sharded", "recompute", "priority+recompute", "early",
    "divided", "divided+priority", "divided+sharded", "divided+recompute", "int8", "bf16",
    "burst+priority",
)  # fmt: skip
PARAMETERS = 10
"""Of the network, two of its four linear layers and its normalisation each."""
MEASURED = 2
"""Steps that are counted, after as many that begin (top-k warms up, what is unused is asked)."""


def asks(rank: int, kind: str) -> list[str]:
    """Where the host waits in later steps."""
    with on_streams() as device:
        model = Net().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        apply(model, optimizer, made(kind), timeout_s=30)
        batches = [[t.float() if t.is_floating_point() else t for t in data(4, seed, device)]
                   for seed in range(2 * MEASURED)]  # fmt: skip

        def step(number: int) -> None:
            x, y = batches[number]
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(MEASURED):
            step(number)
        with counted() as places:
            for number in range(MEASURED, 2 * MEASURED):
                step(number)
        model(batches[0][0])  # what is on its way is waited for
    return places


@pytest.mark.parametrize("kind", NONE)
def test_the_host_never_waits(ranks, kind):
    for places in ranks(2)(asks, kind):
        assert places == []


@pytest.mark.parametrize(("kind", "each"), [("topk", 0), ("dropped", 0)])
def test_lossy_exchange_asks(ranks, kind, each):
    for places in ranks(2)(asks, kind):
        assert len(places) / MEASURED == each, places


def test_what_asks_is_counted():
    tensor = torch.ones(3)
    control = torch.zeros(2, device="cpu")
    with counted() as places:
        control.tolist()
        int(control[0])
        assert places == []
        tensor.sum().item()
        if tensor.any():
            tensor.nonzero()
        float(tensor[0])
    assert [place.split()[0] for place in places] == ["item", "__bool__", "nonzero", "__float__"]
