"""Files to give to the commands, and a way to run one as a user would."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from meshwright.cli import app as cli
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
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


KEPT = ("00.conv2d", "10.conv2d", "12.conv2d", "24.conv2d", "31.flatten", "3?.linear")


def short_vgg() -> ModelProfile:
    """VGG-16 by its published layer times, less most of its convolutions: commands that say
    something of a plan say it in a third of the time."""
    whole = load_table("vgg16")
    ends = {whole.units[0].name, whole.units[-1].name}
    units = [u for u in whole.units if u.name in ends or any(fnmatch(u.name, k) for k in KEPT)]
    into = {edge.target: edge for edge in whole.edges}
    edges = [
        msgspec.structs.replace(into[target.name], source=source.name)
        for source, target in pairwise(units)
    ]
    return msgspec.structs.replace(whole, units=tuple(units), edges=tuple(edges))


@pytest.fixture
def vgg_file(tmp_path: Path) -> Path:
    """All of it, where what is planned depends on that."""
    path = tmp_path / "vgg.json"
    save(load_table("vgg16"), path)
    return path


@pytest.fixture
def profile_file(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    save(short_vgg(), path)
    return path


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.json"
    save(cluster_of(8), path)
    return path


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan and the cache of what it was made from: planned once, as most tests
    need any plan and change nothing of how it is made."""
    folder = tmp_path_factory.mktemp("planned")
    profile, cluster, plan = (folder / f"{name}.json" for name in ("profile", "cluster", "plan"))
    save(short_vgg(), profile)
    save(cluster_of(8), cluster)
    arguments = ["plan", str(profile), "-c", str(cluster), "--batch", "256", "-o", str(plan)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        assert cli.run(arguments) == 0
    return folder


@pytest.fixture
def plan_file(meshwright, planned: Path, tmp_path: Path) -> Path:
    """As if ``plan`` had just been run here."""
    shutil.copytree(planned / "cache", tmp_path / "cache", dirs_exist_ok=True)
    return Path(shutil.copy(planned / "plan.json", tmp_path))


@pytest.fixture
def plan(plan_file: Path) -> Plan:
    return load(Plan, plan_file)
