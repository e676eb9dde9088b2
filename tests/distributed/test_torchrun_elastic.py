"""A user's own script under plain ``torchrun --nnodes 1:2 --max-restarts 3``: agents that come and
go, each time another plan, and one loss curve."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launched import children
from torch import nn

from tests.processes import alive, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMON = """
import os, time
from pathlib import Path
import torch
from torch import nn

def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def batch_of(step):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 8, generator=draw)
    return x, x.sum(1, keepdim=True)
"""
SCRIPT = f"""{COMMON}
import meshwright as mw
import torch.distributed as dist

here = Path(__file__).parent
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
model, optimizer = made()
model, optimizer, plan = mw.auto_parallelize(
    model, optimizer, example_inputs=(torch.randn(4, 8),), global_batch_size=8
)
assert plan.world_size == world
ckpt = mw.checkpoint(here / "kept", model, optimizer, every=5)
step = ckpt.resume()
while not (here / "end").exists() or step < int((here / "end").read_text() or 10**9):
    x, y = (t.chunk(world)[rank] for t in batch_of(step))
    loss = nn.functional.mse_loss(model(x), y)
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
ckpt.close()
"""


class Agents:
    """torchrun's agents and their ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "train.py").write_text(SCRIPT)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        told = {
            "OMP_NUM_THREADS": "1",
            # Else one that stays rank 0 does not tell a new one where to meet (torch 2.13).
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--max-restarts", "3", "--nproc-per-node", "1", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "elastic"),
            # How soon a host that is gone is noticed, and how long others are waited for.
            *("--rdzv-conf", "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"),
            *("--local-addr", "127.0.0.1", str(self.folder / "train.py")),
        ]
        with (self.folder / f"log-{len(self.started)}").open("wb") as log:
            agent = subprocess.Popen(command, env={**os.environ, **told}, stdout=log, stderr=log)
        self.started.append(agent)
        return agent

    def losses(self) -> list[tuple[int, int, float]]:
        """Step, number of ranks and loss, in the order in which they were trained."""
        path = self.folder / "losses"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(b), float(c)) for a, b, c in map(str.split, lines)]

    def until_trained_by(self, world: int, steps: int = 8) -> None:
        """Waits until that many ranks have made some steps after those that are there."""
        before = len(self.losses())
        assert wait_until(
            lambda: sum(row[1] == world for row in self.losses()[before:]) >= steps, 120
        ), "".join(path.read_text()[-3000:] for path in self.folder.glob("log-*"))

    @staticmethod
    def kill(agent: subprocess.Popen[bytes]) -> None:
        """The agent and its ranks at once, as when their host is gone."""
        ranks = children(agent.pid, "train.py")  # which torchrun puts into sessions of their own
        for pid in (agent.pid, *ranks):
            os.kill(pid, signal.SIGKILL)
        agent.wait()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    for agent in found.started:
        if agent.poll() is None:
            found.kill(agent)
    left = alive(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_host_comes_and_goes(agents: Agents):
    first = agents.start()
    agents.until_trained_by(1)
    second = agents.start()
    agents.until_trained_by(2)
    agents.kill(second)
    agents.until_trained_by(1)
    end = agents.losses()[-1][0] + 20
    (agents.folder / "end").write_text(str(end))
    assert first.wait(60) == 0
    found = agents.losses()
    assert {step for step, _, _ in found} == set(range(end))
    assert (agents.folder / "kept").is_dir()
    # Where ranks were ended, the steps since the last checkpoint were made again.
    steps = [step for step, _, _ in found]
    assert [world for i, (_, world, _) in enumerate(found) if i == 0 or found[i - 1][1] != world][
        :3
    ] == [1, 2, 1]
    assert all(b == a + 1 or (b <= a and b % 5 == 0) for a, b in itertools.pairwise(steps))
    expected = undisturbed(end)
    for step, _, loss in found:
        assert loss == pytest.approx(expected[step], rel=1e-3), step


def undisturbed(steps: int) -> list[float]:
    """The losses of the same training by one process without any of it."""
    scope: dict[str, object] = {}
    exec(COMMON, scope)
    torch.set_num_threads(1)
    model, optimizer = scope["made"]()  # type: ignore[operator]
    found = []
    for step in range(steps):
        x, y = scope["batch_of"](step)  # type: ignore[operator]
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found
