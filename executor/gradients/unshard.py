"""When the parameters of fully sharded units are whole: from the moment in which something needs
them until the next unit's turn."""

# [Note: Unshard and reshard]
# What needs a unit's parameters is noticed by what it does: whoever touches a parameter whose
# memory is free (``ResharedParam``), in forward as a rule, and whatever autograd has saved of it
# and takes out again in backward (hooks on saved tensors). So units that run twice, or by another
# way than their modules' forward, are right as well, for one more all-gather each time. While a
# unit works, the parameters of the one that followed it last time are already on their way.
#
# In forward a unit is resharded when the next one is unsharded; in backward when its gradients are
# complete, or when that backward is over. All ranks must unshard the units in one order, as each
# time is collective; votes at the end of backward compare ``order_digest``.

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd import Variable

from ..comm.groups import Group
from ..comm.watchdog import Watchdog
from ..comm.worker_threads import IssueQueue
from ..redistribution.lazy import check_version
from .buckets import GradParam
from .fully_sharded import FullyShardedGradGroup
from .pending import PendingParam, resume, suspend, weakly
from .reshard import SHARDED, ResharedParam, ShardedParamRef
from .slices import GradGroup

Saved = tuple[Tensor, int, FullyShardedGradGroup | None]
"""What autograd saves of a tensor: itself, its version, and the group that holds its memory."""


