from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """``ranks(4)(function)`` runs a function on four ranks."""
    pools: dict[int, Ranks] = {}

    def of_size(size: int) -> Ranks:
        return pools.setdefault(size, Ranks(size))

    yield of_size
    for pool in pools.values():
        pool.stop()
