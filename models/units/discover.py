"""Discovery: the units of a model, the edges between them, and how each unit can be divided."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from ...planner.schema.errors import InputError
from ...planner.schema.profile import EdgeProfile, PieceProfile
from ..failing import in_module
from ..opened import leaves_in
from ..replay import UnitCall, capture
from ..spec import SplitSpec, UnitSpec
from ..splits import BLOCK_KINDS, LEAF_KINDS, find_splits, guessed
from ..splits.check import is_equivalent
from ..splits.leaves import BATCH_NORMS
from ..trial_sizes import SEVERAL, first_taken
from ..workload import Batch
from . import stays_whole
from .batch_dims import sample_dim
from .chance import every_layer, may_be_left_out
from .flow import GLUE, INPUT, OUTPUT, Called, Ends, Flow, flow_of, pruned, tensor_numbers
from .pieces import pieces_of
from .select import (
    TracedUnit,
    parameters_outside,
    parameters_used_outside,
    select_units,
)
from .stays_whole import bytes_of, why_glue_stays, why_no_split, why_not_finer, why_not_plain
from .trace import Trace, record

# [Note: How units are found]
# A model is run once on a batch and once on a batch of another size, in training mode. Hooks on
# every module and a TorchFunctionMode record what is called, with which tensors (``trace``). Then
# ``select`` chooses the units, ``flow`` the tensors between them, and ``pieces`` the stretches that
# can be recomputed as one. Symbolic tracing (torch.fx, torch.export) is not used: it fails on
# forwards that look at values or shapes, it needs operations instead of the modules that users
# name in plans, and the executor does not need a graph: it wraps modules of the model as it is.
# Two sizes tell samples apart from other dimensions: bytes that do not grow with the batch are no
# activations, and the dimension of a tensor that is as long as the batch in both counts samples
# (see [Note: Where the samples are] in batch_dims.py). What these two forwards do not show (a
# branch taken for other inputs) is not known.

_TRIED_SAMPLES = 2
_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}


@dataclass(frozen=True)
class Discovery:
    """A model's units in forward order, ``@input`` first and ``@output`` last, and their edges.

    ``outside`` are names of parameters that belong to no unit: used between units, or by no
    forward. ``pieces`` are the stretches of the forward that can run again together.
    ``fingerprint`` stands for the structure: names, shapes and types of parameters and buffers, and
    the units.
    """

    units: tuple[UnitSpec, ...]
    edges: tuple[EdgeProfile, ...]
    outside: tuple[str, ...]
    fingerprint: str
    pieces: tuple[PieceProfile, ...] = ()

    def unit(self, name: str) -> UnitSpec:
        return next(u for u in self.units if u.name == name)


def discover(
    model: nn.Module, batch: Batch, other: Batch | None = None, *, check: bool = True
) -> Discovery:
    """The units of ``model``, found by running it on ``batch`` and on ``other``, a batch of another
    size (made from ``batch`` if not given).

    With ``check`` a way to divide a unit that was recognised by its looks is tried on the unit's
    own inputs before it is listed. Raises ``InputError`` where the model fails on its batch. The
    model is left as it was.
    """
    check_gradients(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise InputError(
            f"no parameter of this {type(model).__name__} requires a gradient, so there is nothing "
            "to train: set requires_grad_(True) on what is to be trained"
        )
    optional = may_be_left_out(model)
    with every_layer(model):
        return _discover(model, batch, other, optional, check=check)


def _discover(
    model: nn.Module, batch: Batch, other: Batch | None, optional: set[str], *, check: bool
) -> Discovery:
    # One sample more, as one less could be one, which batch normalisation refuses.
    other = other or batch.take(torch.arange(batch.size + 1) % batch.size)
    traces = record(model, batch), record(model, other)
    inputs = _input_dims(batch)
    try:
        return _finest(model, traces, _Trial(model, batch) if check else None, optional, inputs)
    except InputError:
        raise  # a mistake of the user's
    except Exception as error:
        # Its forwards ran: as one unit it trains data parallel.
        return _as_one(model, traces, inputs, error)


def _finest(
    model: nn.Module,
    traces: tuple[Trace, Trace],
    trial: _Trial | None,
    optional: set[str],
    inputs: dict[int, int],
) -> Discovery:
    refused: set[str] = set()
    # Ends after a few rounds: ``refused`` only grows, and each name in it is a module.
    while True:
        traced = [select_units(model, trace, refused) for trace in traces]
        flows = [flow_of(trace, r) for trace, r in zip(traces, traced, strict=True)]
        specs = _specs(model, traces, traced, flows[0], optional)
        kept = trial.checked(specs) if trial else specs
        # A module that only looks like attention or an MLP has better chances in its parts.
        lost = {
            n for n, u in specs.items() if u.kind in BLOCK_KINDS and u.splits and not kept[n].splits
        }
        if lost <= refused:
            return _discovery(model, traces, traced[0], flows, kept, inputs)
        refused |= lost


def _as_one(
    model: nn.Module, traces: tuple[Trace, Trace], inputs: dict[int, int], error: Exception
) -> Discovery:
    """The model as one unit that is not divided, as ``error`` came while finer ones were looked
    for."""
    traced = [[TracedUnit("other", (trace.calls("")[0],))] for trace in traces]
    flows = [flow_of(trace, one) for trace, one in zip(traces, traced, strict=True)]
    whole = traced[0][0]
    sizes = traces[0].size, traces[1].size
    dims = _batched(whole, traced[1][0], sizes)
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    where = in_module(model, error)
    spec = UnitSpec(
        whole.name, "other", whole.modules,
        **_batched_fields(dims or {}, first=_leaves_first(whole, traced[1][0], sizes)),
        batch_statistics=any(isinstance(inner, BATCH_NORMS) for inner in model.modules()),
        stays_whole=f"{stays_whole.NOT_FOUND}{where} with {said}",
    )  # fmt: skip
    return _discovery(model, traces, traced[0], flows, {whole.name: spec}, inputs)


def discovered(model: nn.Module, make_batch: Callable[[int], Batch]) -> tuple[Discovery, Batch]:
    """``discover`` on batches of the first two sizes that the model takes, and the first of the
    batches."""

    def of(sizes: tuple[int, ...]) -> tuple[Discovery, Batch]:
        batch = make_batch(sizes[0])
        found = discover(model, batch, make_batch(sizes[1]))
        _tell_mixed(found)
        return found, batch

    return first_taken(SEVERAL, of)


def _tell_mixed(found: Discovery) -> None:
    names = [unit.name for unit in found.units if unit.mixed]
    if names:
        warnings.warn(
            f"{len(names)} units are not divided, {names[0]!r} first: what enters them grows with "
            "the batch, but in no one dimension that counts the samples (keep samples and "
            "positions in dimensions of their own)",
            stacklevel=2,
        )


def _input_dims(batch: Batch) -> dict[int, int]:
    """The dims of the leaves among the model's inputs that hold samples; none where dim 0 of the
    first tensor tells them."""
    dims = iter(batch.batch_dims or ())
    leaves = leaves_in((batch.args, dict(batch.kwargs)))
    known = [next(dims, None) if isinstance(leaf, Tensor) else None for leaf in leaves]
    found = {i: dim for i, dim in enumerate(known) if dim is not None}
    first = next((i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.ndim), None)
    return found if any(found.values()) or (found and first not in found) else {}


def check_gradients(model: nn.Module) -> None:
    """``InputError`` for a module whose gradients nobody exchanges, or somebody else, or whose
    forward changes a parameter."""
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{what} is scripted or traced by torch.jit and takes no hooks, by which units are "
                "measured and run: train the module that it was made of, and script it afterwards"
            )
        if _exchanges(module):
            raise InputError(
                f"{what} is a {type(module).__name__}, which exchanges gradients itself: give the "
                "module inside it, and let the plan come before what wraps it (Accelerate's "
                "prepare, say)"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"embedding {name!r} makes sparse gradients, which are not exchanged: build it "
                "with sparse=False"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise InputError(
                f"embedding {name!r} has max_norm={module.max_norm:g}, by which a forward changes "
                "the vectors that its own samples use, so that ranks would come to have different "
                "ones: build it without max_norm, and either limit all of them after each step "
                "(with torch.no_grad(): weight.renorm_(2, 0, max_norm)) or those that are looked "
                "up, in the forward"
            )


def _exchanges(module: nn.Module) -> bool:
    """Whether it is one of torch's own ways to train on several devices."""
    replicas = isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
    # By name, as torch.distributed is no part of this room: FSDP2 puts its class before a module's.
    names = {cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("torch.")}
    return replicas or bool(names & _WRAPPERS)


