"""Background jobs as processes: priority, caps, ends, orphans, and what they do to a foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from meshwright.executor.apply import apply
from meshwright.executor.background.job import background_job
from meshwright.executor.background.protocol import VARIABLE, Kind, Settings, unpacked
from meshwright.executor.launch.background import (
    GPU_MEMORY,
    Background,
    idle_share,
    limit_gpu_memory,
    outlook,
)
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import UnitPlan
from meshwright.planner.schema.record import save
from meshwright.profiler.overhead import UNPREDICTED
from plans import plan as plan_by_hand
from plans import scheduled

from tests.processes import alive, wait_until

pytestmark = [
    pytest.mark.alone,  # at the lowest priority it hardly runs beside other tests
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks the Linux kernel"),
]
MIB = 2**20


def python(folder: Path, code: str) -> tuple[str, ...]:
    """The command that runs ``code`` from a file in ``folder``, by which ``alive`` knows it."""
    script = folder / "beside.py"
    script.write_text(code)
    return (sys.executable, str(script))


def settings(folder: Path, code: str, **options) -> Settings:
    told = {"limit": 1.1, "grace_s": 5.0, **options}
    return Settings(python(folder, code), str(folder / "log"), **told)


def status(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(field))


FOREVER = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)\n"


def test_it_runs_at_the_lowest_priority_and_dies_first(tmp_path):
    with background_job(settings(tmp_path, FOREVER)) as job:
        pid = job.last.pid
        idle = os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert idle or os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
        assert os.getsid(pid) == pid
        assert wait_until(lambda: "begun" in (tmp_path / "log").read_text())
        assert not job.state().ended
    assert not alive(tmp_path)


def test_a_held_one_stands_still_and_a_released_one_goes_on(tmp_path):
    with background_job(settings(tmp_path, FOREVER)) as job:
        pid = job.last.pid
        job.hold()
        assert wait_until(lambda: status(pid, "State").startswith("T"), 5)
        job.release()
        assert wait_until(lambda: not status(pid, "State").startswith("T"), 5)


def test_told_to_stop_it_may_write_a_checkpoint_even_while_held(tmp_path):
    code = (
        "import signal, sys, time, pathlib\n"
        f"kept = pathlib.Path({str(tmp_path / 'checkpoint')!r})\n"
        "def end(*_):\n    time.sleep(0.3)\n    kept.write_text('whole')\n    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, end)\n" + FOREVER
    )
    with background_job(settings(tmp_path, code)) as job:
        assert wait_until(lambda: "begun" in (tmp_path / "log").read_text())
        job.hold()
        ended = job.stop()
    assert ended.ended == "exit code 7"
    assert (tmp_path / "checkpoint").read_text() == "whole"


def test_one_that_does_not_listen_is_killed_with_all_it_has_started(tmp_path):
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if len(sys.argv) == 1:\n"
        "    subprocess.Popen([sys.executable, __file__, 'child'], start_new_session=True)\n"
        + FOREVER
    )
    with background_job(settings(tmp_path, code, grace_s=0.3)) as job:
        assert wait_until(lambda: (tmp_path / "log").read_text().count("begun") == 2)
        assert len(alive(tmp_path)) == 2
        assert job.stop().ended == "SIGKILL"
        assert not alive(tmp_path)


def test_its_memory_is_capped(tmp_path):
    code = f"held = []\nwhile True: held.append(bytearray({16 * MIB}))\n"
    with background_job(settings(tmp_path, code, memory_bytes=256 * MIB)) as job:
        assert job.wait().ended == "exit code 1"
    assert "MemoryError" in (tmp_path / "log").read_text()


def test_its_end_is_told_with_what_it_used(tmp_path):
    code = "import time\nend = time.time() + 0.5\nwhile time.time() < end: pass\n"
    with background_job(settings(tmp_path, code)) as job:
        ended = job.wait()
    assert ended.ended == "exit code 0"
    assert ended.cpu_s > 0
    assert 0 < ended.open_s <= ended.seconds


def test_a_killed_launcher_takes_it_along(tmp_path):
    code = (
        "import time\n"
        "from meshwright.executor.background.job import background_job\n"
        "from meshwright.executor.background.protocol import Settings\n"
        f"with background_job(Settings({python(tmp_path, FOREVER)!r}, {str(tmp_path / 'log')!r}, "
        "1.1, grace_s=0.5)):\n"
        "    print('begun', flush=True)\n    time.sleep(90)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"begun\n"
        assert wait_until(lambda: alive(tmp_path))
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(timeout=20)
        assert wait_until(lambda: not alive(tmp_path), 10)


def test_a_killed_pacer_takes_it_along(tmp_path):
    with background_job(settings(tmp_path, FOREVER)) as job:
        os.kill(int(status(job.last.pid, "PPid")), signal.SIGKILL)
        assert wait_until(lambda: not alive(tmp_path), 10)


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"run": ""}, "empty"),
        ({"run": "'unclosed"}, "quote it"),
        ({"run": "no-such-program-here x"}, "no program"),
        ({"run": "true", "limit": 1.0}, "more than 1"),
        ({"run": "true", "log": "/no/such/folder/log"}, "--background-log"),
        ({"run": "true", "at_end": "vanish"}, "finish or stop"),
        ({"run": "true", "grace_s": -1.0}, "grace"),
        ({"run": "true", "gpu_memory_bytes": 5}, "1MiB or more"),
    ],
)
def test_a_users_mistake_is_one_sentence(wrong, remedy):
    def begin():
        with background_job(Background(**wrong).settings()):
            pass

    with pytest.raises(InputError, match=remedy) as found:
        begin()
    assert "\n" not in str(found.value)


def test_a_plan_for_several_ranks_is_refused(tmp_path):
    save(plan_by_hand(2), tmp_path / "plan.json")
    with pytest.raises(InputError, match="2 ranks"):
        Background(str(tmp_path / "plan.json")).settings()


def test_a_limit_of_gpu_memory_is_every_gpus(tmp_path, monkeypatch):
    save(plan_by_hand(1), tmp_path / "small.json")
    limited = Background(str(tmp_path / "small.json"), gpu_memory_bytes=3 << 30).settings()
    assert limited.command[-2:] == (str(tmp_path / "small.json"), str(3 << 30))
    assert GPU_MEMORY not in dict(limited.environment)  # there is none here
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    command = Background("true", gpu_memory_bytes=3 << 30).settings()
    assert dict(command.environment)[GPU_MEMORY] == "0=3072M,1=3072M"
    assert command.command == ("true",)
    assert GPU_MEMORY not in dict(Background("true").settings().environment)


def test_a_plans_training_keeps_to_it_by_itself(monkeypatch):
    told = []
    properties = SimpleNamespace(total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: told.append(args)
    )
    device = torch.device("cuda", 0)
    limit_gpu_memory(device, 4 << 30)
    limit_gpu_memory(device, 40 << 30)
    limit_gpu_memory(torch.device("cpu"), 4 << 30)
    assert told == [(0.25, device), (1.0, device)]


def test_what_a_plan_leaves_idle_is_told():
    narrow = UnitPlan(
        name="fc", kind="linear", modules=("fc",), layout=Layout(groups=1), forward_s=0.1,
        backward_s=0.2,
    )  # fmt: skip
    wide = msgspec.structs.replace(narrow, name="conv", modules=("conv",), layout=Layout(groups=2))
    made = msgspec.structs.replace(
        plan_by_hand(2, [wide, narrow], placement=(1, 0)),
        prediction=msgspec.structs.replace(UNPREDICTED, step_s=0.6),
    )
    assert idle_share(made, 0) == pytest.approx(0.5)  # at position 1, which fc leaves out
    assert idle_share(made, 1) == 0
    assert "0% to 50%" in outlook(made, range(2))
    assert "no rank here idle" in outlook(made, [1])


def told_by(rank: int, folder: str) -> list[int]:
    """The numbers of the steps that a rank tells of, which are applied lazily."""
    path = Path(folder) / f"pipe{rank}"
    os.mkfifo(path)
    read = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.environ[VARIABLE] = str(path)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with scheduled("priority"):
            apply(model, optimizer, plan_by_hand(2, statistics="local"))
    finally:
        del os.environ[VARIABLE]
    for _ in range(5):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.state_dict()
    records = list(unpacked(os.read(read, 2**16)))
    os.close(read)
    return [r.number for r in records if r.kind == Kind.STEPPED]


def test_lazy_steps_are_told_once(ranks, tmp_path):
    assert ranks(2)(told_by, str(tmp_path)) == [[1, 2, 3, 4]] * 2


# -- beside a launch -----------------------------------------------------------------------------

TRAINING = """
import os, signal, sys, time
from pathlib import Path
import torch
import meshwright as mw

