"""An optimizer's own step on chunks of parameters, with float32 main weights where those have 16
bits (Micikevicius et al., arXiv 1710.03740)."""

# [Note: Main weights]
# Beside 1, bfloat16 has steps of 1/128: an update smaller than half of that changes nothing, and
# late in training most are. Who updates a chunk therefore keeps the chunk's weights in float32 too,
# with an optimizer's state of that type, and gives the parameter what they round to; gradients and
# parameters travel in the parameter's own type. They stand among the optimizer's state, under
# ``MAIN_WEIGHTS``, so that whatever saves, loads or divides that state does it with them.
#
# Whoever changes a parameter otherwise (``load_state_dict``, clamping) need not know of them: where
# they do not round to what stands in the chunk, the chunk is right.

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.steps import VIEW, parameters_of

Groups = list[dict[str, Any]]
StepOn = Callable[[Groups, dict[Any, Any]], None]
"""The optimizer's own step on groups of parameters and their state."""

MAIN_WEIGHTS = "main_weights"
"""The key of an optimizer's state under which they stand."""


def has_main_weights(parameter: Tensor) -> bool:
    """Whether steps on chunks of it keep float32 main weights."""
    return parameter.is_floating_point() and parameter.element_size() == 2


def own_step(optimizer: Optimizer) -> StepOn:
    """The step of its class, whatever now stands in its place on the object."""
    attributes = {k: v for k, v in optimizer.__dict__.items() if k != "step"} | {VIEW: True}

    def step_on(groups: Groups, state: dict[Any, Any]) -> None:
        if not any(group["params"] for group in groups):
            return
        # A view: an object of its class without ``__init__``, with other groups and state.
        view: Any = object.__new__(type(optimizer))
        view.__dict__.update(attributes)
        view.param_groups = [group for group in groups if group["params"]]
        view.state = state
        view.step()

    return step_on


def update_chunks(
    chunks: Mapping[nn.Parameter, nn.Parameter],
    groups: Groups,
    state: dict[Any, Any],
    step_on: StepOn,
) -> None:
    """Updates the chunk of each parameter by the chunk's gradient, which may be gone afterwards.
    ``groups`` and ``state`` are the optimizer's, of the parameters."""
    states: dict[Any, Any] = defaultdict(dict)
    stepped: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, chunk in chunks.items():
        known = dict(state.get(parameter, {}))
        stepped[parameter] = one = chunk
        if has_main_weights(chunk):
            stepped[parameter] = one = _main_weights(chunk, known.pop(MAIN_WEIGHTS, None))
            known = {key: _as_float32(value) for key, value in known.items()}
        if known:
            states[one] = known
    step_on(
        [{**g, "params": [stepped[p] for p in g["params"] if p in stepped]} for g in groups], states
    )
    for parameter, one in stepped.items():
        if one is not chunks[parameter]:
            chunks[parameter].data.copy_(one.data)
            states[one][MAIN_WEIGHTS] = one.data
        if one in states:
            state[parameter] = states[one]


def steps_of(optimizer: Optimizer) -> Iterator[tuple[bool, Callable[[], object]]]:
    """Yields (whether it is the step of a sharded exchange, the step): the optimizer's step on its
    parameters, then, where it differs, the step that a sharded exchange makes on their chunks."""
    yield False, optimizer.step
    parameters = parameters_of(optimizer)
    if not any(has_main_weights(p) for p in parameters):
        return
    state: dict[Any, Any] = {}

    def step() -> None:
        chunks = {p: nn.Parameter(p.detach()) for p in parameters}
        for parameter, chunk in chunks.items():
            chunk.grad = parameter.grad
        update_chunks(chunks, optimizer.param_groups, state, own_step(optimizer))

    yield True, step


def _main_weights(chunk: nn.Parameter, known: Tensor | None) -> nn.Parameter:
    """A chunk's weights in float32, as ``known`` where they still hold, with its gradient, which
    the chunk gives away."""
    main = chunk.detach().float()
    if known is not None:  # where it lies, so that all of a unit's are never there twice
        main = torch.where(known.to(chunk.dtype) == chunk, known, main, out=known)
    found = nn.Parameter(main)
    if chunk.grad is not None:
        found.grad, chunk.grad = chunk.grad.float(), None  # never both of all parameters
    return found


def _as_float32(value: Any) -> Any:
    # Not a step count, which is a scalar.
    return value.float() if isinstance(value, Tensor) and value.ndim else value
