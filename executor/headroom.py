"""Whether what a plan needs is free, before its first step; and what to say when it was not, or
when the optimizer keeps more or less than the plan counts on.

What a plan needs is the largest point of its timeline (see [Note: The memory timeline] in
planner/memory/timeline.py).
"""

import os
import socket
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.units.storages import OverBudgetError
from ..models.workload import device_of
from ..planner.memory.reserved import fragments_bytes
from ..planner.schema.errors import InputError, NoRoomError
from ..planner.schema.goal import MOST_MICRO_BATCHES, STATE_COPIES, STATE_OPTIONS
from ..planner.schema.pins import forbidding
from ..planner.schema.plan import CLASS_NAMES, Plan
from .cgroups import memory_groups
from .comm.setups import device_identity
from .gradients.pending import bare
from .gradients.reshard import sharded_param
from .optimizer.kinds import optimizer_name
from .run import Run

# Set to 0 it lets a run begin that would be refused.
SWITCH = "MESHWRIGHT_CHECK_MEMORY"
# Below this nothing is refused: the process itself takes more.
SPARE_BYTES = 2**24
MIB = 2**20
# A plan that is made for what is free now takes so much less, as that changes until it runs.
_LESS = 0.02


def free_bytes(device: torch.device) -> int | None:
    """What can still be allocated on a rank's GPU, by all that share it; on a CPU a rank's part of
    what the host and its control group (a container's limit) have left. None where nobody
    knows."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # What torch's allocator keeps of freed memory is taken as far as the driver can tell.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept - fragments_bytes(free + kept)
    free_here = host_free_bytes()
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return free_here // ranks if free_here is not None else None


def host_free_bytes() -> int | None:
    """What this host and its control groups have left. None where nobody knows."""
    known = [group.free_bytes for group in memory_groups()]
    with suppress(OSError):  # no Linux
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        known += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")]
    return min(known, default=None)


def kept_pinned_bytes() -> int:
    """What torch's allocator keeps of pinned memory that was freed, for what is pinned next."""
    stats = torch.cuda.host_memory_stats()
    # torch 2.13 names all of it ``allocated`` and what is in use ``active``; earlier releases
    # ``reserved`` and ``allocated``.
    allocated = int(stats.get("allocated_bytes.current", 0))
    whole = int(stats.get("reserved_bytes.current", allocated))
    return max(whole - int(stats.get("active_bytes.current", allocated)), 0)


