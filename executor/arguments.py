"""What ``auto_parallelize`` is given, checked for its types before anything starts."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..planner.schema.errors import InputError
from ..planner.schema.plan import Plan
from ..planner.solve.request import check_time_limit
from .gradients.feedback import Lossy


def check_arguments(
    optimizer: Any,
    *,
    plan: Any,
    global_batch_size: Any,
    memory_limit_bytes: Any,
    micro_batches: Any,
    min_fidelity: Any,
    inner_steps: Any,
    time_limit_s: Any,
    lossy: Any,
) -> None:
    """Raises ``InputError`` with the first value of a wrong type, and what to give instead.

    Only types, and the time limit: what a number must be is the goal's to say (``make_goal``).
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise _wrong("optimizer", optimizer, "a torch.optim.Optimizer, such as SGD(parameters)")
    if plan is not None and not isinstance(plan, Plan | str | Path):
        raise _wrong("plan", plan, "a Plan or the path of its file, such as 'plan.json'")
    if global_batch_size is not None and not _whole(global_batch_size):
        raise _wrong("global_batch_size", global_batch_size, "a whole number of samples as int")
    if memory_limit_bytes is not None and not _whole(memory_limit_bytes):
        raise _wrong("memory_limit_bytes", memory_limit_bytes, "bytes as int, such as 8 * 2**30")
    if not _counts(micro_batches):
        raise _wrong("micro_batches", micro_batches, "the counts to choose from, such as (1, 2)")
    if min_fidelity is not None and not _number(min_fidelity):
        raise _wrong("min_fidelity", min_fidelity, "a share from 0 to 1, such as 0.9")
    if inner_steps is not None and not _whole(inner_steps):
        raise _wrong("inner_steps", inner_steps, "a whole number of steps as int, such as 32")
    if time_limit_s is not None and not _number(time_limit_s):
        raise _wrong("time_limit_s", time_limit_s, "seconds, such as 30")
    check_time_limit(time_limit_s)
    if not isinstance(lossy, bool | Lossy):
        raise _wrong("lossy", lossy, "True or False, or how it is done as mw.Lossy(...)")


def tell_of_idle_ranks(batch: int, ranks: int) -> None:
    """Warns of a global batch that leaves ranks without samples."""
    if 0 < batch < ranks:
        warnings.warn(
            f"a global batch of {batch} leaves {ranks - batch} of {ranks} ranks without "
            f"samples: pass global_batch_size in samples of all ranks, at least {ranks}",
            stacklevel=3,
        )


def tell_of_ready_plan(
    plan: Plan,
    *,
    global_batch_size: int | None,
    memory_limit_bytes: int | None,
    micro_batches: Sequence[int],
    min_fidelity: float | None,
    inner_steps: int | None,
) -> None:
    """Warns of what is asked for beside a ready plan that was made for something else."""
    goal, local = plan.goal, plan.local_steps
    pairs = {
        "global_batch_size": (global_batch_size, goal.batch),
        "memory_limit_bytes": (memory_limit_bytes, goal.memory_limit_bytes),
        "min_fidelity": (min_fidelity, goal.min_fidelity),
        "inner_steps": (inner_steps, None if local is None else local.inner_steps),
    }
    changed = [
        f"{name}={asked} (the plan has {'none' if has is None else has})"
        for name, (asked, has) in pairs.items()
        if asked is not None and asked != has
    ]
    if tuple(micro_batches) != (1,) and plan.micro_batches not in micro_batches:
        changed.append(f"micro_batches={micro_batches} (the plan has {plan.micro_batches})")
    if changed:
        warnings.warn(
            f"a ready plan is taken as it is, whatever is asked for beside it: {', '.join(changed)}"
            "; plan anew with that, or leave it out",
            stacklevel=3,
        )


def _wrong(name: str, value: object, remedy: str) -> InputError:
    return InputError(f"{name}={value!r} is of type {type(value).__name__}: give {remedy}")


def _whole(value: object) -> bool:
    """Whether it is a Python int: numpy's do not survive being written to a plan's file."""
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, float) or _whole(value)


def _counts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(map(_whole, value))
