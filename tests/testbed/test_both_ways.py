"""An exchange among two hosts uses both ways of the link at once, whoever comes later."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed import Bed, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(90),
    pytest.mark.alone,
]

PROGRAM = Path(__file__).parent / "programs" / "both_ways.py"
MIB, MBIT_S, LATE_S = 4.0, 200.0, 0.05


def test_neither_way_waits_for_the_other() -> None:
    with Bed(2, MBIT_S) as bed:
        done = bed.launch([str(PROGRAM), str(MIB), str(LATE_S)], timeout_s=60)
    assert [d.returncode for d in done] == [0, 0], [d.stderr[-800:] for d in done]
    one_way_s = MIB * 2**20 / (MBIT_S * 1e6 / 8)
    # One way after the other takes twice as long: on one process group all of these did, a gather
    # half as long again.
    for host in done:
        for median_s in map(float, host.stdout.split()):
            assert one_way_s < median_s < 1.3 * one_way_s
