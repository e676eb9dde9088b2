"""Which redistributed tensors the units of one forward share.

What is the same redistribution is said in planner/cost/redistribution.py (see
[Note: Shared redistributions] there); here stands what has moved in the forward that runs.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.spec import SplitSpec
from ...planner.cost.ownership import Form, TensorPlacement, data_parallel_placement
from ...planner.cost.redistribution import SharedRedistribution, shared_redistribution
from ...planner.schema.plan import UnitPlan
from .lazy import LazyRedistributed, version_of
from .redistribute import Dims


class UnitInput(NamedTuple):
    """Input ``number`` of a unit, and how the unit needs it: ``features`` along ``dim`` are sliced
    (1 and None: none are). ``doing`` names its redistribution in reports; samples are in
    ``batch_dim``."""

    unit: str
    number: int
    target: TensorPlacement
    features: int
    dim: int | None
    doing: str
    batch_dim: int = 0

    @property
    def dims(self) -> Dims:
        """What a move of it cuts."""
        return Dims(self.batch_dim, self.dim)

    def takes_slices_of(self, lazy: LazyRedistributed) -> bool:
        """Whether the same dim is sliced here and in ``lazy``, which has slices of features."""
        dim = lazy.sharded_dim
        assert dim is not None
        assert self.dim is not None
        return self.dim % len(lazy.shape) == dim and lazy.shape[dim] == self.features


def unit_input(unit: UnitPlan, spec: SplitSpec | None, form: Form, number: int = 0) -> UnitInput:
    """What ``unit`` needs of its input ``number`` in that form."""
    features, dim = 1, None
    if form == "feature_shard":
        assert spec is not None, "what is divided has a specification"
        features, dim = spec.features, spec.feature_dim
    doing = f"the input of unit {unit.name!r}"
    placement = TensorPlacement(unit.layout, form)
    return UnitInput(unit.name, number, placement, features, dim, doing, unit.batch_dim(number))


# The first use of a tensor in a forward: the unit, which of its inputs, which of its calls, and
# whether gradients are wanted. Tensors are new in each forward, and this tells them again.
FirstUse = tuple[str, int, int, bool]


class _Moved(NamedTuple):
    """What units got, and its version when it arrived."""

    tensor: Tensor
    version: int


@dataclass
class _Entry:
    """A tensor as it was when a unit first needed it, which units needed it, and what they got."""

    tensor: Tensor
    version: int
    first: FirstUse
    users: list[UnitInput] = field(default_factory=list)
    moved: dict[SharedRedistribution, _Moved] = field(default_factory=dict)


class RedistributionCache:
    """The tensors that units have got in the forward that runs.

    The first forward of a kind tells which tensors have several users. Where all ranks run all
    units, later forwards hold only these, and only where a backward may follow: what a unit got it
    has saved for backward then, and the next one saves no more. With ``prefetch`` (units on parts
    of the ranks) a tensor moves to all its users when the first of them needs it.
    """

    def __init__(self, world_size: int, *, prefetch: bool = False) -> None:
        self._outside_units = data_parallel_placement(world_size)
        self._prefetch = prefetch
        self._entries: dict[int, _Entry] = {}
        self._users: dict[FirstUse, list[UnitInput]] = {}
        self._calls: Counter[tuple[str, int]] = Counter()
        self._open = False

    def begin(self) -> None:
        """Before a forward."""
        self._entries, self._open = {}, True
        self._calls.clear()

    def end(self, *, complete: bool) -> None:
        """After a forward; one that did not ``complete`` tells nothing about users."""
        if complete:
            for entry in self._entries.values():
                if self._prefetch or len(entry.users) > 1 or entry.first not in self._users:
                    self._users[entry.first] = entry.users
        self._entries, self._open = {}, False

    def get(
        self,
        tensor: Tensor,
        need: UnitInput,
        move: Callable[[Tensor, UnitInput], Tensor],
        *,
        changes: bool = False,
    ) -> Tensor:
        """The tensor as it is needed: what another unit got, or what ``move`` makes of it. A unit
        that ``changes`` it in place does not prefetch it for others."""
        # In backward, what runs again holds nothing beyond its unit. In inference mode nobody can
        # tell whether the tensor was changed.
        again = not self._prefetch and not (self._open and torch.is_grad_enabled())
        if again or torch.is_inference_mode_enabled():
            return move(tensor, need)
        entry = self._entries.get(id(tensor))
        if entry is None or entry.version != version_of(tensor):
            use = need.unit, need.number
            self._calls[use] += 1
            first = *use, self._calls[use], torch.is_grad_enabled()
            users = self._users.get(first)
            if not self._prefetch and users is not None and len(users) == 1:
                return move(tensor, need)
            # The entry refers to the tensor, so no other can get its id while the entry lives.
            entry = self._entries[id(tensor)] = _Entry(tensor, version_of(tensor), first)
            if self._prefetch and users is not None and not changes:
                for user in users:
                    self._moved(entry, user, move)
        entry.users.append(need)
        return self._moved(entry, need, move)

    def _moved(
        self, entry: _Entry, need: UnitInput, move: Callable[[Tensor, UnitInput], Tensor]
    ) -> Tensor:
        tensor = entry.tensor
        source = tensor.source if isinstance(tensor, LazyRedistributed) else self._outside_units
        key = shared_redistribution(id(tensor), source, need.target, need.features, need.dim)
        known = entry.moved.get(key)
        # A unit may have changed in place what it got. Where units leave ranks idle this must not
        # be asked: an idle rank changes nothing, and all ranks have to issue the same moves.
        if known is None or (not self._prefetch and version_of(known.tensor) != known.version):
            arrived = move(tensor, need)
            known = entry.moved[key] = _Moved(arrived, version_of(arrived))
        return known.tensor
