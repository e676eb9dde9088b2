"""Training steps of a workload under a plan, and what they were measured to take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, isfinite
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler

from ...models.failing import in_module, raised_outside
from ...models.opened import tensors_in
from ...models.precision import in_precision
from ...models.units.storages import peak_bytes
from ...models.workload import Batch, Workload, device_of
from ...planner.schema.errors import InputError, MeshwrightError, RunError
from ...planner.schema.plan import Plan
from ...planner.schema.precision import is_scaled
from ...planner.schema.record import Bytes, Count, Record, Seconds
from ..apply import apply
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.latest import shown
from ..comm.moments import Moment, now, seconds_between
from ..gradients.dropping import DroppedGradGroup
from ..gradients.reshard import resident_parameters
from ..micro import micro_batches
from ..optimizer.kinds import optimizer_for
from ..parallel import is_parallel, run_of
from ..run import Run
from ..step_clock import UNREAD, StepMoments

# Of a training without a script: what Adam's authors recommend (Kingma & Ba, 2015).
LEARNING_RATE = 1e-3
# Steps that are not measured: the first allocate, open connections and fill caches.
WARM_UP = 2
# Samples of one forward when a rank evaluates its share: bounds memory, not the result.
EVALUATED = 64
# A scaler leaves out a step whose gradients are not finite and goes on from good weights. So many
# last losses, none of them finite, tell that a training with one has failed all the same.
LAST_SCALED = 2


class Measured(Record, frozen=True, kw_only=True):
    """What steps under a plan took, as the slowest rank saw it.

    Seconds are medians over the measured steps: ``blocking_s`` is the wait inside redistribution
    and batch statistics, ``exposed_s`` the wait for gradients at the end of backward, ``update_s``
    the optimizer's step, ``compute_s`` the rest of ``step_s``. ``drawing_s`` is what a rank's host
    takes besides, at most, to draw the next batch and copy its share, while a GPU may go on.
    ``wire_bytes`` is the most that a rank sends in a step; ``peak_bytes`` the most that tensors
    took in one, by position, ``reserved_bytes`` the most that torch's allocator took of a GPU for
    it. ``losses`` are of the whole batch, one for each step from the first but for those that are
    not finite, which a scaler has left out.
    """

    steps: Count
    step_s: Seconds
    compute_s: Seconds
    blocking_s: Seconds
    exposed_s: Seconds
    update_s: Seconds
    drawing_s: Seconds
    wire_bytes: Bytes
    peak_bytes: tuple[Bytes, ...]
    samples_per_s: float
    losses: tuple[float, ...]
    reserved_bytes: Bytes | None = None


@dataclass(frozen=True)
class LaunchedStep:
    """A step that this rank has launched. On a device's streams it may still be going on."""

    loss: Tensor
    moments: StepMoments
    before_update: Moment
    wire_bytes: int
    share: float
    """This rank's part of the batch's samples."""
    drawing_s: float
    """What the host took before it, to draw the batch and this rank's share of it."""

    def spent(self) -> StepFigures:
        """Its figures. Waits until it is over."""
        step_s, blocking_s, exposed_s = self.moments.seconds()
        return StepFigures(
            loss=float(self.loss),
            step_s=step_s,
            blocking_s=blocking_s,
            exposed_s=exposed_s,
            update_s=seconds_between(self.before_update, self.moments.end),
            drawing_s=self.drawing_s,
            wire_bytes=self.wire_bytes,
        )


@dataclass(frozen=True)
class StepFigures:
    """One step of one rank: its part of the whole batch's loss, seconds and bytes sent."""

    loss: float
    step_s: float
    blocking_s: float
    exposed_s: float
    update_s: float
    drawing_s: float
    wire_bytes: int


def scaler_for(workload: Workload) -> GradScaler | None:
    """What scales a workload's loss, where its precision wants that."""
    scaled = is_scaled(workload.precision)
    return GradScaler(device_of(workload.model).type) if scaled else None


def begin_training(
    workload: Workload,
    plan: Plan,
    device: torch.device | str,
    timeout_s: float | None = None,
    learning_rate: float = LEARNING_RATE,
) -> tuple[Workload, torch.optim.Optimizer]:
    """The workload in its precision on the device, with ``plan`` applied, and the optimizer of the
    plan's goal. Collective."""
    workload = in_precision(workload)
    model = workload.model.to(device)
    optimizer = optimizer_for(plan.goal.optimizer, model.parameters(), learning_rate)
    apply(model, optimizer, plan, timeout_s=timeout_s)
    return workload, optimizer


def run_steps(
    workload: Workload,
    plan: Plan,
    steps: int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    draw: Callable[[int], Batch] | None = None,
    scaler: GradScaler | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measured:
    """Trains for ``steps`` measured steps, a few before them, and two after them for memory.

    Collective. The plan is applied to the workload's model unless it was already. ``draw(step)``
    gives the whole batch of a step, the same on every rank; by default the workload makes one of
    the goal's size, seeded with the step's number. Without an ``optimizer`` the goal's is made,
    without a ``scaler`` the one that the precision wants.
    """
    found = run_range(
        workload, plan, range(WARM_UP + steps), optimizer=optimizer, draw=draw, scaler=scaler,
        progress=progress,
    )  # fmt: skip
    assert found is not None, "some steps come after those that warm up"
    return found


def run_range(
    workload: Workload,
    plan: Plan,
    numbers: range,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    draw: Callable[[int], Batch] | None = None,
    scaler: GradScaler | None = None,
    kept: Checkpoint | None = None,
    launched: Callable[[int, LaunchedStep], None] = lambda number, step: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Measured | None:
    """The same for the steps of those ``numbers``, which ``kept`` checkpoints count; it ends with
    one. The first two are not measured: None where there are no others. ``launched`` is told of
    each step, which may still be going on. Raises ``RunError`` where the training has failed,
    before that would be saved."""
    model = workload.model
    optimizer = optimizer or optimizer_for(plan.goal.optimizer, model.parameters())
    if not is_parallel(model):
        apply(model, optimizer, plan)
    model.train()
    draw = draw or partial(_random, workload, plan.goal.batch)
    scaler = scaler or scaler_for(workload)
    step = partial(take_step, workload, plan, optimizer=optimizer, scaler=scaler)

    def drawn(number: int) -> LaunchedStep:
        begun_s = time.perf_counter()
        batch = draw(number)
        drawing_s = time.perf_counter() - begun_s
        found = step(batch)
        return replace(found, drawing_s=drawing_s + found.drawing_s)

    taken = _TakenSteps(run_of(model), numbers.start, scaled=scaler is not None)
    for number in numbers:
        launched(number, taken.add(drawn(number)))
        saved = kept is not None and kept.due
        if saved:
            taken.check_losses()
        if kept is not None:
            kept.step()
        progress(number + 1, numbers.stop)
    few = len(numbers) <= WARM_UP
    if few or (kept is not None and not saved):
        taken.check_losses()
    if kept is not None:
        if not saved:
            kept.save()
        kept.close()
    if few:
        return None
    last = draw(numbers.stop)
    peak = _peak(workload, step, last, optimizer), reserved_at_most(device_of(model)) or 0
    return _summary(taken, plan, peak, last.size)


class _TakenSteps:
    """The steps of a run that were taken, the first of them of number ``start``; ``scaled`` by a
    scaler or not."""

    def __init__(self, run: Run, start: int, *, scaled: bool) -> None:
        self.run, self._start, self._scaled = run, start, scaled
        self._launched: list[LaunchedStep] = []
        self._spent: list[StepFigures] = []
        self._checked = 0

    def add(self, step: LaunchedStep) -> LaunchedStep:
        """One more, which may still be going on."""
        self._launched.append(step)
        if len(self._launched) == UNREAD:
            self.figures()
        return step

    def figures(self) -> list[StepFigures]:
        """Those of this rank. Waits until all steps are over."""
        self._spent += [step.spent() for step in self._launched]
        self._launched.clear()
        return self._spent

    def check_losses(self) -> None:
        """Raises ``RunError`` where the losses since the last check tell that the training has
        failed. Collective, and waits for the steps, as saving does."""
        spent = self.figures()
        # Where a scaler has left out the last step, the one before counts, from before the last
        # check or not.
        first = max(min(self._checked, len(spent) - LAST_SCALED), 0)
        mine = [step.loss for step in spent[first:]]
        self.losses_of(self.run.everyone.gather(mine, "the losses", whole=False).rows(), first)
        self._checked = len(spent)

    def losses_of(self, by_rank: Iterable[Sequence[float]], first: int = 0) -> tuple[float, ...]:
        """``whole_losses`` of these steps, from the parts of all ranks since the ``first``."""
        return whole_losses(by_rank, self._start + first, scaled=self._scaled)


def steps_left(
    kept: Checkpoint, steps: int, say: Callable[[str], None], *, restarted: bool = False
) -> range:
    """The numbers of those of ``steps`` in all that are still to be made, after it has gone on
    from the latest checkpoint; ``say`` is told from which. That there are none is refused, unless
    the launcher has ``restarted`` ranks that were lost after the last step."""
    found = kept.go_on()
    if found.step >= steps and restarted:
        say(f"the training had come to its end, step {found.step}, when its ranks were lost")
        return range(0)
    if found.step >= steps:
        raise InputError(
            f"the training in {shown(kept.folder)} is at step {found.step} and --steps asks for "
            f"{steps}, so it is trained to the end: ask for more --steps (steps), write its "
            "weights by meshwright export, or name a new folder"
        )
    say(found.sentence)
    return range(found.step, steps)


def _peak(
    workload: Workload,
    step: Callable[[Batch], object],
    batch: Batch,
    optimizer: torch.optim.Optimizer,
) -> int:
    """The most that tensors took in a step, without the whole ``batch``, which every rank has for
    the measurement."""

    run = run_of(workload.model)
    # Two steps, as the second's forward runs while the first's gradients live. Where gradients are
    # left out in turn, until each has been sent once, and the forward that updates the last.
    waiting = any(group.feedback for group in _dropped_groups(run))
    steps = run.lossy.patience + 2 if waiting else 2

    def work() -> None:
        for _ in range(steps):
            step(batch)

    apart = tensors_in((batch.args, dict(batch.kwargs), batch.target))
    return peak_bytes(work, _lasting(workload, optimizer), device_of(workload.model), apart)


def _dropped_groups(run: Run) -> list[DroppedGradGroup]:
    groups = run.priority.grad_groups if run.priority is not None else ()
    return [group for group in groups if isinstance(group, DroppedGradGroup)]


def train_step(
    workload: Workload, plan: Plan, batch: Batch, optimizer: torch.optim.Optimizer
) -> float:
    """One step on ``batch``, the whole batch and the same on every rank: this rank takes its share,
    in the plan's micro-batches. Returns the loss over the whole batch. Collective.
    """
    spent = timed_step(workload, plan, batch, optimizer)
    run = run_of(workload.model)
    parts = run.everyone.gather([spent.loss], "the sum of losses", whole=False).rows()
    return float(sum(row[0] for row in parts))


def timed_step(
    workload: Workload,
    plan: Plan,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None = None,
) -> StepFigures:
    """``train_step`` with its figures, for this rank alone; with a ``scaler`` by its scaled
    loss. Waits until the device has made it."""
    return take_step(workload, plan, batch, optimizer, scaler).spent()


def take_step(
    workload: Workload,
    plan: Plan,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    scaler: GradScaler | None = None,
) -> LaunchedStep:
    """The same without waiting for it."""
    run = run_of(workload.model)
    device = device_of(workload.model)
    begun_s = time.perf_counter()
    mine = share_of(batch, run).to(device)
    drawing_s = time.perf_counter() - begun_s
    blocking, exposed, sent = run.meter.seconds, run.exposed_s, run.meter.sent_bytes
    run.watch.stream_waits.begin()
    start = now(device)
    # On the device: to read each loss would make the host wait for it.
    loss = torch.zeros((), dtype=torch.float64, device=device)
    for part in micro_batches(workload.model, mine, plan.micro_batches):
        value = loss_of(workload, part)
        (scaler.scale(value) if scaler else value).backward()  # type: ignore[no-untyped-call]
        if part.size:  # the mean over nothing is not a number
            loss += value.detach() * (part.size / batch.size)
    before_update = now(device)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    waited = run.meter.seconds - blocking, run.exposed_s - exposed
    return LaunchedStep(
        loss=loss,
        moments=StepMoments(start, now(device), *waited, run.watch.stream_waits.take()),
        before_update=before_update,
        wire_bytes=run.meter.sent_bytes - sent,
        share=mine.size / batch.size,
        drawing_s=drawing_s,
    )


def loss_of(workload: Workload, batch: Batch) -> Tensor:
    """The loss of one forward; ``InputError`` that names the module where the model's own code
    fails on it."""
    try:
        return workload.loss(workload.model(*batch.args, **batch.kwargs), batch.target)
    except (MeshwrightError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # What fails here in communicating, or in code of ours, is no mistake of the user's.
        if not raised_outside(error, ("meshwright", "torch.distributed")):
            raise
        raise InputError(
            f"the model of {workload.name!r} failed on a batch of {batch.size}"
            f"{in_module(workload.model, error)} with {type(error).__name__}: {error}; if it "
            "refuses that size, plan for another --batch (a rank gets its part of it)"
        ) from error


def share_of(batch: Batch, run: Run) -> Batch:
    """This rank's samples, copied, so that it holds no others with them: as many as the plan has
    for its position."""
    position, _ = run.world.share
    run.local_batches.satisfied()
    sizes = run.whole_plan.local_batches(batch.size)
    start = sum(sizes[:position])
    return batch.slice(start, start + sizes[position]).copied()


def _lasting(workload: Workload, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What lives from step to step."""
    # One by one: a list would keep what is held back of gradients beyond the step that sends it.
    yield from resident_parameters(workload.model)
    yield from workload.model.buffers()
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
    run = run_of(workload.model)
    for group in _dropped_groups(run):
        yield from group.unsent()
    if run.apart is not None:
        yield from run.apart.lasting()


def _summary(taken: _TakenSteps, plan: Plan, peak: tuple[int, int], batch: int) -> Measured:
    """The slowest rank's figures, on every rank; ``peak`` has the most bytes of tensors, and what
    was reserved for them. Collective."""
    spent = taken.figures()
    measured = spent[WARM_UP:]
    names = "step_s", "blocking_s", "exposed_s", "update_s", "drawing_s", "wire_bytes"
    typical = typical_of(plan)
    middle = [typical([getattr(step, name) for step in measured]) for name in names]
    mine = [*middle, *peak, *(step.loss for step in spent)]
    rows = taken.run.everyone.gather(mine, "the end of training", whole=False).rows()
    losses = taken.losses_of(row[8:] for row in rows)
    # The parts of one rank's step, so that they add up to it.
    slowest = max(rows, key=lambda row: row[0])
    step_s, blocking_s, exposed_s, update_s = slowest[:4]
    return Measured(
        steps=len(measured),
        step_s=step_s,
        compute_s=max(step_s - blocking_s - exposed_s - update_s, 0.0),
        blocking_s=blocking_s,
        exposed_s=exposed_s,
        update_s=update_s,
        drawing_s=max(row[4] for row in rows),
        wire_bytes=int(max(row[5] for row in rows)),
        peak_bytes=tuple(int(rows[rank][6]) for rank in plan.placement),
        samples_per_s=batch / step_s if step_s else 0.0,
        losses=losses,
        reserved_bytes=int(max(row[7] for row in rows)) or None,
    )


def typical_of(plan: Plan) -> Callable[[Sequence[float]], float]:
    """What stands for the figures of many steps: the median, or where some steps do what others do
    not, as hosts that train apart exchange something in some of them, the mean."""
    return median if plan.local_steps is None else fmean


def reserved_at_most(device: torch.device) -> int | None:
    """The most that torch's allocator has taken of a GPU; None of a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


def whole_losses(
    by_rank: Iterable[Sequence[float]], start: int = 0, *, scaled: bool = False
) -> tuple[float, ...]:
    """The whole batch's loss at each step from the one of number ``start``, from the parts of all
    ranks. Raises ``RunError`` where one is not finite; with a scaler (``scaled``) only where the
    last ones are not, and others are left out."""
    losses = tuple(sum(part) for part in zip(*by_rank, strict=True))
    wrong = [k for k, loss in enumerate(losses) if not isfinite(loss)]
    if not wrong or (scaled and any(map(isfinite, losses[-LAST_SCALED:]))):
        return tuple(filter(isfinite, losses))
    # Not one that a scaler has left out before good ones.
    first = next(k for k in wrong if not scaled or not any(map(isfinite, losses[k:])))
    raise RunError(
        f"the loss of step {start + first + 1} is {losses[first]}: nothing is measured or saved of "
        "a training that has failed; look at the data, the learning rate and the precision"
    )


def drawing(workload: Workload, batch: int) -> Callable[[int], Batch]:
    """Gives the global batch of each step, the same on every rank: the training data in an order
    that is drawn anew for each pass, or random batches where the workload has no data. A batch
    larger than the data takes several passes."""
    if workload.data is None:
        return partial(_random, workload, batch)
    data = workload.data("train")
    steps, passes = max(data.size // batch, 1), ceil(batch / data.size)

    def draw(number: int) -> Batch:
        # Drawn anew at each step and not kept: any step can be asked for, as after a restart.
        first = number // steps * passes
        order = torch.cat([_order(data.size, first + i) for i in range(passes)])
        start = number % steps * batch
        return data.take(order[start : start + batch])

    return draw


def _order(samples: int, number: int) -> Tensor:
    """An order of the data for the pass of that number."""
    generator = torch.Generator().manual_seed(number)
    return torch.randperm(samples, generator=generator, device="cpu")


def _random(workload: Workload, batch: int, number: int) -> Batch:
    # Which seeds a GPU's generator, too: what draws on it in the model's forward goes on as it was.
    device = device_of(workload.model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(number)
        return workload.make_batch(batch)


def accuracy(workload: Workload, device: torch.device) -> float | None:
    """The share of right predictions on the test data, every rank predicting its part; None where
    the workload has none. Collective; the model is left in training mode."""
    if workload.data is None or workload.accuracy is None:
        return None
    run = run_of(workload.model)
    whole = workload.data("test")
    mine = share_of(whole, run)
    # As many forwards on every rank, since divided units need all of them.
    pieces = ceil(max(run.whole_plan.local_batches(whole.size)) / EVALUATED)
    right = 0.0
    workload.model.eval()
    with torch.no_grad():
        for i in range(pieces):
            part = mine.slice(mine.size * i // pieces, mine.size * (i + 1) // pieces).to(device)
            output = workload.model(*part.args, **part.kwargs)
            right += part.size * workload.accuracy(output, part.target) if part.size else 0.0
    workload.model.train()
    total = torch.tensor(right, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / whole.size