def _discovery(
    model: nn.Module,
    traces: Sequence[Trace],
    traced: list[TracedUnit],
    flows: Sequence[Flow],
    specs: dict[str, UnitSpec],
    inputs: dict[int, int],
) -> Discovery:
    """Puts units and edges together; ``inputs`` are the dims of samples in the model's inputs."""
    slopes = _slopes(flows[0], flows[1], traces[0].size - traces[1].size)
    # What does not grow with the batch is no activation: weights, tables of positions.
    nodes, ends = pruned(flows[0], {e for e, (whole, _) in slopes.items() if whole > 0})
    names = {node: node for node in nodes}
    glue = [node for node in nodes if node.startswith(GLUE)]
    names.update({node: f"{GLUE}{i}" for i, node in enumerate(glue)})
    fixed = {
        INPUT: UnitSpec(INPUT, "input", (), **_batched_fields(inputs)),
        OUTPUT: UnitSpec(OUTPUT, "output", ()),
    }
    known = {**specs, **fixed}

    def glue_of(node: str) -> UnitSpec:
        reason = _why_glue_stays(node, flows[0], ends, specs)
        return UnitSpec(names[node], "glue", (), stays_whole=reason)

    units = tuple(known.get(n) or glue_of(n) for n in nodes)
    numbers = tensor_numbers(flows[0], ends)
    edges = tuple(_edge(e, slopes[e], names, specs, numbers[e]) for e in ends)
    pieces = pieces_of(traces[0], traced, names)
    outside = parameters_outside(model, traced)
    return Discovery(units, edges, outside, fingerprint(model, units), pieces)


