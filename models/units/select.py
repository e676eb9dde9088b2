"""Which submodules are the units of a model.

A unit is the smallest piece that can get a decision of its own: called once in a forward, entered
and left through known tensors. From the model downwards a module is entered as long as the modules
in it that are called exactly once have most of its parameters: the few that its own code uses
(class tokens, tables of positions, scales of a branch), or that of modules called several times,
then belong to no unit. Attention, MLPs and mixtures of experts with a known recipe are one unit
each.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ...planner.schema.profile import UnitKind
from ..splits import LEAF_KINDS, block_kind
from ..splits.leaves import BATCH_NORMS, CONVOLUTIONS, is_linear, is_norm, may_follow
from .trace import Event, Trace, TracedTensor

# The share of a module's parameters, by bytes, that its own code may use between its units: neither
# divided nor sharded there, and whole in memory whatever the plan.
MOST_OUTSIDE = 0.2

# How the names of torch's operations that draw random numbers begin.
_RANDOM = (
    "dropout", "alpha_dropout", "feature_", "bernoulli", "rand", "normal", "uniform", "exponential",
    "gumbel", "multinomial", "rrelu", "log_normal", "geometric", "cauchy",
)  # fmt: skip


@dataclass(frozen=True)
class TracedUnit:
    """A unit in a trace: its modules' calls in order."""

    kind: UnitKind
    calls: tuple[Event, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(c.module or "" for c in self.calls)

    @property
    def name(self) -> str:
        """The first module's fully qualified name; a model that is one unit is called ``model``."""
        return self.modules[0] or "model"

    @property
    def start(self) -> int:
        return self.calls[0].index

    @property
    def end(self) -> int:
        return self.calls[-1].end

    def parameters(self, model: nn.Module) -> set[int]:
        """Identities of the parameters that its modules have."""
        return {id(p) for name in self.modules for p in model.get_submodule(name).parameters()}


def select_units(model: nn.Module, trace: Trace, refused: Collection[str] = ()) -> list[TracedUnit]:
    """The units of a model in the order in which a forward calls them.

    ``refused`` names modules that look as if a recipe knew them and do not stay whole for that.
    """
    chosen = dict(_units(model, trace, "", refused))
    calls = sorted((trace.calls(name)[0] for name in chosen), key=lambda e: e.index)
    return _merge(model, trace, [TracedUnit(chosen[c.module or ""], (c,)) for c in calls])


def _units(
    model: nn.Module, trace: Trace, name: str, refused: Collection[str]
) -> Iterator[tuple[str, UnitKind]]:
    """The units at or below a called module that has parameters."""
    module = model.get_submodule(name)
    kind = block_kind(model, name) if name and name not in refused else None
    children = [c for c in called_children(model, trace, name) if called_plainly(trace, c)]
    whole = kind is not None or is_parametrized(module)  # which computes what the module has
    if whole or not children or not _enterable(model, trace, name, children):
        yield name, kind or kind_of(module)
        return
    for child in children:
        yield from _units(model, trace, child, refused)


def called_children(model: nn.Module, trace: Trace, name: str) -> Iterator[str]:
    """The nearest modules below that have parameters and are called (lists are not)."""
    for child, module in model.get_submodule(name).named_children():
        full = f"{name}.{child}" if name else child
        if next(module.parameters(), None) is None:
            continue
        if trace.calls(full):
            yield full
        else:
            yield from called_children(model, trace, full)


def called_plainly(trace: Trace, name: str) -> bool:
    """Whether a module is called once in the forward, and with tensors by which it can be run by
    itself, as it cannot by those of a transform of ``torch.func``."""
    calls = trace.calls(name)
    return len(calls) == 1 and not calls[0].transformed


def _enterable(model: nn.Module, trace: Trace, name: str, children: list[str]) -> bool:
    """Whether what the module uses besides the parameters of ``children``, those called once, is
    little."""
    return parameters_of_own_code(model, trace, name, children)[1] <= MOST_OUTSIDE


def parameters_of_own_code(
    model: nn.Module, trace: Trace, name: str, children: list[str]
) -> tuple[list[str], float]:
    """The parameters that a module uses outside its ``children`` and that these do not have, and
    their share of both by bytes."""
    inside = set(children)
    # Its own code may use theirs: an output layer that is tied to an embedding has its weight.
    theirs = {p for child in children for p in model.get_submodule(child).parameters()}
    used = {
        model.get_parameter(p): p
        for event in trace.events
        if event.parameters and (not name or name in event.stack) and not inside & set(event.stack)
        for p in event.parameters
    }
    own = {p: n for p, n in used.items() if p not in theirs}
    own_bytes = sum(p.nbytes for p in own)
    return list(own.values()), own_bytes / max(own_bytes + sum(p.nbytes for p in theirs), 1)


def parameters_used_outside(model: nn.Module, trace: Trace, traced: list[TracedUnit]) -> set[int]:
    """Identities of the parameters that are used where they are not registered: outside of units,
    or in a unit that does not have them. They cannot be divided.
    """
    found: set[int] = set()
    for event in trace.events:
        used = {id(model.get_parameter(p)) for p in event.parameters}
        found |= used - _owned(model, traced, event)
    return found


def _owned(model: nn.Module, traced: list[TracedUnit], event: Event) -> set[int]:
    """Identities of the parameters of the unit in which an event happens."""
    unit = next((u for u in traced if u.start <= event.index < u.end), None)
    return unit.parameters(model) if unit is not None else set()


def uses_foreign(model: nn.Module, trace: Trace, unit: TracedUnit) -> bool:
    """Whether a unit uses parameters that are not its own (given to it as inputs, say)."""
    own = unit.parameters(model)
    used = {p for event in trace.events[unit.start : unit.end] for p in event.parameters}
    return any(id(model.get_parameter(p)) not in own for p in used)


def draws_for_all(trace: Trace, unit: TracedUnit) -> bool:
    """Whether a unit draws random numbers (dropout) for what all members of a group have alike, or
    have parts of a sum of: every member would draw them for itself."""
    events = trace.events[unit.start : unit.end]
    drawing = [e for e in events if e.module is None and e.name.startswith(_RANDOM)]
    if unit.kind == "experts":
        return any(not _between_uses(event, events) for event in drawing)
    first = next((e.index for e in events if e.parameters), unit.end)
    return any(event.index < first for event in drawing)


def _between_uses(event: Event, events: Sequence[Event]) -> bool:
    """Whether an event lies in a module inside the unit, such as one expert, between two uses of
    that module's parameters: there members have different features."""
    inside = event.stack[event.stack.index(events[0].module or "") + 1 :]

    def used(name: str, some: Sequence[Event]) -> bool:
        return any(p.startswith(f"{name}.") for e in some for p in e.parameters)

    before, after = (
        [e for e in events if (e.index < event.index) is early] for early in (True, False)
    )
    return any(used(name, before) and used(name, after) for name in inside)


def kind_of(module: nn.Module) -> UnitKind:
    """What a module is called in tables."""
    if is_linear(module):
        return "linear"
    if isinstance(module, CONVOLUTIONS):
        return "conv"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    leaf = next(module.children(), None) is None
    return "norm" if leaf and is_norm(module) else "other"


def _merge(model: nn.Module, trace: Trace, traced: list[TracedUnit]) -> list[TracedUnit]:
    """Runs with what follows each directly and belongs to it: activation, dropout, pooling, and
    batch normalisation after a convolution."""
    taken: set[str] = set()
    merged = []
    for unit in traced:
        if unit.modules[0] in taken:
            continue
        while (call := _next_call(model, trace, unit)) is not None:
            unit = TracedUnit(unit.kind, (*unit.calls, call))
            taken.add(call.module or "")
        merged.append(unit)
    return merged


def _next_call(model: nn.Module, trace: Trace, unit: TracedUnit) -> Event | None:
    """The call that directly follows a unit and joins it, if there is one."""
    if unit.end >= len(trace.events) or unit.kind not in LEAF_KINDS:
        return None
    event = trace.events[unit.end]
    if event.module is None or len(trace.calls(event.module)) != 1:
        return None
    first, module = model.get_submodule(unit.modules[0]), model.get_submodule(event.module)
    if not may_follow(first, module) or (isinstance(module, BATCH_NORMS) and len(unit.calls) > 1):
        return None
    # It belongs to the unit only if the result goes there and nowhere else: a residual connection
    # that starts between the two would otherwise be cut off from its tensor.
    made = unit.calls[-1].made
    if not len(made) == len(event.given) == len(event.made) == 1:
        return None
    if event.given[0].key != made[0].key or _used_elsewhere(trace, made[0], event):
        return None
    return event


def _used_elsewhere(trace: Trace, tensor: TracedTensor, event: Event) -> bool:
    """Whether anything after ``event`` uses the tensor that went into it."""
    if event.made[0].key == tensor.key:
        return False  # changed in place: what comes later uses the result
    later = (seen for after in trace.events[event.end :] for seen in after.given)
    return any(seen.key == tensor.key for seen in chain(later, trace.made))


def parameters_outside(model: nn.Module, traced: list[TracedUnit]) -> tuple[str, ...]:
    """Names of parameters that belong to no unit: used between units, or not at all."""
    owned = {one for unit in traced for one in unit.parameters(model)}
    return tuple(name for name, p in model.named_parameters() if id(p) not in owned)
