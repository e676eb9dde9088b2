"""Recompute (activation checkpointing, Chen et al., arXiv 1604.06174): a region keeps what enters
it; its forward runs again when backward asks for the first tensor that it would have saved.

torch's own ``checkpoint`` wraps one call of a function, and a unit is several calls in the user's
forward; and it lets the second forward change running statistics again. So the second forward runs
here with the random state, autocast, training modes and buffers that the first one began with, and
with the forward that its collectives belong to; it leaves all of these as they were. Its values
and, where units are divided, its collectives are the first one's in the same order.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.trees import map_only
from ...models.units.storages import storage_of, tensors_in
from ...planner.schema.errors import InputError, RunError
from ...planner.schema.pins import forbidding
from ..redistribution.lazy import version_of
from .offload import HostCopy, Offload, View
from .regions import Region, caching_casts

# Makes a forward the current one again, for a while.
ResumeForward = Callable[[], AbstractContextManager[None]]
# No backward: autograd numbers them from 0 on, and says -1 outside of all.
NO_TASK = -2


class SavedTensor:
    """Stands for one saved tensor; lives as long as backward may ask for it."""

    def __init__(self) -> None:
        self.value: Tensor | None = None


class _OnHost:
    """A tensor that enters a region and waits on the host until its forward runs again."""

    def __init__(self, view: View, requires_grad: bool) -> None:
        self.view, self.requires_grad = view, requires_grad


class Recomputed:
    """One forward through a region whose saved tensors are not kept. Where units are offloaded,
    ``offload`` has the copies of what enters it."""

    def __init__(
        self,
        region: Region,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        resume_forward: ResumeForward,
        offload: Offload | None = None,
    ) -> None:
        self._region, self._args, self._kwargs = region, args, kwargs
        self._tensors = tensors_in((args, kwargs))
        self._offload = offload
        # Copies under way, until its inputs hold them, and the storages that these have.
        self._copies: list[HostCopy] = []
        storages = map(storage_of, self._tensors if offload is not None else ())
        self._entered = {storage._cdata for storage in storages if storage is not None}
        self._versions = _versions(self._tensors)
        # Versions are compared before the second forward: of other values it would save others.
        inner = region.inner()
        self._parameters = [p for m in inner for p in m._parameters.values() if p is not None]
        self._parameter_versions: list[int] = []
        # Weak: what backward no longer asks for must not be kept again.
        self._saved: list[weakref.ref[SavedTensor]] = []
        self._task = NO_TASK  # the backward that their values were made in
        self._kinds: list[tuple[Any, ...]] = []
        self._state = _State(inner, [*self._tensors, *self._parameters], resume_forward)

    def pack(self, tensor: Tensor) -> SavedTensor:
        """Remembers that there was a tensor, and nothing of it."""
        saved = SavedTensor()
        self._saved.append(weakref.ref(saved))
        self._kinds.append(_kind(tensor))
        if self._offload is not None and (storage := storage_of(tensor)) is not None:
            entered = storage._cdata in self._entered
            if entered and (copy := self._offload.copy_of(tensor)) is not None:
                self._copies.append(copy)
        return saved

    def leave(self, output: Any) -> None:
        """Notes what must not change until the forward runs again."""
        self._state.leave()
        self._parameter_versions = _versions(self._parameters)
        if _versions(self._tensors) != self._versions:
            raise InputError(
                f"unit {self._region.name!r} changes its input in place, so it cannot be "
                f"recomputed from it: plan with {forbidding('recompute')}, or build it without"
            )
        if self._offload is not None:
            self._let_inputs_leave(self._offload)

    def _let_inputs_leave(self, offload: Offload) -> None:
        """Holds the copies on the host of what enters the region and is saved, where there are
        any; what nobody saves the plan counts here, on the device."""
        held: dict[int, _OnHost] = {}

        def hold(tensor: Tensor) -> Tensor | _OnHost:
            if id(tensor) not in held and (copy := offload.known_copy_of(tensor)) is not None:
                held[id(tensor)] = _OnHost(View(tensor, copy), tensor.requires_grad)
            return held.get(id(tensor), tensor)

        self._args, self._kwargs = map_only(Tensor, hold, (self._args, self._kwargs))
        self._copies.clear()
        # Of those on the host what tells of changes in place, in their stead.
        self._tensors = [
            held[id(tensor)].view.changes if id(tensor) in held else tensor
            for tensor in self._tensors
        ]

    def unpack(self, saved: SavedTensor) -> Tensor:
        """The tensor, by running the forward again unless that has happened in this backward."""
        # What was made in an earlier backward (of a graph that was retained) may have lost its
        # memory since: that of parameters which are whole only while they are used.
        task = torch._C._current_graph_task_id()
        if saved.value is None or task != self._task:
            self._rerun()
            self._task = task
        if saved.value is None:
            raise self._other("fewer tensors")
        return saved.value

    def _rerun(self) -> None:
        self._check_unchanged()
        args, kwargs = _leaves((self._args, self._kwargs))
        number = 0

        def keep(tensor: Tensor) -> None:
            nonlocal number
            if number == len(self._saved) or _kind(tensor) != self._kinds[number]:
                raise self._other("other tensors")
            saved = self._saved[number]()
            if saved is not None:
                saved.value = tensor.detach()  # without the second forward's graph, which ends here
            number += 1

        # With gradients, as backward runs without: the same operators must save the same tensors.
        with self._state.restored(), torch.enable_grad(), saved_tensors_hooks(keep, _no_backward):
            self._region.run(args, kwargs)
        if number < len(self._saved):
            raise self._other("fewer tensors")

    def _check_unchanged(self) -> None:
        inputs = _versions(self._tensors) == self._versions
        if inputs and _versions(self._parameters) == self._parameter_versions:
            return
        what = "its parameters were" if inputs else "what enters it was"
        raise RunError(
            f"unit {self._region.name!r} is to be recomputed in backward, and {what} changed in "
            "place since its forward: change them after backward, or plan it with memory 'keep'"
        )

    def _other(self, what: str) -> RunError:
        return RunError(
            f"unit {self._region.name!r} saves {what} when its forward runs again in backward: its "
            "path must not depend on anything but its inputs; plan it with memory 'keep'"
        )


class _State:
    """What a forward depends on beside its inputs and parameters, as it is when it begins."""

    def __init__(
        self, modules: Sequence[nn.Module], tensors: Sequence[Tensor], resume_forward: ResumeForward
    ) -> None:
        self._resume_forward = resume_forward
        self._training = [(module, module.training) for module in modules]
        # Running statistics too: what batch normalisation adds up from depends on them.
        self._buffers = [
            (module, name, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        devices = dict.fromkeys(t.device for t in tensors if t.device.type != "cpu")
        self._devices = tuple(devices)
        self._random: list[Tensor] | None = _random_states(self._devices)
        self._autocast = [
            (k, *_casts(k)) for k in dict.fromkeys(["cpu", *(d.type for d in devices)])
        ]
        self._cached = torch.is_autocast_cache_enabled()

    def leave(self) -> None:
        """The forward is over. One that has drawn no random numbers will draw none again."""
        assert self._random is not None
        if all(map(torch.equal, _random_states(self._devices), self._random)):
            self._random = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """All of it as it was, while the forward runs again; afterwards as it is now."""
        # Regions are many and may be small: what is as it was is left alone.
        with ExitStack() as stack:
            stack.enter_context(self._resume_forward())
            if self._random is not None:
                stack.enter_context(_drawing_from(self._devices, self._random))
            for kind, enabled, dtype in self._autocast:
                if (enabled, dtype) != _casts(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            stack.enter_context(caching_casts(self._cached))
            stack.enter_context(self._modules())
            yield

    @contextmanager
    def _modules(self) -> Iterator[None]:
        """Training modes and buffers as they were."""
        training = [(m, m.training) for m, mode in self._training if m.training != mode]
        buffers = [(module, name, module._buffers[name]) for module, name, _ in self._buffers]
        try:
            for module, now in training:
                module.training = not now
            # Copies take the buffers' place: what the second forward changes in place (running
            # statistics) must not reach the model's own, which autograd may have saved as well.
            for module, name, value in self._buffers:
                module._buffers[name] = value.clone()
            yield
        finally:
            for module, now in training:
                module.training = now
            for module, name, own in buffers:
                module._buffers[name] = own


def _random_states(devices: Sequence[torch.device]) -> list[Tensor]:
    """Of the generators that random numbers are drawn from: the host's, and those of devices."""
    of_devices = (getattr(torch, device.type).get_rng_state(device) for device in devices)
    return [torch.get_rng_state(), *of_devices]


@contextmanager
def _drawing_from(devices: Sequence[torch.device], states: Sequence[Tensor]) -> Iterator[None]:
    now = _random_states(devices)
    try:
        _set_random_states(devices, states)
        yield
    finally:
        _set_random_states(devices, now)


def _set_random_states(devices: Sequence[torch.device], states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:], strict=True):
        getattr(torch, device.type).set_rng_state(state, device)


def _casts(kind: str) -> tuple[bool, torch.dtype]:
    """Whether and to what autocast casts on such devices."""
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _leaves(inputs: Any) -> Any:
    """The same values without the graph that made them."""
    # What is one tensor stays one: attention takes another path where query, key and value are.
    made: dict[int, Tensor] = {}

    def leaf(one: Tensor | _OnHost) -> Tensor:
        if id(one) not in made:
            tensor = one.view.back() if isinstance(one, _OnHost) else one.detach()
            made[id(one)] = tensor.requires_grad_(one.requires_grad)
        return made[id(one)]

    return map_only((Tensor, _OnHost), leaf, inputs)


def _no_backward(_: Any) -> Tensor:
    raise RunError("a forward that only recomputes has no backward")
