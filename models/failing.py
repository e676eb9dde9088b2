"""Which module of a model an error was raised in."""

import traceback

from torch import nn


def failing_module(model: nn.Module, error: BaseException) -> str | None:
    """The name of the innermost of ``model``'s modules in whose method ``error`` was raised; None
    where it was raised in none (in the loss, say). The model itself is ``""``."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # Named so by convention; what else is called so is no module of the model.
        name = names.get(id(frame.f_locals.get("self")))
        found = found if name is None else name
    return found


def raised_outside(error: BaseException, packages: tuple[str, ...]) -> bool:
    """Whether the code that raised ``error`` belongs to none of ``packages``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    where = frames[-1].f_globals.get("__name__", "") if frames else ""
    return not any(f"{where}.".startswith(f"{package}.") for package in packages)


def in_module(model: nn.Module, error: BaseException) -> str:
    """Where ``error`` was raised, to follow in a sentence: " in module 'x.y'", or nothing."""
    name = failing_module(model, error)
    return f" in module {name!r}" if name else ""
