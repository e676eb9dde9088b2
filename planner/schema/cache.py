"""Documents kept on disk: what was measured, and what plans were made from, by fingerprint."""

import os
from pathlib import Path
from typing import TypeVar

from .errors import InputError
from .record import Document, fingerprint, load, save

CACHE_VARIABLE = "MESHWRIGHT_CACHE"
DocumentT = TypeVar("DocumentT", bound=Document)


def cache_folder() -> Path:
    """``MESHWRIGHT_CACHE``, else ``meshwright`` in the user's cache folder (XDG)."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    # The XDG base directory specification's default where the variable is not set.
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "meshwright"


def _path(mark: str) -> Path:
    return cache_folder() / "documents" / f"{mark}.json"


def get(cls: type[DocumentT], mark: str) -> DocumentT | None:
    """The document kept under that mark, if there is one that can be read."""
    # Damaged, of another version of Meshwright, or in a folder of another user: it is made anew.
    try:
        path = _path(mark)
        return load(cls, path) if path.exists() else None
    except (InputError, OSError, RuntimeError):
        return None


def get_named(cls: type[DocumentT], mark: str, option: str) -> DocumentT:
    """``get`` of what a plan was made from; where it is not here, ``InputError`` names the
    ``option`` that takes its file."""
    try:
        path = _path(mark)
        there = path.exists()
    except (OSError, RuntimeError):  # no permission, no home
        there = False
    if not there:
        raise InputError(
            f"the {cls.__name__} {mark} that the plan was made from is not on this machine: name "
            f"its file with {option}"
        )
    return load(cls, path)


def put(document: Document, mark: str | None = None) -> None:
    """Keeps a document under a mark, by default its fingerprint."""
    try:
        path = _path(mark or fingerprint(document))
        path.parent.mkdir(parents=True, exist_ok=True)
        save(document, path)
    except (
        OSError,
        InputError,
        RuntimeError,
    ):  # no home, no room, no permission: it is just not found later
        return
