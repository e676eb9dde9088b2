"""``verify``: PASS for plans as they are, FAIL with the right name where something differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.launch import verify as verification
from meshwright.executor.launch.verify import LOSS, STATE, Yardstick, deviations, verify_on_ranks
from meshwright.executor.parallel import is_parallel
from meshwright.models.units.discover import discover
from meshwright.models.zoo import build
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan, UnitPlan
from meshwright.planner.schema.record import save
from plans import plan as plan_by_hand
from torch import nn

pytestmark = pytest.mark.timeout(180)


def plan_of(workload: mw.Workload, world: int, styles: dict[str, str], **more: object) -> Plan:
    """The workload's units with those styles, divided over all ranks, else data parallel."""
    found = discover(workload.model, workload.make_batch(3), workload.make_batch(2))
    units = []
    for spec in found.units:
        style = styles.get(spec.name, "none")
        degree = 1 if style == "none" else world
        units.append(
            UnitPlan(
                name=spec.name,
                kind=spec.kind,
                modules=spec.modules,
                batched_inputs=spec.batched_inputs,
                batch_dims=spec.batch_dims,
                layout=Layout(groups=world // degree, degree=degree),
                style=style,
            )
        )
    made = plan_by_hand(world, units, **more)
    return msgspec.structs.replace(made, target=workload.name)


# -- the yardstick ----------------------------------------------------------------------------


def test_the_yardstick_is_the_designs():
    assert STATE[torch.float64] == Yardstick(1e-9, 1e-10)
    assert STATE[torch.float32] == Yardstick(1e-5, 1e-6)
    assert LOSS[torch.float32].relative == 1e-5


@pytest.mark.parametrize(("off_by", "equal"), [(0.9, True), (1.1, False)])
def test_the_yardstick_takes_every_element(off_by, equal):
    reference = torch.tensor([100.0, 1e-3, 0.0], dtype=torch.float64)
    for i in range(3):
        found = reference.clone()
        found[i] += off_by * (1e-9 * reference[i] + 1e-10)
        (deviation,) = deviations(
            {"w": found}, {"w": reference}, STATE[torch.float64], lambda name: "all"
        )
        assert deviation.passed is equal
        assert deviation.of_allowed == pytest.approx(off_by, rel=1e-3)


@pytest.mark.parametrize(
    "found",
    [
        {"w": torch.tensor([1.0, float("nan")])},
        {"w": torch.ones(3)},
        {},
        {"w": torch.ones(2), "more": torch.ones(1)},
    ],
)
def test_what_is_missing_or_no_number_differs(found):
    (deviation,) = deviations(found, {"w": torch.ones(2)}, STATE[torch.float32], lambda name: "all")
    assert not deviation.passed


def test_whole_numbers_must_be_equal():
    one, two = torch.tensor(10**12), torch.tensor(10**12 + 1)
    (deviation,) = deviations({"n": two}, {"n": one}, STATE[torch.float32], lambda name: "all")
    assert not deviation.passed


# -- on ranks ---------------------------------------------------------------------------------


def normalised() -> mw.Workload:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )

    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 1, 4, 4),), torch.randint(3, (size,)))

    return mw.Workload("normalised", model, make_batch, nn.functional.cross_entropy)


def verify_normalised(rank: int, styles: dict[str, str], dtype: str) -> verification.Verification:
    workload = normalised()
    plan = plan_of(workload, 2, styles, statistics="local")
    return verify_on_ranks(plan, workload, dtype=dtype)


class StochasticDepth(nn.Module):
    """As torchvision's, which keeps its rate as ``p``."""

    def __init__(self) -> None:
        super().__init__()
        self.p = 0.2


def test_whatever_leaves_out_by_chance_is_switched_off():
    model = nn.Sequential(nn.Dropout(0.5), StochasticDepth(), nn.Linear(2, 2))
    assert verification._without_dropout(model) == ["dropout is off in 2 modules"]
    assert (model[0].p, model[1].p) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("styles", [{}, {"5": "column", "7": "row"}])
