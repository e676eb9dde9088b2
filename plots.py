"""Whether plots can be drawn: matplotlib is an extra."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .planner.errors import InputError


def check_plots() -> None:
    """Raises ``InputError`` where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise InputError("a plot needs the package matplotlib: pip install 'meshwright[report]'")


def pyplot() -> Any:
    """matplotlib's ``pyplot``, drawing into files. Raises ``InputError`` where it is missing."""
    check_plots()
    import_module("matplotlib").use("Agg")
    return import_module("matplotlib.pyplot")
