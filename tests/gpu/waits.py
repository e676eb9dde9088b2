"""Waits that return at once, as on a device's streams, over groups that have none.

A wait of gloo holds the host until a collective is over, so that whoever reads its tensors before
he has waited is not found out, nor what was planned by how long the host was held. Here a wait only
notes that the stream that computes waits from now on. The host is held by the first operator that
uses a tensor of the collective, as the device would be. One that does so before anybody has waited
fails: on streams it would work beside the collective, with whatever there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from streams import COLLECTIVES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Operators that look at no element of what they are given.
_SHAPES_ONLY = {
    "aten::empty_like", "aten::new_empty", "aten::new_empty_strided", "aten::new_zeros",
    "aten::new_ones", "aten::new_full", "aten::zeros_like", "aten::ones_like", "aten::full_like",
    "aten::rand_like", "aten::randn_like", "aten::set_", "aten::resize_",
}  # fmt: skip
# Which arguments of a collective it writes, by their place; it reads the others.
_WRITTEN = dict.fromkeys(COLLECTIVES, (0,))


@dataclass(frozen=True)
class Part:
    """Bytes of one storage, which is kept alive as long as this is."""

    storage: torch.UntypedStorage
    begin: int
    end: int

    def meets(self, other: Part) -> bool:
        """Whether both have a byte in common."""
        same = self.storage.data_ptr() == other.storage.data_ptr()
        return same and self.begin < other.end and other.begin < self.end


def part_of(tensor: Tensor) -> Part | None:
    """Where the elements of a tensor lie, None where it has none."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset() * tensor.element_size()
    return Part(tensor.untyped_storage(), begin, begin + (last + 1) * tensor.element_size())


@dataclass
class InFlight:
    """A collective, and what it reads and writes."""

    name: str
    work: dist.Work
    reads: list[Part]
    writes: list[Part]
    waited: bool = False


@dataclass
class Wire:
    """All collectives whose tensors nobody has used since; ``held`` counts waits of the device that
    were left to an operator."""

    under_way: list[InFlight] = field(default_factory=list)
    held: int = 0

    def used(self, operator: str, tensors: Sequence[Tensor], *, written: bool) -> None:
        """Waits for what an operator is given. Raises ``AssertionError`` where nobody has."""
        for part in filter(None, map(part_of, tensors)):
            for one in list(self.under_way):
                touched = [*one.writes, *(one.reads if written else ())]
                if any(part.meets(other) for other in touched):
                    assert one.waited, f"{operator} uses what {one.name} has, and nobody waited"
                    self._end(one)

    def end(self) -> None:
        for one in list(self.under_way):
            self._end(one)

    def _end(self, one: InFlight) -> None:
        self.held += not one.work.is_completed()
        one.work.wait()
        self.under_way.remove(one)


class StreamedWork:
    """The work of a collective whose wait returns at once."""

    def __init__(self, one: InFlight) -> None:
        self._one = one

    def wait(self, *_: object) -> bool:
        self._one.waited = True
        return True

    def is_completed(self) -> bool:
        return bool(self._one.work.is_completed())


class Stream(TorchDispatchMode):
    """Has each operator wait for what it is given."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view and func._schema.name not in _SHAPES_ONLY:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
            given |= kwargs or {}
            for argument in func._schema.arguments:
                info = argument.alias_info
                found = [t for t in tree_leaves(given.get(argument.name)) if isinstance(t, Tensor)]
                written = info is not None and info.is_write
                self._wire.used(func._schema.name, found, written=written)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits_return_at_once(streamed: Callable[[Any], bool]) -> Iterator[Wire]:
    """Waits for collectives of the process groups that are ``streamed`` return at once."""
    wire, before = Wire(), {name: getattr(dist, name) for name in COLLECTIVES}

    def started(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            if not (kwargs.get("async_op") and group is not None and streamed(group)):
                return before[name](*args, **kwargs)
            given = [[t for t in tree_leaves(a) if isinstance(t, Tensor)] for a in args]
            for place, tensors in enumerate(given):
                # It begins when the stream that computes is as far as this.
                wire.used(name, tensors, written=place in _WRITTEN[name])
            parts = [[p for t in tensors if (p := part_of(t))] for tensors in given]
            writes = [p for place in _WRITTEN[name] for p in parts[place]]
            reads = [p for place, each in enumerate(parts) if place not in _WRITTEN[name]
                     for p in each]  # fmt: skip
            # What was sent from a CPU's memory gives that back once it was waited for.
            apart = tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, args)
            one = InFlight(name, before[name](*apart, **kwargs), reads, writes)
            wire.under_way.append(one)
            return StreamedWork(one)

        return call

    def read(way: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def call(tensor: Tensor) -> Any:
            wire.used(way.__name__, [tensor], written=False)
            return way(tensor)

        return call

    # No operators, on a CPU: from a device these are copied by one first.
    read_directly = [patch.object(Tensor, way.__name__, read(way))
                     for way in (Tensor.numpy, Tensor.tolist)]  # fmt: skip
    for name in COLLECTIVES:
        setattr(dist, name, started(name))
    try:
        with read_directly[0], read_directly[1], Stream(wire):
            yield wire
        wire.end()
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
