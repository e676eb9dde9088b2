"""``launch --max-restarts``: a training whose processes are killed or stopped at any moment ends as
one that nobody disturbed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched import Training, disturb, small_hybrid_plan
from meshwright.planner.schema.record import save
from plans import plan, unit

EVERY = 5
SPAN = 60
SCRIPT = """
import os, signal, time
from pathlib import Path
import meshwright as mw, torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, plan = mw.auto_parallelize(model, optimizer, plan=mw.load(mw.Plan, "plan.json"))
attempt = len(list(Path.cwd().glob("attempt-*"))) if os.environ["RANK"] == "1" else None
with mw.checkpoint(None, model, optimizer) as ckpt:
    first = ckpt.resume()
    if attempt is not None:
        Path(f"attempt-{attempt}").touch()
    for step in range(first, 9):
        if attempt in (0, 1) and step == 5:
            ckpt.wait()
            time.sleep(1.0)  # until the other rank has made it one
            os.kill(os.getpid(), (signal.SIGKILL, signal.SIGSTOP)[attempt])
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
"""


def trained(folder: Path, steps: int, kinds: Sequence[str], seed: int = 0) -> dict[str, bytes]:
    """What the last checkpoint of a training holds that was disturbed in those ways, each after
    some more steps."""
    arguments = [
        *("plan.json", "--steps", str(steps), "--checkpoint", "kept"),
        *("--checkpoint-every", str(EVERY), "--max-restarts", str(2 * len(kinds))),
    ]
    training, chance = Training(folder, arguments), random.Random(seed)
    save(small_hybrid_plan(), folder / "plan.json")
    training.start()
    try:
        for number, kind in enumerate(kinds):
            at = number * SPAN + chance.randrange(EVERY, SPAN // 2)
            training.until(lambda at=at: training.step() >= at and len(training.ranks()) == 2)
            disturb(training, kind, chance)
        assert training.ended() == 0, training.log
    finally:
        training.end()
    assert training.log.count("SIGKILL (out of memory?)") >= sum(
        kind in ("rank", "writing") for kind in kinds
    )
    left = sorted(path.name for path in (folder / "kept").iterdir())
    assert all(entry.startswith("step-") for entry in left), left
    return training.kept(steps)


def ends_as_undisturbed(folder: Path, kinds: list[str], seed: int) -> None:
    steps = SPAN * (len(kinds) + 1)
    expected = trained(folder / "undisturbed", steps, ())
    assert len(expected) == 2
    assert trained(folder / "disturbed", steps, kinds, seed) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_kills(tmp_path: Path):
    ends_as_undisturbed(tmp_path, ["rank", "writing", "launcher"], 1)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_twenty_kills(tmp_path: Path):
    kinds = [
        *["rank"] * 7, *["writing"] * 6, *["launcher"] * 3, *["starting"] * 2, *["stopped"] * 2,
    ]  # fmt: skip
    random.Random(5).shuffle(kinds)
    ends_as_undisturbed(tmp_path, kinds, 5)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_script_whose_rank_is_killed_and_then_stands_still(tmp_path: Path):
    """Stands still for longer than ranks wait for each other; by then no restart is left."""
    arguments = [
        *("plan.json", "--checkpoint", "kept", "--checkpoint-every", "3"),
        *("--max-restarts", "1", "train.py"),
    ]
    training = Training(tmp_path / "run", arguments)
    save(plan(2, [unit("0", 1, "none", 2), unit("1", 1, "none", 2)]), training.folder / "plan.json")
    (training.folder / "train.py").write_text(SCRIPT)
    try:
        training.start(MESHWRIGHT_TIMEOUT_S="5")
        training.until(lambda: (training.ranks(), (training.folder / "attempt-1").exists())[1])
        training.ranks()
        assert training.ended() == 1, training.log
        told = "note: rank 1 ended with SIGKILL (out of memory?); its own output says more; start"
        assert told in training.log
        assert "note: goes on from the checkpoint of step 3 in kept" in training.log
        assert (
            "a rank that is not heard of has stalled or ended; what it printed last says more, or "
            "the kernel's log where memory ran out; it has been started again once, as often as "
            "--max-restarts allows: the same command goes on from the latest"
        ) in " ".join(training.log.split())
        training.start()
        assert training.ended() == 0, training.log
        assert training.step() == 9
    finally:
        training.end()
