"""``launch`` for hosts elsewhere: what goes together, what is written, and what is only shown."""

from __future__ import annotations

import json
import os
import shlex
import sys

import msgspec
import pytest
from meshwright import Hosts, InputError, launch
from meshwright.planner.schema import cache
from meshwright.planner.schema.cluster import Device, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.record import save
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.estimate import load_table

from tests.ssh import behave, behave_as_host, cluster_of_hosts, plan_for_hosts, put_ssh
from tests.strategies import cluster

from .conftest import short_vgg

PLAN = plan_for_hosts(8)


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    save(PLAN, path)
    return path


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--hosts a --hostfile f", "--hosts and --hostfile start hosts in different ways"),
        ("--hosts a --slurm f", "--hosts and --slurm start hosts in different ways"),
        ("--slurm f --kubernetes g", "--slurm and --kubernetes start hosts"),
        ("--hosts a,b --nnodes 2", "leave out --nnodes and --node-rank"),
        ("--slurm f --rendezvous a:1", "leave out --node-rank and --rendezvous"),
        ("--kubernetes f", "add --image NAME"),
        ("--dry-run", "--dry-run says nothing without --hosts or --hostfile or --slurm or"),
        ("--ssh-option X=1 --slurm f", "--ssh-option says nothing without --hosts or --hostfile"),
        ("--submit --kubernetes f --image i", "--submit says nothing without --slurm"),
        ("--gpus 2 --hosts a", "--gpus says nothing without --slurm or --kubernetes"),
        ("--env X=1", "--env says nothing without"),
        (
            "--hosts a,b,c --dry-run",
            "8 ranks do not divide over 3 hosts: use as many hosts as divi",
        ),
        (
            "--hosts a,b --nproc 1,2,3",
            "--nproc (ranks_here) has numbers for 3 hosts and there are 2",
        ),
        ("--hosts a,b --nproc 4,3 --dry-run", "the plan is for 8 ranks and 7 would be started"),
        ("--hosts a,b --nproc 4,3", "the plan is for 8 ranks and 7 would be started"),
        ("--hosts a;b", "'a;b' is no host"),
        ("--hosts a,b --rendezvous 29500", "rendezvous '29500' is no address"),
        ("--hostfile gone", "cannot read the hostfile gone: No such file"),
        ("--slurm gone/job --nnodes 2", "cannot write gone/job: there is no folder"),
        ("--slurm job --nnodes 2 --slurm-option a;b", "--slurm-option 'a;b' cannot stand"),
        ("--kubernetes j --nnodes 2 --image i --job-name A", "'A' is no name for Kubernetes"),
        ("--max-restarts 1", "none are kept: add --checkpoint FOLDER"),
        ("--min-nodes 1 --checkpoint c", "--min-nodes says nothing without --hosts or --hostfile"),
        ("--hosts a,b --min-nodes 1", "none are kept: add --checkpoint FOLDER"),
        ("--hosts a,b --min-nodes 3 --checkpoint c", "--min-nodes 3 is more than the 2 hosts of"),
        ("--hosts a,b --profile p", "are for planning again with fewer hosts: add --min-nodes"),
        (
            "--nnodes 2 --rendezvous a:1 --max-restarts 1 --checkpoint c",
            "with --nnodes there is one on each host: use --hosts",
        ),
        ("--slurm f --max-restarts 1 --checkpoint c", "with --slurm-option requeue"),
        ("--kubernetes f --image i --max-restarts 1", "none are kept: add --checkpoint FOLDER"),
        ("--max-restarts -1 --checkpoint c", "--max-restarts -1 cannot be: give at least 0"),
        (
            "--kubernetes f --image i --max-restarts 1 --checkpoint c --no-resume",
            "with --no-resume pods that are started again would refuse the checkpoints",
        ),
    ],
)
def test_what_is_refused(meshwright, plan_file, given, words):
    done = meshwright("launch", plan_file, *given.split())
    assert done.code == 2
    assert words in done.sentence


def test_hosts_say_themselves_how_many_they_are():
    for more in ({"nodes": 2}, {"node_rank": 1}, {"rendezvous": "a:1"}):
        with pytest.raises(InputError, match="leave out nodes, node_rank and rendezvous"):
            launch(PLAN, hosts=Hosts(("a", "b")), **more)