def _why_glue_stays(
    node: str, flow: Flow, ends: Sequence[Ends], specs: Mapping[str, UnitSpec]
) -> str:
    """Why glue is not part of the unit before it, where functions alone keep that and the next one
    from leaving slices to each other; else empty."""
    sources = [source for source, target in ends if target == node]
    targets = [target for source, target in ends if source == node]
    if len(sources) != 1 or len(targets) != 1:
        return ""
    before, after = specs.get(sources[0]), specs.get(targets[0])
    # As ``select`` joins modules to a unit: directly behind it, and nothing else uses what it made.
    follows = flow.nodes[flow.nodes.index(node) - 1] == sources[0]
    alone = sum(source == sources[0] for source, _ in ends) == 1
    if before is None or after is None or not (follows and alone):
        return ""
    left, taken = before.split("column"), after.split("row")
    if before.kind not in LEAF_KINDS or left is None or taken is None:
        return ""
    if (left.feature_dim, left.features) != (taken.feature_dim, taken.features):
        return ""
    names = _in_a_line(flow.called.get(node, ()), flow.edges[sources[0], node])
    return why_glue_stays(names, before.kind == "conv")


def _in_a_line(calls: Sequence[Called], given: Collection[int]) -> list[str]:
    """The names of operations of which each takes only what the one before has made, the first one
    the only tensor ``given``; none where they are not in such a line."""
    names, last = [], tuple(given)
    for call in calls:
        if call.given != last or len(last) != 1:
            return []
        names.append(call.name)
        last = call.made
    return names


