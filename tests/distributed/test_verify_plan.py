"""``verify``: PASS for plans as they are, FAIL with the right name where something differs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import meshwright as mw
import msgspec
import numpy as np
import pytest
import torch
from launched import environment
from meshwright.executor.launch import verify as verification
from meshwright.executor.launch.train import run_steps
from meshwright.executor.launch.verify import verify_on_ranks
from meshwright.executor.launch.yardstick import LOSS, STATE, Yardstick, deviations
from meshwright.executor.parallel import is_parallel
from meshwright.models.units.discover import discover
from meshwright.models.zoo import build
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan, UnitPlan
from meshwright.planner.schema.record import save
from plans import plan as plan_by_hand
from torch import nn

from tests.traces import check_trace, tracks

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


class Turning(nn.Linear):
    """Has a complex parameter and a complex buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.by = nn.Parameter(torch.randn(2, dtype=torch.cfloat))
        self.register_buffer("angles", torch.polar(torch.ones(2), torch.arange(2.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.view_as_complex(super().forward(x).reshape(-1, 2, 2)) * self.by * self.angles
        return torch.view_as_real(made).flatten(1)


def verify_complex(rank: int) -> list[verification.Verification]:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 4),), torch.randn(size, 4))

    def workload() -> mw.Workload:
        torch.manual_seed(3)
        return mw.Workload("complex", Turning(), make_batch, nn.functional.mse_loss)

    step = verification.train_step

    def drifting(used, *rest):
        loss = step(used, *rest)
        with torch.no_grad():
            used.model.by += 1e-6j
        return loss

    found = [verify_on_ranks(plan_by_hand(2), workload())]
    verification.train_step = drifting
    try:
        return [*found, verify_on_ranks(plan_by_hand(2), workload())]
    finally:
        verification.train_step = step


def test_complex_numbers_are_compared_in_both_parts(ranks):
    found, drifting = ranks(2)(verify_complex)[0]
    assert (found.passed, found.dtype, found.notes) == (True, "float64", ())
    assert not drifting.passed
    assert [d.worst for d in drifting.deviations if d.what.startswith("parameters")] == ["by"]


class Single(nn.Linear):
    """Has no double precision, like torch's product of groups in mixtures of experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float32, got Double")
        return super().forward(x)


class Unmasked(nn.Linear):
    """Multiplies zeros by float64's smallest number in float32, like a mask of some models."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.zeros(()) * torch.finfo(x.dtype).min


class Casting(nn.Linear):
    """Makes its parameters single in its first forward, like a router of some models."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(torch.float32)
        return super().forward(x.to(torch.float32)).to(x.dtype)


class Growing(nn.Linear):
    """Makes a buffer anew in the size of its input, like positions of some models."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("positions", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.positions) != x.shape[1]:
            self.positions = torch.arange(x.shape[1], dtype=x.dtype)
        return super().forward(x + self.positions)


def verify_other_forwards(rank: int) -> list[verification.Verification]:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 3),), torch.randn(size, 2))

    def verified(cls: type[nn.Linear]) -> verification.Verification:
        torch.manual_seed(3)
        workload = mw.Workload("other", cls(3, 2), make_batch, nn.functional.mse_loss)
        return verify_on_ranks(plan_by_hand(2), workload)

    return [verified(cls) for cls in (Single, Unmasked, Casting, Growing)]


def test_models_of_their_own_precision_or_size_are_compared(ranks):
    single, unmasked, casting, growing = ranks(2)(verify_other_forwards)[0]
    assert all(found.passed for found in (single, unmasked, casting, growing))
    for found, why in (
        (single, "expected Float32, got Double"),
        (unmasked, "its outputs are no numbers there"),
    ):
        assert found.dtype == "float32"
        told = f"the model does not compute in float64 ({why}): compared in float32"
        assert found.notes == (told,)
    assert casting.dtype == growing.dtype == "float64"


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


class Even(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) % 2:
            raise ValueError(f"{len(x)} is odd")
        return super().forward(x)


def picky() -> mw.Workload:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 3),), torch.randn(size, 2))

    torch.manual_seed(3)
    model = nn.Sequential(Even(3, 4), nn.Linear(4, 2))
    return mw.Workload("even", model, make_batch, nn.functional.mse_loss)


def verify_picky(rank: int) -> tuple[verification.Verification, list[str]]:
    said = []
    for refused in (
        lambda: verify_on_ranks(plan_by_hand(2), picky(), batch=2),
        lambda: run_steps(picky(), goal_of(plan_by_hand(2), 6), 1),
    ):
        with pytest.raises(mw.InputError) as caught:
            refused()
        said.append(str(caught.value))
    return verify_on_ranks(plan_by_hand(2), picky(), batch=4), said


class Lengths(nn.Linear):
    """Is told of each sample how much of it counts, in a list."""

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        pairs = zip(x, lengths, strict=True)
        return torch.stack([super(Lengths, self).forward(row[:n].mean(0)) for row, n in pairs])


def verify_lengths(rank: int) -> str:
    def make_batch(size: int) -> mw.Batch:
        return mw.Batch(
            (torch.randn(size, 5, 3), [1 + i % 5 for i in range(size)]), torch.randn(size, 2)
        )

    given = mw.Workload("lengths", Lengths(3, 2), make_batch, nn.functional.mse_loss)
    with pytest.raises(mw.InputError) as caught:
        verify_on_ranks(plan_by_hand(2), given, batch=8)
    return str(caught.value)


