"""When each thing goes on in a step of this rank: what it computes and waits for, what its
optimizer updates, and what is on its way to other ranks.

Only while a few steps are recorded for a trace; nothing here runs otherwise. Moments are those of
``moments``: nothing waits for the device until all is over.
"""

# [Note: How messages are recorded]
# A collective's own end is told by the future of its work: gloo's thread that completes it calls
# back, and NCCL's future gives a stream that waits for it, on which an event is as late as that.
# The works are made in many places, all by functions of ``torch.distributed`` or by the exchange of
# pairwise.py: these are replaced while steps are recorded.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import pairwise
from .groups import Group
from .moments import Moment, now
from .worker_threads import in_worker

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor", "all_to_all_single",
    "reduce_scatter_single", "reduce_scatter_tensor", "broadcast",
)  # fmt: skip
"""torch's functions by which messages are sent here, as different versions of it call them."""

BETWEEN = "between units"
"""What is computed, but not by a unit."""


class NamedInterval(NamedTuple):
    """Something that went on between two moments."""

    name: str
    start: Moment
    end: Moment


@dataclass
class MessageMoments:
    """A message of a group, and when it was issued and had arrived (None: it has not yet)."""

    name: str
    group: Group
    message_bytes: int
    start: Moment
    end: Moment | None = None


class StepRecorder:
    """What goes on while it is there. ``mark`` says what this rank has computed since the mark
    before; what it waited for or updated meanwhile is in ``waits`` and ``updates``, and part of
    that. ``apart`` are updates of other threads than the one that trains. ``steps`` are from the
    first forward to the end of the optimizer's step."""

    def __init__(self, device: torch.device, groups: Iterable[Group]) -> None:
        self._device = device
        # On a device's streams the moments of a group on the host would be those of another clock.
        on_device = device.type == "cuda"
        self._groups: dict[Any, Group] = {
            handle: group
            for group in groups
            for handle in (group.handle, group.opposite)
            if handle is not None and group.on_stream == on_device
        }
        self.computing: list[NamedInterval] = []
        self.waits: list[NamedInterval] = []
        self.updates: list[NamedInterval] = []
        self.apart: list[NamedInterval] = []
        self.messages: list[MessageMoments] = []
        self.steps: list[tuple[Moment, Moment]] = []
        self._step_start: Moment | None = None
        self._last = now(device)
        self._local = threading.local()
        self._undo = ExitStack()

    def now(self) -> Moment:
        """This moment of the device."""
        return now(self._device)

    def mark(self, name: str) -> Moment:
        """This rank has done that since the mark before; "" where it does not count."""
        at = self.now()
        if name:
            self.computing.append(NamedInterval(name, self._last, at))
        self._last = at
        return at

    def forward_begins(self) -> None:
        """A forward that trains begins: of a step, its first begins the step."""
        if self._step_start is None:
            self._step_start = self.mark("")
        else:
            self.mark(BETWEEN)

    def step_ends(self) -> None:
        """The optimizer's step has returned."""
        end = self.mark("")
        if self._step_start is not None:
            self.steps.append((self._step_start, end))
        self._step_start = None

    def issued(self, what: str) -> None:
        """What this thread is about to send."""
        self._local.what = what

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait of the thread that trains."""
        if in_worker():
            yield
            return
        start = self.now()
        yield
        self.waits.append(NamedInterval(f"wait for {what}", start, self.now()))

    def update_begins(self) -> None:
        """This thread begins to update parameters."""
        self._local.update = self.now()

    def update_ends(self, name: str) -> None:
        """The update that this thread has begun is over."""
        start = getattr(self._local, "update", None)
        if start is not None:
            (self.apart if in_worker() else self.updates).append(
                NamedInterval(name, start, self.now())
            )
        self._local.update = None

    # -- messages ------------------------------------------------------------------------------

    def watch_messages(self) -> None:
        """Records messages from now on, until ``end``. See [Note: How messages are recorded]."""
        for module, name in (*((dist, name) for name in COLLECTIVES), (pairwise, "exchange")):
            before = getattr(module, name, None)
            if before is not None:
                setattr(module, name, self._recording(before, name))
                self._undo.callback(setattr, module, name, before)

    def end(self) -> None:
        """Records nothing more of messages that are sent later."""
        self._undo.close()

    def _recording(self, before: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(before)
        def send(*args: Any, **kwargs: Any) -> Any:
            group = self._groups.get(kwargs.get("group"))
            if group is None:
                return before(*args, **kwargs)
            what = getattr(self._local, "what", "") or name
            self._local.what = ""
            size = max((a.nbytes for a in args if isinstance(a, Tensor)), default=0)
            message = MessageMoments(what, group, size, self.now())
            work = before(*args, **kwargs)
            self.messages.append(message)
            if work is None:  # it was waited for
                message.end = self.now()
                return work

            def arrived(_: Any) -> None:
                message.end = now(self._device)

            work.get_future().add_done_callback(arrived)
            return work

        return send
