"""What a rank hands to ``torch.distributed``, which no change of the package moves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


@contextmanager
def told(
    names: Collection[str], tell: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """``tell(name, args, kwargs)`` is called before each collective of those names."""
    before = {name: getattr(dist, name) for name in names}

    def telling(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tell(name, args, kwargs)
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, telling(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
