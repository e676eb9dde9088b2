"""The rate between a device and its host's memory: its arithmetic, with a clock of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from meshwright.planner.schema.cluster import Device, Interference
from meshwright.profiler.collectives import COLLECTIVES, MeasuredGroup
from meshwright.profiler.links import _cluster, copy_rate, host_bytes_per_s

CPU = torch.device("cpu")


def clock(seconds: list[float]) -> Callable[[], float]:
    """Goes on by those seconds from the first to the second time it is read, and so on."""

    def times() -> Iterator[float]:
        now = 0.0
        for taken in seconds:
            yield now
            now += taken
            yield now

    return times().__next__


def test_the_slower_direction_counts() -> None:
    out, back = [9.0, 1.0, 2.0, 3.0], [9.0, 4.0, 4.0, 5.0]  # the first of each is not counted
    assert copy_rate(CPU, 1000, 3, clock([*out, *back])) == 1000 / 4.0
    assert copy_rate(CPU, 1000, 3, clock([*back, *out])) == 1000 / 4.0


def test_a_disturbed_copy_does_not_count_for_more() -> None:
    assert copy_rate(CPU, 1000, 3, clock([1.0, 1.0, 50.0, 1.0, 1.0, 1.0, 1.0, 1.0])) == 1000.0


def test_copies_are_really_made() -> None:
    assert 1e6 < copy_rate(CPU, 1 << 20) < 1e13


def test_a_cpu_has_no_memory_but_its_host_s() -> None:
    assert host_bytes_per_s(CPU) is None


@pytest.mark.parametrize(("rates", "least"), [((3e10, 2e10), 2e10), ((None, None), None)])
def test_each_device_has_its_own_rate(
    rates: tuple[float | None, float | None], least: float | None
) -> None:
    devices = [Device(name="gpu", memory_bytes=2**30, host_bytes_per_s=rate) for rate in rates]
    group = MeasuredGroup(None, (0, 1), 0, CPU)  # type: ignore[arg-type]
    group.seconds = {(collective, 1024): [1.0] for collective in COLLECTIVES}
    between = np.array([[0.0, 1.0], [1.0, 0.0]])
    made = _cluster(["a", "b"], devices, [("inter", [(0, 1)], group)], Interference(), between)
    assert tuple(device.host_bytes_per_s for device in made.devices) == rates
    assert made.host_bytes_per_s == least