def test_dropout_and_local_statistics_are_set_aside_and_said(ranks, styles, dtype):
    first, second = ranks(2)(verify_normalised, styles, dtype)
    assert first == second
    assert first.passed
    assert first.batches == (8, 9, 8)
    assert any("dropout is off in 1 module" in note for note in first.notes)
    assert any("statistics of the whole batch" in note for note in first.notes)
    kinds = {d.what: d for d in first.deviations}
    assert kinds["loss"].tensors == 3
    assert kinds["buffers"].tensors == 3
    if styles:
        assert kinds["parameters, column (1,2)"].tensors == 2


def verify_micro(rank: int) -> verification.Verification:
    workload = build("mlp")
    return verify_on_ranks(plan_of(workload, 2, {}, micro_batches=3), workload)


def test_micro_batches_equal_the_whole_batch(ranks):
    assert ranks(2)(verify_micro)[0].passed


def verify_with_a_fault(rank: int) -> verification.Verification:
    """One rank's copy of one layer drifts by a little in every step."""
    workload = build("mlp")
    plan = plan_of(workload, 2, {"3": "column", "5": "row"})
    step = verification.train_step

    def drifting(*args: object) -> float:
        loss = step(*args)
        with torch.no_grad():
            workload.model[3].weight += 1e-6
        return loss

    verification.train_step = drifting
    try:
        return verify_on_ranks(plan, workload)
    finally:
        verification.train_step = step


def test_a_fault_is_found_and_named(ranks):
    found = ranks(2)(verify_with_a_fault)[0]
    assert not found.passed
    broken = {d.what: d for d in found.deviations}["parameters, column (1,2)"]
    assert not broken.passed
    assert broken.worst == "3.weight"
    assert broken.largest > 1e-6


class RootMeanSquare(nn.Module):
    """Normalises in float32, whatever it is given, as language models do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


def verify_coarse(rank: int) -> tuple[verification.Verification, verification.Verification]:
    def workload() -> mw.Workload:
        torch.manual_seed(3)
        norms = [RootMeanSquare(8), RootMeanSquare(8)]
        layers = [nn.Linear(4, 8), norms[0], nn.Linear(8, 8), nn.GELU(), norms[1], nn.Linear(8, 3)]

        def make_batch(size: int) -> mw.Batch:
            return mw.Batch((torch.randn(size, 4),), torch.randint(3, (size,)))

        model = nn.Sequential(*layers)
        return mw.Workload("coarse", model, make_batch, nn.functional.cross_entropy)

    plain = verify_on_ranks(plan_of(workload(), 2, {"2": "row"}), workload())
    step = verification.train_step

    def drifting(used: mw.Workload, *args: object) -> float:
        loss = step(used, *args)
        with torch.no_grad():
            used.model[2].weight += 1e-4
        return loss

    verification.train_step = drifting
    try:
        return plain, verify_on_ranks(plan_of(workload(), 2, {"2": "row"}), workload())
    finally:
        verification.train_step = step


def test_a_model_is_judged_by_the_precision_in_which_it_computes(ranks):
    found, drifting = ranks(2)(verify_coarse)[0]
    assert found.passed
    assert found.notes == (
        "module '1' (and 1 more) computes in float32 whatever it is given: differences of "
        "float32's rounding are allowed",
    )
    assert not drifting.passed


class Single(nn.Linear):
    """Has no double precision, like torch's product of groups in mixtures of experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float32, got Double")
        return super().forward(x)


def verify_single(rank: int) -> verification.Verification:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 3),), torch.randn(size, 2))

    torch.manual_seed(3)
    workload = mw.Workload("single", Single(3, 2), make_batch, nn.functional.mse_loss)
    return verify_on_ranks(plan_by_hand(2), workload)


def test_a_model_without_double_precision_is_compared_in_single(ranks):
    found = ranks(2)(verify_single)[0]
    assert found.passed
    assert found.dtype == "float32"
    assert found.notes == (
        "the model does not compute in float64 (expected Float32, got Double): compared in float32",
    )


