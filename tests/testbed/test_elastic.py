"""Runs over real ssh that lose ranks, launchers and hosts, and get hosts back; on four hosts beside
the one of the launcher."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.checkpoint.folder import steps_in
from meshwright.models import zoo
from meshwright.models.units.discover import discover
from meshwright.planner.schema.goal import make_goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import RunReport

from benchmarks.testbed import Bed, Host
from tests.distributed.launched import Training, is_running, small_hybrid_plan
from tests.distributed.plans import by_columns_and_rows, plan_for
from tests.processes import wait_until
from tests.sampling import sampled
from tests.testbed.ssh_hosts import SLEEP, SshHosts, lacking, pids

pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.timeout(400),
]
LIMIT_S = 150.0
NAMES = "host1", "host2", "host3", "host4"
# With a short time between two looks for hosts that are back.
PROGRAM = (
    "from meshwright.executor.launch.hosts import reach\nreach.LOOK_S = 2.0\n"
    "from meshwright.cli.app import main\nmain()\n"
)
SCRIPT = """
import os, time
from pathlib import Path
import meshwright as mw, torch
import torch.distributed as dist
from meshwright.models import zoo

here = Path(__file__).parent
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
workload = zoo.build("mlp")
# With so large an eps, or steps of gradients that are but rounding are as long as others.
optimizer = torch.optim.Adam(workload.model.parameters(), eps=1e-3)
model, optimizer, plan = mw.auto_parallelize(workload.model, optimizer)
assert plan.world_size == world
each = 24 // world
with mw.checkpoint(None, model, optimizer) as ckpt:
    step = ckpt.resume()
    while not (here / "end").exists() or step < int((here / "end").read_text() or 10**9):
        torch.manual_seed(step)
        batch = workload.make_batch(24).slice(rank * each, (rank + 1) * each)
        loss = workload.loss(model(*batch.args), batch.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        if rank == 0:
            with (here / "losses").open("a") as losses:
                print(step, world, float(whole) / world, file=losses, flush=True)
        step += 1
        ckpt.step()
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[SshHosts]:
    with Bed(5, 1000.0) as bed:
        yield SshHosts(bed, tmp_path_factory.mktemp("elastic"))


def under(names: Sequence[str]) -> tuple[str, str]:
    return "--hosts", ",".join(names)


# -- four hosts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "degree", "kinds"),
    sampled([("gpt-mini", 2, ("attention", "mlp")), ("vgg11-32", 4, ("linear",))], 1),
)
def test_a_hybrid_plan_on_four_hosts(hosts, target, degree, kinds):
    workload = zoo.build(target)
    found = discover(workload.model, workload.make_batch(4))
    made = plan_for(found, 4, by_columns_and_rows(workload.model, degree, kinds))
    layouts = {str(unit.layout) for unit in made.units}
    assert len(layouts) > 1, layouts
    save(msgspec.structs.replace(made, target=target), hosts.folder / f"{target}.json")
    code, out, err = hosts.ended(
        hosts.start(
            "--steps", "3", "--report", "report.json", plan=f"{target}.json", hosts=under(NAMES)
        )
    )
    assert code == 0, err
    report = load(RunReport, hosts.folder / "report.json")
    assert (report.target, report.world_size, report.steps) == (target, 4, 3)
    assert report.measured.blocking_s > 0
    assert "step time" in out


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
     pytest.param(signal.SIGKILL, -9, marks=pytest.mark.long)],
)  # fmt: skip
def test_four_hosts_end_with_their_launcher(hosts, number, code):
    (hosts.folder / "sleep.py").write_text(SLEEP)
    save(small_hybrid_plan(4), hosts.folder / "four.json")
    launcher = hosts.start(
        "--checkpoint", "unused", "--max-restarts", "3", "sleep.py", plan="four.json",
        hosts=under(NAMES),
    )  # fmt: skip
    hosts.begun(4)
    launcher.send_signal(number)
    assert launcher.wait(60) == code
    hosts.check_idle(40 if number == signal.SIGKILL else 5)
    _, err = launcher.communicate()
    assert "Traceback" not in err
    assert "started again" not in err