def test_what_would_run_is_only_shown(meshwright, plan_file, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no ssh
    monkeypatch.setenv("PYTHONPATH", "/my modules:/b")
    (tmp_path / "hosts").write_text("root@a slots=5\nb slots=3\n")
    given = (
        "--hostfile",
        "hosts",
        "--trace",
        "t.json",
        "--env",
        "X=1 2",
        "--timeout",
        9,
        "--dry-run",
    )
    done = meshwright("launch", plan_file, *given, "t.py", "--lr", "a b")
    assert done.code == 0
    lines = done.out.splitlines()
    assert (lines[0], lines[2]) == ("# on root@a", "# on b")
    words = shlex.split(lines[3])
    assert words[:3] == ["cd", str(tmp_path), "&&"]
    assert "X=1 2" in words
    assert "PYTHONPATH=/my modules:/b" in words
    assert words[words.index(sys.executable) :] == [
        *(sys.executable, "-m", "meshwright", "launch", str(plan_file), "--nnodes=2"),
        *("--nproc=5,3", "--timeout=9.0", "--trace=t.json", "--node-rank=1"),
        "--rendezvous=a:29500",
        *("t.py", "--lr", "a b"),
    ]


def test_a_node_of_the_plan_that_is_spread_over_hosts_is_told(meshwright, tmp_path):
    profile, links = tmp_path / "profile.json", tmp_path / "links.json"
    save(short_vgg(), profile)
    save(cluster(2, devices=2), links)
    asked = "--batch", 64, "--solver", "heuristic", "-o", "plan.json"
    assert meshwright("plan", profile, "-c", links, *asked).code == 0
    for hosts, told in (("a,b", False), ("a,b,c,d", True)):
        done = meshwright("launch", "plan.json", "--hosts", hosts, "--dry-run")
        assert done.code == 0, done.err
        said = "the plan was made for n0 with 2 ranks, and these start on 2 hosts"
        assert (said in " ".join(done.err.split())) == told


def test_a_job_of_slurm_is_written_and_submitted(meshwright, plan_file, tmp_path, monkeypatch):
    given = ("launch", plan_file, "--nnodes", 2, "--slurm", "job", "--slurm-option", "partition=p")
    shown = meshwright(*given, "--dry-run", "t.py")
    assert shown.code == 0
    assert not (tmp_path / "job").exists()
    written = meshwright(*given, "t.py")
    assert written.out == "written to job; start it with: sbatch job\n"
    assert (tmp_path / "job").read_text() == shown.out
    assert "#SBATCH --partition=p" in shown.out
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    done = meshwright(*given, "--submit", "t.py")
    assert (done.code, done.out, done.err) == (0, "", "note: Submitted batch job 7\n")


def test_a_manifest_is_written(meshwright, plan_file, tmp_path):
    given = ("--nnodes", 4, "--kubernetes", "j.json", "--image", "i:1", "--gpus", 2)
    kept = ("--checkpoint", "/kept", "--resume", "--max-restarts", 2)
    done = meshwright("launch", plan_file, *given, *kept, "--folder", "/w", "t.py")
    assert done.err == "note: pods keep checkpoints in /kept: mount a volume there that all share\n"
    assert done.out == "written to j.json; start it with: kubectl create -f j.json\n"
    _, job_set = json.loads((tmp_path / "j.json").read_text())["items"]
    assert job_set["spec"]["failurePolicy"] == {"maxRestarts": 2}
    pod = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # The path of this machine's Python says nothing of an image.
    assert container["command"][:4] == ["python", "-m", "meshwright", "launch"]
    assert {"--nproc=2", "--checkpoint=/kept", "--resume"} <= set(container["command"])
    assert (container["workingDir"], container["image"]) == ("/w", "i:1")


def test_what_a_job_needs_besides_is_told(meshwright, tmp_path):
    device = Device(name="cpu (made up)", memory_bytes=2**40)
    there = msgspec.structs.replace(
        cluster_of_hosts(2),
        nodes=tuple(Node(name=f"host{i}", devices=(device,)) for i in range(2)),
    )
    save(make_plan(load_table("vgg16"), there, Goal(batch=32)), tmp_path / "cpus.json")
    cache.put(there)
    given = ("launch", "cpus.json", "--nnodes", 2, "--gpus", 1)
    done = meshwright(*given, "--slurm", "job")
    assert done.err.startswith(
        "note: the plan was made for cpu (made up), and --gpus asks for GPUs"
    )
    done = meshwright(
        *given, "--kubernetes", "j.json", "--image", "i", "--trace", "t.json", "--tensorboard", "s",
        "--background", "sleep 9",
    )  # fmt: skip
    assert done.err.splitlines()[1:] == [
        "note: each pod runs sleep 9 beside its ranks: the image has to have it",
        "note: pods write t.json, s, background.log, which end with them: mount a volume there",
    ]


def test_a_run_on_hosts_is_reported_as_one_here(meshwright, plan_file, tmp_path, monkeypatch):
    folder = put_ssh(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    figures = "{'step_s': 1.0}"
    report = (
        "tell('report', target='vgg16', world_size=8, steps=3, "
        f"predicted={figures}, measured={figures}, data_parallel={figures})\n"
    )
    behave_as_host(folder, "a", f"begin()\nprint('chatter')\n{report}")
    behave_as_host(folder, "b", "begin()\n")
    done = meshwright("launch", plan_file, "--hosts", "a,b", "--json", "--report", "r.json")
    assert done.code == 0
    assert json.loads(done.out) == json.loads((tmp_path / "r.json").read_text())
    assert done.err == "a: chatter\n"
    behave(folder, "b", "print('Host key verification failed.', file=sys.stderr)\nsys.exit(255)")
    done = meshwright("launch", plan_file, "--hosts", "a,b")
    assert done.code == 2
    assert done.sentence.startswith("meshwright: host b: ssh does not know its key")
