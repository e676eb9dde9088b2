"""``auto_parallelize``: it measures, plans and applies, the same on every rank, or says why not."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import meshwright as mw
import msgspec
import pytest
import torch
import torch.distributed as dist
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.comm.agreement import rank_zero_decides, together
from meshwright.executor.optimizer.kinds import planned_for
from meshwright.executor.parallel import run_of
from meshwright.planner.schema.cluster import Device, Level, Node
from meshwright.planner.schema.goal import ROUNDED_FIDELITY
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import LOSSY
from meshwright.planner.schema.record import decode, encode, fingerprint, save
from meshwright.profiler import sessions
from plans import plan as plan_by_hand
from plans import unit
from torch import nn
from torch.nn import functional as F

LIMIT_S = 100.0
pytestmark = pytest.mark.timeout(240)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)
    )


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 12, generator=generator)
    return x, torch.randint(4, (count,), generator=generator)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, mine: slice, steps: int = 3
) -> None:
    x, y = samples(10)
    for _ in range(steps):
        F.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# -- measured and planned ---------------------------------------------------------------------


def measure_plan_and_train(rank: int, cache: str) -> tuple[bytes, dict[str, torch.Tensor]]:
    os.environ["MESHWRIGHT_CACHE"] = cache
    model = network()
    optimizer = sgd(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    x, _ = samples(10)
    same_model, same_optimizer, plan = mw.auto_parallelize(
        model, optimizer, example_inputs=(x[:4],), global_batch_size=10
    )
    assert same_model is model
    assert same_optimizer is optimizer
    assert torch.equal(torch.get_rng_state(), random)
    now = mw.full_state_dict(model)
    assert list(now) == list(before)
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    trained(model, optimizer, slice(0, 7) if rank == 0 else slice(7, 10))
    return encode(plan), mw.full_state_dict(model)


def test_measures_plans_and_trains_as_one_process_would(ranks, tmp_path, measurements):
    (plan, first), (other_plan, other) = ranks(2)(
        measure_plan_and_train, str(tmp_path), limit_s=LIMIT_S
    )
    assert plan == other_plan
    alone = network()
    trained(alone, sgd(alone), slice(0, 10))
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(first[name], expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(first[name], other[name])
    kept = list((tmp_path / "documents").glob("*.json"))
    # The profile and the cluster, each by what it was measured for and by its fingerprint.
    assert len(kept) == 4
    shutil.copytree(tmp_path, measurements, dirs_exist_ok=True)  # for tests that want no other
    again = ranks(2)(measure_plan_and_train, str(tmp_path), limit_s=20.0)
    assert fingerprint_of_measurements(again[0][0]) == fingerprint_of_measurements(plan)


def fingerprint_of_measurements(plan: bytes) -> tuple[str, str]:
    made = decode(mw.Plan, plan)
    return made.provenance.profile, made.provenance.cluster


class Lion(torch.optim.Optimizer):
    """One of nobody's that torch knows."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad.sign() * parameter.norm()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "Lion": lambda model: Lion(model.parameters()),
}


