"""What goes on after a sharded step has returned: averages are waited for, this rank's chunks are
updated, and the parameters are gathered, parcel by parcel in forward order.

A thread of its own does so while the thread that trains goes on to the next forward. All ranks must
issue the gathers in one order; they have a process group of their own, on which nothing else is
sent and only this thread issues, so their order is that of forward on every rank, wherever its
main thread is. A rank that reads its parameters after a step needs other ranks' chunks, but nothing
that their programs have to do: their threads send them, even while their main threads wait in
something else.

On a device's streams (NCCL) two communicators' kernels must be launched in one order on all ranks,
and a wait does not hold the host: ``step()`` does it all there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..comm.watchdog import Watchdog
from ..comm.worker_threads import as_here, spawn


class StepParticipant(Protocol):
    """A parcel on such a trip."""

    @property
    def arrived(self) -> bool:
        """Whether every gradient that is waited for has come."""

    def reduce(self, watch: Watchdog) -> float:
        """Waits for the averages of this rank's elements. Returns the seconds waited."""

    def gather(self) -> None:
        """Sends this rank's elements of the parameters to all peers."""


class StepStage:
    """One parcel's part of a trip. ``apply`` updates this rank's chunks."""

    def __init__(self, grad_group: StepParticipant, apply: Callable[[], None]) -> None:
        self.grad_group, self.apply = grad_group, apply
        self.updated = False
        self.sent = threading.Event()
        """Set when its gathering has been issued, or never will be."""

    def update(self) -> None:
        """Updates this rank's chunks, and lets go of their gradients."""
        self.apply()
        self.apply, self.updated = _nothing, True


def _nothing() -> None:
    """What is left to apply of an updated stage."""


class ShardedStepPipeline:
    """The parcels of one step, in forward order. ``waited(parcel, seconds)`` is told how long each
    one's averages were waited for."""

    def __init__(
        self,
        stages: Sequence[StepStage],
        watch: Watchdog,
        waited: Callable[[Any, float], None],
    ) -> None:
        self._stages = {stage.grad_group: stage for stage in stages}
        self._watch, self._waited = watch, waited
        self._error: BaseException | None = None

    def start(self) -> None:
        """Sets out, in a thread of its own."""
        spawn("meshwright sharded step", as_here(self._travel))

    def run(self) -> None:
        """Goes all the way at once."""
        self._travel()
        self._check()

    def past(self, grad_group: StepParticipant) -> bool:
        """Whether the gathering of a parcel has been issued."""
        return self._stages[grad_group].sent.is_set()

    def wait_for(self, grad_group: StepParticipant) -> float:
        """Waits until the gathering of a parcel has been issued; raises what has prevented that.
        Returns the seconds waited. It ends in any case: each wait on the way has its limit."""
        start_s = time.perf_counter()
        self._stages[grad_group].sent.wait()
        self._check()
        return time.perf_counter() - start_s

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _travel(self) -> None:
        try:
            with torch.no_grad():
                for stage in self._stages.values():
                    self._advance(stage)
        except BaseException as error:  # raised where somebody waits for its outcome
            self._error = error
        finally:
            for stage in self._stages.values():
                stage.sent.set()

    def _advance(self, stage: StepStage) -> None:
        """Updates a stage's chunks, and others that have to be updated anyway while its gradients
        come; sends its chunks."""
        for other in self._stages.values():
            if stage.updated or stage.grad_group.arrived:
                break
            if other.grad_group.arrived:
                self._update(other)
        self._update(stage)
        stage.grad_group.gather()
        stage.sent.set()

    def _update(self, stage: StepStage) -> None:
        if not stage.updated:
            self._waited(stage.grad_group, stage.grad_group.reduce(self._watch))
            stage.update()
