"""A few steps of a run as each rank sees them: recorded where the launcher asked for a trace.

Recording begins when the first steps are over. The first one that is recorded is not told, as what
the step before it had on its way is not known; what the last one leaves on its way arrives in the
step behind it, when the figures are read, which waits for the device once. Then this rank leaves
them in the launcher's folder.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...models.workload import device_of
from ...planner.schema.record import load, save
from ...planner.schema.recorded import (
    RecordedGroup,
    RecordedSpan,
    RecordedStep,
    RecordedSteps,
)
from ...planner.simulate.events import Interval, gaps
from ..comm.groups import Group, HostGroups, World
from ..comm.moments import Moment, seconds_between
from ..comm.recorder import BETWEEN, MessageMoments, NamedInterval, StepRecorder
from ..comm.steps import after_each_step
from ..parallel import run_of
from ..run import Run
from .train import WARM_UP

# The folder in which ranks leave what they have recorded.
TRACE_VARIABLE = "MESHWRIGHT_TRACE"
STEPS = 3
"""So many steps are told."""
LEAST_STEPS = WARM_UP + 1
"""Of a run of fewer there is nothing to tell."""
UNTOLD = ("control", "everyone", "checkpoint")
"""Groups of ranks' agreements, which are no part of what a step sends."""


def record_timeline(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Records some of the next steps of ``model`` where the launcher asked for a trace."""
    folder = os.environ.get(TRACE_VARIABLE)
    if folder:
        _Recording(model, optimizer, Path(folder))


def recorded_in(folder: Path) -> list[RecordedSteps]:
    """What the ranks of this host have left there, in their order."""
    found = [load(RecordedSteps, path) for path in folder.glob("timeline-*.json")]
    return sorted(found, key=lambda one: one.rank)


class _Recording:
    """Recording the steps of one model, from the end of one optimizer step to that of another."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
        self._model, self._run, self._folder = model, run_of(model), folder
        self._steps = 0
        self._recorder: StepRecorder | None = None
        self._undo = ExitStack()
        self._done = False
        after_each_step(model.parameters(), optimizer, self._stepped)
        # Of a run that ends early, what there is.
        atexit.register(self._leave)

    def _stepped(self, _: Optimizer) -> None:
        self._steps += 1
        recorder = self._recorder
        if recorder is not None and len(recorder.steps) <= STEPS:
            recorder.step_ends()
            if len(recorder.steps) > STEPS:
                self._stop()
        elif recorder is not None:
            self._leave()
        if self._steps == WARM_UP:
            self._start()

    def _start(self) -> None:
        run = self._run
        self._recorder = recorder = StepRecorder(device_of(self._model), groups_of(run.world))
        run.watch.recorder = recorder
        _mark_modules(self._model, run, recorder, self._undo)
        _mark_gradients(run, recorder, self._undo)
        _note_updates(recorder, self._undo)
        recorder.watch_messages()

    def _stop(self) -> None:
        """What goes on from now on is no part of it, but for messages that are on their way."""
        assert self._recorder is not None
        self._run.watch.recorder = None
        self._undo.close()
        self._recorder.end()

    def _leave(self) -> None:
        recorder = self._recorder
        if recorder is None or self._done or not recorder.steps:
            return
        self._done = True
        self._stop()
        rank = self._run.world.rank
        if self._folder.is_dir():  # the launcher may be gone
            save(told(rank, recorder), self._folder / f"timeline-{rank}.json")


def groups_of(world: World) -> list[Group]:
    """The process groups of a run, those left out whose messages are only agreements."""
    found: list[Group] = []
    for field in fields(world):
        value = getattr(world, field.name)
        for one in value.values() if isinstance(value, dict) else (value,):
            if isinstance(one, HostGroups):
                found += one.adding, one.across, one.gathering
            elif isinstance(one, Group):
                found.append(one)
    return [group for group in found if not group.label.startswith(UNTOLD)]


# -- what marks the end of each piece of work ------------------------------------------------------


def _mark_modules(model: nn.Module, run: Run, recorder: StepRecorder, undo: ExitStack) -> None:
    """Says when each unit's modules have worked, also again in backward."""
    # A module that is compiled is compiled anew with a hook: there a forward is told as a whole.
    compiled = run.compiled is not None and len(run.compiled) > 0
    if not compiled:
        for unit in run.plan.units:
            for name in unit.modules:
                module = model.get_submodule(name)
                before = module.register_forward_pre_hook(_between(recorder))
                after = module.register_forward_hook(_worked(recorder, unit.name))
                undo.callback(before.remove)
                undo.callback(after.remove)
    whole = model.register_forward_hook(_worked(recorder, "all" if compiled else ""))
    undo.callback(whole.remove)


def _between(recorder: StepRecorder) -> Callable[..., None]:
    def hook(*_: object) -> None:
        recorder.mark(BETWEEN)

    return hook


def _worked(recorder: StepRecorder, unit: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        again = torch._C._current_graph_task_id() >= 0  # in a backward
        what = "recompute" if again else "forward"
        recorder.mark(f"{what} {unit}" if unit else BETWEEN)

    return hook


def _mark_gradients(run: Run, recorder: StepRecorder, undo: ExitStack) -> None:
    """Says when each parameter's gradient is complete: the backward of its unit, and of what has
    no parameters behind it, has come so far."""
    units = run.plan.units
    for param in run.gradients.params:
        name = units[param.unit].name if param.unit < len(units) else param.name
        parameter: Any = param.parameter  # torch has not typed its hooks

        def hook(_: object, name: str = name) -> None:
            recorder.mark(f"backward {name}")

        undo.callback(parameter.register_post_accumulate_grad_hook(hook).remove)


def _note_updates(recorder: StepRecorder, undo: ExitStack) -> None:
    """Says when an optimizer works: of a lazy step, each time that it is applied to something."""

    def begins(*_: object) -> None:
        recorder.update_begins()

    def ends(*_: object) -> None:
        recorder.update_ends("update")

    undo.callback(register_optimizer_step_pre_hook(begins).remove)
    undo.callback(register_optimizer_step_post_hook(ends).remove)


# -- what is told ----------------------------------------------------------------------------------


def told(rank: int, recorder: StepRecorder) -> RecordedSteps:
    """What was recorded, in seconds. Waits until the device has come so far."""
    origin = recorder.steps[0][0]

    def at(moment: Moment) -> float:
        return seconds_between(origin, moment)

    def spans(stretches: Iterable[NamedInterval]) -> list[RecordedSpan]:
        return [
            RecordedSpan(name=one.name, start_s=at(one.start), end_s=at(one.end))
            for one in stretches
        ]

    steps = [RecordedStep(start_s=at(start), end_s=at(end)) for start, end in recorder.steps]
    # Of a run that was too short for more, the first too.
    steps = steps[1:] or steps
    waits, updates = spans(recorder.waits), spans(recorder.updates)
    busy = sorted((one.start_s, one.end_s) for one in (*waits, *updates))
    return RecordedSteps(
        rank=rank,
        steps=tuple(steps),
        computing=tuple(_without(_joined(spans(recorder.computing)), busy)),
        waiting=tuple(waits),
        updating=(*updates, *spans(recorder.apart)),
        groups=tuple(_groups(recorder.messages, at)),
    )


def _joined(spans: Iterable[RecordedSpan]) -> list[RecordedSpan]:
    """Neighbours of one name as one: a unit's backward has a mark for each of its parameters."""
    found: list[RecordedSpan] = []
    for span in spans:
        last = found[-1] if found else None
        if last is not None and last.name == span.name and last.end_s == span.start_s:
            found[-1] = RecordedSpan(name=span.name, start_s=last.start_s, end_s=span.end_s)
        else:
            found.append(span)
    return found


def _without(spans: Iterable[RecordedSpan], busy: Sequence[Interval]) -> Iterable[RecordedSpan]:
    """What of the spans is left where something else went on."""
    for span in spans:
        for start_s, end_s in gaps(busy, span.start_s, span.end_s):
            yield RecordedSpan(name=span.name, start_s=start_s, end_s=end_s)


def _groups(
    messages: Sequence[MessageMoments], at: Callable[[Moment], float]
) -> Iterable[RecordedGroup]:
    by_group: dict[tuple[str, tuple[int, ...]], list[RecordedSpan]] = {}
    for message in messages:
        if message.end is None:  # of a run that has ended meanwhile
            continue
        span = RecordedSpan(
            name=message.name,
            start_s=at(message.start),
            end_s=at(message.end),
            message_bytes=message.message_bytes,
        )
        by_group.setdefault((message.group.label, message.group.ranks), []).append(span)
    for (label, ranks), found in by_group.items():
        found.sort(key=lambda one: one.end_s)
        yield RecordedGroup(label=label, ranks=ranks, messages=tuple(found))