def fingerprint(model: nn.Module, units: Sequence[UnitSpec]) -> str:
    """Sixteen hexadecimal digits for a model's structure as Meshwright sees it."""
    parts = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in model.named_parameters()]
    parts += [f"{n} {tuple(b.shape)} {b.dtype}" for n, b in model.named_buffers()]
    parts += [f"{u.name} {u.kind} {' '.join(u.modules)}" for u in units]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _slopes(flow: Flow, other: Flow, samples: int) -> dict[Ends, tuple[float, float]]:
    """(bytes, gradient bytes) for each sample of each edge, by two forwards of different size."""

    def slope(ends: Ends, gradient: bool) -> float:
        more = flow.bytes(ends, gradient=gradient) - other.bytes(ends, gradient=gradient)
        # What is smaller for more samples does not grow with them, so it is no activation.
        return max(0.0, more / samples)

    return {e: (slope(e, False), slope(e, True)) for e in flow.edges if e in other.edges}


def _edge(
    ends: Ends,
    slope: tuple[float, float],
    names: dict[str, str],
    specs: dict[str, UnitSpec],
    tensors: int,
) -> EdgeProfile:
    source, target = ends
    # A source that is divided by columns leaves slices of its features, a target that is divided by
    # rows takes some: either may say how many there are.
    sliced = [
        split.features
        for name, style in ((source, "column"), (target, "row"))
        if name in specs and (split := specs[name].split(style)) is not None  # type: ignore[arg-type]
    ]
    features = sliced[0] if sliced else 1
    return EdgeProfile(
        source=names[source], target=names[target], bytes_per_sample=slope[0],
        gradient_bytes_per_sample=slope[1], features=features, tensors=tensors,
    )  # fmt: skip


def _specs(
    model: nn.Module,
    traces: Sequence[Trace],
    traced: Sequence[list[TracedUnit]],
    flow: Flow,
    optional: set[str],
) -> dict[str, UnitSpec]:
    """The units by name, with the splits that they have by the look of them; a forward may leave
    out the modules in ``optional``."""
    found = {}
    twins = {unit.name: unit for unit in traced[1]}
    sizes = traces[0].size, traces[1].size
    shared = parameters_used_outside(model, traces[0], traced[0])
    total_bytes = bytes_of(model)
    for unit in traced[0]:
        twin = twins.get(unit.name)
        batched = _batched(unit, twin, sizes)
        modules = [model.get_submodule(name) for name in unit.modules]
        # Only a unit whose hooks see all that enters and leaves it, and its parameters, is divided.
        reads = stays_whole.READS if unit.name in flow.inside else ""
        obstacle = reads or why_not_plain(model, traces[0], unit, shared, optional)
        # Whether it would be divided, if only one dimension of its inputs counted samples.
        mixed = batched is None and twin is not None and not obstacle
        if not obstacle and not (batched and _leaves_samples(unit, twin, sizes, flow, batched)):
            absent = stays_whole.ABSENT if twin is None else stays_whole.ELSEWHERE
            obstacle = stays_whole.MIXED if mixed else absent
        splits = find_splits(model, unit.modules)
        fitting = tuple(s for s in splits if batched and not obstacle and _fits(unit, s, batched))
        reason = why_not_finer(model, traces[0], unit) if unit.kind not in BLOCK_KINDS else ""
        if splits and not fitting:
            reason = reason or obstacle or stays_whole.FEATURES
        if not splits:
            reason = reason or why_no_split(model, unit, total_bytes)
        norms = any(isinstance(inner, BATCH_NORMS) for m in modules for inner in m.modules())
        fields = _batched_fields(batched or {}, first=_leaves_first(unit, twin, sizes))
        found[unit.name] = UnitSpec(
            unit.name, unit.kind, unit.modules, **fields, splits=fitting,
            batch_statistics=norms, mixed=mixed and bool(splits), stays_whole=reason,
        )  # fmt: skip
    return found


