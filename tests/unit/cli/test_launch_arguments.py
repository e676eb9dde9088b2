"""Where ``launch``'s own options end and those of the script begin."""

import msgspec
import pytest
import torch
from meshwright import api
from meshwright.cli.launch import separate_script
from meshwright.executor.checkpoint.folder import prepare
from meshwright.executor.checkpoint.storage import Description
from meshwright.executor.checkpoint.storage import save as save_checkpoint
from meshwright.executor.comm.setups import device_name
from meshwright.executor.launch.hosts.settings import Hosts
from meshwright.executor.launch.launch import differences
from meshwright.executor.launch.scalars import TENSORBOARD_VARIABLE
from meshwright.planner.schema import cache
from meshwright.planner.schema.cluster import Device, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.local_steps import LocalSteps
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save
from meshwright.planner.solve.evaluate import make_plan

from .conftest import cluster_of, short_vgg


@pytest.mark.parametrize(
    ("given", "script"),
    [
        ("launch p.json", None),
        ("launch p.json --nproc 2", None),
        ("launch --nproc 2 p.json --json", None),
        ("launch p.json s.py --lr 1 --json", "s.py --lr 1 --json"),
        ("launch p.json --nproc 2 s.py --nproc 3", "s.py --nproc 3"),
        ("launch p.json --json s.py p.json", "s.py p.json"),
        ("launch --timeout=9 p.json -m mine.train -v", "-m mine.train -v"),
        ("launch p.json -- s.py -x", "s.py -x"),
        ("launch --no-resume p.json --checkpoint kept s.py --resume", "s.py --resume"),
        ("plan launch p.json s.py", None),
        ("launch p.json --hosts a,b --dry-run s.py --submit", "s.py --submit"),
        ("launch --submit p.json --slurm job s.py", "s.py"),
    ],
)
def test_the_script_begins_after_the_plan(given, script):
    found = separate_script(given.split())
    assert [w for w in found if w != "--"] == [w for w in given.split() if w != "--"]
    if script is None:
        assert "--" not in found
    else:
        assert found[found.index("--") + 1 :] == script.split()


