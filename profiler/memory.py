"""The memory that a model's units take in one step: what is saved for backward, and temporaries.

See [Note: Dry runs] below for models that do not fit into this machine.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..executor.memory.offload import LEAST_BYTES
from ..models.compiled import eagerly
from ..models.opened import tensors_in
from ..models.replay import deepcopy_of, preserved
from ..models.spec import UnitSpec
from ..models.units.storages import LiveStorages, scratch_of, storage_of
from ..models.workload import Batch, Workload, device_of
from ..planner.schema.curve import Curve
from .timing import Loss, Timeline


@dataclass
class Footprint:
    """Bytes by node: feature maps ``saved`` for backward, the largest ``gradient`` of feature maps
    alive at once, the largest ``workspace`` besides; ``new_grad`` and ``never_together`` as in
    ``ShareProfile``. ``storages`` counts those that are saved and large enough to be offloaded.
    ``discarded`` are the units whose output nobody saves, ``unreached`` the names
    of parameters that backward computed no gradient of.
    """

    saved: dict[str, int] = field(default_factory=dict)
    gradient: dict[str, int] = field(default_factory=dict)
    workspace: dict[str, int] = field(default_factory=dict)
    new_grad: dict[str, int] = field(default_factory=dict)
    never_together: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    discarded: set[str] = field(default_factory=set)
    unreached: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        """All feature maps, and the most that a node has besides."""
        besides = [self.gradient.get(n, 0) + self.workspace.get(n, 0) for n in self.saved]
        return sum(self.saved.values()) + max(besides, default=0)


class SavedTensors:
    """Counts the storages that autograd saves, each once, without ``known`` ones (parameters,
    buffers, the batch)."""

    def __init__(self, known: Sequence[Tensor], node: Callable[[], str]) -> None:
        self.bytes: dict[str, int] = {}
        # Tensors are kept, as the number of one that is freed could be another one's later. On the
        # meta device storages have numbers too, but no addresses.
        self._seen = {s._cdata: t for t in known if (s := storage_of(t)) is not None}
        self._node = node

    def pack(self, tensor: Tensor) -> Tensor:
        """The hook for ``torch.autograd.graph.saved_tensors_hooks``."""
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self._seen:
            self._seen[storage._cdata] = tensor
            self.bytes[self._node()] = self.bytes.get(self._node(), 0) + storage.nbytes()
        return tensor


def measure_footprint(
    model: nn.Module, units: Sequence[UnitSpec], batch: Batch, loss: Loss, device: torch.device
) -> Footprint:
    """The footprint of one step on ``batch``, whose gradients are freed again.

    Every storage belongs to the node that made it. What is alive when forward ends is ``saved``,
    the batch itself for the first node. The rest of what was alive at most while a node was at work
    is its ``workspace`` in forward; in backward, beyond that and the gradients of parameters of its
    own and of the nodes after it, its ``gradient`` (or ``never_together``, where it is less), and
    ``new_grad`` is how much more it would be if gradients that are complete did not count.
    """
    walk = _MemoryWalk(model, units, device)
    # Without gradients, as after zero_grad(set_to_none=True): backward allocates them anew.
    before = [p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    try:
        # Compiled code does not show what it allocates: these are the eager model's bytes.
        with eagerly(), walk.timeline, walk.live:
            walk.step(batch, loss)
    finally:
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            parameter.grad = gradient
    return walk.footprint()


class SavedInputs(NamedTuple):
    """Bytes of a unit's inputs that it saves for backward, and of those that nobody else does."""

    saved: int
    kept: int


