"""Whether what a plan needs is free, before its first step; and what to say when it was not.

What a plan needs is the largest point of its timeline (see [Note: The memory timeline] in
planner/memory/timeline.py).
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.units.storages import OverBudgetError
from ..planner.schema.errors import InputError
from ..planner.schema.plan import CLASS_NAMES, Moment, Plan
from .gradients.pending import bare
from .gradients.reshard import sharded_param
from .run import Run

SWITCH = "MESHWRIGHT_CHECK_MEMORY"
"""Set to 0 it lets a run begin that would be refused."""
SPARE_BYTES = 2**24
"""Below this nothing is refused: the process itself takes more."""
MIB = 2**20

_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def free_bytes(device: torch.device) -> int | None:
    """What a rank can still allocate on its device: on a CPU its share of what the host and its
    control group (a container's limit) have left. None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    known = [n for n in (_host_bytes(), _group_bytes()) if n is not None]
    return min(known) // _local_ranks() if known else None


def _host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return 1024 * int(found[0]) if found else None


def _group_bytes() -> int | None:
    try:
        limit, used = (path.read_text().strip() for path in _GROUPS)
    except OSError:
        return None
    return max(int(limit) - int(used), 0) if limit.isdigit() else None


def _local_ranks() -> int:
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def check_headroom(run: Run, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raises ``InputError`` on every rank where some rank has less free than the plan is predicted
    to need there. Collective; what the model and the optimizer hold already is not needed anew."""
    plan = run.plan
    if not plan.prediction.peak_bytes:
        return
    first = next(model.parameters(), None)
    free = free_bytes(torch.device("cpu") if first is None else first.device)
    there = _bytes([*model.parameters(), *model.buffers(), *_state(optimizer)])
    needed = max(plan.prediction.peak_bytes[run.world.position] - there, 0)
    mine = [needed, -1 if free is None else free]
    rows = run.control.gather(mine, "the check of free memory", whole=False).rows()
    if os.environ.get(SWITCH) == "0":
        return
    for rank, (needs, has) in enumerate(rows):
        if has >= 0 and needs > max(has, SPARE_BYTES):
            raise InputError(refusal(plan, rank, int(needs), int(has)))


def refusal(plan: Plan, rank: int, needed_bytes: int, free: int) -> str:
    """Why a rank cannot run the plan, and what would help."""
    return (
        f"rank {rank} has {_mib(free)} of memory free and the plan needs {_mib(needed_bytes)} more"
        f"{_at(plan.prediction.fullest)}: free some, plan with --memory-limit "
        f"{_limit(plan, needed_bytes, free)}, or set {SWITCH}=0"
    )


def _at(moment: Moment | None) -> str:
    """Where a step holds most, and what that is."""
    if moment is None:
        return ""
    return f" (most in the {moment.phase} of unit {moment.unit!r}, above all {moment.largest})"


def _limit(plan: Plan, needed_bytes: int, free: int) -> str:
    """A limit under which a plan would fit."""
    fits = max(plan.prediction.peak_bytes, default=0) - (needed_bytes - free)
    return f"{max(fits, MIB) // MIB}MiB"


def overflowed(error: BaseException) -> bool:
    """Whether a run ended for want of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in text


class _Watched(NamedTuple):
    """The run that was applied last."""

    # Weak: a run that its user has dropped must not keep its model's memory.
    run: weakref.ref[Run]
    model: weakref.ref[nn.Module]
    optimizer: weakref.ref[Optimizer] | None


_watched: _Watched | None = None


def watch_memory(run: Run, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Should this process end for want of memory, ``account`` is printed on stderr."""
    global _watched
    if _watched is None:
        before = sys.excepthook

        def explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            found = account(error) if overflowed(error) else None
            if found is not None:
                print("\n  ".join([found.sentence, *found.details, found.remedy]), file=sys.stderr)

        # A hook rather than an except clause: the loop is the user's.
        sys.excepthook = explain
    optimizer_ref = weakref.ref(optimizer) if optimizer is not None else None
    _watched = _Watched(weakref.ref(run), weakref.ref(model), optimizer_ref)


class Account(NamedTuple):
    """What a run that lacked memory has to say, sentence by sentence. ``limit_bytes`` is what the
    rank may take in a plan that is made instead; ``remedy`` names a command that makes one."""

    sentence: str
    details: tuple[str, ...]
    remedy: str
    limit_bytes: int


def account(error: BaseException) -> Account | None:
    """What the last run held when memory ran out, what was predicted, and how to make a plan that
    needs less; None where there is no run. Communicates nothing: peers may be gone."""
    run, model = (_watched.run(), _watched.model()) if _watched is not None else (None, None)
    if _watched is None or run is None or model is None:
        return None
    optimizer = _watched.optimizer() if _watched.optimizer is not None else None
    plan = run.plan
    first_line = next(iter(str(error).splitlines()), "") or type(error).__name__
    # The limit to plan with: the budget that was passed, else a tenth less than was needed.
    limit = error.limit_bytes if isinstance(error, OverBudgetError) else less_than(plan)
    return Account(
        f"rank {run.world.rank} ran out of memory: {first_line}",
        (*forecast(plan), *_in_memory(model, optimizer)),
        f"a plan that needs less: {command(plan, limit)}",
        limit,
    )


def forecast(plan: Plan) -> tuple[str, ...]:
    """What a plan was predicted to hold where it holds most, the largest first."""
    moment = plan.prediction.fullest
    if moment is None:
        return ()
    parts = ", ".join(
        f"{CLASS_NAMES[name]} {_mib(count)}"
        for name, count in sorted(moment.by_class().items(), key=lambda item: -item[1])
        if count
    )
    return (
        f"predicted at most {_mib(moment.total)}, in the {moment.phase} of {moment.unit}: {parts}",
        "the other points of a step: meshwright explain PLAN --memory",
    )


def _in_memory(model: nn.Module, optimizer: Optimizer | None) -> tuple[str, ...]:
    """What is in memory now as far as it has names, and the largest of it."""
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    now = {
        "weights": sum(map(_parameter_bytes, model.parameters())) + _bytes(model.buffers()),
        "optimizer state": _bytes(_state(optimizer)),
        "weight gradients": _bytes(gradients.values()),
    }
    largest = sorted(model.named_parameters(), key=lambda item: -_bytes([item[1]]))[:3]
    names = ", ".join(f"{name} {_mib(_bytes([p]))}" for name, p in largest)
    return (
        "held now: " + ", ".join(f"{k} {_mib(n)}" for k, n in now.items()),
        f"largest parameters: {names}",
    )


def _parameter_bytes(parameter: nn.Parameter) -> int:
    """Bytes of a parameter that are in memory now. Waits for nothing."""
    param = sharded_param(parameter)
    if param is None:
        return _bytes([parameter])
    whole = bare(parameter).untyped_storage().nbytes()
    return whole + _bytes([param.grad_group.chunks[param.grad_param]])


def less_than(plan: Plan) -> int:
    """A tenth less than a plan needs on its fullest rank."""
    return int(0.9 * max(plan.prediction.peak_bytes, default=MIB))


def command(plan: Plan, limit_bytes: int, micro_batches: Iterable[int] = (1, 2, 4, 8)) -> str:
    """The command that plans the same within a limit."""
    counts = sorted({*micro_batches, *plan.goal.micro_batches})
    return (
        f"meshwright plan {plan.target} --cluster CLUSTER --batch {plan.goal.batch} "
        f"--optimizer {plan.goal.optimizer} --micro-batches {','.join(map(str, counts))} "
        f"--memory-limit {max(limit_bytes, MIB) // MIB}MiB"
    )


def _state(optimizer: Optimizer | None) -> list[Tensor]:
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"
