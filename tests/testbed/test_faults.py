"""A slow host is slower and right; a stalled one or a cut link ends every other rank in time, with
a sentence that names rank and host of who is missing, and leaves no process. A case takes 20 s."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from meshwright.planner.schema.plan import SHARDING

from benchmarks.testbed import Bed, Host, missing
from tests.sampling import sampled

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(150),
]

PROGRAM = Path(__file__).parent / "programs" / "train.py"
LIMIT_S = 5
FEW_S = 16
"""From the limit until torchrun has ended too: asking who lives (2 s), letting others ask (3 s),
gloo's own limit on what it still carries (5 s), and ending six processes on few cores."""

SCHEDULES = ["barrier", "priority"]


@pytest.fixture
def bed() -> Iterator[Bed]:
    with Bed(3, 200.0) as made:
        yield made


class Training:
    """The program on all hosts of a bed."""

    def __init__(self, bed: Bed, schedule: str, steps: int, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        folder.mkdir()
        told = {"MESHWRIGHT_TIMEOUT_S": str(LIMIT_S)}
        self.processes = bed.begin([str(PROGRAM), schedule, str(steps), str(folder)], told)

    def steps(self, rank: int = 0) -> list[float]:
        path = self.folder / f"steps-{rank}"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def reach(self, step: int, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while any(len(self.steps(rank)) < step for rank in range(self.bed.count)):
            assert all(p.poll() is None for p in self.processes), self.said()
            assert time.monotonic() < deadline, "the ranks did not get there"
            time.sleep(0.05)

    def said(self) -> list[str]:
        return [p.communicate(timeout=60)[1] for p in self.processes if p.poll() is not None]

    def error(self, rank: int, deadline: float) -> str:
        """The sentence with which a rank ends, before the deadline, and its torchrun with it."""
        process = self.processes[rank]
        _, said = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        assert process.returncode == 1, said[-2000:]
        found = re.findall(r"RunError: (.*)", said)
        assert found, said[-2000:]
        return str(found[0])

    def results(self) -> list[dict[str, torch.Tensor]]:
        for process in self.processes:
            said = process.communicate(timeout=90)[1]
            assert process.returncode == 0, said[-2000:]
        return [torch.load(self.folder / f"result-{r}") for r in range(self.bed.count)]


def running(host: Host) -> list[str]:
    done = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def nothing_left(host: Host) -> bool:
    deadline = time.monotonic() + 10
    while running(host) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not running(host)


@pytest.mark.alone
@pytest.mark.parametrize("schedule", sampled(SCHEDULES, 1))
def test_a_slow_host_is_slower_and_right(schedule: str, tmp_path: Path) -> None:
    with Bed(2, 200.0) as bed:
        undisturbed = Training(bed, schedule, 16, tmp_path / "undisturbed").results()
        training = Training(bed, schedule, 16, tmp_path / "slow")
        training.reach(8)
        bed.set_rate(bed.hosts[1], 20.0)
        slow = training.results()
        seconds = training.steps()
        assert median(seconds[10:]) > 3 * median(seconds[2:8])
    for mine, right in zip(slow, undisturbed, strict=True):
        assert all(torch.equal(mine[name], right[name]) for name in right)


@pytest.mark.parametrize("schedule", sampled([*SCHEDULES, "headers"], 1))
def test_a_stalled_rank_is_named_on_every_other(bed: Bed, schedule: str, tmp_path: Path) -> None:
    training = Training(bed, schedule, 0, tmp_path / "run")
    training.reach(3)
    stalled = training.pid(1)
    os.kill(stalled, signal.SIGSTOP)
    deadline = time.monotonic() + LIMIT_S + FEW_S
    for rank in (0, 2):
        error = training.error(rank, deadline)
        assert error.startswith(f"rank {rank} on host{rank} waits in"), error
        assert "rank 1 on host1 is not heard of any more" in error
        other = 2 - rank
        assert f"rank {other} on host{other} is not heard" not in error, error
        assert nothing_left(bed.hosts[rank])
    assert running(bed.hosts[1])
    os.kill(stalled, signal.SIGCONT)  # it finds itself alone
    assert "rank 1 on host1 waits in" in training.error(1, time.monotonic() + LIMIT_S + FEW_S)
    assert nothing_left(bed.hosts[1])


@pytest.mark.parametrize("schedule", sampled([*SCHEDULES, *SHARDING], 2))
def test_a_cut_link_is_named_on_both_sides(bed: Bed, schedule: str, tmp_path: Path) -> None:
    training = Training(bed, schedule, 0, tmp_path / "run")
    training.reach(3)
    bed.cut(bed.hosts[1])
    deadline = time.monotonic() + LIMIT_S + FEW_S
    for rank in (0, 2):
        error = training.error(rank, deadline)
        assert error.startswith(f"rank {rank} on host{rank} waits in"), error
        assert "rank 1 on host1 is not heard of any more" in error
    alone = training.error(1, deadline)
    assert alone.startswith("rank 1 on host1 waits in"), alone
    assert "nothing is heard of rank 0 on host0, rank 2 on host2" in alone
    assert all(nothing_left(host) for host in bed.hosts)


@pytest.mark.slow
def test_the_host_of_the_store_is_cut_off(bed: Bed, tmp_path: Path) -> None:
    training = Training(bed, "priority", 0, tmp_path / "run")
    training.reach(3)
    bed.cut(bed.hosts[0])
    deadline = time.monotonic() + LIMIT_S + FEW_S
    first = training.error(0, deadline)
    assert "rank 1 on host1 is not heard of any more" in first
    assert "rank 2 on host2 is not heard of any more" in first
    for rank in (1, 2):
        assert "nothing is heard of rank 0 on host0" in training.error(rank, deadline)
    assert all(nothing_left(host) for host in bed.hosts)


@pytest.mark.slow
def test_launch_says_the_sentence_and_ends(tmp_path: Path) -> None:
    """``meshwright launch``'s own engine, whose workers leave word instead of a traceback."""
    start = (
        "import sys; from pathlib import Path\n"
        "from meshwright.executor.launch.processes import Ranks, run_ranks\n"
        "from meshwright.planner.schema.errors import RunError\n"
        "number, folder, *program = sys.argv[1:]\n"
        "try:\n"
        "    run_ranks(program, Ranks(1, 2, int(number), '10.77.0.1:29500'), Path(folder))\n"
        "except RunError as error:\n"
        "    sys.exit(f'meshwright: {error}')\n"
    )
    with Bed(2, 200.0) as bed:
        training = Training.__new__(Training)
        training.bed, training.folder = bed, tmp_path
        training.processes = [
            bed.start(
                host,
                [
                    *(sys.executable, "-c", start, str(host.number), str(tmp_path / host.name)),
                    *(str(PROGRAM), "priority", "0", str(tmp_path)),
                ],
                {"MESHWRIGHT_TIMEOUT_S": str(LIMIT_S)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in bed.hosts
        ]
        training.reach(3)
        bed.cut(bed.hosts[1])
        for process in training.processes:
            said = process.communicate(timeout=LIMIT_S + FEW_S)[1]
            mine, other = (0, 1) if process is training.processes[0] else (1, 0)
            assert process.returncode == 1, said[-2000:]
            assert f"meshwright: rank {mine} on host{mine} waits in" in said
            assert f"rank {other} on host{other}" in said
            assert "Traceback" not in said
        assert all(nothing_left(host) for host in bed.hosts)
