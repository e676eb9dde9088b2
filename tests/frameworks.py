"""The packages that ``make`` installs beside the environment for the tests of ``mw.adapt`` and of
TensorBoard: with accelerate in it, transformers would do other things in other tests."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "frameworks"
EXAMPLES = Path(__file__).parents[1] / "examples"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test where a package is neither there nor in the environment."""
    missing = [p for p in packages if PathFinder.find_spec(p, [*sys.path, str(FOLDER)]) is None]
    reason = f"{', '.join(missing)} not installed: make .venv/frameworks.stamp"
    return pytest.mark.skipif(bool(missing), reason=reason)


def use() -> None:
    """Makes them importable in this process, and the examples too."""
    for folder in (FOLDER, EXAMPLES):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
