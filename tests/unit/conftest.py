"""Settings of tests within one process."""

import sys
from collections.abc import Iterator
from functools import cache

import pytest


@pytest.fixture(scope="session", autouse=True)
def _rates_measured_once() -> Iterator[None]:
    """What compressing gradients takes is the same for every model on a device, and most of the
    time of profiling a small one. Tests of the planner alone do without torch."""
    if "torch" not in sys.modules:
        yield
        return
    from meshwright.profiler import model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "compression_rates", cache(model.compression_rates))
        yield
