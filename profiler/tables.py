"""Published layer times that come with the package, as profiles to plan with."""

from __future__ import annotations

from importlib import resources

from ..planner.schema.errors import InputError
from ..planner.schema.layer_times import profile_of_table
from ..planner.schema.profile import ModelProfile

_FOLDER = ("data", "deeppool_a100")


def tables() -> tuple[str, ...]:
    """The names of the tables."""
    folder = resources.files(__package__).joinpath(*_FOLDER)
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".json")))


def load_table(name: str) -> ModelProfile:
    """The profile of a network by its layer times on an A100 (see the folder's README)."""
    if name not in tables():
        raise InputError(f"there is no table {name!r}: choose from {', '.join(tables())}")
    file = resources.files(__package__).joinpath(*_FOLDER, f"{name}.json")
    return profile_of_table(file.read_bytes(), f"table {name}")