class UnshardManager:
    """Unshards and reshards an exchange's fully sharded groups, in forward order; perhaps none.
    ``finish_step(group)`` ends what a step has left to do for one, ``issued`` is told of each
    collective before it is issued."""

    def __init__(
        self,
        grad_groups: Sequence[FullyShardedGradGroup],
        watch: Watchdog,
        issued: Callable[[str, int, Group], None],
        finish_step: Callable[[FullyShardedGradGroup], None],
    ) -> None:
        self.grad_groups = tuple(grad_groups)
        self.waited_s = 0.0
        self._watch, self._issued, self._finish_step = watch, issued, finish_step
        self._issue_queue = IssueQueue("meshwright unshard")
        self._in_forward = self._forward_has_grad = False
        self._backward = -1
        """The backward that is going on, as autograd numbers them."""
        self._complete: Counter[FullyShardedGradGroup] = Counter()
        """How many gradients of each group this backward has completed."""
        self._current: FullyShardedGradGroup | None = None
        self.order_digest = 0
        """A hash of the groups unsharded since it was last set to zero, in their order."""
        self.used_without_grad: set[FullyShardedGradGroup] = set()
        """What the last forward has used where autograd did not see it."""
        self._following: dict[tuple[bool, FullyShardedGradGroup], FullyShardedGradGroup] = {}
        """Which group came after one last time, in backward (True) and in forward."""
        self._by_storage: dict[int, tuple[torch.UntypedStorage, FullyShardedGradGroup]] = {}
        """By the number of a storage that parameters of a group have or had while it was whole. It
        is held, as another would else get the number when it is gone."""
        for before, after in zip(self.grad_groups, self.grad_groups[1:], strict=False):
            self._following[False, before] = after
            self._following[True, after] = before
        self._hooks: list[Any] = []
        for grad_group in self.grad_groups:
            with _out_of_graph():
                self._free(grad_group)
            complete = weakly(self._gradient_complete, grad_group)
            for param in grad_group.params:
                parameter: Any = param.parameter  # torch has not typed its hooks
                self._hooks.append(parameter.register_post_accumulate_grad_hook(complete))

    def end(self) -> None:
        """All parameters are whole, as any other, from now on. Collective."""
        with _out_of_graph():
            for grad_group in self.grad_groups:
                self._unshard(grad_group)
                self._open(grad_group)
                for param in grad_group.params:
                    del param.parameter.__dict__[SHARDED]
        for hook in self._hooks:
            hook.remove()

    # -- forward -------------------------------------------------------------------------------

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """One forward of the whole model: what autograd saves in it knows where it comes from."""
        if not self.grad_groups:
            yield
            return
        self._in_forward, self._current = True, None
        self._forward_has_grad = torch.is_grad_enabled()
        if self._forward_has_grad:
            self.used_without_grad.clear()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._in_forward = False
            self._watch_all()
        # The last unit's parameters stay: they are the first that backward needs.
        with _out_of_graph():
            self._reshard_all(but={self._current} if torch.is_grad_enabled() else ())

    @contextmanager
    def around_read(self) -> Iterator[None]:
        """Around one function that reads parameters outside the model's forward."""
        if self._in_forward or _current_backward() >= 0:
            yield
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._watch_all()

    def unshard(
        self, grad_groups: Iterable[FullyShardedGradGroup], arguments: Iterable[Tensor]
    ) -> None:
        """A function needs the parameters of ``grad_groups``, which are among its ``arguments``."""
        wanted = set(grad_groups)
        # As reentrant checkpointing runs a forward: autograd does not see it, and so cannot foresee
        # the gradients that a backward inside backward will compute.
        if self._in_forward and self._forward_has_grad and not torch.is_grad_enabled():
            self.used_without_grad.update(wanted)
        with _out_of_graph():
            needed = {self._group_of(tensor) for tensor in arguments} | wanted
            if _current_backward() < 0:
                self._reshard_all(but=needed | self._next_after(wanted))
            for grad_group in self.grad_groups:  # in one order on all ranks
                if grad_group in wanted:
                    self._unshard_and_prefetch(grad_group)
                    self._open(grad_group)

    def _unshard_and_prefetch(self, grad_group: FullyShardedGradGroup) -> None:
        self._begin_backward()
        self._start_unshard(grad_group)
        backward = self._backward >= 0
        if self._in_forward or backward:
            if self._current is not None and self._current is not grad_group:
                self._following[backward, self._current] = grad_group
            self._current = grad_group
            # Issued before its own are waited for, so that the link never idles between the two.
            for following in self._next_after({grad_group}):
                self._start_unshard(following)
        self._unshard(grad_group)

    def _next_after(self, used: set[FullyShardedGradGroup]) -> set[FullyShardedGradGroup]:
        """Those that are needed next, as far as can be known."""
        backward = _current_backward() >= 0
        if not (self._in_forward or backward):
            return set()
        found = {self._following.get((backward, grad_group)) for grad_group in used}
        return {g for g in found if g is not None and not (backward and self._is_complete(g))}

    # -- backward ------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        # At the first unshard or gradient of a backward, as nobody tells when one begins.
        backward = _current_backward()
        if backward == self._backward:
            return
        self._backward = backward
        if backward < 0:
            return

        def end() -> None:
            with _out_of_graph():
                self._reshard_all()
            self._backward, self._current = -1, None

        self._complete.clear()
        self._current = None
        Variable._execution_engine.queue_callback(end)

    def _gradient_complete(self, grad_group: FullyShardedGradGroup) -> None:
        self._begin_backward()
        self._complete[grad_group] += 1
        if self._is_complete(grad_group):
            with _out_of_graph():
                self._reshard(grad_group)

    def make_room(self, grad_group: GradGroup) -> None:
        """Before a group's gradients leave: waits until those of the group before it in backward
        are the only ones on their way."""
        # So that a backward takes no more memory where the network is slow.
        if not isinstance(grad_group, FullyShardedGradGroup):
            return
        away = [g for g in reversed(self.grad_groups) if g is not grad_group and g.outstanding]
        for i, other in enumerate(away):
            if i < len(away) - 1 or other.arrived:
                self.waited_s += other.release(self._watch)

    def _is_complete(self, grad_group: FullyShardedGradGroup) -> bool:
        return self._complete[grad_group] >= len(grad_group.params)

    # -- what autograd saves -------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Saved:
        return tensor, tensor._version, self._group_of(tensor)

    def _unpack(self, saved: Saved) -> Tensor:
        tensor, version, grad_group = saved
        check_version(tensor, version)
        is_current = grad_group is self._current and self._backward == _current_backward()
        if grad_group is not None and not (is_current and grad_group.resident):
            with _out_of_graph():
                self._unshard_and_prefetch(grad_group)
        return tensor

    def _group_of(self, tensor: Tensor) -> FullyShardedGradGroup | None:
        storage = _storage_of(tensor)
        found = None if storage is None else self._by_storage.get(storage._cdata)
        return None if found is None else found[1]

    # -- states of a group ---------------------------------------------------------------------

    def _start_unshard(self, grad_group: FullyShardedGradGroup) -> None:
        if grad_group.resident or grad_group.coming:
            return
        self.order_digest = crc32(grad_group.unit.to_bytes(4, "little"), self.order_digest)
        for number, one in enumerate(grad_group.unshard_slices):
            text = f"gathering {number} of {one.params[0].name!r} for a use"
            self._issued(text, one.gathered_bytes, one.gather_group)
        grad_group.announce()
        # On a device's streams all is issued by the thread that trains, in one order on all ranks.
        in_thread = not grad_group.updated and not grad_group.on_stream
        self._issue_queue.submit(grad_group.issue, in_thread=in_thread)

    def _unshard(self, grad_group: FullyShardedGradGroup) -> None:
        self._start_unshard(grad_group)
        if grad_group.coming:
            self.waited_s += grad_group.wait_for_unshard(self._watch)
            if grad_group.pipeline is not None:
                self._finish_step(grad_group)
            for param in grad_group.params:
                storage = _storage_of(param.parameter)
                if storage is not None:
                    self._by_storage[storage._cdata] = storage, grad_group

    def _open(self, grad_group: FullyShardedGradGroup) -> None:
        # Its parameters are as any other, until they are watched again or resharded.
        grad_group.opened = True
        grad_group.exposed |= not (self._in_forward or _current_backward() >= 0)
        for param in grad_group.params:
            resume(param.parameter)

    def _watch_group(self, grad_group: FullyShardedGradGroup) -> None:
        for param in grad_group.params:
            if not isinstance(param.parameter, PendingParam):
                reference = ShardedParamRef(self, grad_group, param)
                suspend(param.parameter, reference, ResharedParam)
                param.parameter.__dict__[SHARDED] = reference

    def _watch_all(self) -> None:
        for grad_group in self.grad_groups:
            if grad_group.resident:
                self._watch_group(grad_group)

    def _reshard(self, grad_group: FullyShardedGradGroup) -> None:
        if grad_group.coming:  # its memory is the library's until what was issued has come
            self._unshard(grad_group)
        if grad_group.resident:
            self._free(grad_group)

    def _reshard_all(self, but: Collection[FullyShardedGradGroup | None] = ()) -> None:
        for grad_group in self.grad_groups:
            if grad_group not in but:
                self._reshard(grad_group)

    def _free(self, grad_group: FullyShardedGradGroup) -> None:
        # Also those that the parameters had before somebody gave them other memory.
        gone = [number for number, (_, group) in self._by_storage.items() if group is grad_group]
        for number in gone:
            del self._by_storage[number]
        grad_group.reshard()
        self._watch_group(grad_group)

    # -- chunks --------------------------------------------------------------------------------

    def peek(self, grad_group: FullyShardedGradGroup, param: GradParam) -> Tensor:
        """This rank's elements of a parameter as they are now. Waits for a step, and communicates
        nothing: other ranks need not do the same."""
        with _out_of_graph():
            if grad_group.pipeline is not None:
                self._finish_step(grad_group)
            grad_group.keep_chunks()
        return grad_group.chunks[param]

    def reshard(self, grad_group: FullyShardedGradGroup) -> None:
        """Gives the memory of a group back, but for its chunks, which may be changed then. Call it
        on all ranks."""
        with _out_of_graph():
            if grad_group.pipeline is not None:
                self._finish_step(grad_group)
            self._reshard(grad_group)


@contextmanager
def _out_of_graph() -> Iterator[None]:
    """Without autograd or inference mode: tensors made here stay."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _current_backward() -> int:
    """The number of the backward that this thread is in, −1 outside."""
    return torch._C._current_graph_task_id()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """What tensors that share memory have in common; None where one has none of its own."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
