"""``auto_parallelize``: measure, plan and apply, from one line of a training script."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import targets
from .arguments import check_arguments
from .executor.apply import apply
from .executor.exchange.lazy import releases_not
from .executor.exchange.optimizer import check_holds
from .executor.exchange.residual import Lossy
from .executor.ranks.agreement import rank_zero_decides, together
from .executor.ranks.watch import time_limit
from .executor.report import PLAN_VARIABLE, record_run
from .executor.start import start_process_group
from .goals import make_goal
from .measure import batches_for, cluster_of_ranks, profile_on_ranks
from .planner.nouns.errors import InputError
from .planner.nouns.goal import BatchStatistics, Goal
from .planner.nouns.noun import load
from .planner.nouns.pins import EARLY_RELEASE
from .planner.nouns.plan import Plan
from .planner.solver import solve
from .planning import Schedules, check_schedule, problem_for
from .units.workload import Workload

OptimizerName = Literal["sgd", "momentum", "adam", "adamw"]
WORKLOAD_SAMPLES = 32
"""What a rank is taken to feed of a ``Workload``, which makes batches of any size."""


def auto_parallelize(
    model: nn.Module | Workload,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example_inputs: Any = None,
    global_batch_size: int | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    plan: Plan | str | Path | None = None,
    memory_limit_bytes: int | None = None,
    micro_batches: Sequence[int] = (1,),
    batch_statistics: BatchStatistics = "local",
    schedule: Schedules = "auto",
    lossy: bool | Lossy = False,
    min_fidelity: float | None = None,
    solver: str = "auto",
    time_limit_s: float | None = None,
    timeout_s: float | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer | None, Plan]:
    """Plans how to train ``model`` on the ranks there are, and makes it so; collective.

    Starts the process group from torchrun's environment if there is none; without torchrun this
    process is the only rank. ``plan`` (or the file that the launcher names in ``MESHWRIGHT_PLAN``)
    is applied as it is. Else rank 0 profiles the model, all ranks measure their links, and rank 0
    plans for all; what was measured is kept on disk and found again by its fingerprint.

    ``example_inputs``: a tensor, a tuple of arguments, a mapping of keyword arguments or a
    ``Batch``, a few samples of what a rank will feed. Not needed for a ``Workload`` or a model with
    ``dummy_inputs``. ``global_batch_size`` in samples (default: the example's on each rank).
    ``loss(output, target)`` is measured with the model where given. ``schedule`` says how gradients
    travel: ``barrier``, ``priority``, or ``auto`` for what is predicted quicker. ``time_limit_s``
    bounds the search, ``timeout_s`` every later wait for another rank. ``lossy`` allows part of the
    gradients to wait for later steps where communication would be waited for, as long as
    ``min_fidelity`` (0.9, say) of their energy is sent at once, as measured. ``Lossy`` settings in
    place of True say how, for a ready ``plan`` too. The other arguments are ``Goal``'s; the
    optimizer's kind is read off ``optimizer``.

    Returns the same model object, the same optimizer object and the plan. Raises ``InputError`` or
    ``InfeasibleError``, the same on every rank.
    """
    limit = time_limit(timeout_s)
    check_schedule(schedule)
    check_arguments(
        optimizer, plan=plan, global_batch_size=global_batch_size,
        memory_limit_bytes=memory_limit_bytes, micro_batches=micro_batches,
        min_fidelity=min_fidelity, time_limit_s=time_limit_s,
    )  # fmt: skip
    device = start_process_group(limit)
    module = model.model if isinstance(model, Workload) else model
    together(lambda: _ready(module, optimizer, device))
    chosen = together(lambda: _given_plan(plan))
    if chosen is None:
        workload, samples = together(lambda: _workload(model, example_inputs, loss))
        goal = together(
            lambda: make_goal(
                samples * dist.get_world_size() if global_batch_size is None else global_batch_size,
                memory_limit_bytes=memory_limit_bytes,
                optimizer=optimizer_name(optimizer),
                micro_batches=micro_batches,
                batch_statistics=batch_statistics,
                allow_lossy=lossy is not False,
                min_fidelity=min_fidelity,
            )
        )
        with torch.random.fork_rng():  # measuring draws random batches; the user's draws go on
            forbidden = (EARLY_RELEASE,) if releases_not(optimizer) else ()
            chosen = _make_plan(workload, goal, device, schedule, solver, time_limit_s, forbidden)
    settings = lossy if isinstance(lossy, Lossy) else None
    model_, optimizer_ = apply(module, optimizer, chosen, timeout_s=timeout_s, lossy=settings)
    record_run(model_, optimizer_)
    return model_, optimizer_, chosen


def _given_plan(plan: Plan | str | Path | None) -> Plan | None:
    source = plan if plan is not None else os.environ.get(PLAN_VARIABLE)
    if source is None or isinstance(source, Plan):
        return source
    return load(Plan, source, "plan")


def _make_plan(
    workload: Workload,
    goal: Goal,
    device: torch.device,
    schedule: Schedules,
    solver: str,
    time_limit_s: float | None,
    forbidden: Sequence[str],
) -> Plan:
    profile = profile_on_ranks(workload, batches_for(goal, dist.get_world_size()), device)
    cluster = cluster_of_ranks(device)
    problem = problem_for(profile, cluster, goal, schedule=schedule, forbidden=forbidden)
    return rank_zero_decides(lambda: solve(problem, solver, time_limit_s).checked())


def _workload(
    model: nn.Module | Workload, example_inputs: Any, loss: Callable[[Any, Any], Tensor] | None
) -> tuple[Workload, int]:
    """What to measure, and how many samples a rank feeds where the user does not say."""
    if isinstance(model, Workload):
        return model, WORKLOAD_SAMPLES
    if not isinstance(model, nn.Module):
        raise InputError(
            f"auto_parallelize got {type(model).__name__} as model, expected a torch.nn.Module or "
            "a meshwright.Workload"
        )
    example = targets.example_batch(model, example_inputs)
    return targets.from_model(model, example, loss), example.size


def _ready(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """The model on this rank's device. Parameter objects stay, so optimizers stay valid: one of
    another model is refused before anything is measured."""
    if device.type != "cpu":
        model.to(device)
    if optimizer is not None and isinstance(model, nn.Module):
        check_holds(optimizer, model)


def optimizer_name(optimizer: torch.optim.Optimizer | None) -> OptimizerName:
    """Which of the goal's optimizers has the same state per parameter."""
    if optimizer is None:
        return "sgd"
    if isinstance(optimizer, torch.optim.SGD):
        return "momentum" if any(g["momentum"] for g in optimizer.param_groups) else "sgd"
    return "adamw" if isinstance(optimizer, torch.optim.AdamW) else "adam"