folder = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
model, optimizer, _ = mw.auto_parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
torch.manual_seed(1 + int(os.environ["RANK"]))
for number in range(int(sys.argv[4])):
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    victim = folder / "pid"
    if sys.argv[2] == "kill" and number == 30 and os.environ["RANK"] == "0":
        while not victim.exists():
            time.sleep(0.01)
        os.kill(int(victim.read_text()), signal.SIGKILL)
    if sys.argv[2] == "wait" and number == 30:
        (folder / f"begun{os.environ['RANK']}").touch()
        time.sleep(90)
if os.environ["RANK"] == "0":
    torch.save(mw.full_state_dict(model), folder / sys.argv[3])
else:
    mw.full_state_dict(model)
"""
BESIDE = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
while True: sum(range(1000))
"""


def launch(folder: Path, *options: str) -> list[str]:
    """A launch of two ranks; ``options`` are those before and after the script."""
    save(plan_by_hand(2, statistics="local"), folder / "plan.json")
    (folder / "train.py").write_text(TRAINING)
    return [
        *(sys.executable, "-m", "meshwright", "launch", str(folder / "plan.json"), *options),
        *("--timeout", "100", str(folder / "train.py"), str(folder)),
    ]


def with_background(
    folder: Path, code: str = BESIDE, grace: str = "0.5", at_end: str = "stop"
) -> list[str]:
    command = (*python(folder, code), str(folder / "pid"))
    return [
        *("--background", " ".join(command), "--background-log", str(folder / "log")),
        *("--background-grace", grace, "--background-at-end", at_end),
    ]


