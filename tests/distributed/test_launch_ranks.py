"""Starting ranks: what they are told, how failures reach the user, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.record import save
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.estimate import load_table

from tests.processes import alive, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    """A plan for two ranks; the scripts of these tests do not apply it."""
    device = Device(name="a100", memory_bytes=40 * 2**30)
    two = Cluster(
        name="two",
        nodes=tuple(Node(name=f"host{i}", devices=(device,)) for i in range(2)),
        levels=(Level(name="inter", latency_s=1e-4, bytes_per_s=1e9),),
    )
    path = tmp_path / "plan.json"
    save(make_plan(load_table("vgg16"), two, Goal(batch=32)), path)
    return path


def command(plan_file: Path, code: str, *options: str) -> list[str]:
    script = plan_file.parent / "script.py"
    script.write_text(code)
    return [
        *(sys.executable, "-m", "meshwright", "launch", str(plan_file)),
        *(*options, str(script), "--lr", "0.1"),
    ]


def launch(plan_file: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(plan_file, code, *options), capture_output=True, text=True, timeout=100, check=False
    )


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    return next(line for line in done.stderr.splitlines() if line.startswith("meshwright: "))


def ranks_alive(plan_file: Path) -> list[int]:
    """Processes whose command line names this test's script."""
    return alive(plan_file.parent / "script.py")


def test_ranks_are_told_who_they_are(plan_file):
    done = launch(
        plan_file,
        "import os, sys\n"
        "names = ['RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR']\n"
        "print(*(os.environ[n] for n in names), sys.argv[1:], 'OMP_NUM_THREADS' in os.environ)\n"
        "assert os.path.exists(os.environ['MESHWRIGHT_PLAN'])\n",
    )
    assert done.returncode == 0, done.stderr
    told = sorted(line for line in done.stdout.splitlines() if "127.0.0.1" in line)
    assert told == [f"{r} {r} 2 127.0.0.1 ['--lr', '0.1'] True" for r in range(2)]
    assert "nothing was measured" in done.stderr


def test_a_modules_arguments_are_its_own_and_with_json_what_it_prints_is_not_on_stdout(plan_file):
    (plan_file.parent / "mine.py").write_text("import sys; print('got', sys.argv[1:])\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "meshwright", "launch", "--json", str(plan_file)),
            *("-m", "mine", "--timeout", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=plan_file.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("got ['--timeout', '--json']") == 2


def test_a_failing_ranks_error_reaches_the_user(plan_file):
    done = launch(
        plan_file,
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('the loss is not finite')\n"
        "time.sleep(90)\n",
    )
    assert done.returncode == 1
    assert sentence(done) == "meshwright: rank 1 failed with ValueError: the loss is not finite"
    assert "Traceback" in done.stderr
    assert "runpy" not in done.stderr  # the program's own lines only
    assert "worker.py" not in done.stderr
    assert not ranks_alive(plan_file)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("InputError", 2),
        pytest.param("InfeasibleError", 3, marks=pytest.mark.slow),
        pytest.param("RunError", 1, marks=pytest.mark.slow),
    ],
)
def test_errors_of_ours_keep_their_exit_code(plan_file, kind, code):
    done = launch(
        plan_file, f"from meshwright import {kind}\nraise {kind}('a batch of 3 cannot be')\n"
    )
    assert done.returncode == code
    assert sentence(done) == "meshwright: a batch of 3 cannot be"
    assert "Traceback" not in done.stderr


def test_a_killed_rank_is_named(plan_file):
    done = launch(
        plan_file,
        "import os, signal, time\n"
        "if os.environ['RANK'] == '0':\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(90)\n",
    )
    assert done.returncode == 1
    assert "rank 0 ended with SIGKILL" in sentence(done)
    assert not ranks_alive(plan_file)


@pytest.mark.slow
def test_the_time_limit_ends_every_rank(plan_file):
    start = time.monotonic()
    done = launch(
        plan_file,
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(90)\n",
        *("--timeout", "3"),
    )
    assert done.returncode == 1
    assert "limit of 3 s" in sentence(done)
    assert time.monotonic() - start < 40
    assert not ranks_alive(plan_file)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_every_rank(plan_file, number, code):
    begun = [plan_file.parent / f"begun{rank}" for rank in range(2)]
    start = str(plan_file.parent / "begun")
    with subprocess.Popen(
        command(
            plan_file,
            f"import os, time\nopen({start!r} + os.environ['RANK'], 'w')\ntime.sleep(90)\n",
        ),
        stderr=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert wait_until(lambda: all(path.exists() for path in begun), 60.0)
        launcher.send_signal(number)
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert "Traceback" not in err
    assert not ranks_alive(plan_file)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_a_launcher_that_is_killed_takes_its_ranks_along(plan_file):
    begun = plan_file.parent / "begun"
    with subprocess.Popen(
        command(plan_file, f"import time\nopen({str(begun)!r}, 'w')\ntime.sleep(90)\n")
    ) as launcher:
        assert wait_until(begun.exists, 60.0)
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(timeout=20)
        assert wait_until(lambda: not ranks_alive(plan_file))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel")
def test_a_rank_that_starts_after_its_launcher_is_gone_does_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('begun')")
    worker = [sys.executable, "-m", "meshwright.executor.launch.worker", str(tmp_path), str(script)]
    for launcher, code, printed in ((os.getpid(), 0, "begun\n"), (os.getppid(), 1, "")):
        told = {**os.environ, "MESHWRIGHT_LAUNCHER": str(launcher)}
        done = subprocess.run(worker, env=told, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, printed), done.stderr


def test_the_callers_environment_and_signals_are_put_back(tmp_path):
    from meshwright.executor.launch.processes import Ranks, run_ranks

    script = tmp_path / "script.py"
    script.write_text("import os; assert os.environ['MINE'] == 'yes'\n")
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    run_ranks([str(script)], Ranks(nproc=1, environment={"MINE": "yes"}), tmp_path / "run")
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
