"""Whether what a plan needs is free, before its first step; and what to say when it was not, or
when the optimizer keeps more than the plan counts on.

What a plan needs is the largest point of its timeline (see [Note: The memory timeline] in
planner/memory/timeline.py).
"""

import os
import sys
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.units.storages import OverBudgetError
from ..models.workload import device_of
from ..planner.schema.errors import InputError
from ..planner.schema.goal import STATE_COPIES, STATE_OPTIONS
from ..planner.schema.plan import CLASS_NAMES, Plan
from .gradients.pending import bare
from .gradients.reshard import sharded_param
from .run import Run

# Set to 0 it lets a run begin that would be refused.
SWITCH = "MESHWRIGHT_CHECK_MEMORY"
# Below this nothing is refused: the process itself takes more.
SPARE_BYTES = 2**24
MIB = 2**20
# Of control groups version 2, as a container sees its own.
_GROUPS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


def free_bytes(device: torch.device) -> int | None:
    """What a rank can still allocate on its device: on a CPU its share of what the host and its
    control group (a container's limit) have left. None where nobody knows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch's allocator keeps of freed memory is taken as far as the driver can tell.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    known = []
    with suppress(OSError):  # no Linux
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        known += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError):  # no control group
        limit, used = (path.read_text().strip() for path in _GROUPS)
        if limit.isdigit():  # else "max": none is set
            known.append(max(int(limit) - int(used), 0))
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return min(known) // ranks if known else None


def check_headroom(run: Run, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raises ``InputError`` on every rank where some rank has less free than the plan is predicted
    to need there. Collective; what the model and the optimizer hold already is not needed anew."""
    plan = run.plan
    if not plan.prediction.peak_bytes:
        return
    free = free_bytes(device_of(model))
    there = _bytes([*model.parameters(), *model.buffers(), *_state(optimizer)])
    needed = max(plan.prediction.peak_bytes[run.world.position] - there, 0)
    mine = [needed, -1 if free is None else free]
    rows = run.control.gather(mine, "the check of free memory", whole=False).rows()
    # Asked after the gather: ranks may have been given different environments, and all must come.
    if os.environ.get(SWITCH) == "0":
        return
    for rank, (needs, has) in zip(sorted(run.world.placement), rows, strict=True):
        if has >= 0 and needs > max(has, SPARE_BYTES):
            raise InputError(refusal(plan, rank, int(needs), int(has)))


def refusal(plan: Plan, rank: int, needed_bytes: int, free: int) -> str:
    """Why a rank cannot run the plan, and what would help."""
    most, moment = "", plan.prediction.fullest
    if moment is not None:
        most = f" (most in the {moment.phase} of unit {moment.unit!r}, above all {moment.largest})"
    fits = max(plan.prediction.peak_bytes, default=0) - (needed_bytes - free)
    return (
        f"rank {rank} has {_mib(free)} of memory free and needs {_mib(needed_bytes)} "
        f"for the plan besides what it has{most}: free some, "
        f"plan with --memory-limit {max(fits, MIB) // MIB}MiB, or set {SWITCH}=0"
    )


def overflowed(error: BaseException) -> bool:
    """Whether a run ended for want of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # Torch has an error of its own for accelerators only.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


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
    plan = run.whole_plan
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
    now = {
        "weights": sum(map(_parameter_bytes, model.parameters())) + _bytes(model.buffers()),
        "optimizer state": _bytes(_state(optimizer)),
        "weight gradients": _bytes(p.grad for p in model.parameters() if p.grad is not None),
    }
    largest = sorted(model.named_parameters(), key=lambda item: -_bytes([item[1]]))[:3]
    names = ", ".join(f"{name} {_mib(_bytes([p]))}" for name, p in largest)
    return (
        "held now: " + ", ".join(f"{k} {_mib(n)}" for k, n in now.items()),
        f"largest parameters: {names}",
    )


def _parameter_bytes(parameter: nn.Parameter) -> int:
    """Bytes of a parameter that are in memory now."""
    # Of a fully sharded one the storage as it is: to read the parameter would gather it.
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
    return sum(t.nbytes for t in tensors)


def _mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB"


def state_copies(optimizer: Optimizer) -> int | None:
    """How many values the optimizer keeps for each of a parameter's; None where that is not known.
    Options that keep more (``amsgrad``, say) count."""
    name = type(optimizer).__name__
    # The user's own class of the same name may keep anything.
    known = type(optimizer) is getattr(torch.optim, name, None)
    if not known or name not in STATE_COPIES:
        return None
    groups = optimizer.param_groups
    more = (sum(bool(group.get(option)) for option in STATE_OPTIONS) for group in groups)
    return STATE_COPIES[name] + max(more, default=0)


def check_optimizer_state(optimizer: Optimizer | None, plan: Plan) -> None:
    """Warns where the optimizer keeps more than a plan under a memory limit was made for."""
    kept = state_copies(optimizer) if optimizer is not None else None
    if kept is None or plan.goal.memory_limit_bytes is None or kept <= plan.goal.state_copies:
        return
    # A warning: it trains right all the same.
    warnings.warn(
        f"this {type(optimizer).__name__} keeps {_values(kept)} for each of a parameter's, and the "
        f"plan was made for {plan.goal.optimizer} with {_values(plan.goal.state_copies)}: it takes "
        "more memory than its limit allows for; plan with the optimizer that you use (--optimizer)",
        stacklevel=4,
    )


def _values(count: int) -> str:
    return f"{count} value" if count == 1 else f"{count} values"
