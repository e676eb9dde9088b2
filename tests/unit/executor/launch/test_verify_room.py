"""What ``verify`` takes of this host's memory is compared with what is free before it starts."""

import meshwright as mw
import msgspec
import pytest
from meshwright.executor.launch import tasks, verify_room
from meshwright.executor.launch.verify_room import check_room, needed_bytes, usual_batch
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear

MIB = 2**20
SAVED = 2.0**20


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
    whole = (4 * 3 * 4 + 16 * 4 + 2 * 4) * MIB
    assert usual_batch(plan) == 16
    assert needed_bytes(plan, "own", 16) == pytest.approx(whole, rel=0.1)
    assert needed_bytes(plan, "float32", 16) == needed_bytes(plan, "own", 16)
    assert needed_bytes(plan, "float64", 16) == 2 * needed_bytes(plan, "own", 16)
    halves = plan_of(precision="bf16")
    assert needed_bytes(halves, "float64", 16) == 4 * needed_bytes(halves, "own", 16)


def test_in_micro_batches_it_is_what_one_process_takes():
    plan = plan_of(micro_batches=4)
    # What a rank has of a micro-batch is what the plan says that it has at once: a fourth of the
    # samples hold as much. The whole batch is 64 samples, beside the other ranks' weights.
    of_sample = 4 * 4 * MIB
    whole = (3 + 3) * 4 * MIB + 64 * of_sample
    assert needed_bytes(plan, "own", 64) == pytest.approx(whole, rel=0.1)


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
        "to verify the plan, 4 ranks and one process take about 240.0 MiB of this host's memory "
        "(16 samples in float64), and 240.0 MiB are free: give --batch 8 (batch=8), or set "
        "MESHWRIGHT_CHECK_MEMORY=0"
    )
    monkeypatch.setenv("MESHWRIGHT_CHECK_MEMORY", "0")
    mw.verify(plan)
    assert len(started) == 2


def test_the_remedy_is_what_fits(free):
    plan = plan_of()
    for dtype, batch, remedy in (
        ("float64", 4, "give --dtype float32 (dtype='float32'), or set"),
        ("float32", 4, "verify a plan for fewer ranks (plan --ranks), or set"),
    ):
        free(needed_bytes(plan, dtype, batch) - 1)
        with pytest.raises(InputError) as error:
            check_room(plan, dtype, batch)
        assert remedy in str(error.value)
    # Both, where neither is enough.
    free(needed_bytes(plan, "float32", 4))
    with pytest.raises(InputError, match=r"give --dtype float32 .* and --batch 4 \(batch=4\), or"):
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
