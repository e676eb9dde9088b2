"""Equality of a plan's training with a single process, on the user's own model.

Three steps of SGD with momentum on the ranks of the plan, and the same three in one process on the
whole batch; the second batch is one sample larger, so that shares are uneven. Equality is claimed
for dropout off and for batch statistics over the whole batch: both are set so here, and the notes
say where that changed something.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...models.workload import Batch, Workload
from ...planner.explain.compare import policy_words
from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan, UnitPlan
from ...planner.schema.record import Count, Record
from ..apply import apply
from ..comm.agreement import rank_zero_decides, together
from ..parallel import full_state_dict
from .equality import LOSS, STATE, Deviation, DtypeName, deviations
from .train import train_step

STEPS = 3
LEARNING_RATE = 0.01
MOMENTUM = 0.9
SEED = 1
_DTYPES = {"float64": torch.float64, "float32": torch.float32}

Progress = Callable[[int, int, str], None]


class Verification(Record, frozen=True, kw_only=True):
    """What was compared over which batches, what was changed for it, and how it came out."""

    target: str
    world_size: Count
    dtype: DtypeName
    batches: tuple[Count, ...]
    notes: tuple[str, ...]
    deviations: tuple[Deviation, ...]
    passed: bool


class _Trained(NamedTuple):
    """Where a training ended: the losses of its steps, parameters and buffers by name."""

    losses: list[float]
    state: dict[str, Tensor]


def verify_on_ranks(
    plan: Plan,
    workload: Workload,
    *,
    dtype: DtypeName = "float64",
    batch: int | None = None,
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Verification:
    """Whether ``plan`` trains the workload's model as one process does; collective.

    The same workload, equally initialised, must be given on every rank; its model is not usable
    afterwards. ``batch`` in samples: the plan's, but at most four for each rank, unless given.
    """
    plan, notes = _over_the_whole_batch(plan, workload.model)
    notes += _still(workload.model)
    sizes = batch_sizes(plan, batch)
    batches = together(lambda: _draw(workload, sizes, dtype, device))
    workload.model.to(device, _DTYPES[dtype]).train()
    alone = copy.deepcopy(workload.model) if dist.get_rank() == 0 else None
    total = 2 * len(sizes)
    ours = _train_together(
        plan, workload, batches, timeout_s, lambda n: progress(n, total, "ranks")
    )

    def judge() -> tuple[Deviation, ...]:
        assert alone is not None
        theirs = _train_alone(
            alone, workload, batches, lambda n: progress(len(sizes) + n, total, "one process")
        )
        return _compare(
            ours,
            theirs,
            plan,
            dtype,
            {n for n, _ in alone.named_parameters(remove_duplicate=False)},
        )

    found = rank_zero_decides(judge)
    return Verification(
        target=plan.target,
        world_size=plan.world_size,
        dtype=dtype,
        batches=tuple(sizes),
        notes=tuple(notes),
        deviations=found,
        passed=all(d.passed for d in found),
    )


def batch_sizes(plan: Plan, batch: int | None) -> list[int]:
    """The sizes of the global batches of the steps: the second is uneven."""
    size = batch or min(plan.goal.batch, 4 * plan.world_size * plan.micro_batches)
    return [size, size + 1, size]


def _over_the_whole_batch(plan: Plan, model: nn.Module) -> tuple[Plan, list[str]]:
    if plan.goal.batch_statistics == "global" or not any(
        isinstance(m, _BatchNorm) for m in model.modules()
    ):
        return plan, []
    goal = msgspec.structs.replace(plan.goal, batch_statistics="global")
    note = (
        "the plan normalises by each rank's own statistics, as DistributedDataParallel does, which "
        "no single process equals: compared with statistics of the whole batch"
    )
    return msgspec.structs.replace(plan, goal=goal), [note]


def _still(model: nn.Module) -> list[str]:
    """Turns dropout off: modules, and the rates that modules of any kind keep as attributes."""
    off = list(_rates(model))
    for module, name in off:
        setattr(module, name, 0.0)
    what = "1 module" if len(off) == 1 else f"{len(off)} modules"
    return [f"dropout is off in {what}"] if off else []


def _rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        is_dropout = "dropout" in type(module).__name__.lower()
        for name, value in vars(module).items():
            named = "drop" in name.lower() or (is_dropout and name == "p")
            if named and isinstance(value, float) and 0 < value <= 1:
                yield module, name


def _draw(
    workload: Workload, sizes: list[int], dtype: DtypeName, device: torch.device | str
) -> list[Batch]:
    """The same batches on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return [workload.make_batch(size).to(device, _DTYPES[dtype]) for size in sizes]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def _train_together(
    plan: Plan,
    workload: Workload,
    batches: list[Batch],
    timeout_s: float | None,
    progress: Callable[[int], None],
) -> _Trained:
    optimizer = _optimizer(workload.model)
    model, _ = apply(workload.model, optimizer, plan, timeout_s=timeout_s)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(train_step(workload, plan, batch, optimizer))
        progress(number + 1)
    return _Trained(losses, full_state_dict(model))


def _check_repeatable(model: nn.Module, batch: Batch) -> None:
    """Two forwards must give the same, or nothing that is compared means anything."""
    before = [b.clone() for b in model.buffers()]
    with torch.no_grad():
        first, second = (pytree.tree_leaves(model(*batch.args, **batch.kwargs)) for _ in range(2))
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    pairs = zip(first, second, strict=True)
    if not all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor)):
        raise InputError(
            "the model gives different outputs for one batch although dropout is off, so no two "
            "runs of it are equal: switch off what is random in it to verify a plan"
        )


def _train_alone(
    model: nn.Module, workload: Workload, batches: list[Batch], progress: Callable[[int], None]
) -> _Trained:
    _check_repeatable(model, batches[0])
    optimizer = _optimizer(model)
    losses = []
    for number, batch in enumerate(batches):
        loss = workload.loss(model(*batch.args, **batch.kwargs), batch.target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        progress(number + 1)
    return _Trained(losses, dict(model.state_dict()))


def _compare(
    ours: _Trained, theirs: _Trained, plan: Plan, dtype: DtypeName, parameters: set[str]
) -> tuple[Deviation, ...]:
    losses = [
        {f"step {i + 1}": torch.tensor(x, dtype=torch.float64) for i, x in enumerate(t.losses)}
        for t in (ours, theirs)
    ]
    loss = deviations(losses[0], losses[1], LOSS[dtype], lambda name: "loss")
    kinds = _kinds(plan)

    def kind(name: str) -> str:
        return kinds(name) if name in parameters else "buffers"

    return loss + deviations(ours.state, theirs.state, STATE[dtype], kind)


def _decided(unit: UnitPlan) -> str:
    divided = "data parallel" if unit.style == "none" else f"{unit.style} {unit.layout}"
    return ", ".join(["parameters", divided, *policy_words(unit)])


def _kinds(plan: Plan) -> Callable[[str], str]:
    """The class of a parameter: how the unit that it belongs to is divided, and how its gradients
    are exchanged."""
    by_module = {module: _decided(unit) for unit in plan.units for module in unit.modules}

    def kind(name: str) -> str:
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1))
        return next((by_module[p] for p in prefixes if p in by_module), "parameters, data parallel")

    return kind
