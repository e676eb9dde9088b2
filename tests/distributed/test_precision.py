"""Every precision under every kind of plan trains as one process does in that precision, and
takes the memory that was predicted for it."""

from __future__ import annotations

from functools import cache

import meshwright as mw
import pytest
import torch
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides
from meshwright.executor.launch.train import run_steps
from meshwright.executor.launch.verify import verify_on_ranks
from meshwright.models.precision import in_precision
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.precision import PRECISIONS, Precision
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.solve.evaluate import make_plan
from meshwright.planner.solve.unit_options import all_options
from meshwright.profiler.model import profile
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

from tests.sampling import sampled
from tests.strategies import cluster

WORLD, BATCH = 2, 16
KINDS = {
    "data parallel": Option(data_parallel(WORLD)),
    "divided": Option(data_parallel(WORLD)),
    "sharded": Option(data_parallel(WORLD), exchange="sharded"),
    "fully sharded": Option(data_parallel(WORLD), exchange="fully_sharded"),
    "recompute": Option(data_parallel(WORLD), memory="recompute"),
}
MODELS = ("llama", "resnet")


def resnet() -> mw.Workload:
    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1], layer_type="basic",
        num_labels=10,
    )  # fmt: skip

    def make_batch(size: int) -> mw.Batch:
        images, labels = torch.randn(size, 3, 48, 48), torch.randint(10, (size,))
        return mw.Batch((), None, {"pixel_values": images, "labels": labels})

    model = ResNetForImageClassification(config)
    return mw.Workload("resnet", model, make_batch, lambda out, _: out.loss)


def workload(name: str) -> mw.Workload:
    torch.manual_seed(0)
    if name == "resnet":
        return resnet()
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip

    def make_batch(size: int) -> mw.Batch:
        ids = torch.randint(256, (size, 32))
        return mw.Batch((), None, {"input_ids": ids, "labels": ids})

    return mw.Workload(name, LlamaForCausalLM(config), make_batch, lambda out, _: out.loss)


@cache
def profiled(name: str, precision: Precision) -> ModelProfile:
    return profile(
        in_precision(workload(name), precision), batches=(2, 4, 8), repeats=1,
        degrees=(WORLD,), budget_s=10,
    )  # fmt: skip


def planned(name: str, kind: str, precision: Precision) -> Plan:
    """Rank 0's plan of that kind, as far as each unit can follow. Collective."""

    def make() -> Plan:
        found, wish = profiled(name, precision), KINDS[kind]
        goal = Goal(batch=BATCH, optimizer="adamw")
        # Under the barrier nothing is sharded.
        schedule = "priority" if wish.shards else "barrier"
        model = CostModel(found, cluster(WORLD), goal, sliced=wish.shards)
        chosen = []
        for options in all_options(model, CAPABILITY):
            cuts = [o for o in options if o == Option(o.layout, o.style) and o.layout.degree > 1]
            if kind == "divided" and cuts:
                chosen.append(cuts[0])
            else:
                chosen.append(wish if wish in options else KINDS["data parallel"])
        return make_plan(
            found, cluster(WORLD), goal, chosen, schedule=schedule, executor=CAPABILITY
        )

    return rank_zero_decides(make)


def equals_one_process(rank: int, name: str, kind: str, precision: Precision, dtype: str) -> None:
    made = planned(name, kind, precision)
    found = verify_on_ranks(made, workload(name), dtype=dtype, batch=8, timeout_s=60)
    assert found.passed, (found.deviations, found.cause)
    # What computes in fewer bits is found, and judged by their yardstick.
    autocast = PRECISIONS[precision].autocast
    if autocast is not None:
        assert any(autocast in note for note in found.notes) == (dtype == "own"), found.notes


CASES = [(name, kind, precision) for name in MODELS for kind in KINDS for precision in PRECISIONS]


@pytest.mark.parametrize(
    ("name", "kind", "precision", "dtype"),
    [
        ("llama", "divided", "bf16-mixed", "own"),
        ("llama", "fully sharded", "fp16-mixed", "own"),
        ("llama", "recompute", "bf16-mixed", "float64"),
        *sampled([(*case, "own") for case in CASES], 8),
    ],
)
def test_trains_as_one_process(ranks, name, kind, precision, dtype):
    ranks(WORLD)(equals_one_process, name, kind, precision, dtype, limit_s=100)


def digits() -> tuple[nn.Module, mw.Batch]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    return model, mw.Batch((torch.randn(8, 6),), torch.randint(3, (8,)))


def trains_a_users_loop(rank: int) -> None:
    model, batch = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = nn.functional.cross_entropy
    model, _, made = mw.auto_parallelize(
        model, optimizer, example_inputs=batch, loss=loss_of, precision="bf16-mixed"
    )
    assert made.precision == "bf16-mixed"
    output = model(*batch.args)
    assert output.dtype == torch.bfloat16
    loss_of(output, batch.target).backward()
    optimizer.step()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def keeps_what_has_stepped(rank: int) -> None:
    model, batch = digits()
    optimizer = torch.optim.AdamW(model.parameters())
    nn.functional.cross_entropy(model(*batch.args), batch.target).backward()
    optimizer.step()
    with pytest.raises(InputError, match="convert the model before its optimizer is made"):
        mw.auto_parallelize(model, optimizer, example_inputs=batch, precision="bf16")


def reads_what_is_around(rank: int) -> None:
    model, batch = digits()
    with torch.autocast("cpu", torch.bfloat16):
        _, _, made = mw.auto_parallelize(model, example_inputs=batch)
    assert made.precision == "bf16-mixed"


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(trains_a_users_loop, marks=pytest.mark.slow),
        keeps_what_has_stepped,
        reads_what_is_around,
    ],
)
def test_auto_parallelize(ranks, check):
    ranks(WORLD)(check)


def peak_error(rank: int, name: str, kind: str, precision: Precision) -> float:
    made = planned(name, kind, precision)
    measured = run_steps(in_precision(workload(name), precision), made, 1)
    assert all(torch.isfinite(torch.tensor(measured.losses)))
    return max(made.prediction.peak_bytes) / max(measured.peak_bytes) - 1


@pytest.mark.parametrize(
    ("name", "kind", "precision"),
    [("llama", "divided", "bf16-mixed"), ("llama", "sharded", "bf16"), *sampled(CASES, 8)],
)
def test_peak_is_predicted(ranks, name, kind, precision):
    errors = ranks(WORLD)(peak_error, name, kind, precision, limit_s=100)
    print(f"{name}, {kind}, {precision}: {errors[0]:+.2%}")  # for docs/results/memory.md
    assert abs(errors[0]) <= 0.05
