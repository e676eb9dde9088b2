"""What is known of a unit before anything is measured: where it is and how it can be divided."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..planner.cost.ownership import feature_bounds
from ..planner.schema.layout import Style
from ..planner.schema.profile import UnitKind


@dataclass(frozen=True)
class ParameterCut:
    """How one parameter or buffer is sliced: along ``dim``, which is made of ``blocks`` equal
    blocks that are sliced alike (three where queries, keys and values are packed).

    ``name`` is the fully qualified name in the model.
    """

    name: str
    dim: int
    blocks: int = 1

    def parts(self, length: int) -> int:
        """How many parts of a dimension of ``length`` the members share out."""
        return length // self.blocks

    def bounds(self, length: int, degree: int, member: int) -> list[tuple[int, int]]:
        """The slices ``[left, right)`` of a dimension of ``length`` that a member holds."""
        block = self.parts(length)
        left, right = feature_bounds(block, degree, member)
        return [(b * block + left, b * block + right) for b in range(self.blocks)]


@dataclass(frozen=True)
class SplitSpec:
    """A way to divide a unit's parameters over the members of a group.

    ``parts`` and ``uneven`` as in ``SplitProfile``. ``features`` is the length of dimension
    ``feature_dim`` of the sliced tensor: the output for ``column``, the first input for ``row``.
    Parameters without a cut stay whole on every member.
    """

    style: Style
    parts: int
    uneven: bool
    features: int
    feature_dim: int
    cuts: tuple[ParameterCut, ...]


@dataclass(frozen=True)
class UnitSpec:
    """A unit: consecutive submodules entered at the first and left at the last.

    ``batched_inputs`` are the leaves among the flattened ``(args, kwargs)`` of the first module's
    call that hold samples, ``batch_dims`` the dimension of each that counts them (None: 0 of all,
    and of all that the unit leaves).
    ``mixed`` units stay whole only because an input of theirs grows with the batch and no one
    dimension of it counts samples. ``stays_whole`` says why a unit is not made of finer ones or not
    divided, with the remedy; empty where it is as fine as its modules are.
    """

    name: str
    kind: UnitKind
    modules: tuple[str, ...]
    batched_inputs: tuple[int, ...] = ()
    splits: tuple[SplitSpec, ...] = ()
    batch_statistics: bool = False
    batch_dims: tuple[int, ...] | None = None
    mixed: bool = False
    stays_whole: str = ""

    @property
    def batch_dim(self) -> int:
        """The dimension of samples in its first batched input, and in the output if it divides."""
        return self.batch_dims[0] if self.batch_dims else 0

    def split(self, style: Style) -> SplitSpec | None:
        return next((s for s in self.splits if s.style == style), None)


class Reduce(Protocol):
    """Turns a member's partial sums over its group's samples into the sum for its own samples."""

    def __call__(self, partial: Tensor) -> Tensor: ...
