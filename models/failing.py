"""Which module of a model an error was raised in, and where in its code."""

import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from torch import nn

PACKAGES = ("meshwright", "torch", *sys.stdlib_module_names)
"""Whose code is not the user's to mend."""


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
    return not frames or not _belongs(frames[-1].f_globals, packages)


def in_module(model: nn.Module, error: BaseException) -> str:
    """Where ``error`` was raised, to follow in a sentence: " in module 'x.y' (file.py, line 7)", or
    as much of it as is known."""
    name, line = failing_module(model, error), _failing_line(error)
    return (f" in module {name!r}" if name else "") + (f" ({line})" if line else "")


def _failing_line(error: BaseException) -> str:
    """The innermost line of code outside ``PACKAGES``."""
    found = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not _belongs(frame.f_globals, PACKAGES):
            found = f"{Path(frame.f_code.co_filename).name}, line {number}"
    return found


def _belongs(variables: Mapping[str, object], packages: tuple[str, ...]) -> bool:
    """Whether a module with these variables belongs to one of ``packages``."""
    where = variables.get("__name__", "")
    return any(f"{where}.".startswith(f"{package}.") for package in packages)
