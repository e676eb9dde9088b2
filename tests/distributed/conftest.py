from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Ranks


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """The ranks that have been started, by their number."""
    started: dict[int, Ranks] = {}
    yield started
    for pool in started.values():
        pool.stop()


@pytest.fixture(scope="module")
def ranks(pools: dict[int, Ranks]) -> Iterator[Callable[[int], Ranks]]:
    """``ranks(4)(function)`` runs a function on four ranks."""
    yield lambda size: pools.setdefault(size, Ranks(size))
    for pool in pools.values():
        pool.leave_groups()
