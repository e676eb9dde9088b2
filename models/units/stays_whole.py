"""Why a unit is not made of finer ones, or is not divided: what is said of it, with the remedy.

Each reason is half a sentence that follows "unit 'x' stays whole: ". Names in it are seen from the
unit, so that equal layers have equal reasons.
"""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..splits.leaves import is_norm
from .kept import kept_results
from .select import (
    TracedUnit,
    called_children,
    called_plainly,
    draws_for_all,
    parameters_of_own_code,
    uses_foreign,
)
from .trace import Trace

MIXED = (
    "what enters it grows with the batch, but in no one dimension that counts the samples: keep "
    "samples and positions in dimensions of their own"
)
ABSENT = "a forward on another number of samples leaves it out: call it in every forward"
ELSEWHERE = (
    "its samples are not in one dimension from its first input to its only output that is used: "
    "return one tensor, with them in the same dimension"
)
READS = (
    "it uses tensors that were made elsewhere and are no arguments of its call: pass them to its "
    "forward"
)
UNPLAIN = (
    "a tensor that enters or leaves it is nested, sparse or inside torch.vmap: give it dense ones, "
    "filled up to one size"
)
LEFT_OUT = "a forward may leave it out (layer drop): set that rate to 0 to have it divided"
SHARED = (
    "its parameters are used outside it too: call the module instead of reading them, or untie them"
)
DRAWS = (
    "it draws random numbers (dropout) before it uses a parameter, or outside the features of its "
    "experts: draw them in a module of their own"
)
FOREIGN = "it uses parameters of other modules: let it have its own"
ALTERED = (
    "it has hooks, a forward that was replaced, or computed parameters (weight normalisation, "
    "pruning): put them on after the plan is applied, or remove them"
)
COMPUTED = (
    "its parameters are computed from others (a parametrization): remove it "
    "(torch.nn.utils.parametrize.remove_parametrizations)"
)
KEEPS = "it keeps a result in an attribute, of which a member would have a part: return it instead"
FEATURES = "its features have no dimension apart from its samples: give them one of their own"
NOT_SHOWN = (
    "tried on its own inputs, the parts of it do not compute what the whole does: let its forward "
    "be that of its class"
)
FEWER = "a forward on fewer samples leaves it out, so that no division could be tried"

# Functions that have a module which joins the unit before it, on elements or on channels.
ON_ELEMENTS = {
    "relu": "ReLU", "relu6": "ReLU6", "leaky_relu": "LeakyReLU", "elu": "ELU", "selu": "SELU",
    "celu": "CELU", "gelu": "GELU", "silu": "SiLU", "mish": "Mish", "tanh": "Tanh",
    "sigmoid": "Sigmoid", "softplus": "Softplus", "hardswish": "Hardswish", "hardtanh": "Hardtanh",
    "dropout": "Dropout",
}  # fmt: skip
ON_CHANNELS = {
    "max_pool2d": "MaxPool2d", "avg_pool2d": "AvgPool2d", "dropout2d": "Dropout2d",
    "adaptive_avg_pool2d": "AdaptiveAvgPool2d",
}  # fmt: skip

# Of units with less than this share of a model's parameters it is not said that no way to divide
# them is known: norms and the like, where nothing would be gained.
SMALL = 0.01

# Followed by where, and by the error.
NOT_FOUND = "looking for finer units failed (the model itself runs)"


def why_glue_stays(functions: Sequence[str], on_channels: bool) -> str:
    """Why code that calls these functions between two units which are divided by columns and by
    rows is not part of the first; empty where modules would not do either. ``on_channels`` says
    that the first one's features are channels."""
    known = {**ON_ELEMENTS, **(ON_CHANNELS if on_channels else {})}
    names = [name.strip("_") for name in functions]
    if not names or not all(name in known for name in names):
        return ""
    called = list(dict.fromkeys(names))
    modules = _and([f"nn.{known[name]}" for name in called])
    functions_are = "are functions" if len(called) > 1 else "is a function"
    return (
        f"{_and(called)} {functions_are} between two units that would leave slices of their "
        f"features to each other: call {modules} instead, which the unit before takes in"
    )