def _batched(
    unit: TracedUnit, twin: TracedUnit | None, sizes: tuple[int, int]
) -> dict[int, int] | None:
    """The leaves of the unit's inputs that hold samples, with the dims that count them in both
    forwards; None where an input grows with the batch and no one dim of it counts samples."""
    if twin is None or len(unit.calls[0].inputs) != len(twin.calls[0].inputs):
        return None
    found = {}
    pairs = zip(unit.calls[0].inputs, twin.calls[0].inputs, strict=True)
    for i, (a, b) in enumerate(pairs):
        if a is None or b is None:
            continue
        dim, sure = sample_dim(a.shape, b.shape, sizes)
        if not sure:
            return None
        if dim is not None:
            found[i] = dim
    return found


class _BatchedFields(TypedDict):
    batched_inputs: tuple[int, ...]
    batch_dims: tuple[int, ...] | None


def _batched_fields(dims: Mapping[int, int], *, first: bool = True) -> _BatchedFields:
    """A unit's fields by the dims of those inputs that hold samples; ``first``: whether all that it
    leaves has them in dim 0."""
    elsewhere = tuple(dims.values()) if dims and (any(dims.values()) or not first) else None
    return {"batched_inputs": tuple(dims), "batch_dims": elsewhere}


def _leaves_first(unit: TracedUnit, twin: TracedUnit | None, sizes: tuple[int, int]) -> bool:
    """Whether every output of the unit has its samples in dim 0."""
    outputs, others = unit.calls[-1].made, twin.calls[-1].made if twin else []
    return len(outputs) == len(others) and all(
        sample_dim(a.shape, b.shape, sizes) == (0, True)
        for a, b in zip(outputs, others, strict=True)
    )


def _leaves_samples(
    unit: TracedUnit,
    twin: TracedUnit | None,
    sizes: tuple[int, int],
    flow: Flow,
    batched: Mapping[int, int],
) -> bool:
    """Whether the unit's first output has its samples where the first batched input has them, and
    no other is used."""
    outputs, others = unit.calls[-1].made, twin.calls[-1].made if twin else []
    if not outputs or not others or not batched:
        return False
    dim, sure = sample_dim(outputs[0].shape, others[0].shape, sizes)
    if not sure or dim != next(iter(batched.values())):
        return False
    used = {key for ends, seen in flow.edges.items() if ends[0] == unit.name for key in seen}
    return all(s.key == outputs[0].key or s.key not in used for s in outputs)


def _fits(unit: TracedUnit, split: SplitSpec, batched: Mapping[int, int]) -> bool:
    """Whether a split suits the tensors that the unit was seen with: its features are not where
    the samples are, and the input that a row split slices comes first."""
    given, made = unit.calls[0].inputs[0], unit.calls[-1].outputs[0]
    if given is None or made is None:
        return False
    tensor = given if split.style == "row" else made
    dims, samples = len(tensor.shape), next(iter(batched.values()))
    return dims > 1 and dims > split.feature_dim and split.feature_dim % dims != samples