# -- hosts that go and come back -------------------------------------------------------------------


class Curve:
    """The losses that a training has written: step, number of ranks, loss."""

    def __init__(self, path: Path, told: Callable[[], str]) -> None:
        self.path, self.told = path, told

    def rows(self) -> list[tuple[int, int, float]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(int(a), int(b), float(c)) for a, b, c in map(str.split, lines)]

    def until_trained_by(self, world: int, steps: int = 15) -> None:
        """Waits until that many ranks have made some steps after those that are there."""
        before = len(self.rows())
        done = wait_until(
            lambda: sum(row[1] == world for row in self.rows()[before:]) >= steps, LIMIT_S
        )
        assert done, self.told()


@pytest.mark.parametrize(
    ("count", "lost"),
    [
        pytest.param(3, (1,), marks=pytest.mark.slow),  # the host of rank 0
        pytest.param(4, (4, 1), marks=pytest.mark.long),
    ],
)
def test_hosts_go_and_come_back(hosts, monkeypatch, tmp_path, count, lost):
    """Each time under another plan, from the last checkpoint; the loss curve joins."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    profile = mw.profile("mlp", device="a100-sxm-40gb", batches=(6, 12, 24))
    cluster = mw.describe_cluster(device="a100-sxm-40gb", nodes=count, inter_gbit_s=1.0)
    save(mw.plan(profile, cluster, make_goal(24, optimizer="adam")), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    told = tmp_path / "log"
    curve = Curve(tmp_path / "losses", told.read_text)
    with told.open("w") as log:
        launcher = hosts.start(
            "--min-nodes", "2", "--max-restarts", "4", "--checkpoint", "kept", "--folder",
            str(tmp_path), "--checkpoint-every", "10", str(tmp_path / "train.py"),
            plan=str(tmp_path / "plan.json"), hosts=under(NAMES[:count]),
            program=("-c", PROGRAM), stdout=log, stderr=log,
        )  # fmt: skip
    curve.until_trained_by(count)
    for gone, number in enumerate(lost, start=1):
        hosts.lose(hosts.bed.hosts[number])
        curve.until_trained_by(count - gone)
    for number in lost:
        hosts.restore(hosts.bed.hosts[number])
    curve.until_trained_by(count)
    end = curve.rows()[-1][0] + 60
    (tmp_path / "end").write_text(str(end))
    code, _, _ = hosts.ended(launcher)
    said = told.read_text()
    assert code == 0, said
    rows = curve.rows()
    worlds = [world for i, (_, world, _) in enumerate(rows) if i == 0 or rows[i - 1][1] != world]
    assert worlds[: len(lost) + 1] == [count - gone for gone in range(len(lost) + 1)]
    assert worlds[-1] == count
    assert {step for step, _, _ in rows} == set(range(end))
    for before, after in itertools.pairwise(rows):
        # It goes on from a checkpoint, with the steps after it once more.
        assert after[0] == before[0] + 1 or (after[0] <= before[0] and after[0] % 10 == 0)
    expected = alone(end)
    for step, _, loss in rows:
        assert loss == pytest.approx(expected[step], rel=1e-4), step
    assert f"planned again for {count - 1} of {count} hosts: for {count - 1} ranks" in said
    answers = "answers" if len(lost) == 1 else "answer"
    assert f"{answers} again: stopped at the checkpoint of step" in said
    assert f"planned again for {count} of {count} hosts" in said
    # Growing does not count as a restart.
    assert f"(restart {len(lost)} of 4)" in said
    assert f"(restart {len(lost) + 1} of 4)" not in said
    assert "goes on from the checkpoint of step 10 in kept" in said
    assert steps_in(tmp_path / "kept")
    assert load(Plan, tmp_path / f"kept-plan-of-{count - 1}-hosts.json").world_size == count - 1


def alone(steps: int) -> list[float]:
    """The losses of the same training by one process."""
    torch.manual_seed(0)
    workload = zoo.build("mlp")
    optimizer = torch.optim.Adam(workload.model.parameters(), eps=1e-3)
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        batch = workload.make_batch(24)
        loss = workload.loss(workload.model(*batch.args), batch.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


# -- twenty kills ----------------------------------------------------------------------------------

SPAN, EVERY = 60, 5


def named(host: Host, words: str) -> list[int]:
    """The processes on a host whose command line has those words."""
    found = []
    for pid in pids(host):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if words in line and is_running(pid):
                found.append(pid)
    return found


class TrainingOverSsh(Training):
    """A training on two hosts, and what is done to it."""

    def __init__(self, hosts: SshHosts, folder: Path, arguments: list[str]) -> None:
        super().__init__(folder, arguments)
        self.hosts, self.members = hosts, hosts.bed.hosts[1:3]

    def spawn(self, log: IO[bytes], more: Mapping[str, str]) -> subprocess.Popen[Any]:
        return self.hosts.start(
            *self.arguments, "--folder", str(self.folder), plan=str(self.folder / "plan.json"),
            hosts=under(NAMES[:2]), environment=more, stdout=log, stderr=log,
        )  # fmt: skip

    def ended(self) -> int:
        assert self.launcher is not None
        return self.hosts.ended(self.launcher)[0]

    def disturb(self, kind: str, chance: random.Random) -> None:
        host, before = chance.choice(self.members), self.log.count("started again")
        if kind == "writing":
            self.until(self.writing)
        else:
            time.sleep(chance.random() * 0.1)
        if kind == "host":
            self.hosts.lose(host)
            self.hosts.restore(host)
            return
        words = "hosts.remote" if kind == "torchrun" else "launch.worker"
        if kind == "frozen":
            found = list(pids(host))
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
                time.sleep(20 if number == signal.SIGSTOP else 0)
            assert self.log.count("started again") == before
            return
        found = named(host, words)
        self.until(lambda: found or named(host, words))
        os.kill((found or named(host, words))[0], signal.SIGKILL)


def trained(hosts: SshHosts, folder: Path, steps: int, kinds: Sequence[str], seed: int = 0):
    """What the last checkpoint of a training holds, disturbed in those ways."""
    arguments = [
        *("--steps", str(steps), "--checkpoint", "kept", "--checkpoint-every", str(EVERY)),
        *("--max-restarts", str(2 * len(kinds))),
    ]
    run, chance = TrainingOverSsh(hosts, folder, arguments), random.Random(seed)
    save(small_hybrid_plan(), folder / "plan.json")
    run.start()
    for number, kind in enumerate(kinds):
        at = number * SPAN + chance.randrange(EVERY, SPAN // 2)
        run.until(lambda at=at: run.step() >= at)
        run.disturb(kind, chance)
    assert run.ended() == 0, run.log
    assert run.log.count("started again") >= sum(kind != "frozen" for kind in kinds)
    return run.kept(steps)


KINDS = [
    *["rank"] * 5, *["writing"] * 5, *["torchrun"] * 4, *["host"] * 5, "frozen",
]  # fmt: skip


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kinds", "seed"),
    [
        pytest.param(["rank", "host"], 8, marks=pytest.mark.slow),
        pytest.param(KINDS, 7, marks=pytest.mark.long),
    ],
)
def test_kills_on_hosts(hosts, tmp_path, kinds, seed):
    shuffled = random.Random(seed).sample(kinds, len(kinds))
    steps = SPAN * (len(kinds) + 1)
    expected = trained(hosts, tmp_path / "undisturbed", steps, ())
    assert len(expected) == 2
    assert trained(hosts, tmp_path / "disturbed", steps, shuffled, seed) == expected
