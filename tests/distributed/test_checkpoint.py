"""Checkpoints on real ranks: going on from one is as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import PLANS, Trained, unequal


def goes_on(rank: int, name: str, world: int, folder: str, **options: Any) -> list[str]:
    """What differs between six steps, and three, a new model and three more."""
    chosen = PLANS[name](world)
    straight = Trained(rank, chosen, f"{folder}/straight", seed=1, **options)
    straight.train(6)
    first = Trained(rank, chosen, f"{folder}/first", seed=1, every=3, **options)
    first.train(4)  # one more than is saved
    first.ckpt.close()
    second = Trained(rank, chosen, f"{folder}/first", seed=2, every=3, **options)
    assert second.ckpt.resume() == 3
    second.train(3)
    assert second.losses == straight.losses[3:]
    return unequal(second.digest(), straight.digest())


@pytest.mark.parametrize("name", list(PLANS))
def test_goes_on_bit_for_bit(ranks, tmp_path: Path, name: str):
    optimizer = "plain" if name == "mirror" else "sgd" if name == "topk" else "adamw"
    for found in ranks(2)(goes_on, name, 2, str(tmp_path), optimizer=optimizer):
        assert found == []
