"""The commands together, as a user goes through them; the examples and the demo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from launched import environment
from meshwright.planner.schema.cache import CACHE_VARIABLE
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import load, save
from plans import plan as plan_by_hand

from tests.traces import check_trace, tracks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(400)


def command(*arguments: object, cwd: Path, limit_s: float = 300) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        cwd=cwd,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def meshwright(*arguments: object, cwd: Path) -> str:
    return command("-m", "meshwright", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A folder with a cluster of two local ranks and a plan for ``mlp`` on it."""
    folder = tmp_path_factory.mktemp("measured")
    meshwright("probe", "--ranks", 2, "-o", "cluster.json", cwd=folder)
    out = meshwright(
        *("plan", "mlp", "-c", "cluster.json", "--batch", 33, "-o", "plan.json"),
        *("--optimizer", "momentum"),
        cwd=folder,
    )
    assert "Predicted for one step" in out
    return folder


@pytest.mark.slow
def test_probe_measures_two_ranks_here(measured):
    cluster = load(Cluster, measured / "cluster.json")
    assert cluster.origin == "measured"
    assert cluster.world_size == 2
    assert {c.collective for c in cluster.levels[0].curves} >= {"all_reduce", "all_to_all"}


@pytest.mark.slow
def test_plan_measures_the_model_once(measured, tmp_path, monkeypatch):
    """In a cache of its own: other tests measure this model at the same time, and the later one's
    measurement would be found."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    again = ("plan", "mlp", "-c", "cluster.json", "--batch", 33)
    meshwright(*again, "--optimizer", "momentum", "-o", "once.json", cwd=measured)
    meshwright(*again, "-o", "again.json", cwd=measured)
    plans = [load(Plan, measured / name) for name in ("once.json", "again.json")]
    assert plans[0].provenance.profile == plans[1].provenance.profile


@pytest.mark.slow
def test_explain_the_measured_plan(measured):
    assert "The largest part of the step" in meshwright("explain", "plan.json", cwd=measured)


@pytest.mark.slow
def test_profile_of_two_ranks_at_once(tmp_path):
    out = meshwright(*("profile", "mlp", "--ranks", 2, "--batches", "4,8", "--json"), cwd=tmp_path)
    document = json.loads(out)
    assert document["document"] == "ModelProfile"
    assert document["batches"] == [4, 8]


@pytest.mark.slow
def test_estimate_for_a_device_that_is_not_here(tmp_path):
    meshwright("profile", "mlp", "--device", "h100-sxm", "-o", "h100.json", cwd=tmp_path)
    profile = load(ModelProfile, tmp_path / "h100.json")
    assert profile.origin == "estimated"
    assert profile.device == "h100-sxm"


@pytest.mark.slow
def test_plan_for_a_cluster_that_is_not_here(measured):
    described = ("--device", "a100-sxm-40gb", "--nodes", 8, "--inter-gbit-s", 1)
    meshwright("cluster", *described, "-o", "a100.json", cwd=measured)
    meshwright("plan", "vgg16", "-c", "a100.json", "--batch", 256, "-o", "v.json", cwd=measured)
    made = load(Plan, measured / "v.json")
    divided = {u.kind for u in made.units if u.layout.degree > 1}
    assert "linear" in divided
    assert "conv" not in divided
    assert made.speedup > 3


@pytest.mark.slow
def test_a_run_is_shown_traced_and_reported(measured):
    """Predicted and measured one above the other, and on the page."""
    more = ("--report", "result.json", "--trace", "run.json", "--steps", 12)
    meshwright("launch", "plan.json", *more, cwd=measured)
    events = json.loads((measured / "run.json").read_text())["traceEvents"]
    check_trace(events)
    found = tracks(events)
    for rank in range(2):
        for which in ("predicted", "measured"):
            assert len(found[f"rank {rank}", f"step, {which}"]) == 3
            assert found[f"rank {rank}", f"computing, {which}"]
    plan = load(Plan, measured / "plan.json")
    names = {span["name"] for span in found["rank 0", "computing, measured"]}
    linear = next(unit.name for unit in plan.units if unit.kind == "linear")
    assert {f"forward {linear}", f"backward {linear}"} <= names
    out = meshwright("report", "plan.json", "--result", "result.json", cwd=measured)
    assert out == "written to report.html; any browser opens it\n"
    assert "The step as predicted and as measured" in (measured / "report.html").read_text()


@pytest.mark.slow
def test_two_hosts_that_meet_at_a_rendezvous(tmp_path):
    save(msgspec.structs.replace(plan_by_hand(2), target="mlp"), tmp_path / "plan.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "meshwright", "launch", "plan.json", "--json"),
                *("--nnodes", "2", "--node-rank", str(n), "--rendezvous", address),
                *("--steps", "3", "--timeout", "200"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment(),
        )
        for n in (1, 0)
    ]
    try:
        (other, other_err), (first, first_err) = [h.communicate(timeout=250) for h in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert [h.returncode for h in hosts] == [0, 0], first_err + other_err
    assert json.loads(first)["world_size"] == 2
    assert other == ""


# -- examples and demo ------------------------------------------------------------------------


@pytest.mark.slow
def test_example_of_a_script(tmp_path):
    script = EXAMPLES / "train_digits.py"
    alone = command(script, "--epochs", 2, cwd=tmp_path)
    assert "1 ranks, test accuracy" in alone
    together = command(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *(script, "--epochs", 2),
        cwd=tmp_path,
    )
    # The same batches, whatever the ranks: the same training, to rounding.
    accuracy = [float(out.split("accuracy ")[1].split("%")[0]) for out in (alone, together)]
    assert accuracy[0] > 80
    assert abs(accuracy[0] - accuracy[1]) < 2


@pytest.mark.slow
def test_example_of_a_model_of_ones_own(measured, tmp_path):
    target, links = f"{EXAMPLES / 'own_model.py'}:tagger", measured / "cluster.json"
    meshwright("plan", target, "-c", links, "--batch", 64, "-o", "p.json", cwd=tmp_path)
    assert "PASS" in meshwright("verify", "p.json", cwd=tmp_path)
    assert "step time" in meshwright("launch", "p.json", "--steps", 5, cwd=tmp_path)


@pytest.mark.long  # continuous integration runs the demo itself
def test_demo(tmp_path):
    report = json.loads(meshwright("demo", "-o", "kept", "--json", cwd=tmp_path))
    assert report["verification"]["passed"]
    assert report["planned"]["accuracy"] > 0.9
    assert report["data_parallel"]["accuracy"] > 0.9
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {
        *("cluster.json", "profile.json", "plan.json", "data-parallel.json", "demo.json")
    }
    assert load(Plan, tmp_path / "kept" / "plan.json").target == "cnn-digits"
