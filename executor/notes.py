"""What people are told beside a result: a line each on stderr."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


def note(text: str | None) -> None:
    """Says ``text`` on stderr, so that stdout stays the result's; nothing where it is empty."""
    if text:
        print(f"note: {text}", file=sys.stderr, flush=True)


def show_warnings_as_notes(tell: Callable[[str], None] = note) -> None:
    """From now on a warning of this package is a line for its user, which ``tell`` says, without
    the code that raised it."""
    warnings.showwarning = partial(_show, tell, warnings.showwarning)


def _show(
    tell: Callable[[str], None], otherwise: Callable[..., None], message: Warning | str,
    category: type[Warning], filename: str, *rest: Any,
) -> None:  # fmt: skip
    if issubclass(category, UserWarning) and Path(filename).is_relative_to(PACKAGE):
        tell(str(message))
    else:
        otherwise(message, category, filename, *rest)
