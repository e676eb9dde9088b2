"""Sharded exchange on the test bed, beside dense exchange by priority and FSDP2.

    python benchmarks/sharded.py --models gpt-mini --optimizers momentum adamw

Needs root. Two hosts with a core each, all systems in the same processes, in turns. ``waiting`` is
sharded exchange whose ``step()`` returns when the last gather has been issued; ``fully`` shards the
parameters too, as FSDP2 does; ``weight_bytes`` are a rank's between steps. ``predicted`` are the
planner's simulations with the times measured here. The last line is one JSON object: rows.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from meshwright.executor.gradients.fully_sharded import FullyShardedGradGroup
from meshwright.executor.gradients.pending import bare
from meshwright.executor.gradients.sharded import ShardedGradGroup
from meshwright.executor.parallel import is_parallel, run_of
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.plan import SHARDING, ExchangePolicy, Plan
from ranks import goodput, on_a_bed, run, set_rate, slowest
from rows import command_line, print_json, print_row
from systems import (
    BATCHES,
    SLICE_BYTES,
    Measured,
    Optimizing,
    System,
    UnitClock,
    by_fsdp,
    in_turns,
    momentum,
    own_batch,
    simulated,
)

OPTIMIZERS: dict[str, Optimizing] = {
    "momentum": momentum,
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True),
}


def waiting(measured: Measured, plan: Plan, optimizing: Optimizing) -> System:
    """A model under ``plan`` whose steps wait until the last gather has been issued. Collective."""
    # As they must on NCCL.
    system = System(measured.workload(), optimizing, plan)
    step = system.optimizer.step

    def wait() -> None:
        step()
        for grad_group in run_of(system.model).priority.grad_groups:
            if isinstance(grad_group, ShardedGradGroup) and grad_group.pipeline is not None:
                grad_group.pipeline.wait_for(grad_group)

    system.optimizer.step = wait  # type: ignore[method-assign,assignment]
    return system


def state_bytes(system: System) -> int:
    """Of the optimizer's state on this rank."""
    # Asking for it ends pending steps, so that all state is there.
    system.optimizer.state_dict()
    values = [v for state in system.optimizer.state.values() for v in state.values()]
    values = [getattr(v, "_local_tensor", v) for v in values if isinstance(v, torch.Tensor)]
    # Numbers without dimensions count steps.
    return sum(v.nbytes for v in values if v.ndim)


def weight_bytes(system: System) -> int:
    """Of parameters on this rank between steps."""
    # FSDP2's parameters are DTensors: what a rank holds is their local tensor.
    held = [bare(getattr(p, "_local_tensor", p)) for p in system.model.parameters()]
    if is_parallel(system.model):
        # Resharded parameters are empty. What they keep between steps lies in their groups.
        for group in run_of(system.model).priority.grad_groups:
            if isinstance(group, FullyShardedGradGroup):
                held += group.chunks.values()
    return sum(t.untyped_storage().nbytes() for t in held)


def predicted(measured: Measured, policy: ExchangePolicy = "dense") -> float:
    """A step as the planner simulates it, of the slowest rank. Collective."""
    chain = measured.chain
    if policy in SHARDING:
        # Every rank updates its own part only.
        chain.update_s[:] /= dist.get_world_size()
    if policy == "fully_sharded":
        # A gather more, of what is a reduce-scatter and a gather.
        chain.exchange_s[:] *= 1.5
    return slowest(simulated(chain, measured.sizes, SLICE_BYTES))


def figures(
    measured: Measured, batch: Any, asked: dict[str, Any], optimizing: Optimizing
) -> dict[str, Any]:
    """All systems in turns. Collective."""
    dense = measured.plan()
    sharded, fully = (with_exchange(dense, policy) for policy in SHARDING)
    systems = {
        "dense": System(measured.workload(), optimizing, dense),
        "sharded": System(measured.workload(), optimizing, sharded),
        "waiting": waiting(measured, sharded, optimizing),
        "fully": System(measured.workload(), optimizing, fully),
    }
    if asked["fsdp"]:
        systems["fsdp"] = by_fsdp(measured, optimizing)
    seconds = in_turns(systems, batch, asked["steps"], asked["rounds"])
    return {
        **{f"{key}_s": value for key, value in seconds.items()},
        **{f"{key}_state_bytes": state_bytes(system) for key, system in systems.items()},
        **{f"{key}_weight_bytes": weight_bytes(system) for key, system in systems.items()},
        "dense_predicted_s": predicted(measured),
        "sharded_predicted_s": predicted(measured, "sharded"),
        "fully_predicted_s": predicted(measured, "fully_sharded"),
    }


def rank_rows(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each optimizer and ratio. Collective."""
    name = asked["model"]
    batch = own_batch(name, asked["batch"])
    for optimizer in asked["optimizers"]:
        clock = UnitClock(name, OPTIMIZERS[optimizer])
        times, weights = clock.times(batch), sum(clock.sizes)
        for ratio in asked["ratios"]:
            mbit_s = 8e-6 * weights / (ratio * times.step_s)
            set_rate(asked["folder"], mbit_s)
            rate = median(goodput(weights).bytes_per_s for _ in range(3))
            measured = Measured(name, clock.sizes, clock.modules, times, rate)
            yield {
                "model": name, "optimizer": optimizer, "ratio": ratio, "mbit_s": mbit_s,
                "compute_s": times.step_s, "update_s": times.update_s,
                **figures(measured, batch, asked, OPTIMIZERS[optimizer]),
            }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=["gpt-mini"])
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=["adamw"])
    parser.add_argument("--ratios", nargs="+", type=float, default=[1.0])
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--fsdp", action="store_true", help="measures FSDP2 as well")
    asked = parser.parse_args()
    rows = []
    for model in asked.models:
        for row in on_a_bed(
            __file__, {**vars(asked), "model": model, "batch": BATCHES[model] // 2}
        ):
            print_row(row)
            rows.append(row)
    print_json({"rows": rows})


if __name__ == "__main__":
    run(rank_rows, main)
