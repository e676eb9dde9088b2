"""Plots into files, where matplotlib is there: it is an extra."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...planner.schema.errors import InputError


def check_plots() -> None:
    """Raises ``InputError`` where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise InputError("a plot needs the package matplotlib: pip install 'meshwright[report]'")


@contextmanager
def figure_in(path: Path, *shape: int, **options: Any) -> Iterator[Any]:
    """The axes of a new figure (``shape`` and ``options`` as for matplotlib's ``subplots``), which
    is written into ``path`` (.png, .svg or .pdf) when they have been drawn on. Raises
    ``InputError`` where matplotlib is missing or cannot write such a file."""
    check_plots()
    # By name, as mypy would ask for matplotlib's types, which are there with the extra only. Agg
    # needs no display.
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(*shape, layout="constrained", **options)
    try:
        yield axes
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise InputError(f"the plot cannot be written to {path}: {error}") from None
    finally:
        # pyplot keeps every figure until it is closed.
        pyplot.close(figure)
