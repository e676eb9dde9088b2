"""An exchange among two hosts uses both ways of the link at once, whoever comes later."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.testbed import Bed, missing

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(90),
]

PROGRAM = Path(__file__).parent / "programs" / "both_ways.py"
MIB, MBIT_S, LATE_S = 1.0, 40.0, 0.05


def test_neither_way_waits_for_the_other() -> None:
    with Bed(2, MBIT_S) as bed:
        done = bed.launch([str(PROGRAM), str(MIB), str(LATE_S)], timeout_s=60)
    assert [d.returncode for d in done] == [0, 0], [d.stderr[-800:] for d in done]
    one_way_s = MIB * 2**20 / (MBIT_S * 1e6 / 8)
    # One way after the other takes twice as long: on one process group all of these did.
    for host in done:
        assert one_way_s < float(host.stdout) < 1.5 * one_way_s + LATE_S
