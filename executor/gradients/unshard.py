"""When the parameters of fully sharded units are whole: from a use until the next unit's.

A use is noticed by what it does: whoever touches a parameter whose memory is free
(``ResharedParam``), in forward as a rule, and whatever autograd has saved of it and takes out again
in backward. So units that run twice, or by another way than their modules' forward, are right as
well, for one more gather each time. While a unit works, the parameters of the one that followed it
last time are on their way already.

In forward a unit's parameters are freed when the next one is touched; in backward when its
gradients are complete, or when that backward is over. All ranks must use the units in one order, as
each use is collective. One thread at a time issues on the process group of uses: the one that
trains, or while the chunks of a unit still wait for their update, one that waits in its stead.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ..comm.groups import Group
from ..comm.watchdog import Watchdog
from ..comm.worker_threads import as_here, spawn
from .fully_sharded import FullyShardedGradGroup
from .pending import Pending, resume, suspend
from .reshard import USE, Keeper, ResharedParam
from .slices import GradGroup

Saved = tuple[Tensor, int, FullyShardedGradGroup | None]
"""What autograd saves of a tensor: itself, its version, and the parcel that holds its memory."""


class UnshardManager:
    """The uses of an exchange's fully sharded parcels, in forward order. ``settle(parcel)`` ends
    what a step has left to do for one, ``issued`` is told of each collective before it is issued.
    """

    def __init__(
        self,
        grad_groups: Sequence[FullyShardedGradGroup],
        watch: Watchdog,
        issued: Callable[[str, int, Group], None],
        settle: Callable[[FullyShardedGradGroup], None],
    ) -> None:
        self.grad_groups = tuple(grad_groups)
        self.waited_s = 0.0
        self._watch, self._announce, self._settle = watch, issued, settle
        self._issuer = Issuer()
        self._inside = self._graded = False
        self._task = -1
        """The backward that is going on, as autograd numbers them."""
        self._complete: dict[FullyShardedGradGroup, int] = {}
        self._current: FullyShardedGradGroup | None = None
        self._trail = 0
        self._ungraded: set[FullyShardedGradGroup] = set()
        self._followed_by: dict[tuple[bool, FullyShardedGradGroup], FullyShardedGradGroup] = {}
        self._homes: dict[int, FullyShardedGradGroup] = {}
        self._hooks: list[Any] = []
        for before, after in zip(self.grad_groups, self.grad_groups[1:], strict=False):
            self._followed_by[False, before] = after
            self._followed_by[True, after] = before
        with _out_of_graph():
            for grad_group in self.grad_groups:
                self._free(grad_group)
        self._hooks = [hook for grad_group in self.grad_groups for hook in self._attach(grad_group)]

    def _attach(self, grad_group: FullyShardedGradGroup) -> Iterator[Any]:
        # Weak references, as Python's garbage collector does not see through a parameter's hooks.
        myself, mine = weakref.ref(self), weakref.ref(grad_group)

        def ready(_: nn.Parameter) -> None:
            fetcher, grad_group = myself(), mine()
            if fetcher is not None and grad_group is not None:
                fetcher._completed(grad_group)

        for entry in grad_group.entries:
            parameter: Any = entry.parameter
            yield parameter.register_post_accumulate_grad_hook(ready)

    def end(self) -> None:
        """All parameters are whole, as any other, from now on. Collective."""
        with _out_of_graph():
            for grad_group in self.grad_groups:
                self._want(grad_group)
                self._open(grad_group)
                for entry in grad_group.entries:
                    del entry.parameter.__dict__[USE]
        for hook in self._hooks:
            hook.remove()

    # -- forward -------------------------------------------------------------------------------

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """One forward of the whole model: what autograd saves in it knows where it comes from."""
        self._inside, self._current = True, None
        self._graded = torch.is_grad_enabled()
        if self._graded:
            self._ungraded.clear()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._inside = False
            self._rest_all()
        with _out_of_graph():  # the last unit's are the first that backward needs
            self._evict({self._current} if torch.is_grad_enabled() else set())

    @contextmanager
    def around_touch(self) -> Iterator[None]:
        """One function outside the model's forward: parameters are touched by it, and no more."""
        if self._inside or _task() >= 0:
            yield
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._rest_all()

    def _rest_all(self) -> None:
        for grad_group in self.grad_groups:
            if grad_group.resident:
                self._rest(grad_group)

    def touch(self, grad_groups: Iterable[FullyShardedGradGroup], beside: Iterable[Tensor]) -> None:
        """Something uses the parameters of ``grad_groups``, and perhaps those ``beside``."""
        if self._inside and self._graded and not torch.is_grad_enabled():
            self._ungraded.update(grad_groups)
        with _out_of_graph():
            wanted = set(grad_groups)
            kept = {self._home(tensor) for tensor in beside} | wanted
            if _task() < 0:
                self._evict(kept | self._next(wanted))
            for grad_group in self.grad_groups:  # in one order on all ranks
                if grad_group in wanted:
                    self._use(grad_group)
                    self._open(grad_group)

    def _use(self, grad_group: FullyShardedGradGroup) -> None:
        """Makes a parcel whole, and sees to the next one."""
        self._begin_task()
        self._request(grad_group)
        backward = self._task >= 0
        if self._inside or backward:
            if self._current is not None and self._current is not grad_group:
                self._followed_by[backward, self._current] = grad_group
            self._current = grad_group
            for following in self._next({grad_group}):
                self._request(following)
        self._want(grad_group)

    def hidden(self, grad_group: FullyShardedGradGroup) -> bool:
        """Whether the last forward has used a parcel where autograd did not see it, so that a
        backward inside backward may compute gradients (reentrant checkpointing)."""
        return grad_group in self._ungraded

    def trail(self) -> int:
        """Stands for the parcels put together since it was last asked, in their order."""
        found, self._trail = self._trail, 0
        return found

    def _next(self, used: set[FullyShardedGradGroup]) -> set[FullyShardedGradGroup]:
        """Those that are used next, as far as can be known."""
        backward = _task() >= 0
        if not (self._inside or backward):
            return set()
        found = {self._followed_by.get((backward, grad_group)) for grad_group in used}
        return {p for p in found if p is not None and not (backward and self._done(p))}

    # -- backward ------------------------------------------------------------------------------

    def _begin_task(self) -> None:
        task = _task()
        if task == self._task:
            return
        self._task = task
        if task >= 0:
            self._complete, self._current = {}, None
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        with _out_of_graph():
            self._evict(set())
        self._task, self._current = -1, None

    def _completed(self, grad_group: FullyShardedGradGroup) -> None:
        """One more gradient of a parcel is complete."""
        self._begin_task()
        self._complete[grad_group] = self._complete.get(grad_group, 0) + 1
        if self._done(grad_group):
            with _out_of_graph():
                self._release(grad_group)

    def _done(self, grad_group: FullyShardedGradGroup) -> bool:
        return self._complete.get(grad_group, 0) >= len(grad_group.entries)

    # -- what autograd saves -------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Saved:
        return tensor, tensor._version, self._home(tensor)

    def _unpack(self, saved: Saved) -> Tensor:
        tensor, version, grad_group = saved
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(tensor.shape)} is at version "
                f"{tensor._version}, expected version {version}"
            )
        known = grad_group is self._current and self._task == _task()
        if grad_group is not None and not (known and grad_group.resident):
            with _out_of_graph():
                self._use(grad_group)
        return tensor

    def _home(self, tensor: Tensor) -> FullyShardedGradGroup | None:
        return self._homes.get(storage_of(tensor))

    # -- states of a parcel --------------------------------------------------------------------

    def _request(self, grad_group: FullyShardedGradGroup) -> None:
        """Sees to it that a parcel becomes whole. Collective, in the order of uses."""
        if grad_group.resident or grad_group.coming:
            return
        self._trail = crc32(grad_group.unit.to_bytes(4, "little"), self._trail)
        for number, one in enumerate(grad_group.fetches):
            text = f"gathering {number} of {one.entries[0].name!r} for a use"
            self._announce(text, one.sent_bytes, one.gathers)
        grad_group.announce()
        aside = not grad_group.updated and not any(e.group.on_stream for e in grad_group.entries)
        self._issuer.submit(grad_group.issue, aside=aside)

    def _want(self, grad_group: FullyShardedGradGroup) -> None:
        """Waits until a parcel is whole."""
        self._request(grad_group)
        if grad_group.coming:
            self.waited_s += grad_group.land(self._watch)
            self._settle_step(grad_group)
            for entry in grad_group.entries:
                self._homes[storage_of(entry.parameter)] = grad_group

    def _settle_step(self, grad_group: FullyShardedGradGroup) -> None:
        if grad_group.trip is not None:
            self._settle(grad_group)

    def _open(self, grad_group: FullyShardedGradGroup) -> None:
        """Its parameters are as any other, until they rest or are freed."""
        grad_group.opened = True
        grad_group.exposed |= not (self._inside or _task() >= 0)
        for entry in grad_group.entries:
            resume(entry.parameter)

    def _rest(self, grad_group: FullyShardedGradGroup) -> None:
        """Whoever touches its parameters is noticed."""
        for entry in grad_group.entries:
            if not isinstance(entry.parameter, Pending):
                keeper = Keeper(self, grad_group, entry)
                suspend(entry.parameter, keeper, ResharedParam)
                entry.parameter.__dict__[USE] = keeper

    def _evict(self, kept: set[Any]) -> None:
        """Frees all but those."""
        for grad_group in self.grad_groups:
            if grad_group not in kept:
                self._release(grad_group)

    def _release(self, grad_group: FullyShardedGradGroup) -> None:
        if grad_group.coming:
            self._want(grad_group)
        if grad_group.resident:
            self._free(grad_group)

    def _free(self, grad_group: FullyShardedGradGroup) -> None:
        for entry in grad_group.entries:
            self._homes.pop(storage_of(entry.parameter), None)
        grad_group.free()
        self._rest(grad_group)

    # -- chunks --------------------------------------------------------------------------------

    def peek(self, grad_group: FullyShardedGradGroup, entry: Any) -> Tensor:
        """This rank's elements of a parameter as they are now. Waits for a step; communicates
        nothing, and leaves everything where it is: other ranks need not do the same."""
        with _out_of_graph():
            self._settle_step(grad_group)
            grad_group.keep_chunks()
        return grad_group.chunks[entry]

    def chunk(self, grad_group: FullyShardedGradGroup, entry: Any) -> Tensor:
        """The same, to be changed: the whole is free from then on. On all ranks alike."""
        with _out_of_graph():
            self._settle_step(grad_group)
            if grad_group.resident or grad_group.coming:
                self._release(grad_group)
        return grad_group.chunks[entry]

    def depart(self, grad_group: FullyShardedGradGroup) -> None:
        """A step is about to update the chunks: the whole is out of date."""
        with _out_of_graph():
            self._release(grad_group)


