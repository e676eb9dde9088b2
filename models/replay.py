"""One unit by itself: the inputs that it got in a forward of the model, and running it on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree  # torch has no public name for it

from .compiled import eagerly
from .spec import UnitSpec
from .workload import Batch

CopiedT = TypeVar("CopiedT", nn.Module, list[nn.Module])

# Frozen parameters of so many bytes in all are copied whatever is trained beside them.
_FEW_BYTES = 2**26


HeldBuffer = tuple[nn.Module, str, Tensor, Tensor]
"""A module, the name of a buffer of it, the buffer, and a copy of its values."""


def held_buffers(model: nn.Module) -> list[HeldBuffer]:
    """All buffers of a model as they are now, but for those that have no shape yet."""
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer)
    ]


def put_back(buffers: list[HeldBuffer]) -> None:
    """Gives buffers the values that they had, also where a forward put another tensor there: some
    are made anew in the size of the first input, or resized to it (observers for quantization)."""
    with torch.no_grad():
        for module, name, buffer, before in buffers:
            if buffer.shape == before.shape:
                buffer.copy_(before)
            else:
                buffer.data = before.clone()  # the same object, in its first size
            module._buffers[name] = buffer


@contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Puts buffers (running statistics), frozen parameters (``_held_frozen``), gradients, modes of
    training and random states back at the end."""
    # Others are not copied: a forward and backward do not change what is trained.
    buffers, frozen = held_buffers(model), _held_frozen(model)
    gradients = [(p, p.grad) for p in model.parameters()]
    modes = [(m, m.training) for m in model.modules()]
    for parameter, _ in gradients:
        parameter.grad = None  # backward would add to what is there
    # The model's own devices: by default torch saves the random state of every one that there is.
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        put_modes_back(modes)
        put_back(buffers)
        for parameter, before in frozen:
            # Only what has changed, past what a graph that is still there has noted of it.
            if parameter.shape == before.shape and not parameter.equal(before.to(parameter)):
                parameter.data.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def train_whole(model: nn.Module) -> None:
    """Puts a model into training mode, as it will be in a training, where the whole of it is in
    evaluation mode; where only parts are, the user has frozen these."""
    if not model.training:
        model.train()


def _held_frozen(model: nn.Module) -> list[tuple[nn.Parameter, Tensor]]:
    """Frozen parameters with copies of their values: some models move theirs in each forward
    (codebooks, momentum encoders). None where they take much more memory than those that are
    trained, as under LoRA: those do not move, and a copy might not fit."""
    # Those without values, or quantized by a class of their own, are none that a forward moves.
    plain = (p for p in model.parameters() if type(p) is nn.Parameter and not p.is_meta)
    there = [p for p in plain if p.layout is torch.strided]
    frozen = [p for p in there if not p.requires_grad]
    frozen_bytes, total = sum(p.nbytes for p in frozen), sum(p.nbytes for p in there)
    if frozen_bytes > max(total - frozen_bytes, _FEW_BYTES):
        return []
    return [(p, p.detach().clone()) for p in frozen]


def put_modes_back(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Gives modules, outer ones first, the train/eval modes that they had."""
    # By their own methods: some change more than the flag (layers of LoRA that add their product to
    # the weight for evaluation).
    for module, mode in modes:
        if module.training != mode:
            with suppress(Exception):  # it may have no other mode
                module.train(mode)
    for module, mode in modes:
        module.training = mode  # of those, too, that set another themselves


def fix_statistics(model: nn.Module) -> None:
    """Makes batch normalisation go by running statistics, until modes are set anew."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.eval()


def copied(modules: CopiedT) -> CopiedT:
    """``copy.deepcopy`` of a module or a list of them, also where a module keeps a tensor that it
    computes before each forward (torch's old weight normalisation, pruning). What a module keeps
    and Python cannot copy (a lock, an open file, a generator) the copy has in common with it."""
    # deepcopy refuses those, as they have a history; the copy computes its own.
    memo: dict[int, Any] = {}
    for module in [modules] if isinstance(modules, nn.Module) else modules:
        for inner in module.modules():
            # A list of them too, in which some layers keep their losses.
            for value in pytree.tree_leaves(list(vars(inner).values())):
                if isinstance(value, Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
    return deepcopy_of(modules, memo)


def deepcopy_of(modules: CopiedT, memo: dict[int, Any]) -> CopiedT:
    """``copy.deepcopy``, which refuses a model for one attribute that it cannot copy: such a one is
    kept as it is. ``memo`` has what stands for some objects in the copy."""
    try:
        return copy.deepcopy(modules, dict(memo))
    except Exception:
        shared = dict(memo)
        for module in [modules] if isinstance(modules, nn.Module) else modules:
            for inner in module.modules():
                own = (v for name, v in vars(inner).items() if name not in _OF_MODULES)
                shared.update({id(value): value for value in own if not _is_copyable(value, memo)})
        return copy.deepcopy(modules, shared)


# What every module has: its tensors, parts and hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def _is_copyable(value: object, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # whatever its class raises
        return False
    return True


@dataclass(frozen=True, eq=False)
class UnitCall:
    """The arguments of a unit's first module. Floating tensors require a gradient where they did in
    the model's forward.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> UnitCall:
        """The same call with other tensors."""
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return UnitCall(args, kwargs)

    def fresh(self) -> UnitCall:
        """A copy whose tensors are leaves without gradients."""
        return self.map(lambda t: t.detach().clone().requires_grad_(t.requires_grad))

    def to(self, dtype: torch.dtype) -> UnitCall:
        """A copy with floating tensors in that precision."""

        def change(t: Tensor) -> Tensor:
            made = t.detach().to(dtype if t.is_floating_point() else t.dtype, copy=True)
            return made.requires_grad_(t.requires_grad)

        return self.map(change)


def capture(model: nn.Module, batch: Batch, units: Sequence[UnitSpec]) -> dict[str, UnitCall]:
    """The call of each unit (by name) in one forward of the model on ``batch``.

    The model, its buffers and the random state are left as they were.
    """
    calls: dict[str, UnitCall] = {}
    handles = []
    for unit in units:
        if not unit.modules:
            continue

        # Copied at once: a later module may change the tensors in place.
        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = unit.name) -> None:
            calls[name] = UnitCall(args, kwargs).fresh()

        first = model.get_submodule(unit.modules[0])
        handles.append(first.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with preserved(model), eagerly(), torch.enable_grad():
            model(*batch.args, **batch.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def run_modules(model: nn.Module, modules: Sequence[str], call: UnitCall) -> Any:
    """The output of consecutive modules, the first called as ``call`` says."""
    output = model.get_submodule(modules[0])(*call.args, **call.kwargs)
    for name in modules[1:]:
        output = model.get_submodule(name)(output)
    return output
