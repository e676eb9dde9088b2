"""Which parcel carries out an exchange policy, and what its ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...planner.schema.plan import ExchangePolicy
from ..comm.control import Control
from .dropping import DroppedGradGroup, Dropping
from .fully_sharded import FullyShardedGradGroup
from .residual import Lossy
from .sharded import ShardedGradGroup
from .slices import GradGroup
from .topk import TopkGradGroup, TopkState

PARCELS: Mapping[ExchangePolicy, type[GradGroup]] = {
    "dense": GradGroup,
    "sharded": ShardedGradGroup,
    "fully_sharded": FullyShardedGradGroup,
    "dropped": DroppedGradGroup,
    "topk": TopkGradGroup,
}


class Policy(Protocol):
    """What the parcels of one policy share, told of every backward."""

    name: str

    def begin(self) -> None:
        """Before a backward."""

    def end(self) -> None:
        """After a backward, when everything has left."""

    def state(self) -> dict[str, Any]:
        """What the next backwards depend on, but for what parcels hold."""

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a ``state``."""


def start_policies(
    grad_groups: Sequence[GradGroup], control: Control, lossy: Lossy
) -> list[Policy]:
    """Those that the parcels need, in one order on all ranks."""
    dropped = [p for p in grad_groups if isinstance(p, DroppedGradGroup)]
    picked = [p for p in grad_groups if isinstance(p, TopkGradGroup)]
    policies: list[Policy] = []
    if dropped:
        policies.append(Dropping(dropped, control, lossy.patience))
    if picked:
        policies.append(TopkState(picked, lossy))
    return policies


def picking_of(policies: Sequence[Policy]) -> TopkState | None:
    """What parcels of top-k share, if there are any."""
    return next((p for p in policies if isinstance(p, TopkState)), None)