def test_what_cannot_be_shared_out_is_told(ranks):
    for said in ranks(2)(verify_lengths):
        assert "takes its batch of 8 and fails on 4 samples of it" in said
        assert "test_verify_plan.py, line" in said
        assert "make what it has of each sample (a list of lengths, say) a tensor" in said


def goal_of(plan: Plan, batch: int) -> Plan:
    return msgspec.structs.replace(plan, goal=msgspec.structs.replace(plan.goal, batch=batch))


def test_shares_that_a_model_refuses_are_left_out_or_told(ranks):
    for found, said in ranks(2)(verify_picky):
        assert found.passed
        assert found.batches == (4, 4, 4)
        assert "uneven shares are not compared, as they are refused: " in found.notes[0]
        for sentence, size in zip(said, (1, 3), strict=True):
            where = rf"batch of {size} in module '0' \(test_verify_plan\.py, line \d+\) with "
            assert re.search(rf"{where}ValueError: {size} is odd", sentence)


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
    """Adds one number to the whole batch, as some jitter positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(())


class Masked(nn.Module):
    """Leaves out elements of each sample by chance, drawn by numpy."""

    def __init__(self, *, mixing: bool = False) -> None:
        super().__init__()
        self.mixing = mixing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.from_numpy(np.random.random(x.shape) > 0.3).to(x.device)
        x = x * kept
        return nn.functional.normalize(x, dim=0) if self.mixing else x


def random_workload(first: nn.Module) -> mw.Workload:
    torch.manual_seed(3)

    def make_batch(size: int) -> mw.Batch:
        return mw.Batch((torch.randn(size, 6),), torch.randint(3, (size,)))

    model = nn.Sequential(first, nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    return mw.Workload("random", model, make_batch, nn.functional.cross_entropy)


def verify_random(rank: int) -> dict[str, verification.Verification]:
    def verified(first: nn.Module, **more: object) -> verification.Verification:
        # A column and a row of one pair, so that masked samples travel; or data parallel.
        plan = plan_of(random_workload(first), 2, {"1": "column", "3": "row"}, **more)
        return verify_on_ranks(plan, random_workload(first))

    found = {
        "of the batch": verified(Restless(6, 6)),
        "of samples": verified(Masked()),
        "in micro-batches": verified(Masked(), micro_batches=2),
        "mixing": verified(Masked(mixing=True)),
    }
    apply, draws_in = verification.apply, verification.draws_in
    verification.draws_in = lambda step_s: 32  # however busy the machine is

    def faulty(model: nn.Module, *args: object, **kwargs: object) -> object:
        # Summed over the ranks, not averaged.
        model[1].bias.register_hook(lambda gradient: 2 * gradient)
        return apply(model, *args, **kwargs)

    verification.apply = faulty
    try:
        plan = plan_of(random_workload(Masked()), 2, {})
        found["summed"] = verify_on_ranks(plan, random_workload(Masked()))
    finally:
        verification.apply, verification.draws_in = apply, draws_in
    return found


def test_a_model_that_is_random_is_held_to_its_own_spread(ranks):
    np.random.seed(5)
    first, second = ranks(2)(verify_random)
    assert first == second
    # Every rank can draw what one process draws: equal to rounding.
    jittered = first["of the batch"]
    assert (jittered.passed, jittered.draws, len(jittered.batches)) == (True, None, 3)
    assert jittered.notes == (
        "module '0' is random: compared with equal random numbers in every step",
    )
    for name in ("of samples", "in micro-batches"):
        found = first[name]
        assert found.passed
        assert found.random == "module '0'"
        assert 8 <= found.draws <= 32
        assert any("of right plans 0.1% would differ" in note for note in found.notes)
        assert any("times the mean" in note for note in found.notes)
    mixed = first["mixing"]
    assert not mixed.passed
    assert "computes over the batch as a whole" in mixed.cause
    summed = first["summed"]
    assert not summed.passed
    assert summed.cause == ""
    assert [d.worst for d in summed.deviations if not d.passed] == ["1.bias"]


# -- the command ------------------------------------------------------------------------------


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshwright", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=cwd,
        env=environment(),
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
    files = ("--report", "r.json", "--trace", "t.json")
    done = command("launch", "plan.json", *files, "train.py", 9, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained mlp") == 2
    assert "step time" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["steps"] == 5  # nine, without the three of the warm-up, make five differences
    assert report["measured"]["step_s"] > report["measured"]["blocking_s"] > 0
    assert "t.json, without what is predicted: this machine has not made the plan" in done.stderr
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    check_trace(events)
    named = {track.split()[0] for process, track in tracks(events) if process == "rank 1"}
    assert {"computing,", "exchange,", "redistribution"} <= named


@pytest.mark.slow
def test_a_script_of_one_step_is_not_measured(tmp_path):
    save(plan_of(build("mlp"), 2, {"3": "column", "5": "row"}), tmp_path / "plan.json")
    (tmp_path / "train.py").write_text(SCRIPT)
    done = command("launch", "plan.json", "train.py", 1, cwd=tmp_path)
    assert done.returncode == 0
    assert "nothing was measured" in done.stderr
