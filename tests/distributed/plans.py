"""Plans made by hand: layouts that a test chooses, for the units of a model."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.planner.goal import BatchStatistics, Goal
from meshwright.planner.layout import Layout, Style
from meshwright.planner.plan import Plan, Prediction, Provenance, UnitPlan

NOTHING = Prediction(
    step_s=0.0,
    compute_s=0.0,
    blocking_s=0.0,
    exposed_s=0.0,
    update_s=0.0,
    exchange_s=0.0,
    wire_bytes=0,
    peak_bytes=(),
    gpu_seconds=0.0,
    samples_per_s=0.0,
)


def unit(
    modules: str | Sequence[str],
    degree: int,
    style: Style,
    world_size: int,
    batched_inputs: tuple[int, ...] = (0,),
) -> UnitPlan:
    """A unit of ``modules`` at that degree; all other ranks form more groups of the same kind."""
    names = (modules,) if isinstance(modules, str) else tuple(modules)
    return UnitPlan(
        name=names[0],
        kind="other",
        modules=names,
        batched_inputs=batched_inputs,
        layout=Layout(groups=world_size // degree, degree=degree),
        style=style,
    )


def plan(
    world_size: int,
    units: Sequence[UnitPlan] = (),
    *,
    placement: Sequence[int] | None = None,
    statistics: BatchStatistics = "global",
    bucket_bytes: int = 2**20,
    micro_batches: int = 1,
) -> Plan:
    """A plan of those units; without any it is plain data parallelism."""
    return Plan(
        target="test",
        model="test",
        world_size=world_size,
        goal=Goal(batch=8, batch_statistics=statistics),
        placement=tuple(placement or range(world_size)),
        bucket_bytes=bucket_bytes,
        micro_batches=micro_batches,
        units=tuple(units),
        prediction=NOTHING,
        baseline=NOTHING,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )
