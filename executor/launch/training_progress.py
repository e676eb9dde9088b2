"""What is shown while a plan trains: how far it is, and its steps beside what was predicted.

Nothing here waits for a device or for another rank. Steps count when the device has made them; the
loss is copied to the host now and then and shown once it is there. What ranks need to know of each
other, to say which of them is slow, they leave in the process group's store now and then, which
rank 0 reads in a thread, and only where steps are not as predicted.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple, TextIO

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...models.workload import device_of
from ...planner.schema import cache
from ...planner.schema.cluster import LINK_NAMES, Cluster, LevelName
from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan, Prediction
from ...planner.schema.record import Count, Record, Seconds
from ...planner.schema.report import LEAST_STEPS
from ...planner.schema.text import expected, seconds
from ..background.protocol import VARIABLE as BACKGROUND_VARIABLE
from ..comm.groups import Group, World
from ..comm.heartbeat import Heartbeat
from ..comm.moments import Moment, has_come, now
from ..notes import note
from ..parallel import run_of
from ..run import Run
from ..step_clock import StepMoments, clock_of
from .train import LaunchedStep, typical_of

# Set by the launcher where progress is to be shown.
PROGRESS_VARIABLE = "MESHWRIGHT_PROGRESS"
REWRITTEN_S, LINE_S = 0.5, 30.0
"""How often the line on a terminal is rewritten; how often a line is printed elsewhere."""
FIRST_S = 5.0
"""Until the first line elsewhere, so that a run is seen to have begun."""
TOLD_S = 2.0
"""How often a rank leaves its figures for rank 0."""
WARM_UP = 3
"""Steps that are not held against the prediction: memory is first allocated, caches are cold."""
COMPARED_S = 30.0
"""How often it is asked why steps are not as predicted."""
FAR = 0.05
"""The share of an end of the predicted interval by which steps must leave it to be told of: less
has no cause that could be named."""
MOST_STEPS = 200
"""So many of the latest steps count."""


class RankSteps(Record, frozen=True, kw_only=True):
    """What is typical of one rank's latest ``steps``: all of one, and the waits in it."""

    steps: Count
    step_s: Seconds
    blocking_s: Seconds
    exposed_s: Seconds

    @property
    def compute_s(self) -> float:
        return max(self.step_s - self.blocking_s - self.exposed_s, 0.0)


class Cause(NamedTuple):
    """Why steps are not as predicted: what it is about, said once, and the sentence."""

    about: str
    sentence: str


class TrainingProgress:
    """How far the training of one model is. ``step(loss)`` tells the loss of each step, if it is to
    be shown; steps themselves are noticed. Rank 0 shows it, every rank has one."""

    def __init__(
        self,
        run: Run,
        device: torch.device,
        *,
        total: int | None = None,
        every_s: float | None = None,
        screen: TextIO | None = None,
        say: Callable[[str], None] = note,
    ) -> None:
        self._run, self._plan, self._say = run, run.whole_plan, say
        self._line = _Line(sys.stderr if screen is None else screen)
        rewritten = REWRITTEN_S if self._line.rewritten else LINE_S
        self._every_s = rewritten if every_s is None else every_s
        self._total, self._done = total, 0
        self._come = 0
        """Steps that the device has made."""
        self._shows = run.world.rank == 0
        self._pending: deque[StepMoments] = deque()
        self._latest: deque[tuple[float, float, float]] = deque(maxlen=MOST_STEPS)
        self._loss = _LatestLoss(device)
        first_s = self._every_s if self._line.rewritten else min(FIRST_S, self._every_s)
        self._next_s = time.monotonic() + (first_s if self._shows else TOLD_S)
        self._figures = _FiguresOfRanks(run)
        # A background job lengthens steps on purpose.
        self._compares = BACKGROUND_VARIABLE not in os.environ
        self._compared_s = -COMPARED_S
        self._answer_s = math.inf
        """When to look again why steps are not as predicted, before the next line."""
        self._told: set[str] = set()

    def step(self, loss: Tensor | float) -> None:
        """The loss of the step that this rank is making or has just made, over its own samples."""
        # Detached, or the graph of this step would live on.
        self._loss.given = loss.detach() if isinstance(loss, Tensor) else loss, 1.0

    def told(self, total: int | None, every_s: float | None) -> None:
        """What a script knows better than the launcher."""
        self._total = self._total if total is None else total
        self._every_s = self._every_s if every_s is None else every_s

    def begin(self, done: int, total: int) -> None:
        """So many of ``total`` steps were made before."""
        self._done, self._total = done, total

    def launched(self, step: LaunchedStep) -> None:
        """A step of ``run_range``."""
        # Of the whole batch's mean it has this rank's part.
        if step.share:
            self._loss.given = step.loss, 1 / step.share
        self._done += 1
        self._stepped(step.moments)

    def noticed(self, step: StepMoments) -> None:
        """The clock of a loop of the user's own tells of a step."""
        # It counts the first too, of which it does not tell, and those before a checkpoint.
        self._done = self._run.steps_done
        self._stepped(step)

    def _stepped(self, step: StepMoments) -> None:
        """A step was launched."""
        self._pending.append(step)
        if len(self._pending) > MOST_STEPS:
            self._take_what_has_come()
        now_s, last = time.monotonic(), self._done == self._total
        due = last or now_s >= self._next_s
        if not due and now_s < self._answer_s:
            return
        self._take_what_has_come()
        found = self._typical()
        if not due:
            if found is not None:
                self._compare(found)
            return
        self._next_s = now_s + (self._every_s if self._shows else TOLD_S)
        if found is not None:
            self._figures.tell(found)
        if self._shows:
            self._show(found, last=last)

    def end(self) -> None:
        """Leaves nothing on the screen that would be overwritten."""
        if self._shows:
            self._line.clear()

    def _take_what_has_come(self) -> None:
        while self._pending and has_come(self._pending[0].end):
            step = self._pending.popleft()
            self._come += 1
            if self._come > WARM_UP:
                self._latest.append(step.seconds())

    def _typical(self) -> RankSteps | None:
        if not self._latest:
            return None
        typical = map(typical_of(self._plan), zip(*self._latest, strict=True))
        step_s, blocking_s, exposed_s = typical
        return RankSteps(
            steps=len(self._latest), step_s=step_s, blocking_s=blocking_s, exposed_s=exposed_s
        )

    def _show(self, found: RankSteps | None, *, last: bool) -> None:
        count = f"step {self._done:,}"
        words = [count if self._total is None else f"{count} of {self._total:,}"]
        loss = self._loss.shown()
        words += [] if loss is None else [f"loss {loss:.4g}"]
        predicted = self._plan.prediction
        if found is not None and found.step_s:
            words.append(f"{self._plan.goal.batch / found.step_s:,.0f} samples/s")
            interval = expected(predicted.step_s, predicted.low_s, predicted.high_s)
            words.append(f"{seconds(found.step_s)} a step, predicted {interval}")
            self._compare(found)
        self._line.show(", ".join(words), stays=last)

    def _compare(self, found: RankSteps) -> None:
        """Says why steps are not as predicted, once for each cause."""
        self._answer_s = math.inf
        if not self._compares:
            return
        if found.steps < LEAST_STEPS:
            self._answer_s = time.monotonic() + TOLD_S
            return
        if not is_far(found.step_s, self._plan.prediction):
            return
        if time.monotonic() < self._compared_s + COMPARED_S:
            return
        every = self._figures.of_all(found)
        if every is None:  # asked for
            self._answer_s = time.monotonic() + TOLD_S
            return
        self._compared_s = time.monotonic()
        cause = why_not_as_predicted(self._plan, every, self._figures.name, self._levels)
        if cause.about not in self._told:
            self._told.add(cause.about)
            self._line.clear()
            self._say(cause.sentence)

    @cached_property
    def _levels(self) -> dict[str, LevelName]:
        return links_waited_for(self._run)


class _Line:
    """One line that is rewritten on a terminal, or a new line each time."""

    def __init__(self, screen: TextIO) -> None:
        self._screen, self.rewritten = screen, screen.isatty()
        self._written = False

    def show(self, words: str, *, stays: bool = False) -> None:
        if not self.rewritten:
            print(words, file=self._screen, flush=True)
            return
        try:
            columns = os.get_terminal_size(self._screen.fileno()).columns
        except OSError:
            columns = 80
        # The cursor stays at the beginning: what a script prints goes over the line.
        end = "\n" if stays else "\r"
        print(f"\r{words[: columns - 1]}\x1b[K", end=end, file=self._screen, flush=True)
        self._written = not stays

    def clear(self) -> None:
        if self._written:
            print("\r\x1b[K", end="", file=self._screen, flush=True)
            self._written = False


class _LatestLoss:
    """The loss as the host knows it: copied without waiting, and shown once it has come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.given: tuple[Tensor | float, float] | None = None
        """The latest, and what to multiply it by."""
        self._copied: tuple[Tensor, float, Moment] | None = None
        self._known: float | None = None

    def shown(self) -> float | None:
        """The loss of an earlier step; the latest is on its way when this returns."""
        if self._copied is not None and has_come(self._copied[2]):
            self._known = float(self._copied[0]) * self._copied[1]
            self._copied = None
        if self._copied is None and self.given is not None:
            loss, factor = self.given
            if not isinstance(loss, Tensor):
                self._known = float(loss) * factor
            else:
                pinned = self._device.type == "cuda"
                host = torch.empty((), dtype=torch.float64, device="cpu", pin_memory=pinned)
                host.copy_(loss.detach().to(torch.float64), non_blocking=True)
                self._copied = host, factor, now(self._device)
            self.given = None
        if self._copied is not None and has_come(self._copied[2]):
            return self.shown()
        return self._known


class _FiguresOfRanks:
    """What ranks tell each other of their steps, by the process group's store."""

    def __init__(self, run: Run) -> None:
        heartbeat = run.watch.heartbeat
        # A store that is kept in a file grows with every word.
        self._heartbeat: Heartbeat | None = heartbeat if heartbeat and heartbeat.beats else None
        self._rank, self._size = run.world.rank, heartbeat.size if heartbeat else 1
        self._prefix = f"meshwright/steps/{run.watch.number}"
        self._heard: dict[int, RankSteps] | None = None
        self._thread: threading.Thread | None = None

    def name(self, rank: int) -> str:
        return self._heartbeat.name(rank) if self._heartbeat else f"rank {rank}"

    def tell(self, found: RankSteps) -> None:
        if self._heartbeat is not None and self._rank:
            text = msgspec.json.encode(found).decode()
            self._heartbeat.leave(f"{self._prefix}/{self._rank}", text)

    def of_all(self, own: RankSteps) -> Mapping[int, RankSteps] | None:
        """What all ranks have told, this one's as it is now; None while they are asked. A rank that
        has told nothing yet may be the one that makes the others wait."""
        if self._heartbeat is None or self._size == 1:
            return {self._rank: own}
        if self._thread is None or not self._thread.is_alive():
            heard, self._heard = self._heard, None
            if heard is not None and len(heard) == self._size - 1:
                return {**heard, self._rank: own}
            # A daemon that nobody waits for: on a link that was cut a read never returns.
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        return None

    def _ask(self) -> None:
        assert self._heartbeat is not None
        found = {}
        keys = {rank: f"{self._prefix}/{rank}" for rank in range(self._size) if rank != self._rank}
        with suppress(RuntimeError, msgspec.MsgspecError):  # the store has ended
            texts = self._heartbeat.left(list(keys.values()))
            for rank, text in zip(keys, texts, strict=True):
                if text is not None:
                    found[rank] = msgspec.json.decode(text, type=RankSteps)
            self._heard = found


def is_far(step_s: float, predicted: Prediction) -> bool:
    """Whether steps leave the predicted interval by more than ``FAR``."""
    low, high = predicted.low_s, predicted.high_s
    if low is None or high is None:
        return False
    return not low * (1 - FAR) <= step_s <= high * (1 + FAR)


