"""Files to give to the commands, and a way to run one as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from meshwright.cli import app as cli
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save
from meshwright.profiler.estimate import load_table


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The one sentence that stderr holds; notes that went before are left out."""
        lines = [line for line in self.err.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("meshwright: ")
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def meshwright(capfd, monkeypatch, tmp_path):
    """Runs one command in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MESHWRIGHT_PLAN"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = cli.run([str(a) for a in arguments])
        return Outcome(code, *capfd.readouterr())

    return run


def cluster_of(ranks: int, gbit_s: float = 1.0, memory_bytes: int = 40 * 2**30) -> Cluster:
    """One device on each of some hosts."""
    device = Device(name="a100", memory_bytes=memory_bytes)
    return Cluster(
        name=f"{ranks} hosts",
        nodes=tuple(Node(name=f"host{i}", devices=(device,)) for i in range(ranks)),
        levels=(Level(name="inter", latency_s=50e-6, bytes_per_s=gbit_s * 1e9 / 8),),
    )


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    """VGG-16 by its published layer times."""
    path = tmp_path / "profile.json"
    save(load_table("vgg16"), path)
    return path


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    save(cluster_of(8), path)
    return path


@pytest.fixture
def plan_file(meshwright, profile_file: Path, cluster_file: Path, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", path)
    assert done.code == 0, done.err
    return path


@pytest.fixture
def plan(plan_file: Path) -> Plan:
    return load(Plan, plan_file)
