"""What torch's allocator reserves of a GPU for tensors."""

from __future__ import annotations

import msgspec
import pytest
from meshwright.cli.render.comparisons import measured_rows, measured_table
from meshwright.executor.launch.report import RankFigures, report_of_script
from meshwright.planner.memory.reserved import segments_bytes
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.report import Figures
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear

MIB = 2**20


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([], 0),
        ([1], 2 * MIB),
        ([MIB] * 4, 4 * MIB),  # small ones share segments of 2 MiB
        ([MIB + 1], 20 * MIB),  # others below 10 MiB those of 20 MiB
        ([5 * MIB] * 4, 20 * MIB),
        ([5 * MIB] * 5, 40 * MIB),
        ([10 * MIB], 10 * MIB),  # and larger ones have their own
        ([10 * MIB + 1], 12 * MIB),
        ([513] * 2048, 2 * MIB),  # in blocks of 512 bytes
        ([513] * 2049, 4 * MIB),
    ],
)
def test_segments_are_those_of_the_caching_allocator(sizes: list[int], segments: int) -> None:
    assert segments_bytes(sizes) == segments


def planned(device_type: str, optimizer: str = "sgd"):
    """A layer of 16 MiB, whose update the plan is for, and one of 4 kB."""
    profile = chain_profile([linear("large", 2048, 2048), linear("small", 32, 32)])
    profile = msgspec.structs.replace(profile, device_type=device_type)
    return make_plan(profile, cluster(2), Goal(batch=8, optimizer=optimizer))


def test_plans_for_gpus_say_what_is_reserved() -> None:
    assert planned("cpu").prediction.reserved_bytes == ()
    for optimizer, lasting in (("sgd", 16 + 2), ("adam", 3 * 16 + 2)):
        plan = planned("cuda", optimizer)
        peak = max(plan.prediction.peak_bytes)
        others = peak - (1 if optimizer == "sgd" else 3) * 4 * (2048**2 + 32**2)
        expected = lasting * MIB + -(-others // (20 * MIB)) * 20 * MIB
        assert plan.prediction.reserved_bytes == (expected, expected)
        assert expected >= peak


def test_a_report_has_it_beside_the_measured() -> None:
    plan = planned("cuda")
    ranks = [
        RankFigures(steps=5, figures=Figures(step_s=1.0, peak_bytes=5, reserved_bytes=size))
        for size in (64 * MIB, 96 * MIB)
    ]
    report = report_of_script(plan, ranks)
    assert report.measured.reserved_bytes == 96 * MIB
    assert report.predicted.reserved_bytes == max(plan.prediction.reserved_bytes)
    (row,) = [row for row in measured_rows(report) if "reserved" in row[0]]
    assert row[2] == "96.0 MiB"
    on_cpus = report_of_script(planned("cpu"), [RankFigures(steps=5, figures=Figures(step_s=1.0))])
    assert not any("reserved" in row[0] for row in measured_rows(on_cpus))
    assert "A script's peak memory is measured on GPUs only" in str(measured_table(on_cpus).caption)
    assert "peak memory" not in str(measured_table(report).caption)