def why_not_as_predicted(
    plan: Plan,
    ranks: Mapping[int, RankSteps],
    name: Callable[[int], str],
    levels: Mapping[str, LevelName],
) -> Cause:
    """The part of the step that differs most from what was predicted, by what ranks have measured.
    ``levels`` are the links that blocking communication and the exchange of gradients cross.

    A rank that computes too long makes the others wait, who then seem to have slow links: so of
    computing the longest counts, and of each wait the shortest of all ranks.
    """
    predicted = plan.prediction
    step_s = max(one.step_s for one in ranks.values())
    low, high = predicted.low_s or predicted.step_s, predicted.high_s or predicted.step_s
    head = f"steps take {seconds(step_s)}, and {seconds(low)} to {seconds(high)} were predicted"
    if step_s < low:
        return Cause(
            "quicker",
            f"{head}: the profile or the cluster was measured while something else ran; "
            "meshwright calibrate corrects them by this run's --report",
        )
    slowest = max(ranks, key=lambda rank: ranks[rank].compute_s)
    computing_s = predicted.compute_s + predicted.waiting_s
    parts: dict[str, tuple[float, float]] = {
        "compute": (ranks[slowest].compute_s, computing_s),
        "blocking": (min(one.blocking_s for one in ranks.values()), predicted.blocking_s),
        "exposed": (min(one.exposed_s for one in ranks.values()), predicted.exposed_s),
    }
    part = max(parts, key=lambda part: parts[part][0] - parts[part][1])
    measured_s, expected_s = parts[part]
    if part == "compute":
        return Cause(
            part,
            f"{head}: computing is slower, {name(slowest)} computes for {seconds(measured_s)} in "
            f"each, and {seconds(expected_s)} were predicted",
        )
    level = levels.get(part)
    where = f"links {LINK_NAMES[level]}" if level is not None else "links"
    what = "gradients" if part == "exposed" else "tensors inside forward and backward"
    return Cause(
        where,
        f"{head}: {where} are slower, each rank waits for {what} for {seconds(measured_s)} or "
        f"longer, and {seconds(expected_s)} were predicted",
    )


def links_waited_for(run: Run) -> dict[str, LevelName]:
    """The links that the two kinds of waits go over: between nodes where any of their groups
    does."""
    nodes: Sequence[object] = ()
    cluster = cache.get(Cluster, run.whole_plan.provenance.cluster)
    if cluster is not None and cluster.world_size == run.whole_plan.world_size:
        nodes = cluster.node_of_rank
    elif run.watch.heartbeat is not None:
        nodes = run.watch.heartbeat.hosts
    if not nodes:
        return {}
    return {
        part: "inter" if any(len({nodes[r] for r in g.ranks}) > 1 for g in groups) else "intra"
        for part, groups in waited_groups(run.world).items()
        if any(group.size > 1 for group in groups)
    }


def waited_groups(world: World) -> dict[str, list[Group]]:
    """The groups that a rank waits for inside forward and backward, and for gradients."""
    hosts: list[Group] = []
    for each in world.hosts.values():
        hosts += each.adding, each.across
    exposed = [*world.gradients.values(), *world.unshards.values(), *hosts]
    exposed += [world.apart] if world.apart is not None else []
    blocking = [*world.redistribution.values(), *world.crossings.values()]
    return {"blocking": blocking, "exposed": exposed}


def progress(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    total: int | None = None,
    every_s: float | None = None,
) -> TrainingProgress:
    """Shows how the training of ``model`` goes, to which a plan has been applied: on a terminal in
    a line that is rewritten, else in a line every ``every_s`` seconds (30). Every rank calls it;
    rank 0 shows. ``total`` is the number of steps, if that is known, with those before the
    checkpoint that ``mw.checkpoint`` goes on from: with the last of them a line is shown and stays.

    Steps are noticed by themselves; ``step(loss)`` of what is returned tells the loss, of which the
    latest is copied to the host when a line is shown. Says once for each cause what makes steps
    leave the predicted interval by more than 5%. Where ``launch`` shows progress already, that is
    returned.
    """
    if every_s is not None and not every_s > 0:
        raise InputError(f"a line every {every_s:g} s cannot be shown: give more than 0 s")
    run = run_of(model)
    if isinstance(run.progress, TrainingProgress):
        run.progress.told(total, every_s)
        return run.progress
    made = TrainingProgress(run, device_of(model), total=total, every_s=every_s)
    clock_of(run, model, optimizer).listeners.append(made.noticed)
    run.progress = made
    return made


def progress_asked() -> bool:
    """Whether the launcher has asked for it."""
    return bool(os.environ.get(PROGRESS_VARIABLE))
