"""What ``verify`` takes of this host's memory is compared with what is free before it starts."""

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.launch import tasks, verify, verify_room
from meshwright.executor.launch.verify_room import check_room, needed_bytes, usual_batch
from meshwright.models.workload import Batch, Workload
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import make_plan
from torch import nn

from tests.strategies import chain_profile, cluster, linear

MIB = 2**20
SAVED = 2.0**20
OF_PROCESSES = 4 * verify_room._PROCESS_BYTES


def plan_of(ranks=4, batch=64, **more):
    profile = chain_profile([linear(f"fc{i}", 512, 512, saved=SAVED) for i in range(4)])
    return msgspec.structs.replace(make_plan(profile, cluster(ranks), Goal(batch=batch)), **more)


@pytest.fixture
def free(monkeypatch):
    """``free(bytes)`` is what this host has, without GPUs."""
    monkeypatch.setattr(verify_room, "on_gpus", lambda ranks: False)

    def set_to(count):
        monkeypatch.setattr(verify_room, "host_free_bytes", lambda: count)

    return set_to


def test_it_is_as_much_as_all_ranks_take_together():
    plan = plan_of()
    # Weights, gradients and momentum of four layers of 1 MiB on each of four ranks, of 16 samples
    # 1 MiB in each layer, and what is kept of one process.
    whole = 1.25 * (4 * 3 * 4 + 16 * 4 + 2 * 4) * MIB + OF_PROCESSES
    assert usual_batch(plan) == 16
    assert needed_bytes(plan, "own", 16) == pytest.approx(whole, rel=0.01)
    assert needed_bytes(plan, "float32", 16) == needed_bytes(plan, "own", 16)
    for one, times in ((plan, 2), (plan_of(precision="bf16"), 4)):
        wide, own = (needed_bytes(one, dtype, 16) - OF_PROCESSES for dtype in ("float64", "own"))
        assert wide == times * own


def test_in_micro_batches_it_is_what_one_process_takes():
    plan = plan_of(micro_batches=4)
    # What a rank has of a micro-batch is what the plan says that it has at once: a fourth of the
    # samples hold as much. The whole batch is 64 samples, beside the other ranks' weights.
    of_sample = 4 * 4 * MIB
    whole = 1.25 * ((3 + 3) * 4 * MIB + 64 * of_sample) + OF_PROCESSES
    assert needed_bytes(plan, "own", 64) == pytest.approx(whole, rel=0.01)


def test_shares_of_one_sample_are_run_with_the_whole_batch():
    """By every rank, so that fewer samples may take more; no remedy goes there."""
    plan = plan_of()
    few, more = (needed_bytes(plan, "own", batch) - OF_PROCESSES for batch in (7, 8))
    assert few == pytest.approx(1.25 * 4 * (4 + 7 * 4) * MIB, rel=0.01)
    assert more < few


@pytest.mark.parametrize(("size", "seen"), [(16, [[16, 4], [4]]), (4, [[4], [4]])])
def test_only_rank_0_runs_the_whole_batch(monkeypatch, size, seen):
    """But where a rank's share is one sample, of which there may be no statistics."""
    plan, found = plan_of(), []
    monkeypatch.setattr(verify, "_run_once", lambda model, batch: found[-1].append(batch.size))
    batch = Batch(args=(torch.zeros(size, 2),), kwargs={}, target=torch.zeros(size))
    for rank in (0, 1):
        found.append([])
        monkeypatch.setattr(verify.dist, "get_rank", lambda rank=rank: rank)
        verify._run_first(nn.Linear(2, 2), batch, plan)
        verify._run_share(Workload("net", nn.Linear(2, 2), None, None), batch, plan)
    assert found == seen


def test_what_does_not_fit_is_refused_before_anything_is_started(free, monkeypatch):
    started = []
    monkeypatch.setattr(tasks, "run_here", lambda *args: started.append(args))
    plan = plan_of()
    needed = needed_bytes(plan, "float64", 16)
    free(needed)
    mw.verify(plan)
    assert len(started) == 1
    free(needed - 1)
    with pytest.raises(InputError) as error:
        mw.verify(plan)
    assert len(started) == 1
    assert str(error.value) == (
        "to verify the plan, 4 ranks and one process take about 1.46 GiB of this host's memory "
        "(16 samples in float64), and 1.46 GiB are free: give --batch 8 (batch=8), or set "
        "MESHWRIGHT_CHECK_MEMORY=0"
    )
    monkeypatch.setenv("MESHWRIGHT_CHECK_MEMORY", "0")
    mw.verify(plan)
    assert len(started) == 2


def test_the_remedy_is_what_fits(free):
    plan = plan_of()
    for dtype, batch, remedy in (
        ("float64", 8, "give --dtype float32 (dtype='float32'), or set"),
        ("float32", 8, "verify a plan for fewer ranks (plan --ranks), or set"),
    ):
        free(needed_bytes(plan, dtype, batch) - 1)
        with pytest.raises(InputError) as error:
            check_room(plan, dtype, batch)
        assert remedy in str(error.value)
    # Both, where neither is enough.
    free(needed_bytes(plan, "float32", 8))
    with pytest.raises(InputError, match=r"give --dtype float32 .* and --batch 8 \(batch=8\), or"):
        check_room(plan, "float64", 16)


def test_nothing_is_refused_where_nobody_knows_or_ranks_have_gpus(free, monkeypatch):
    plan = plan_of()
    free(None)
    check_room(plan, "float64", None)
    free(0)
    nobody = msgspec.structs.replace(plan.prediction, fullest=None)
    check_room(msgspec.structs.replace(plan, prediction=nobody), "float64", None)
    monkeypatch.setattr(verify_room, "on_gpus", lambda ranks: True)
    check_room(plan, "float64", None)