def check_headroom(run: Run, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raises ``NoRoomError`` on every rank where some rank has less free than the plan is predicted
    to need there, ``InputError`` where some host has less than its ranks pin. Collective; what the
    model and the optimizer hold already is not needed anew."""
    ranks, hosts = _ranks(run, model, optimizer), _hosts(run, device_of(model))
    # Asked after they were gathered: ranks may have been given different environments, and all must
    # come.
    if os.environ.get(SWITCH) == "0":
        return
    plan = run.whole_plan
    short = [
        MemoryShortage(rank, int(needs), int(has), _peak_of(plan, rank))
        for rank, (needs, has) in enumerate(ranks)
        if has >= 0 and needs > max(has, SPARE_BYTES)
    ]
    if short:
        raise refusal(plan, short)
    for host in hosts:
        if host.free_bytes is not None and host.needed_bytes > max(host.free_bytes, SPARE_BYTES):
            raise InputError(host.refusal(plan))


def _ranks(run: Run, model: nn.Module, optimizer: Optimizer | None) -> list[list[float]]:
    """What each rank needs of its device besides what it holds, and has free (-1: nobody knows);
    nothing where the plan does not say. Collective."""
    if not run.whole_plan.prediction.peak_bytes:
        return []
    device = device_of(model)
    free = free_bytes(device)
    there = _bytes([*model.parameters(), *model.buffers(), *_state(optimizer)])
    needed = max(_peak_of(run.whole_plan, run.world.rank) - there, 0)
    mine = [needed, -1 if free is None else free]
    # Of all hosts that train, also where these train apart: all ranks are refused, or none.
    everyone, doing = run.everyone, "the check of free memory"
    rows = everyone.gather(mine, doing, whole=False).rows()
    gpu = device_identity(device)
    return divided(rows, everyone.texts(gpu and f"{socket.gethostname()} {gpu}", doing))


def divided(rows: Sequence[Sequence[float]], gpus: Sequence[str]) -> list[list[float]]:
    """What each rank needs and has free, where it computes on that GPU ("": on none): a GPU that
    several share has for each of them as large a part of what is free as it needs of it."""
    wanted: defaultdict[str, float] = defaultdict(float)
    for (needs, _), gpu in zip(rows, gpus, strict=True):
        wanted[gpu] += needs
    return [
        [needs, has * needs / wanted[gpu] if gpu and has > 0 and needs else has]
        for (needs, has), gpu in zip(rows, gpus, strict=True)
    ]


def _peak_of(plan: Plan, rank: int) -> int:
    return plan.prediction.peak_bytes[plan.placement.index(rank)]


class PinnedOnHost(NamedTuple):
    """What the ranks of one host need of its pinned memory, and what it has free (None: nobody
    knows)."""

    name: str
    ranks: tuple[int, ...]
    needed_bytes: int
    free_bytes: int | None

    def refusal(self, plan: Plan) -> str:
        """Why its ranks cannot run the plan, and what would help."""
        offloads = any(unit.memory == "offload" for unit in plan.units)
        mirrors = any(unit.feedback == "host_mirror" for unit in plan.units)
        forbidden = ("offload",) * offloads + ("host_mirror",) * mirrors
        several = len(self.ranks) > 1
        return (
            f"host {self.name} has {_mib(self.free_bytes or 0)} of memory free, and its "
            f"{'ranks' if several else 'rank'} {', '.join(map(str, self.ranks))} "
            f"{'need' if several else 'needs'} up to {_mib(self.needed_bytes)} of pinned memory "
            f"there for {' and '.join(_PINNED[name] for name in forbidden)}: free some, plan with "
            f"{forbidding(*forbidden)}, or set {SWITCH}=0"
        )


_PINNED = {"offload": "feature maps that are offloaded", "host_mirror": "mirrors on the host"}


def _hosts(run: Run, device: torch.device) -> list[PinnedOnHost]:
    """What each host's ranks pin, where the plan pins any. Collective."""
    pinned = run.plan.prediction.pinned_bytes
    # The same on all ranks, as they have the same plan.
    if not pinned:
        return []
    needed, free = 0, host_free_bytes()
    if pins(device):
        needed = pinned[run.world.position]
        free = None if free is None else free + kept_pinned_bytes()
    # Of all hosts that train: where these train apart, each has its own plan's memory.
    everyone, doing = run.everyone, "the check of the hosts' free memory"
    rows = everyone.gather([needed, -1 if free is None else free], doing, whole=False).rows()
    found: dict[str, PinnedOnHost] = {}
    for rank, (name, (needs, has)) in enumerate(
        zip(everyone.texts(socket.gethostname(), doing), rows, strict=True)
    ):
        one = found.get(name, PinnedOnHost(name, (), 0, None))
        # Containers of one host may have limits of their own: the least counts.
        left = [int(has)] if has >= 0 else []
        left += [] if one.free_bytes is None else [one.free_bytes]
        found[name] = PinnedOnHost(
            name, (*one.ranks, rank), one.needed_bytes + int(needs), min(left, default=None)
        )
    return list(found.values())


def pins(device: torch.device) -> bool:
    """Whether copies of what is on the device lie in its host's pinned memory."""
    return device.type == "cuda"


class MemoryShortage(NamedTuple):
    """A rank that has less memory free than it needs for a plan besides what it has, and what it
    needs in all."""

    rank: int
    needed_bytes: int
    free_bytes: int
    peak_bytes: int


def refusal(plan: Plan, short: Sequence[MemoryShortage]) -> NoRoomError:
    """Why some ranks cannot run the plan, and what would help; says of the first of them."""
    most, moment = "", plan.prediction.fullest
    if moment is not None:
        most = f" (most in the {moment.phase} of unit {moment.unit!r}, above all {moment.largest})"
    # One limit for all ranks, so what fits on each of them.
    fits = min(one.peak_bytes - (one.needed_bytes - one.free_bytes) for one in short)
    limit = max(int((1 - _LESS) * fits), MIB)
    first = short[0]
    less = f"--memory-limit {limit // MIB}MiB (memory_limit_bytes={limit // MIB} * 2**20)"
    count = _micro_batches_that_fit(plan, short)
    if count is not None:
        # First what costs little time: within a limit a plan may take many times as long.
        less = f"--micro-batches {count} (micro_batches=({count},)) or, at more time, {less}"
    return NoRoomError(
        f"rank {first.rank} has {_mib(first.free_bytes)} of memory free and needs "
        f"{_mib(first.needed_bytes)} for the plan besides what it has{most}",
        f"free some, plan with {less}, or set {SWITCH}=0",
        limit,
    )


def _micro_batches_that_fit(plan: Plan, short: Sequence[MemoryShortage]) -> int | None:
    """The fewest micro-batches, by doubling, in which the plan's feature maps leave as much room as
    is missing; None where none do, or where gradients are released early, which is not planned in
    micro-batches."""
    moment = plan.prediction.fullest
    if moment is None or any(unit.early_release for unit in plan.units):
        return None
    missing = max(one.needed_bytes - one.free_bytes for one in short)
    maps, count = moment.feature_maps + moment.map_gradients, 2 * plan.micro_batches
    while count <= MOST_MICRO_BATCHES and count * plan.world_size <= plan.goal.batch:
        if maps * (1 - plan.micro_batches / count) >= missing:
            return count
        count *= 2
    return None


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


class MemoryErrorReport(NamedTuple):
    """What a run that lacked memory has to say, sentence by sentence. ``limit_bytes`` is what the
    rank may take in a plan that is made instead; ``remedy`` names a command that makes one."""

    sentence: str
    details: tuple[str, ...]
    remedy: str
    limit_bytes: int


def account(error: BaseException) -> MemoryErrorReport | None:
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
    return MemoryErrorReport(
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
        "the other points of a step: meshwright explain PLAN --memory (mw.memory_timeline)",
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
    """What plans the same within a limit: a command, or the call where the model is an object of a
    script, of which no command knows."""
    from ..models.zoo.catalogue import is_known

    counts = sorted({*micro_batches, *plan.goal.micro_batches})
    limit = max(limit_bytes, MIB) // MIB
    if ":" not in plan.target and not is_known(plan.target):
        return (
            f"auto_parallelize(..., memory_limit_bytes={limit} * 2**20, "
            f"micro_batches={tuple(counts)})"
        )
    goal, more = plan.goal, ""
    if plan.precision is not None:
        more += f" --precision {plan.precision}"
    if goal.batch_statistics != "local":
        more += f" --batch-statistics {goal.batch_statistics}"
    if goal.allow_lossy:
        more += " --allow-lossy"
        more += f" --min-fidelity {goal.min_fidelity:g}" if goal.min_fidelity < 1 else ""
    return (
        f"meshwright plan {plan.target} --cluster CLUSTER --batch {goal.batch} "
        f"--optimizer {goal.optimizer} --micro-batches {','.join(map(str, counts))} "
        f"--memory-limit {limit}MiB{more}"
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
    """Warns where the optimizer keeps more or less than the plan was made for: what the plan says
    of memory is then of another training."""
    kept = state_copies(optimizer) if optimizer is not None else None
    planned = plan.goal.state_copies
    if optimizer is None or kept is None or kept == planned:
        return
    more, nearest = kept > planned, optimizer_name(optimizer)
    # No plan is nearer than one for the name that ``auto_parallelize`` takes: where that counts
    # more than is kept there is nothing to do.
    if not more and nearest == plan.goal.optimizer:
        return
    limited = more and plan.goal.memory_limit_bytes is not None
    remedy = (
        "no plan counts so many: leave room for it by a memory limit (--memory-limit, "
        "memory_limit_bytes)"
        if nearest == plan.goal.optimizer
        else f"plan with --optimizer {nearest} (optimizer={nearest!r})"
    )
    # A warning: it trains right all the same.
    warnings.warn(
        f"this {type(optimizer).__name__} keeps {_values(kept)} for each of a parameter's, and the "
        f"plan was made for {plan.goal.optimizer} with {_values(planned)}: it takes "
        f"{'more' if more else 'less'} memory than "
        f"{'its limit allows for' if limited else 'is predicted'}; {remedy}",
        stacklevel=4,
    )


def _values(count: int) -> str:
    return f"{count} value" if count == 1 else f"{count} values"