class Issuer:
    """Runs pieces of work in the order in which they are submitted: at once, or in a thread that
    ends when there is nothing left to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._running = False

    def submit(self, work: Callable[[], None], *, aside: bool) -> None:
        """Does it now unless ``aside``, or others have to be done first."""
        with self._lock:
            start = not self._running
            if self._running or aside:
                self._waiting.append(as_here(work))
                self._running = True
        if start and aside:
            spawn("meshwright uses", self._run)
        elif start:
            work()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                work = self._waiting.popleft()
            with torch.no_grad():
                work()


@contextmanager
def _out_of_graph() -> Iterator[None]:
    """What is made here outlives the forward in whose midst it is."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _task() -> int:
    """The number of the backward that this thread is in, −1 outside."""
    return torch._C._current_graph_task_id()


def storage_of(tensor: Tensor) -> int:
    """What tensors that share memory have in common; 0 where one has none of its own."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def make_room(
    grad_group: GradGroup, grad_groups: Sequence[FullyShardedGradGroup], watch: Watchdog
) -> float:
    """Before a parcel's gradients leave: waits until those of the parcel before it in backward are
    the only ones on their way, so that a backward takes no more memory where the network is slow.
    Returns the seconds waited."""
    if not isinstance(grad_group, FullyShardedGradGroup):
        return 0.0
    away = [p for p in reversed(grad_groups) if p is not grad_group and p.outstanding]
    return sum(p.release(watch) for i, p in enumerate(away) if i < len(away) - 1 or p.arrived)
