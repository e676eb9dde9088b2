"""What is said when memory is short."""

import pytest
import torch
from meshwright.executor import headroom
from meshwright.executor.headroom import free_bytes, overflowed, refusal
from meshwright.models.units.storages import OverBudgetError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear

MIB = 2**20


@pytest.fixture
def plan():
    profile = chain_profile([linear(f"fc{i}", 512, 512, saved=2.0**20) for i in range(3)])
    return make_plan(profile, cluster(2), Goal(batch=16, optimizer="adam"))


def test_a_plan_knows_where_most_is_alive(plan):
    moment = plan.prediction.fullest
    assert moment.total == max(plan.prediction.peak_bytes)
    assert (moment.unit, moment.phase) == ("fc2", "backward")
    assert moment.largest == "feature maps"
    assert moment.weights == 3 * MIB
    assert moment.optimizer == 6 * MIB


def test_the_refusal_names_rank_unit_class_and_a_limit_that_fits(plan):
    needed = max(plan.prediction.peak_bytes)
    text = refusal(plan, 1, needed, needed - 10 * MIB)
    assert "rank 1" in text
    assert "backward of unit 'fc2', above all feature maps" in text
    assert f"--memory-limit {(needed - 10 * MIB) // MIB}MiB" in text


def test_a_container_s_limit_counts(monkeypatch, tmp_path):
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(f"{500 * MIB}\n")
    used.write_text(f"{100 * MIB}\n")
    monkeypatch.setattr(headroom, "_GROUPS", (limit, used))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu")) == 100 * MIB
    limit.write_text("max\n")
    assert free_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OverBudgetError(2, 1, ""), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, short):
    assert overflowed(error) is short


def test_torch_s_own_error_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert overflowed(caught.value)