def _and(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def why_not_finer(model: nn.Module, trace: Trace, unit: TracedUnit) -> str:
    """Why a unit with parts that have parameters is not entered; empty where it has none, or is
    one that a recipe knows."""
    name = unit.modules[0]
    module = model.get_submodule(name)
    if next(called_children(model, trace, name), None) is None:
        return ""
    if is_parametrized(module):
        return COMPUTED
    children = {c: len(trace.calls(c)) for c in called_children(model, trace, name)}
    once = [child for child in children if called_plainly(trace, child)]
    own, share = parameters_of_own_code(model, trace, name, once)
    largest = max(own, key=lambda p: model.get_parameter(p).nbytes, default="")
    inside = next((c for c in children if any(e.transformed for e in trace.calls(c))), None)
    if inside is not None and (not once or f"{largest}.".startswith(f"{inside}.")):
        return (
            f"module {_inside(name, inside)!r} in it is called inside a transform of torch.func "
            "(vmap, grad), by whose tensors it cannot be run by itself: call it outside of that"
        )
    several = {c: calls for c, calls in children.items() if calls > 1}
    repeated = next((c for c in several if f"{largest}.".startswith(f"{c}.")), None)
    repeated = repeated or (next(iter(several), None) if not once else None)
    if repeated is not None:
        return (
            f"module {_inside(name, repeated)!r} in it is called {several[repeated]} times in a "
            "forward: give each call a module of its own"
        )
    return (
        f"its own code uses {share:.0%} of its parameters, {_inside(name, largest)!r} first: put "
        "these in a module with a forward of its own"
    )


def why_no_split(model: nn.Module, unit: TracedUnit, total_bytes: int) -> str:
    """What is said of a unit of which no recipe knows how to divide it; empty where it is small
    beside the model's parameters, which have so many bytes."""
    modules = [model.get_submodule(name) for name in unit.modules]
    if all(map(is_norm, modules)) or sum(map(bytes_of, modules)) < SMALL * total_bytes:
        return ""
    largest = max(modules, key=bytes_of)
    return (
        f"no way to divide a module of class {type(largest).__name__} is known: make it of torch's "
        "own linear layers, convolutions and embeddings"
    )


def bytes_of(module: nn.Module) -> int:
    """Bytes of a module's parameters."""
    return sum(p.nbytes for p in module.parameters())


def why_not_plain(
    model: nn.Module, trace: Trace, unit: TracedUnit, used_outside: set[int], optional: set[str]
) -> str:
    """What a unit's modules do that a member of a group could not do with its part; empty where
    there is nothing. ``used_outside`` are identities of parameters, ``optional`` names of modules
    that a forward may leave out."""
    modules = [model.get_submodule(name) for name in unit.modules]
    below = any(f"{n}.".startswith(f"{o}.") for n in unit.modules for o in optional)
    ends = [seen for call in unit.calls for seen in (*call.given, *call.made)]
    asked: Mapping[str, bool] = {
        UNPLAIN: not all(seen.plain for seen in ends),
        LEFT_OUT: below,
        SHARED: bool(unit.parameters(model) & used_outside),
        DRAWS: draws_for_all(trace, unit),
        FOREIGN: uses_foreign(model, trace, unit),
        ALTERED: any(altered(m) for m in modules),
        # A member would keep what it makes of its part, or of a whole group's samples.
        KEEPS: any(True for m in modules for _ in kept_results(m)),
    }
    return next((reason for reason, holds in asked.items() if holds), "")


def altered(module: nn.Module) -> bool:
    """Whether a module or one inside it does more than its class says: a hook of the user's runs
    with it, its parameters are computed from others (weight normalisation, pruning), or its forward
    was replaced. Nobody knows what such a module does with a part of its inputs or parameters."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(
        is_parametrized(inner)
        or "forward" in vars(inner)
        or any(getattr(inner, kind) for kind in hooks)
        for inner in module.modules()
    )


def _inside(outer: str, name: str) -> str:
    """A name as seen from the module ``outer``."""
    return name.removeprefix(f"{outer}.") if outer else name