def plan_for_an_optimizer(rank: int, name: str) -> list[str]:
    """How units are divided and exchanged over a slow link, for that optimizer."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 4))
    optimizer = OPTIMIZERS[name](model)
    x, y = samples(8)
    device = Device(name="cpu", memory_bytes=2**40)
    nodes = tuple(Node(name=f"host-{i}", devices=(device,)) for i in range(2))
    links = (Level(name="inter", latency_s=1e-6, bytes_per_s=1e5),)
    slow = mw.Cluster(name="slow", nodes=nodes, levels=links)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        patch.setattr(sessions, "cluster_of_ranks", lambda device: slow)
        _, _, plan = mw.auto_parallelize(
            model, optimizer, example_inputs=(x[:4],), global_batch_size=8, schedule="barrier"
        )
    F.cross_entropy(model(x[4 * rank :][:4]), y[4 * rank :][:4]).backward()
    optimizer.step()
    return [unit.style for unit in plan.units if unit.modules]


def test_a_plan_is_made_for_the_optimizer(ranks):
    styles = {
        name: ranks(2)(plan_for_an_optimizer, name, limit_s=LIMIT_S)[0] for name in OPTIMIZERS
    }
    assert set(styles["sgd"]) > {"none"} or "none" not in styles["sgd"]
    assert set(styles["Adafactor"]) == set(styles["Lion"]) == {"none"}


def test_what_may_be_planned_follows_from_the_optimizer():
    class Steeper(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = network()
    assert planned_for(None, CAPABILITY) is CAPABILITY
    assert planned_for(sgd(model), CAPABILITY) is CAPABILITY
    derived = planned_for(Steeper(model.parameters()), CAPABILITY)
    assert derived.styles == CAPABILITY.styles
    for optimizer in (Steeper(model.parameters()), Lion(model.parameters())):
        found = planned_for(optimizer, CAPABILITY)
        assert not {"sharded", "fully_sharded"} & set(found.exchange)
    assert planned_for(Lion(model.parameters()), CAPABILITY).styles == ("none",)


# -- a ready plan -----------------------------------------------------------------------------


def hybrid(world: int = 2) -> mw.Plan:
    """The first two linear layers as a column and a row pair."""
    return plan_by_hand(world, [unit("0", 2, "column", world), unit("2", 2, "row", world)])


def apply_ready(rank: int, source: object) -> tuple[str, dict[str, torch.Tensor]]:
    model = network()
    F.cross_entropy(model(samples(10)[0]), samples(10)[1])  # a graph from before is no hindrance
    optimizer = sgd(model)
    model, _, plan = mw.auto_parallelize(model, optimizer, plan=source)
    assert model[0].weight.shape == (16, 12)
    trained(model, optimizer, slice(0, 7) if rank == 0 else slice(7, 10))
    return fingerprint(plan), mw.full_state_dict(model)


def apply_from_environment(rank: int, path: str) -> tuple[str, dict[str, torch.Tensor]]:
    os.environ["MESHWRIGHT_PLAN"] = path
    try:
        return apply_ready(rank, None)
    finally:
        del os.environ["MESHWRIGHT_PLAN"]


@pytest.mark.parametrize("way", ["object", "file", "environment"])
def test_a_ready_plan_is_applied_as_it_is(ranks, tmp_path, way):
    path = tmp_path / "plan.json"
    save(hybrid(), path)
    if way == "environment":
        found = ranks(2)(apply_from_environment, str(path))
    else:
        found = ranks(2)(apply_ready, hybrid() if way == "object" else str(path))
    alone = network()
    trained(alone, sgd(alone), slice(0, 10))
    for mark, state in found:
        assert mark == fingerprint(hybrid())
        for name, expected in alone.state_dict().items():
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6)


def divide_with_a_graph_alive(rank: int) -> None:
    model = network()
    x, y = samples(10)
    alive = F.cross_entropy(model(x), y)
    mw.auto_parallelize(model, plan=hybrid())
    F.cross_entropy(model(x[:5]), y[:5]).backward()
    assert model[0].weight.grad.shape == (16, 12)
    assert alive.grad_fn is not None


def test_a_graph_that_is_still_alive_is_no_hindrance(ranks):
    ranks(2)(divide_with_a_graph_alive)


def allow_lossy_exchange(rank: int) -> None:
    model, x = network(), samples(10)[0]
    _, _, plan = mw.auto_parallelize(
        model, sgd(model), example_inputs=(x[:4],), lossy=True, min_fidelity=0.5
    )
    assert plan.goal.allow_lossy
    assert plan.goal.min_fidelity == 0.5
    model = network()
    _, _, given = mw.auto_parallelize(model, sgd(model), plan=plan, lossy=mw.Lossy(patience=3))
    assert given == plan
    assert run_of(model).lossy == mw.Lossy(patience=3)
    _, _, rounded = mw.auto_parallelize(network(), example_inputs=(x[:4],), lossy=True)
    assert rounded.goal.min_fidelity == ROUNDED_FIDELITY
    assert not any(unit.exchange in LOSSY for unit in rounded.units)
    with pytest.raises(mw.InputError, match="allow_lossy=True"):
        mw.auto_parallelize(network(), example_inputs=(x[:4],), min_fidelity=0.5)


@pytest.mark.slow
def test_lossy_exchange_is_allowed_or_not(ranks):
    ranks(2)(allow_lossy_exchange, limit_s=LIMIT_S)


def plan_for_too_few_samples(rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mw.auto_parallelize(network(), example_inputs=(samples(4)[0],), global_batch_size=1)
    return [str(w.message) for w in caught if "global batch" in str(w.message)]


@pytest.mark.slow
def test_a_global_batch_that_leaves_ranks_without_samples_is_told(ranks):
    (told,), others = ranks(2)(plan_for_too_few_samples, limit_s=LIMIT_S)
    assert "a global batch of 1 leaves 1 of 2 ranks without samples" in told
    assert others == []


def train_one_layer(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(12, 6)
    twin = copy.deepcopy(model)
    x = torch.randn(8, 12)
    model, _, chosen = mw.auto_parallelize(model, example_inputs=(x,), global_batch_size=16)
    assert [u.modules for u in chosen.units if u.modules] == [("",)]
    model = copy.deepcopy(twin)
    layout = Layout(groups=1, degree=2)
    units = [
        msgspec.structs.replace(u, layout=layout, style="column") if u.modules else u
        for u in chosen.units
    ]
    model, _, _ = mw.auto_parallelize(
        model, plan=msgspec.structs.replace(chosen, units=tuple(units))
    )
    model(x[4 * rank : 4 * rank + 4]).square().mean().backward()
    twin(x).square().mean().backward()
    shard = model.weight.grad.as_subclass(torch.Tensor)
    return shard, twin.weight.grad


def test_a_model_of_one_layer(ranks):
    found = ranks(2)(train_one_layer)
    whole = torch.cat([shard for shard, _ in found])
    torch.testing.assert_close(whole, found[0][1])


# -- what cannot be ---------------------------------------------------------------------------


def refused_model(rank: int) -> str:
    with pytest.raises(mw.InputError) as caught:
        mw.auto_parallelize(network())
    return str(caught.value)


def test_without_inputs_it_says_what_to_pass(ranks):
    for message in ranks(2)(refused_model):
        assert "example_inputs=(x,)" in message


class FailsInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the tokens are out of range")


def refused_on_all(rank: int) -> str:
    with pytest.raises(mw.InputError) as caught:
        mw.auto_parallelize(FailsInForward(), example_inputs=samples(4)[:1])
    return str(caught.value)


def test_a_model_that_fails_is_the_same_sentence_on_every_rank(ranks):
    first, second = ranks(2)(refused_on_all)
    assert first == second
    assert "the tokens are out of range" in first


def refused_workloads(rank: int) -> list[str]:
    def of(make_batch, loss=nn.functional.mse_loss) -> mw.Workload:
        return mw.Workload("wrong", network(), make_batch, loss)

    def pair(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 12), torch.randn(size, 4)

    def batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 12),), torch.randn(size, 4))

    said = []
    for wrong in (of(pair), of(batch, nn.MSELoss(reduction="none"))):
        with pytest.raises(mw.InputError) as caught:
            mw.auto_parallelize(wrong)
        said.append(str(caught.value))
    return said


def test_a_workload_that_cannot_train_is_told_before_it_is_measured(ranks):
    for made, lost in ranks(2)(refused_workloads):
        assert "make_batch(2) of 'wrong' returned a tuple: return meshwright.Batch" in made
        assert "the loss of 'wrong' gave shape (2, 4), expected one number" in lost


def refused_plan(rank: int) -> str:
    with pytest.raises(mw.InputError) as caught:
        mw.auto_parallelize(network(), plan=hybrid(4))
    return str(caught.value)


def test_a_plan_for_four_ranks_started_on_two(ranks):
    for message in ranks(2)(refused_plan):
        assert "4" in message
        assert "2" in message


def refused_options(rank: int) -> list[str]:
    said = []
    for options in ({"global_batch_size": 0}, {"micro_batches": (0,)}, {"timeout_s": -1.0}):
        with pytest.raises(mw.InputError) as caught:
            mw.auto_parallelize(network(), example_inputs=samples(4)[:1], **options)
        said.append(str(caught.value))
    return said


def test_options_that_cannot_be(ranks):
    for said in ranks(2)(refused_options):
        assert "batch of 0" in said[0]
        assert "micro-batches of 0" in said[1]
        assert "-1" in said[2]


# -- agreement --------------------------------------------------------------------------------


def one_decides(rank: int) -> list[object]:
    found: list[object] = [rank_zero_decides(lambda: ("answer", dist.get_rank()))]

    def wrong() -> None:
        raise mw.InputError(f"rank {dist.get_rank()} is wrong")

    for work in (wrong, lambda: 1 / 0):
        with pytest.raises((mw.MeshwrightError, ZeroDivisionError)) as caught:
            rank_zero_decides(work)
        found.append((type(caught.value).__name__, str(caught.value)))

    def wrong_on_one() -> int:
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return 7

    with pytest.raises((mw.RunError, ValueError)) as caught:
        together(wrong_on_one)
    found.append((type(caught.value).__name__, str(caught.value)))
    found.append(together(lambda: rank * 10))
    return found


def test_what_rank_zero_decides_all_ranks_know(ranks):
    first, second = ranks(2)(one_decides)
    assert first[0] == second[0] == ("answer", 0)
    assert first[1] == second[1] == ("InputError", "rank 0 is wrong")
    assert first[2] == ("ZeroDivisionError", "division by zero")
    assert second[2] == ("RunError", "rank 0 failed with ZeroDivisionError: division by zero")
    assert first[3] == ("RunError", "rank 1 failed with ValueError: only here")
    assert second[3] == ("ValueError", "only here")
    assert (first[4], second[4]) == (0, 10)


# -- without a process group ------------------------------------------------------------------

ALONE = """
import meshwright as mw, torch
from torch import nn
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
same, _, plan = mw.auto_parallelize(model, optimizer, example_inputs=torch.randn(4, 6))
assert same is model and plan.world_size == 1 and plan.goal.batch == 4
assert plan.goal.optimizer == "adamw"
model(torch.randn(4, 6)).sum().backward()
optimizer.step()
mw.save(plan, "plan.json")
print(f"trained alone, {len(mw.explain(plan).units)} units")
"""


def run_alone(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    mine = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        env={**mine, "MESHWRIGHT_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


@pytest.mark.slow
def test_without_torchrun_it_is_a_world_of_one(tmp_path):
    done = run_alone(ALONE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained alone, 4 units" in done.stdout
    told = run_alone("from meshwright.cli.app import run; run(['explain', 'plan.json'])", tmp_path)
    assert "Each unit" in told.stdout, told.stderr


def test_half_an_environment_is_refused(tmp_path):
    done = run_alone(ALONE, tmp_path, RANK="0", WORLD_SIZE="2")
    assert "lacks MASTER_ADDR, MASTER_PORT" in done.stderr


@pytest.mark.slow
def test_models_with_dummy_inputs_need_nothing_else(tmp_path):
    pytest.importorskip("transformers")
    done = run_alone(
        "import meshwright as mw\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "c = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=1, n_head=2)\n"
        "model, optimizer, plan = mw.auto_parallelize(GPT2LMHeadModel(c))\n"
        "assert optimizer is None\n"
        "print('planned', plan.target)\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "planned GPT2LMHeadModel" in done.stdout