def ran(command: list[str], code: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
def test_killing_it_leaves_the_foregrounds_trajectory_as_it_was(tmp_path):
    ran([*launch(tmp_path), "none", "alone.pt", "60"])
    said = ran([*launch(tmp_path, *with_background(tmp_path)), "kill", "beside.pt", "60"])
    assert "ended with SIGKILL" in said
    alone, beside_it = (torch.load(tmp_path / f"{n}.pt") for n in ("alone", "beside"))
    assert all(torch.equal(alone[name], beside_it[name]) for name in alone)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_killed_foreground_leaves_no_orphan(tmp_path, victim):
    command = [*launch(tmp_path, *with_background(tmp_path)), "wait", "x.pt", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        assert wait_until((tmp_path / "begun1").exists, 60)
        assert wait_until((tmp_path / "pid").exists)
        if victim == "launcher":
            launcher.kill()
        else:
            ranks = [p for p in alive(tmp_path) if b"worker" in _line(p)]
            os.kill(ranks[0], signal.SIGKILL)
        launcher.communicate(timeout=60)
    assert launcher.returncode == (-signal.SIGKILL if victim == "launcher" else 1)
    assert wait_until(lambda: not alive(tmp_path), 10)


CHECKPOINTED = (
    """
import pathlib, signal, sys, time

def end(*_):
    time.sleep(0.3)
    pathlib.Path(sys.argv[1]).with_name("checkpoint").write_text("whole")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
"""
    + BESIDE
)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in training", "after it"])
def test_ctrl_c_ends_both_and_the_background_writes_its_checkpoint(tmp_path, when):
    """As a terminal sends it, to all of the launcher's process group."""
    training = when == "in training"
    beside_it = with_background(tmp_path, CHECKPOINTED, "20", "stop" if training else "finish")
    command = [*launch(tmp_path, *beside_it), "wait" if training else "none", "x.pt"]
    command.append("60" if training else "5")
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell lets what it starts in the background ignore Ctrl-C, this test among it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as launcher:
        assert launcher.stderr is not None
        if training:
            assert wait_until((tmp_path / "begun1").exists, 60)
        else:
            assert any("the background job goes on" in line for line in launcher.stderr)
        assert wait_until((tmp_path / "pid").exists)
        os.killpg(launcher.pid, signal.SIGINT)
        _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, said
    assert (tmp_path / "checkpoint").read_text() == "whole"
    assert "meshwright: stopped" in said
    assert "has ended with exit code 0; its output is in" in said
    assert "Traceback" not in said
    assert not alive(tmp_path)


def _line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_second_plan_goes_on_from_its_checkpoint(tmp_path):
    """As it is started, but at ordinary priority: beside busy processors it might never begin."""
    said, steps = "", []
    for _ in range(2):
        code, told = trained_for_a_step(tmp_path, None)
        assert code == 0
        said += told
        steps.append(torch.load(tmp_path / "small.pt", weights_only=True)["step"])
    assert 0 < steps[0] < steps[1]
    assert f"goes on from step {steps[0]} " in said


def trained_for_a_step(folder: Path, precision: str | None) -> tuple[int, str]:
    """The exit code and the output of a second plan's training, told to end at its first step."""
    small = msgspec.structs.replace(plan_by_hand(1), target="mlp", precision=precision)
    save(small, folder / "small.json")
    command, said = Background(str(folder / "small.json")).settings().command, ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as training:
        assert training.stdout is not None
        for line in training.stdout:
            said += line
            if line.startswith("step ") and training.poll() is None:
                training.terminate()
    return training.returncode, said


def test_a_second_plan_trains_in_its_precision(tmp_path):
    assert trained_for_a_step(tmp_path, "bf16")[0] == 0
    state = torch.load(tmp_path / "small.pt", weights_only=True)
    assert {value.dtype for value in state["model"].values()} == {torch.bfloat16}
    # The checkpoint of another precision is neither taken nor written over.
    code, said = trained_for_a_step(tmp_path, "fp16-mixed")
    assert code == InputError.exit_code
    assert "small.pt was trained in bf16 and the plan is for fp16-mixed: move the file" in said
    assert "Traceback" not in said
    (tmp_path / "small.pt").unlink()
    for _ in range(2):
        assert trained_for_a_step(tmp_path, "fp16-mixed")[0] == 0
    state = torch.load(tmp_path / "small.pt", weights_only=True)
    assert state["scaler"]["_growth_tracker"] > 0
