"""Units that take a part of the ranks train as one process does (docs/executor.md)."""

from __future__ import annotations

import os

import pytest
from bursts import check_many

PLANS_EACH = 8


@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_plans(ranks, world):
    ranks(world)(check_many, range(PLANS_EACH), world, limit_s=120)
