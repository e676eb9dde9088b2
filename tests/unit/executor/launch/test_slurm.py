"""The script for Slurm, run by bash with programs in the place of ``scontrol`` and ``srun``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from meshwright import InputError, RunError
from meshwright.executor.launch.hosts.command import HostCommand, lines_to_paste
from meshwright.executor.launch.hosts.settings import Hosts
from meshwright.executor.launch.hosts.slurm import SlurmJob, submit

# What no shell may act on.
ODD = "a b\"c'd;touch x;$(touch x)`touch x`&|\n$HOME\\*"
RECORDER = """#!{python}
import json, os, sys
print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))
"""
SCONTROL = '#!/bin/sh\ntest "$*" = "show hostnames n[7-8]" && printf "n7\\nn8\\n"\n'
# As Slurm does: the command once on each node, which knows its number.
SRUN = """#!{python}
import os, subprocess, sys
options = [a for a in sys.argv[1:] if a.startswith("--")]
command = sys.argv[1 + len(options):]
assert "--ntasks-per-node=1" in options and "--cpus-per-task=16" in options, options
for number in range(int(dict(o[2:].split("=") for o in options if "=" in o)["ntasks"])):
    subprocess.run(command, env={{**os.environ, "SLURM_NODEID": str(number)}}, check=True)
"""


def program(path: Path, text: str) -> str:
    path.write_text(text.format(python=sys.executable) if "{python}" in text else text)
    path.chmod(0o755)
    return str(path)


def odd_command(folder: Path) -> HostCommand:
    """A launch whose every word is odd, of a Python that writes down what it is given."""
    python = program(folder / "py 'thon", RECORDER)
    return HostCommand((python, ODD), f"/{ODD}/plan", (f"--report={ODD}",), ("s.py", ODD), (2, 1))


def expected(command: HostCommand, number: int, place: str) -> list[str]:
    return [
        *(ODD, "-m", "meshwright", "launch", command.plan, "--nnodes=2", "--nproc=2,1"),
        *(f"--report={ODD}", f"--node-rank={number}", f"--rendezvous={place}", "s.py", ODD),
    ]


def run(text: str, folder: Path, shell: str = "bash") -> list[list]:
    told = {
        "PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[7-8]", "SLURM_JOB_ID": "10123",
        "SLURM_CPUS_ON_NODE": "16",
    }  # fmt: skip
    done = subprocess.run(
        [shell, "-c", text], capture_output=True, text=True, env=told, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program(tmp_path / "scontrol", SCONTROL)
    program(tmp_path / "srun", SRUN)
    return tmp_path


def test_every_node_runs_the_launch_with_its_number(folder):
    where = folder / "w o'r;k$(touch x)"
    where.mkdir()
    command = odd_command(folder)
    job = SlurmJob(command, str(where), environment={"ODD": ODD})
    found = run(job.script(), folder)
    assert len(found) == 2
    for number, (words, cwd, environment) in enumerate(found):
        assert words == expected(command, number, "n7:20123")
        assert cwd == str(where)
        assert environment["ODD"] == ODD
    assert not list(folder.rglob("x"))


def test_the_lines_to_paste_run_the_same(folder):
    where = folder / "w o'r;k"
    where.mkdir()
    command = odd_command(folder)
    hosts = Hosts(("n1", "n2"), folder=str(where), environment={"ODD": ODD}, rendezvous=":7")
    found = run("\n".join(lines_to_paste(command, hosts)), folder, shell="sh")
    assert [words for words, _, _ in found] == [expected(command, n, "n1:7") for n in range(2)]
    assert {(cwd, told["ODD"]) for _, cwd, told in found} == {(str(where), ODD)}
    assert not list(folder.rglob("x"))


def options(job: SlurmJob) -> list[str]:
    return [line[8:] for line in job.script().splitlines() if line.startswith("#SBATCH ")]


def plain(**more) -> SlurmJob:
    return SlurmJob(HostCommand(("python",), "plan", (), (), (4, 4)), "/", **more)


def test_what_is_asked_of_slurm():
    more = ("partition=gpu", "--exclusive", "cpus-per-task=32", "constraint=[a|b]&c")
    assert options(plain(gpus=4, options=more)) == [
        "--job-name=meshwright", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=32",
        "--gpus-per-node=4", "--partition=gpu", "--exclusive", "--constraint=[a|b]&c",
    ]  # fmt: skip
    # Where all hosts have the same number, one is told.
    assert "--nproc=4 " in plain().script()


@pytest.mark.parametrize(
    "option", ["a b", "x='y'", "x=#y", "x=1\n#SBATCH --y", "-p gpu", "X=1", "x="]
)
def test_an_option_that_the_script_cannot_hold(option):
    with pytest.raises(InputError, match=r"--slurm-option .* cannot stand in a script"):
        plain(options=(option,)).script()


def test_what_the_launch_decides_itself():
    for option in ("nodes=3", "--ntasks-per-node=2"):
        with pytest.raises(InputError, match=f"{option}' is decided by the launch"):
            plain(options=(option,)).script()
    with pytest.raises(InputError, match="is no name of a job"):
        plain(name="a\n#SBATCH --x")
    with pytest.raises(InputError, match="is no name of an environment variable"):
        plain(environment={"A;B": "1"})


SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing(folder):
    script = folder / "job.sbatch"
    script.write_text(SlurmJob(odd_command(folder), ODD, environment={"ODD": ODD}).script())
    # What node 0's shell is given is quoted as a whole, and it is that shell which expands it.
    checked = [str(SHELLCHECK), "--shell=bash", "--exclude=SC2016", str(script)]
    done = subprocess.run(checked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_script_is_submitted(folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(RunError, match=r"no sbatch on this machine: run 'sbatch .*job'"):
        submit(folder / "job")
    program(folder / "sbatch", '#!/bin/sh\necho "Submitted batch job 7 of $1"\n')
    assert submit(folder / "job") == f"Submitted batch job 7 of {folder / 'job'}"
    program(folder / "sbatch", "#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    with pytest.raises(RunError, match=r"sbatch refused .*job: invalid partition"):
        submit(folder / "job")
