"""Links that the cluster's file misdescribes: one run corrects them for the next plan. A case takes
a minute; ``-s`` prints its figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
import torch
from meshwright.executor.comm.setups import device_name
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import RunReport

from benchmarks.testbed import Bed, Host, missing
from tests.sampling import sampled

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(300),
    pytest.mark.alone,
]

# Every unit data parallel: its gradients, 8 MB, are much more than what a token bucket lets through
# at once, and other work on the machine does not hide them.
TARGET, BATCH, STEPS, PINS = "vgg16-32-narrow", 32, 12, "*=2x1"
MBIT = 1e6 / 8


def described(mbit_s: float) -> Cluster:
    """Two hosts like this one with links of that rate, as a user would write it down."""
    device = Device(name=device_name(torch.device("cpu")), memory_bytes=8 * 2**30)
    nodes = tuple(Node(name=f"host{i}", devices=(device,)) for i in range(2))
    level = Level(name="inter", latency_s=100e-6, bytes_per_s=mbit_s * MBIT)
    return Cluster(name="two hosts", nodes=nodes, levels=(level,))


def start(
    bed: Bed, host: Host, folder: Path, *arguments: str, log: IO[str] | None = None
) -> subprocess.Popen[str]:
    """A command of ``meshwright`` on one host."""
    command = [sys.executable, "-m", "meshwright", *arguments]
    cache = {"MESHWRIGHT_CACHE": str(folder / "cache")}
    return bed.start(host, command, cache, cwd=folder, stdout=subprocess.DEVNULL, stderr=log)


def on(bed: Bed, folder: Path, *arguments: str) -> None:
    """A command of ``meshwright`` on all hosts, ``@`` in it standing for the host's number."""
    with (folder / "log").open("w") as log:
        running = [
            start(
                bed, host, folder, *(a.replace("@", str(host.number)) for a in arguments), log=log
            )
            for host in bed.hosts
        ]
        codes = [process.wait(200) for process in running]
    assert codes == [0] * len(codes), (folder / "log").read_text()[-2000:]


def planned_and_run(bed: Bed, folder: Path, name: str, what: str, cluster: str) -> float:
    """Plans, launches, and says by how much of the step the prediction was off."""
    plan, result = f"{name}.json", f"{name}-result.json"
    asked = ("plan", what, "--cluster", cluster, "--batch", str(BATCH), "--pin", PINS, "-o", plan)
    assert start(bed, bed.hosts[0], folder, *asked).wait(200) == 0
    several = ("--nnodes", "2", "--node-rank", "@", "--rendezvous", f"{bed.hosts[0].address}:29500")
    on(bed, folder, "launch", plan, *several, "--steps", str(STEPS), "--report", result)
    found, made = load(RunReport, folder / result), load(Plan, folder / plan)
    assert made.prediction.step_s == found.predicted.step_s
    error = made.prediction.step_s / found.measured.step_s - 1
    print(
        f"{cluster}: step {1e3 * made.prediction.step_s:.0f} ms predicted, "
        f"{1e3 * found.measured.step_s:.0f} ms measured ({error:+.0%})"
    )
    return abs(error)


@pytest.mark.parametrize(
    ("described_mbit", "true_mbit"), sampled([(1000.0, 200.0), (50.0, 200.0)], 1)
)
def test_a_run_halves_the_next_plans_error(
    described_mbit: float, true_mbit: float, tmp_path: Path
) -> None:
    save(described(described_mbit), tmp_path / "cluster.json")
    with Bed(2, true_mbit) as bed:
        profile = ("profile", TARGET, "--batches", "8,16,32", "-o", "profile.json")
        assert start(bed, bed.hosts[0], tmp_path, *profile).wait(200) == 0
        before = planned_and_run(bed, tmp_path, "first", "profile.json", "cluster.json")
        # Here, as another machine than the hosts may: all that is needed is in files.
        files = ("--profile", "profile.json", "--cluster", "cluster.json")
        command = [sys.executable, "-m", "meshwright", "calibrate", "first.json"]
        done = subprocess.run(
            [*command, "first-result.json", *files],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        after = planned_and_run(
            bed, tmp_path, "second", "profile.calibrated.json", "cluster.calibrated.json"
        )
    found = load(Cluster, tmp_path / "cluster.calibrated.json").levels[0].bytes_per_s / MBIT
    print(f"links: {described_mbit:g} Mbit/s described, {true_mbit:g} there, {found:.0f} found")
    assert found == pytest.approx(true_mbit, rel=0.25)
    assert after <= before / 2