def test_what_is_not_as_planned_is_said_before_anything_starts(meshwright, plan_file, monkeypatch):
    """A plan for eight A100s, on a host with two cores: said first, whatever the run does."""
    started: list[object] = []
    monkeypatch.setattr("meshwright.executor.launch.launch.cores", lambda: 2)
    monkeypatch.setattr(
        "meshwright.executor.launch.launch.run_task", lambda *given: started.append(given)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = meshwright("launch", plan_file)
    assert len(started) == 1
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert "8 ranks of the plan start on this host, which has 2 cores" in notes[0]
    assert "made for a100 and this host has cpu" in notes[1]
    started.clear()
    done = meshwright("launch", plan_file, "--nproc", 2)
    assert (done.code, started) == (2, [])
    assert "the plan is for 8 ranks and 2 would be started" in done.sentence
    assert "note: " not in done.err


def test_how_many_steps_a_script_makes_is_its_own(meshwright, plan_file):
    done = meshwright("launch", "--steps", 20, plan_file, "train.py")
    assert done.code == 2
    assert "--steps 20 concerns a plan's own workload, and a script makes as many" in done.sentence


def test_a_rendezvous_of_no_hosts_is_refused(meshwright, plan_file, monkeypatch):
    started: list[object] = []
    monkeypatch.setattr("meshwright.api.launch", lambda *a, **k: started.append(k["rendezvous"]))
    address = ("--rendezvous", "10.0.0.1:29500")
    done = meshwright("launch", plan_file, *address)
    assert (done.code, started) == (2, [])
    assert "--rendezvous 10.0.0.1:29500 says nothing of one host: say how many" in done.sentence
    # A script of a cluster names both, whatever number it is told.
    meshwright("launch", plan_file, *address, "--nnodes", 1)
    assert started == ["10.0.0.1:29500"]


def test_a_host_of_unequal_ones_is_held_against_its_own_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("meshwright.executor.launch.launch.cores", lambda: 8)
    here = Device(name=device_name(torch.device("cpu")), memory_bytes=2**40)
    others = [Node(name=name, devices=(here,)) for name in ("other", "third")]
    nodes = (cluster_of(1).nodes[0], *others)
    cache.put(there := msgspec.structs.replace(cluster_of(1), nodes=nodes))
    made = make_plan(short_vgg(), there, Goal(batch=6))
    assert differences(made, 1, 1) == differences(made, 1, 2) == []
    (said,) = differences(made, 1, 0)
    assert "the plan was made for a100 and this host has cpu" in said
    devices, hosts = differences(made, 3)  # all of it here
    assert "made for a100 and cpu" in devices
    for node in there.nodes:
        assert node.name in hosts
    assert "the links between them are not used" in hosts
    (said,) = differences(made, 2, 1)
    assert "--nnodes or --hosts" in said


def test_checkpoints_are_refused_before_anything_starts(meshwright, plan_file, tmp_path):
    (tmp_path / "kept" / "step-00000040").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    for options, sentence in (
        (("--checkpoint-every", 5), "--checkpoint-every concerns checkpoints: add --checkpoint"),
        (("--no-resume",), "--resume concerns checkpoints: add --checkpoint FOLDER"),
        (("--checkpoint", tmp_path / "other"), "is not a folder of checkpoints (it has 'notes.txt"),
        (("--checkpoint", tmp_path / "kept", "--no-resume"), "has checkpoints up to step 40: name"),
    ):
        done = meshwright("launch", plan_file, *options)
        assert done.code == 2
        assert sentence in done.sentence
    done = meshwright("export", tmp_path / "other", "-o", tmp_path / "a.pt")
    assert (done.code, "there is no checkpoint in" in done.sentence) == (2, True)
    done = meshwright("export", tmp_path / "kept", "-o", tmp_path / "a.pt")
    assert (done.code, "index.json cannot be read: No such file" in done.sentence) == (2, True)
    assert done.sentence.endswith("copy one back, or name another folder")
    done = meshwright("export", tmp_path / "kept", "-o", tmp_path / "a.bin")
    assert (done.code, "a.bin does not say how weights are written" in done.sentence) == (2, True)


def test_checkpoints_under_local_steps_are_refused(meshwright, plan_file, tmp_path):
    apart = LocalSteps(hosts=2, inner_steps=2)
    made = msgspec.structs.replace(load(Plan, plan_file, "PLAN"), units=(), local_steps=apart)
    save(made, tmp_path / "apart.json")
    done = meshwright("launch", tmp_path / "apart.json", "--checkpoint", tmp_path / "kept")
    assert "leave out --checkpoint (checkpoint), or plan without --allow-local" in done.sentence


def test_a_stopped_run_is_told_how_it_goes_on(meshwright, plan_file, tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.executor.launch.launch.run_task", stop)
    kept = tmp_path / "kept"
    done = meshwright("launch", plan_file)
    assert (done.code, done.err.splitlines()[-1]) == (130, "meshwright: stopped")
    done = meshwright("launch", plan_file, "--checkpoint", "kept")
    assert (done.code, "there is no whole checkpoint in kept to" in done.sentence) == (130, True)
    prepare(kept)
    for step in (40, 80):
        checkpoint = Description(step, 1, "model", "plan", "decisions", b"{}")
        save_checkpoint(kept, checkpoint, 0, {}, b"{}", None)
    (kept / "step-00000080" / "index.json").unlink()
    done = meshwright("launch", plan_file, "--checkpoint", "kept")
    assert done.code == 130
    assert "stopped; the same command goes on from the checkpoint of step 40 in" in done.sentence
    assert "that of step 80 is damaged (index.json cannot be read" in done.sentence


def test_ranks_are_told_of_checkpoints(meshwright, plan_file, tmp_path, monkeypatch):
    started: list[object] = []
    monkeypatch.setattr(
        "meshwright.executor.launch.launch.run_task", lambda *given: started.append(given[0])
    )
    (tmp_path / "kept" / "step-00000040").mkdir(parents=True)
    done = meshwright("launch", plan_file, "--checkpoint", tmp_path / "kept")
    assert "goes on from" not in done.err  # ranks say it, when they have looked
    assert "note: nothing was measured: fewer than 3 of --steps were left" in done.err
    (task,) = started
    assert (task.keeping.folder, task.keeping.every) == (str(tmp_path / "kept"), 50)


def test_scalars_need_tensorboard(meshwright, plan_file, tmp_path, monkeypatch):
    """Said before anything starts, with the remedy; ranks are told of the folder otherwise."""
    told: list[dict[str, str]] = []
    monkeypatch.setattr(
        "meshwright.executor.launch.launch.run_task",
        lambda task, ranks, *given: told.append(ranks.environment),
    )
    launch = ("launch", plan_file, "--tensorboard")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = meshwright(*launch, "scalars")
    assert (done.code, told) == (2, [])
    assert "not installed: pip install tensorboard" in done.sentence
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    done = meshwright(*launch, plan_file)
    assert (done.code, told) == (2, [])
    assert "is a file: name a folder" in done.sentence
    meshwright(*launch, "scalars")
    assert [of[TENSORBOARD_VARIABLE] for of in told] == [str(tmp_path / "scalars")]
    done = meshwright(*launch, "scalars", "--hosts", "a,b", "--nproc", 4, "--dry-run")
    assert done.out.count("--tensorboard=scalars") == 2


@pytest.mark.parametrize(
    ("given", "there"), [("scalars", "/there/scalars"), ("/data/scalars", "/data/scalars")]
)
def test_hosts_write_scalars_in_their_own_folder(plan_file, monkeypatch, given, there):
    told: list[object] = []
    monkeypatch.setattr(
        "meshwright.executor.launch.hosts.elastic.launch_elastic",
        lambda work, hosts, *more: told.append(hosts.environment),
    )
    hosts = Hosts(("a", "b"), folder="/there", environment={"A": "b"})
    api.launch(load(Plan, plan_file), hosts=hosts, tensorboard=given)
    assert told == [{"A": "b", TENSORBOARD_VARIABLE: there}]