def saved_inputs(
    model: nn.Module, units: Sequence[UnitSpec], batch: Batch, loss: Loss
) -> dict[str, SavedInputs]:
    """What each unit saves of its inputs: a divided unit saves another form of them, and then
    nobody saves what it alone did."""
    units_at_work = Timeline(model, units, device_of(model))
    given: dict[str, dict[int, int]] = {}
    savers: dict[int, set[str]] = {}
    alive: list[Tensor] = []  # storages are told apart while all of them are there

    def key(tensor: Tensor) -> int:
        alive.append(tensor)
        storage = storage_of(tensor)
        return id(tensor) if storage is None else int(storage._cdata)

    def save(tensor: Tensor) -> Tensor:
        savers.setdefault(key(tensor), set()).add(units_at_work.node)
        # Not itself: an output that its own graph keeps is a circle that no collector sees, by
        # which a batch's feature maps and the model would never be freed.
        return tensor.detach()

    def enter(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in tensors_in((args, kwargs)):
                storage = storage_of(tensor)
                size = 0 if storage is None else storage.nbytes()
                given.setdefault(name, {})[key(tensor)] = size

        return hook

    # What lasts, whoever saves it.
    apart = tensors_in((batch.args, dict(batch.kwargs), batch.target))
    lasting = {key(t) for t in (*apart, *model.parameters(), *model.buffers())}
    with ExitStack() as hooks, units_at_work, preserved(model), torch.enable_grad():
        for unit in units:
            if unit.modules:
                first = model.get_submodule(unit.modules[0])
                handle = first.register_forward_pre_hook(enter(unit.name), with_kwargs=True)
                hooks.callback(handle.remove)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            loss(model(*batch.args, **batch.kwargs), batch.target)
    alive.clear()  # their graphs hold ``save``, which holds them

    def size(inputs: dict[int, int], name: str, others: bool) -> int:
        return sum(
            size
            for key, size in inputs.items()
            if name in savers.get(key, ())
            and (others or (savers[key] == {name} and key not in lasting))
        )

    return {
        name: SavedInputs(size(inputs, name, True), size(inputs, name, False))
        for name, inputs in given.items()
    }


_PERSISTENT = "persistent"


class _MemoryWalk:
    """One step, and the most bytes alive while each node was at work, forward and backward."""

    def __init__(self, model: nn.Module, units: Sequence[UnitSpec], device: torch.device) -> None:
        self.model, self.units = model, units
        self.timeline = Timeline(model, units, device)
        self.live = LiveStorages(lambda: self.timeline.node, self._see, scratch=scratch_of(device))
        self._phase = "forward"
        self._most: dict[str, dict[str, int]] = {
            "forward": {},
            "backward": {},
            "without_complete": {},
        }
        self._complete = 0
        self._saved: dict[str, int] = {}
        self._storages: dict[str, int] = {}
        self._outputs: dict[str, list[weakref.ref[Any]]] = {}
        self._discarded: set[str] = set()
        self._unreached = {name for name, p in model.named_parameters() if p.requires_grad}

    def _see(self, live: LiveStorages) -> None:
        alive = {self._phase: live.now}
        if self._phase == "backward":
            alive["without_complete"] = live.now - self._complete
        node = self.timeline.node
        for what, now in alive.items():
            self._most[what][node] = max(self._most[what].get(node, 0), now)

    def step(self, batch: Batch, loss: Loss) -> None:
        """Forward and backward, within ``timeline`` and ``live``."""
        timeline, inputs = self.timeline, (batch.args, dict(batch.kwargs), batch.target)
        self.live.add([*self.model.parameters(), *self.model.buffers()], _PERSISTENT)
        self.live.add(tensors_in(inputs), self.units[0].name)
        timeline.mark(self.units[0].name)
        with self._noting_outputs():
            output = self.model(*batch.args, **batch.kwargs)
        timeline.mark(self.units[-1].name)
        value = loss(output, batch.target)
        # Freed in training as well, unless the loss saved it.
        del output
        self._saved = self.live.bytes_by_label()
        self._storages = self.live.count_by_label(LEAST_BYTES)
        for name, storages in self._outputs.items():
            if not any(storage() is not None for storage in storages):
                self._discarded.add(name)
        self._phase = "backward"

        def count(parameter: Tensor, *, name: str) -> None:
            assert parameter.grad is not None
            storage = storage_of(parameter.grad)
            self._complete += 0 if storage is None else storage.nbytes()
            self._unreached.discard(name)

        # Any: torch has not typed its hooks.
        named: list[tuple[str, Any]] = list(self.model.named_parameters())
        with ExitStack() as hooks:
            for name, parameter in named:
                if parameter.requires_grad:
                    hook = partial(count, name=name)
                    hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
            value.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def _noting_outputs(self) -> Iterator[None]:
        """Notes the storages that units leave."""

        def note(name: str, output: Any) -> None:
            # Weakly: held by us none would ever be freed, and every output would seem to be saved.
            storages = map(storage_of, tensors_in(output))
            found = [weakref.ref(s) for s in storages if s is not None]
            self._outputs.setdefault(name, []).extend(found)

        def note_glue(name: str, inputs: Any) -> None:
            known = [made() for row in self._outputs.values() for made in row]
            others = {id(made) for made in known}
            note(name, [t for t in tensors_in(inputs) if id(storage_of(t)) not in others])

        pairs = pairwise(self.units)
        glue = {b.name: a.name for a, b in pairs if a.kind == "glue" and b.modules}
        with ExitStack() as hooks:
            for unit in self.units:
                if unit.name in glue:
                    # What enters a unit and no unit has made, the code before it has.
                    first = self.model.get_submodule(unit.modules[0])
                    entry = first.register_forward_pre_hook(
                        lambda _, args, kwargs, name=glue[unit.name]: note_glue(
                            name, (args, kwargs)
                        ),
                        with_kwargs=True,
                    )
                    hooks.callback(entry.remove)
                if unit.modules:
                    last = self.model.get_submodule(unit.modules[-1])
                    handle = last.register_forward_hook(
                        lambda _, args, output, name=unit.name: note(name, output)
                    )
                    hooks.callback(handle.remove)
            yield

    def footprint(self) -> Footprint:
        """What the step has shown."""
        found = Footprint(discarded=self._discarded, unreached=self._unreached)
        persistent = self._saved.pop(_PERSISTENT, 0)
        found.storages = {unit.name: self._storages.get(unit.name, 0) for unit in self.units}
        gradients, saved = _gradients_from(self.model, self.units), 0
        for unit in self.units:
            name = unit.name
            saved += self._saved.get(name, 0)
            always = persistent + saved
            forward = max(self._most["forward"].get(name, 0) - always, 0)
            found.saved[name], found.workspace[name] = self._saved.get(name, 0), forward
            if name not in self._most["backward"]:
                # No gradient comes to it: what its forward works with is not there in backward.
                found.never_together[name] = forward
                continue
            backward = self._most["backward"][name] - always - gradients[name]
            without = self._most["without_complete"][name] - always
            found.gradient[name] = max(backward - forward, 0)
            found.never_together[name] = max(forward - backward, 0)
            found.new_grad[name] = max(without - backward, 0)
        return found


def _gradients_from(model: nn.Module, units: Sequence[UnitSpec]) -> dict[str, int]:
    """For each unit the bytes of the gradients of its own parameters and of later units', those of
    tied ones at their first unit."""
    first_unit: dict[nn.Parameter, str] = {}
    for unit in units:
        for module in unit.modules:
            for parameter in model.get_submodule(module).parameters():
                first_unit.setdefault(parameter, unit.name)
    own = dict.fromkeys((unit.name for unit in units), 0)
    for parameter, name in first_unit.items():
        own[name] += parameter.nbytes if parameter.requires_grad else 0
    total, found = 0, {}
    # Backward begins with the last unit: when a unit is at work, later ones have their gradients.
    for name in reversed(own):
        total += own[name]
        found[name] = total
    return found


# [Note: Dry runs]
# On torch's meta device tensors have shapes and no values. Everything that is asked of an estimate
# can be had there (units, edges, operations, storages), so that a model need not fit into this
# machine. What a model does by its values cannot (``.item()``, an index of what is not zero): torch
# refuses it, and ``estimate`` falls back on real tensors. For attention torch makes the whole
# matrix of scores there, which no device of today's does in training: see ``FusedAttention``.
META = torch.device("meta")

_ATTENTION: Any = F.scaled_dot_product_attention
_FUSED: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def is_dry(model: nn.Module) -> bool:
    """Whether the model has no memory."""
    return all(t.is_meta for t in (*model.parameters(), *model.buffers()))


def dry(workload: Workload) -> Workload:
    """The same workload on the meta device; its model is copied but for its tensors, unless it is
    there already."""
    model = workload.model

    def make_batch(size: int) -> Batch:
        with META:
            return workload.make_batch(size).to(META)

    if is_dry(model):
        return replace(workload, make_batch=make_batch)
    # deepcopy finds the tensors in its memo and copies only the modules around them.
    memo: dict[int, Any] = {id(b): b.to(META) for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to(META), p.requires_grad)
    computed = (v for m in model.modules() for v in vars(m).values() if isinstance(v, Tensor))
    memo.update({id(t): t.detach().to(META) for t in computed})
    return replace(workload, model=deepcopy_of(model, memo), make_batch=make_batch)


class FusedAttention(TorchFunctionMode):
    """Attention as fused kernels have it, on the meta device too."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is _ATTENTION and args and args[0].is_meta:
            return _fused(*args, **given)
        return func(*args, **given)


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # The CPU's flash kernel takes additive masks and as many heads of keys as of queries; on meta
    # nothing is computed.
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    mask = None if attn_mask is None else attn_mask.detach()
    found = _FUSED(query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale)
    result: Tensor = found[0]
    if attn_mask is not None and attn_mask.requires_grad:
        # A bias that is learnt (T5): that kernel has no gradient for it, others do.
        result = result + 0 * attn_mask.sum()
    return result


class Footprints:
    """Footprints at some batch sizes, as curves."""

    def __init__(self, workload: Workload, units: Sequence[UnitSpec], sizes: Sequence[int]) -> None:
        device = device_of(workload.model)
        self.sizes = tuple(sorted(sizes))
        with FusedAttention():
            self._found = [
                measure_footprint(
                    workload.model, units, workload.make_batch(n), workload.loss, device
                )
                for n in self.sizes
            ]

    def curve(self, quantity: str, unit: str, factor: float = 1.0) -> Curve:
        """A field of ``Footprint`` for a unit; linear between and beyond the sizes."""
        values = [getattr(one, quantity).get(unit, 0) * factor for one in self._found]
        return Curve(x=tuple(map(float, self.sizes)), y=tuple(values))

    @property
    def smallest(self) -> Footprint:
        """The footprint at the smallest size."""
        return self._found[0]