class _Trial:
    """Tries splits of a model's units on the inputs that they get in its forward."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model = model
        self.batch = batch if batch.size <= _TRIED_SAMPLES else batch.slice(0, _TRIED_SAMPLES)
        self._tried: dict[tuple[object, ...], bool] = {}

    def checked(self, specs: Mapping[str, UnitSpec]) -> dict[str, UnitSpec]:
        """The units with those splits only that compute what the whole unit does."""
        # Recipes have been written for samples in dim 0: elsewhere each split is shown right.
        doubtful = [
            u
            for u in specs.values()
            if u.splits and (u.batch_dim or guessed(self.model, u.modules))
        ]
        calls = capture(self.model, self.batch, doubtful) if doubtful else {}
        found = dict(specs)
        for unit in doubtful:
            call = calls.pop(unit.name, None)
            kept = tuple(s for s in unit.splits if call and self._holds(unit, s, call))
            lost = stays_whole.NOT_SHOWN if call else stays_whole.FEWER
            reason = unit.stays_whole or ("" if kept else lost)
            found[unit.name] = replace(unit, splits=kept, stays_whole=reason)
        return found

    def _holds(self, unit: UnitSpec, split: SplitSpec, call: UnitCall) -> bool:
        """``check.is_equivalent``, once for each kind of unit: equal modules on equal shapes behave
        alike."""
        # By what a module prints, and by its settings, those of all modules inside it too.
        modules = [self.model.get_submodule(name) for name in unit.modules]
        inside = [
            (
                repr(m),
                [[s for s in settings(i) if not _counts(*s)] for i in m.modules()],
                [tuple(p.shape) for p in m.parameters()],
            )
            for m in modules
        ]
        shapes = [t.shape for t in call.tensors()]
        key = (split.style, split.parts, str(inside), str(shapes), unit.batch_dims)
        if key not in self._tried:
            # The fewest members that can share it: each is a copy of the unit, and a thread.
            degree = next((d for d in (2, 3, 5, 7) if split.uneven or split.parts % d == 0), 0)
            self._tried[key] = bool(degree) and is_equivalent(self.model, unit, split, call, degree)
        return self._tried[key]


def settings(module: nn.Module) -> list[tuple[str, Any]]:
    """The plain settings of one module and of its configuration: whether it checkpoints, which
    attention it computes, by which function, and whatever else what it prints does not show."""
    config = vars(module).get("config")
    own = [(name, value) for name, value in vars(module).items() if name not in _OF_TORCH]
    found = [*own, *(vars(config).items() if hasattr(config, "__dict__") else ())]
    # A name may be at both, with values of different types.
    kept = ((name, value) for name, given in found if (value := _plain(given)) is not _NOT_PLAIN)
    return sorted(kept, key=lambda pair: (pair[0], repr(pair[1])))


_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_NOT_PLAIN = object()
# Of containers in one another, and of entries of one (a vocabulary is no setting).
_DEEPEST, _MOST_ENTRIES = 3, 200


def _plain(value: object, depth: int = 0) -> object:
    """A setting's value as something that prints alike in every process; ``_NOT_PLAIN`` for what is
    no setting."""
    if isinstance(value, bool | int | float | str | type(None)):
        return value
    if depth == _DEEPEST:
        return _NOT_PLAIN
    try:
        if callable(value) and not isinstance(value, type | nn.Module):
            return _function(value, depth)
        return _container(value, depth)
    except Exception:  # it does not show its entries to everybody, and is no plain setting then
        return _NOT_PLAIN


def _container(value: object, depth: int) -> object:
    # Lists are left out: what a module notes as it runs is no setting of it.
    if isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type)):
        value = vars(value)
    if isinstance(value, Mapping) and len(value) <= _MOST_ENTRIES:
        pairs = [(k, _plain(v, depth + 1)) for k, v in value.items() if isinstance(k, str)]
        return sorted((pair for pair in pairs if pair[1] is not _NOT_PLAIN), key=repr)
    if isinstance(value, tuple) and len(value) <= _MOST_ENTRIES:
        return _all_plain(value, depth)
    return _NOT_PLAIN


def _all_plain(values: Iterable[object], depth: int) -> list[object]:
    """Those of the values in a setting that are plain themselves."""
    return [each for given in values if (each := _plain(given, depth + 1)) is not _NOT_PLAIN]


def _function(value: Any, depth: int) -> object:
    """What a function does: its code with what it has taken along."""
    if isinstance(value, partial):
        return _all_plain((value.func, *value.args, value.keywords), depth)
    if isinstance(value, MethodType):
        return _all_plain((value.__func__,), depth)
    if not isinstance(value, FunctionType):
        named = value if isinstance(value, BuiltinFunctionType) else type(value)
        return named.__module__, named.__qualname__
    code, cells = value.__code__, value.__closure__ or ()
    taken_along = *code.co_consts, *(value.__defaults__ or ()), *(c.cell_contents for c in cells)
    held = _all_plain(taken_along, depth)
    return value.__module__, value.__qualname__, code.co_code.hex(), code.co_names, held


def _counts(name: str, value: object) -> bool:
    """Whether a setting is the number of a layer, which is another one in each of equal layers."""
    number = isinstance(value, int) and not isinstance(value, bool)
    return number and name.endswith(("idx", "index", "layer_id", "layer_number"))
