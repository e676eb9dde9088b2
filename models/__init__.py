"""What is trained: reference workloads, the units of a model, and how units divide."""

from typing import Any

__all__ = ["build", "names"]


def __getattr__(name: str) -> Any:
    # On demand: units and splits below this package must not load all reference workloads.
    if name in __all__:
        from . import zoo

        return getattr(zoo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
