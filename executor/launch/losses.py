"""What rounding gradients, or leaving parts of them for later steps, does to the loss: training
under a plan beside the same with gradients that travel whole and exact."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

import torch

from ...models.workload import Workload
from ...planner.explain.compare import with_exact_gradients
from ...planner.schema.errors import RunError
from ...planner.schema.plan import Plan
from ...planner.schema.record import Count, Index, Record
from ..gradients.feedback import Lossy
from ..parallel import run_of
from .steps import Progress
from .train import LEARNING_RATE, begin_training, drawing, scaler_for, take_step, whole_losses

LATEST = 5
"""The loss where a training has ended is the mean of its last fifth."""
# Batches of seeds lie this far apart.
STREAM = 1_000_003


class SeedLosses(Record, frozen=True, kw_only=True):
    """The whole batch's loss at each step from one seed's weights and batches."""

    seed: Index
    exact: tuple[float, ...]
    plan: tuple[float, ...]

    @property
    def exact_end(self) -> float:
        """The mean of the exact training's last steps."""
        return _end(self.exact)

    @property
    def plan_end(self) -> float:
        """The same of the plan's."""
        return _end(self.plan)

    @property
    def ratio(self) -> float:
        """Where the plan's training has ended over where the exact one has."""
        return self.plan_end / self.exact_end if self.exact_end else math.inf


class LossComparison(Record, frozen=True, kw_only=True):
    """Losses under a plan and with exact gradients, for several seeds. ``data`` says whether
    batches are of the workload's training data; else they are random."""

    target: str
    world_size: Count
    steps: Count
    data: bool
    seeds: tuple[SeedLosses, ...]

    @property
    def ratio(self) -> float:
        """The mean over seeds."""
        return fmean(one.ratio for one in self.seeds)

    @property
    def learns(self) -> bool:
        """Whether the loss falls with exact gradients: else the comparison shows nothing."""
        first = fmean(one.exact[0] for one in self.seeds)
        return fmean(one.exact_end for one in self.seeds) < first - 0.01 * abs(first)

    @property
    def error(self) -> float | None:
        """The standard error of that mean; None of a single seed."""
        ratios = [one.ratio for one in self.seeds]
        return stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None


def steps_to_begin(plan: Plan) -> int:
    """After how many steps all that a lossy plan does to the training has begun: top-k has come
    down to the share that it is to send, hosts that train apart have averaged all they have."""
    found, settings = 0, Lossy()
    if any(unit.exchange == "topk" for unit in plan.units):
        found = settings.stages * settings.stage_backwards
    if plan.local_steps is not None:
        found = max(found, plan.local_steps.steps_to_begin)
    return found


def _end(losses: Sequence[float]) -> float:
    return fmean(losses[-max(len(losses) // LATEST, 1) :])


def compare_losses_on_ranks(
    plan: Plan,
    make: Callable[[int], Workload],
    *,
    steps: int,
    seeds: int,
    learning_rate: float = LEARNING_RATE,
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
    progress: Progress = lambda done, total, what: None,
) -> LossComparison:
    """Trains from each seed twice, with exact gradients and under ``plan``; collective.
    ``make(seed)`` gives a fresh workload, the same on every rank. Raises ``RunError`` where a loss
    is not finite."""
    found, data = [], False
    ways = {"exact gradients": with_exact_gradients(plan), "the plan": plan}
    for seed in range(seeds):
        losses: list[tuple[float, ...]] = []
        for name, chosen in ways.items():
            workload = make(seed)
            data = workload.data is not None
            what = f"seed {seed}, {name}"
            progress(len(losses) + 2 * seed, 2 * seeds, what)
            try:
                losses.append(
                    _trained(chosen, workload, steps, seed, learning_rate, device, timeout_s)
                )
            except RunError as error:
                raise RunError(f"with {what}: {error}") from error
        found.append(SeedLosses(seed=seed, exact=losses[0], plan=losses[1]))
    return LossComparison(
        target=plan.target, world_size=plan.world_size, steps=steps, data=data, seeds=tuple(found)
    )


def _trained(
    plan: Plan,
    workload: Workload,
    steps: int,
    seed: int,
    learning_rate: float,
    device: torch.device | str,
    timeout_s: float | None,
) -> tuple[float, ...]:
    """The losses of a training from a seed."""
    torch.manual_seed(seed)  # of what is random in training; parameters have their values
    workload, optimizer = begin_training(workload, plan, device, timeout_s, learning_rate)
    workload.model.train()
    draw, scaler = drawing(workload, plan.goal.batch), scaler_for(workload)
    taken = [
        take_step(workload, plan, draw(seed * STREAM + number), optimizer, scaler)
        for number in range(steps)
    ]
    mine = [float(step.loss) for step in taken]
    everyone = run_of(workload.model).everyone
    return whole_losses(everyone.gather(mine, "the losses", whole=False).rows())
