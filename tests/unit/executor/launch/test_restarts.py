"""When a run is started again, how often, and in which words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from meshwright import InfeasibleError, InputError, Restarts, RunError
from meshwright.executor.checkpoint.folder import INDEX, step_name
from meshwright.executor.checkpoint.index import CheckpointIndex, encode_index
from meshwright.executor.checkpoint.latest import Latest
from meshwright.executor.launch import launch
from meshwright.executor.launch.hosts.protocol import error_of, failure_of
from meshwright.executor.launch.launch import with_a_plan_that_fits
from meshwright.executor.launch.processes import Ranks
from meshwright.executor.launch.restarts import AGAIN_VARIABLE, RestartCount, run_with_restarts
from meshwright.executor.launch.tasks import CheckpointSettings
from meshwright.executor.launch.timeline import TRACE_VARIABLE
from meshwright.executor.launch.train import steps_left
from meshwright.planner.schema.errors import MemoryRunError
from meshwright.planner.schema.record import save
from meshwright.planner.schema.recorded import RecordedStep, RecordedSteps

from tests.ssh import plan_for_hosts


def lost(error):
    error.lost = True
    return error


def killed():
    return lost(MemoryRunError("rank 1 ended with SIGKILL (out of memory?)", ["it held 3 GiB"], 7))


def test_a_killed_rank_is_still_lost_when_its_host_names_a_plan_that_fits(monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.launch._remedy", lambda *_: "a plan")
    error = killed()
    error.failed_at = 3.0
    told = error_of(failure_of(with_a_plan_that_fits(error, plan_for_hosts(2))), "b")
    assert told.lost
    assert told.failed_at == 3.0
    assert "started again (restart 1 of 2)" in RestartCount(2).after(told, 10)


def put_checkpoint(folder, step):
    """A whole one, of nothing."""
    index = CheckpointIndex(
        step=step, world_size=1, model="", plan="", decisions="", files=(), tensors=()
    )
    where = folder / step_name(step)
    where.mkdir()
    (where / INDEX).write_bytes(encode_index(index))


class Attempts:
    """What each attempt raises, or returns; and what it was given."""

    def __init__(self, *outcomes):
        self.outcomes, self.given, self.said = list(outcomes), [], []

    def __call__(self, ranks, keeping):
        self.given.append((ranks, keeping))
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def run(
        self, folder: Path, most: int, timeout_s: float | None = None, steps: int | None = None
    ):
        ranks = Ranks(nproc=2, timeout_s=timeout_s)
        keeping = CheckpointSettings(folder=str(folder), every=5)
        return run_with_restarts(self, ranks, keeping, Restarts(most), self.said.append, steps)


def test_what_is_wrong_after_the_last_step_is_not_taken_for_a_loss(tmp_path):
    """Ranks that are started again would find the training at its end, and nothing wrong."""
    put_checkpoint(tmp_path, 10)
    wrong = RunError("the loss of step 7 is nan")
    with pytest.raises(RunError, match="the loss of step 7 is nan"):
        Attempts(wrong, "done").run(tmp_path, 2, steps=10)
    assert Attempts(wrong, "done").run(tmp_path, 2, steps=11) == "done"
    assert Attempts(killed(), "done").run(tmp_path, 2, steps=10) == "done"


def test_a_run_that_has_lost_a_rank_is_started_again(tmp_path):
    attempts = Attempts(killed(), RunError("the peer closed"), "done")
    assert attempts.run(tmp_path, 2, timeout_s=100.0) == "done"
    assert attempts.said[0] == (
        "rank 1 ended with SIGKILL (out of memory?); started again (restart 1 of 2); there is no "
        "checkpoint yet, so it begins anew"
    )
    assert attempts.said[1].startswith("the peer closed; started again (restart 2 of 2); there is")
    assert [keeping.restarted for _, keeping in attempts.given] == [False, True, True]
    # The limit is of the whole run, not of each attempt.
    left = [ranks.timeout_s for ranks, _ in attempts.given]
    assert left == sorted(left, reverse=True)
    assert left[2] < left[0] == 100.0
    assert [ranks.limit_s for ranks, _ in attempts.given] == [100.0] * 3


def test_from_a_checkpoint_nothing_is_said_of_beginning_anew(tmp_path):
    put_checkpoint(tmp_path, 5)
    attempts = Attempts(killed(), "done")
    attempts.run(tmp_path, 1)
    assert attempts.said[0].endswith("; started again (restart 1 of 1)")


def test_a_damaged_checkpoint_is_not_where_a_run_goes_on(tmp_path):
    """Two failures alike after a damaged one, with checkpoints made between them."""
    (tmp_path / step_name(1000)).mkdir()
    put_checkpoint(tmp_path, 600)

    class Advancing(Attempts):
        def __call__(self, ranks, keeping):
            put_checkpoint(tmp_path, 700 + 100 * len(self.given))
            return super().__call__(ranks, keeping)

    same = [RunError("the peer closed"), RunError("the peer closed"), "done"]
    assert Advancing(*same).run(tmp_path, 3, steps=1000) == "done"


def test_each_attempt_tells_what_it_has_recorded_itself(tmp_path, monkeypatch):
    """Of the second one only rank 0 has: what rank 1 had of the first is not beside it."""
    step = RecordedStep(start_s=0.0, end_s=1.0)
    outcomes = [((0, 1), killed()), ((0,), "done")]

    def run_task(task, ranks, answer, plan):
        recorded, outcome = outcomes.pop(0)
        for rank in recorded:
            one = RecordedSteps(
                rank=rank, steps=(step,), computing=(), waiting=(), updating=(), groups=()
            )
            save(one, Path(ranks.environment[TRACE_VARIABLE]) / f"timeline-{rank}.json")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(launch, "run_task", run_task)
    told = []
    plan = plan_for_hosts(2)
    report = launch.launch(
        plan, (), 3, Ranks(nproc=2), keeping=CheckpointSettings(folder=str(tmp_path), every=5),
        restarts=Restarts(1), recorded=lambda of, found: told.append((of, [r.rank for r in found])),
    )  # fmt: skip
    assert report == "done"
    assert told == [(plan, [0, 1]), (plan, [0])]


@pytest.mark.parametrize(
    ("steps", "how"),
    [
        ([], "begins anew, as there is no checkpoint yet"),
        ([5, 10], "goes on from the latest whole checkpoint, of step 10"),
    ],
)
def test_restarts_that_are_used_up(tmp_path, steps, how):
    for step in steps:
        put_checkpoint(tmp_path, step)
    attempts = Attempts(killed(), killed())
    with pytest.raises(MemoryRunError) as raised:
        attempts.run(tmp_path, 1)
    assert raised.value.sentence == (
        "rank 1 ended with SIGKILL (out of memory?); it has been started again once, as often as "
        f"--max-restarts allows: the same command {how}"
    )
    assert (raised.value.details, raised.value.limit_bytes) == (("it held 3 GiB",), 7)


@pytest.mark.parametrize(
    "error",
    [
        InputError("there is no script"),
        InfeasibleError("nothing fits"),
        MemoryRunError("rank 0 lacks memory", ["it held 3 GiB"]),
    ],
)
def test_what_would_only_come_again_is_raised_at_once(tmp_path, error):
    attempts = Attempts(error)
    with pytest.raises(type(error)) as raised:
        attempts.run(tmp_path, 3)
    assert raised.value is error
    assert attempts.said == []


def test_what_comes_again_from_the_same_step_is_not_repeated():
    """A rank's own error; one that was killed may be so twice."""
    count = RestartCount(9)
    for step in (5, 10):  # it got on meanwhile
        assert "started again" in count.after(RunError("the loss is nan"), step)
    with pytest.raises(RunError, match="nan; and so it was after a restart from the same step"):
        count.after(RunError("the loss is nan"), 10)
    for _ in range(3):
        assert "started again" in count.after(killed(), 10)


def test_nothing_is_started_again_after_the_time_limit():
    count = RestartCount(9, timeout_s=1e-9)
    error = RunError("the run was ended after its limit")
    with pytest.raises(RunError) as raised:
        count.after(error, 5)
    assert raised.value is error


def test_what_a_scheduler_has_started_again_may_be_at_its_end(tmp_path, monkeypatch):
    def restarted():
        return launch.keeping_for(tmp_path, 5, resume=True).restarted

    for name in (AGAIN_VARIABLE, "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert not restarted()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert not restarted()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert restarted()
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    monkeypatch.setenv(AGAIN_VARIABLE, "1")
    assert restarted()


def test_a_training_whose_ranks_were_lost_after_its_last_step_is_done(tmp_path):
    index = SimpleNamespace(step=9)
    kept = SimpleNamespace(folder=tmp_path, go_on=lambda: Latest(tmp_path, index, {}))
    said: list[str] = []
    assert steps_left(kept, 9, said.append, restarted=True) == range(0)
    assert said == ["the training had come to its end, step 9, when its ranks were lost"]
    assert steps_left(kept, 12, said.append, restarted=True) == range(9, 12)
    with pytest.raises(InputError, match="at step 9 and --steps asks for 9"):
        steps_left(kept, 9, said.append)


def test_a_loss_is_one_on_the_launcher_too():
    assert error_of(failure_of(killed()), "b").lost
    assert not error_of(failure_of(RunError("the loss is nan")), "b").lost


@pytest.mark.parametrize(
    ("restarts", "given", "words"),
    [
        (Restarts(1), (None, 0, 1), r"add --checkpoint FOLDER \(checkpoint\)"),
        (Restarts(0, 1), (None, 2, 1), "add --checkpoint FOLDER"),
        (Restarts(1), ("kept", 0, 2), "with --nnodes there is one on each host: use --hosts"),
        (Restarts(1, 3), ("kept", 2, 1), "--min-nodes 3 is more than the 2 hosts of --hosts"),
        (Restarts(1, 1), ("kept", 0, 1), "--min-nodes 1 is more than the 0 hosts of --hosts"),
    ],
)
def test_what_cannot_be_started_again_is_refused(restarts, given, words):
    with pytest.raises(InputError, match=words):
        restarts.check(*given)


def test_numbers_that_cannot_be():
    with pytest.raises(InputError, match="-1 restarts"):
        Restarts(-1)
    with pytest.raises(InputError, match="--min-nodes 0 would leave no host"):
        Restarts(1, 0)
    Restarts().check(None, 0, 4)
