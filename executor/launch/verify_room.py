"""Whether there is room here for what ``verify`` starts, before it starts anything.

All ranks of a plan and the training in one process share this host's memory. Where that is short
the system kills a rank without a word, minutes later.
"""

import os

from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan
from ...planner.schema.text import samples, size
from ..headroom import SWITCH, host_free_bytes
from .devices import on_gpus

# What a parameter of a plan takes, unless its precision says bfloat16: nearly all are float32.
_USUAL_BYTES = 4
# What a rank holds of its weights: them, gradients and momentum, whatever the plan's optimizer.
_OF_WEIGHTS = 3
# Operators' scratch memory, and what an allocator keeps, beyond what is counted: eight ranks of
# VGG-16 in float64 held a fifth more.
_MARGIN = 1.25
# A share of fewer samples is not run by itself.
_LEAST_SHARE = 2
# Of a process without a model: torch 2.13 has 0.2 GB of its own, and there are connections.
_PROCESS_BYTES = 300 * 2**20
# What rank 0 keeps of the training in one process while all ranks train: weights before and after.
_KEPT = 2


def usual_batch(plan: Plan) -> int:
    """The samples that a plan is compared over where nobody has said how many."""
    return min(plan.goal.batch, 4 * plan.world_size * plan.micro_batches)


def needed_bytes(plan: Plan, dtype: str, batch: int) -> int:
    """What all ranks here and the training in one process take at least: an estimate from what the
    plan is predicted to hold, in elements of ``dtype``, and for each process."""
    moment = plan.prediction.fullest
    if moment is None:
        return 0
    own = 2 if plan.precision == "bf16" else _USUAL_BYTES
    wider = {"float64": 8 / own, "float32": 4 / own}.get(dtype, 1.0)
    share = plan.goal.batch / (plan.world_size * plan.micro_batches)
    model = sum(unit.parameter_bytes for unit in plan.units)
    of_sample, ranks = moment.feature_maps / share, plan.world_size
    # Each rank runs the whole model first: all of them the whole batch where a share is one sample
    # (``verify``).
    alike = batch < _LEAST_SHARE * ranks * plan.micro_batches
    first = ranks * model + of_sample * batch * (ranks if alike else 1)
    # Rank 0 trains alone on the whole batch, while the others have the whole model.
    alone = (ranks - 1 + _OF_WEIGHTS) * model + of_sample * batch
    parts = batch / (ranks * plan.micro_batches)
    training = ranks * (_OF_WEIGHTS * moment.weights + of_sample * parts) + _KEPT * model
    return int(_MARGIN * wider * max(first, alone, training)) + ranks * _PROCESS_BYTES


def check_room(plan: Plan, dtype: str, batch: int | None) -> None:
    """Raises ``InputError`` where that is more than this host has free; on GPUs the ranks
    themselves are asked, when they are there."""
    free = host_free_bytes()
    ranks = plan.world_size
    if free is None or os.environ.get(SWITCH) == "0" or on_gpus(ranks):
        return
    asked = usual_batch(plan) if batch is None else batch
    needed = needed_bytes(plan, dtype, asked)
    if needed <= free:
        return
    raise InputError(
        f"to verify the plan, {ranks} ranks and one process take about {size(needed)} of this "
        f"host's memory ({samples(asked)} in {dtype}), and {size(free)} are free: "
        f"{_remedy(plan, dtype, asked, free)}, or set {SWITCH}=0"
    )


def _remedy(plan: Plan, dtype: str, batch: int, free: int) -> str:
    """What would fit: fewer samples, so of a smaller type, or else fewer ranks."""
    least = _LEAST_SHARE * plan.world_size * plan.micro_batches
    for kind in (dtype, "float32") if dtype == "float64" else (dtype,):
        fewer = batch
        while fewer > least and needed_bytes(plan, kind, fewer) > free:
            fewer = max(fewer // 2, least)
        if needed_bytes(plan, kind, fewer) <= free:
            words = [] if kind == dtype else [f"--dtype {kind} (dtype={kind!r})"]
            words += [] if fewer == batch else [f"--batch {fewer} (batch={fewer})"]
            return f"give {' and '.join(words)}"
    return "free some, or verify a plan for fewer ranks (plan --ranks)"
