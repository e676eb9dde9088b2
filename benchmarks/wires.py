"""Gradients that travel in fewer bytes: ours as bfloat16, and what DDP's hooks make of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from meshwright.models.workload import Batch
from meshwright.planner.cost.exchange import INT8_BYTES
from meshwright.planner.explain.compare import with_exchange, with_wire
from meshwright.planner.schema.goal import make_goal
from meshwright.planner.schema.profile import ModelProfile
from systems import BUCKETS_MB, WARM_UP, Measured, System, by_ddp, medians, planned
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANKS = (1, 2, 4)
# The share of the elements that low rank sends: ranks of 2 to 4 in the matrices of gpt-mini.
LOW_RANK = 0.01
# One bucket: with several the hook's next collective is begun by whichever of gloo's threads ends
# the last, in another order on each rank, and ranks wait for each other for ever (torch 2.13).
ONE_BUCKET_MB = 10**6
# The hook sends whole gradients in its first steps, at least so many.
WHOLE_STEPS = 2
COLUMNS = (
    "model", "hosts", "batch", "ratio", "mbit_s", "compute_s", "ddp_best_s", "ddp_bf16_s",
    "powersgd_s", "priority_s", "bf16_s", "int8_s", "low_rank_s", "plan_bf16_s", "bound_s",
    "bf16_bound_s", "efficiency", "ddp_best / bf16", "ddp_bf16 / bf16", "ddp_best / int8",
    "ddp_best / plan_bf16", "powersgd / low_rank",
    "start_loss", "priority_loss", "ddp_bf16_loss", "powersgd_loss", "bf16_loss", "int8_loss",
    "low_rank_loss",
)  # fmt: skip


def _hooked(system: System, state: object, hook: Callable[..., Any]) -> System:
    assert isinstance(system.model, DistributedDataParallel)
    system.model.register_comm_hook(state, hook)
    return system


# torch's own hook is refused unless the backend is NCCL; what it calls runs on gloo too.
def _as_bf16(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _compress_hook(torch.bfloat16, group, bucket)


def _by_powersgd(measured: Measured, rank: int) -> System:
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=WHOLE_STEPS)
    return _hooked(by_ddp(measured, ONE_BUCKET_MB), state, powerSGD_hook)


def compared_wires(
    measured: Measured, model: ModelProfile, batch: Batch, asked: dict[str, Any]
) -> dict[str, Any]:
    """DDP whole, with its bfloat16 hook and with PowerSGD, the best of each, beside priority whole
    and rounded, and the planner's choice where rounding is allowed: one row. Collective."""
    systems = {f"ddp_{mb}": by_ddp(measured, mb) for mb in BUCKETS_MB}
    for mb in BUCKETS_MB:
        systems[f"ddp_bf16_{mb}"] = _hooked(by_ddp(measured, mb), None, _as_bf16)
    systems |= {f"powersgd_{rank}": _by_powersgd(measured, rank) for rank in RANKS}
    plan = measured.plan()
    systems["priority"] = System(measured.workload(), plan=plan)
    # The order of slices goes by what each takes, so their plans know that it is less.
    half = measured.plan(share=0.5)
    systems["bf16"] = System(measured.workload(), plan=with_wire(half, "bf16"))
    # Every rank sends its gradient to each other, where a ring sends it twice in all.
    quarter = measured.plan(share=INT8_BYTES / 4 * dist.get_world_size() / 2)
    systems["int8"] = System(measured.workload(), plan=with_exchange(quarter, "int8"))
    hundredth = with_exchange(measured.plan(share=LOW_RANK), "low_rank", LOW_RANK)
    systems["low_rank"] = System(measured.workload(), plan=hundredth)
    goal = make_goal(batch.size * dist.get_world_size(), optimizer="momentum", allow_lossy=True)
    chosen = planned(model, goal)
    systems["plan_bf16"] = System(measured.workload(), plan=chosen)
    start_loss = _loss(systems["priority"], batch)
    for system in systems.values():
        system.turn(batch, WARM_UP)
    turns = {key: partial(system.turn, batch, asked["steps"]) for key, system in systems.items()}
    seconds = medians(turns, asked["rounds"])
    losses = {key: _loss(system, batch) for key, system in systems.items()}

    def best(*keys: str) -> str:
        return min(keys, key=lambda key: seconds[key])

    names = {
        "ddp_best": best(*(f"ddp_{mb}" for mb in BUCKETS_MB)),
        "ddp_bf16": best(*(f"ddp_bf16_{mb}" for mb in BUCKETS_MB)),
        "powersgd": best(*(f"powersgd_{rank}" for rank in RANKS)),
        **{key: key for key in ("priority", "bf16", "int8", "low_rank", "plan_bf16")},
    }
    return {
        "start_loss": start_loss,
        **{f"{name}_s": seconds[key] for name, key in names.items()},
        **{f"{name}_loss": losses[key] for name, key in names.items()},
        "plan_schedule": chosen.schedule,
        "plan_rounded": sum(u.rounded for u in chosen.units),
        "plan_divided": sum(u.layout.degree > 1 for u in chosen.units),
        "powersgd_rank": names["powersgd"],
    }  # fmt: skip


def _loss(system: System, batch: Batch) -> float:
    """The mean over all ranks' batches. Collective."""
    with torch.no_grad():
        found = system.workload.loss(system.model(*batch.args, **batch.kwargs), batch.target)
    mean = found.detach().double().reshape(1)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