def verify_sum(rank: int) -> verification.Verification:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 3),), torch.randn(size, 2))

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target, reduction="sum")

    torch.manual_seed(3)
    return verify_on_ranks(plan_by_hand(2), mw.Workload("sum", nn.Linear(3, 2), make_batch, loss))


def test_a_loss_that_no_plan_could_train_alike_is_told(ranks):
    found = ranks(2)(verify_sum)[0]
    assert not found.passed
    assert "not the mean of the losses of its parts" in found.cause


class Ranged(nn.Linear):
    """Keeps the mean of what it has made."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x)
        self.mean = made.detach().mean()
        return made


def verify_ranged(rank: int) -> tuple[verification.Verification, verification.Verification]:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 3),), torch.randn(size, 2))

    def wrong(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ours = nn.functional.mse_loss(output, target)
        return ours * 1.001 if is_parallel(model) else ours

    torch.manual_seed(3)
    right = mw.Workload("ranged", Ranged(), make_batch, nn.functional.mse_loss)
    model = Ranged()
    faulty = mw.Workload("ranged", model, make_batch, wrong)
    chosen = plan_by_hand(2)
    return verify_on_ranks(chosen, right), verify_on_ranks(chosen, faulty)


def test_a_buffer_that_no_plan_could_leave_alike_is_told_and_hides_nothing_else(ranks):
    found, faulty = ranks(2)(verify_ranged)[0]
    assert {d.what for d in found.deviations if not d.passed} == {"buffers"}
    assert "keeps in buffer 'mean'" in found.cause
    assert not faulty.passed
    assert not faulty.cause


class Restless(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(())


def verify_restless(rank: int) -> str:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 3),), torch.zeros(size, 2))

    workload = mw.Workload("restless", Restless(3, 2), make_batch, nn.functional.mse_loss)
    with pytest.raises(mw.InputError) as caught:
        verify_on_ranks(plan_by_hand(2), workload)
    return str(caught.value)


def test_a_model_that_is_random_cannot_be_verified(ranks):
    assert all("different outputs for one batch" in said for said in ranks(2)(verify_restless))


# -- the command ------------------------------------------------------------------------------


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": str(cwd / "cache")},
        check=False,
    )


@pytest.mark.slow
def test_the_command_verifies_and_launches_its_own_ranks(tmp_path):
    save(plan_of(build("mlp"), 2, {"3": "column", "5": "row"}), tmp_path / "plan.json")
    done = command("verify", "plan.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["passed"]
    done = command("launch", "plan.json", "--steps", 3, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 3
    assert report["measured"]["step_s"] > report["measured"]["blocking_s"] > 0
    assert report["measured"]["peak_bytes"] > 0
    assert 0 < report["accuracy"] < 1


@pytest.mark.slow
def test_a_plan_of_another_model_is_refused_by_every_rank(tmp_path):
    other = plan_of(build("cnn-digits"), 2, {})
    save(msgspec.structs.replace(other, target="mlp"), tmp_path / "plan.json")
    done = command("verify", "plan.json", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("meshwright: ")


SCRIPT = """
import meshwright as mw, torch, sys
from torch import nn
from meshwright.models import build
workload = build("mlp")
optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
model, optimizer, plan = mw.auto_parallelize(workload, optimizer)
for step in range(int(sys.argv[1])):
    batch = workload.make_batch(4)
    workload.loss(model(*batch.args), batch.target).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", plan.target)
"""


@pytest.mark.slow
def test_a_script_is_measured_between_its_steps(tmp_path):
    save(plan_of(build("mlp"), 2, {"3": "column", "5": "row"}), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("launch", "plan.json", "--report", "r.json", "train.py", 9, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained mlp") == 2
    assert "step time" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["steps"] == 5  # nine, without the three of the warm-up, make five differences
    assert report["measured"]["step_s"] > report["measured"]["blocking_s"] > 0


@pytest.mark.slow
def test_a_script_of_one_step_is_not_measured(tmp_path):
    save(plan_of(build("mlp"), 2, {"3": "column", "5": "row"}), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("launch", "plan.json", "train.py", 1, cwd=tmp_path)
    assert done.returncode == 0
    assert "nothing was measured" in done.stderr
