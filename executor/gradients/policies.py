"""Which parcel carries out an exchange policy, and what its ranks must agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...planner.schema.plan import ExchangePolicy
from ..comm.control import Control
from .dropping import DroppedParcel, Dropping
from .fully_sharded import FullyShardedParcel
from .residual import Lossy
from .sharded import ShardedParcel
from .slices import Parcel
from .topk import Picking, TopkParcel

PARCELS: Mapping[ExchangePolicy, type[Parcel]] = {
    "dense": Parcel,
    "sharded": ShardedParcel,
    "fully_sharded": FullyShardedParcel,
    "dropped": DroppedParcel,
    "topk": TopkParcel,
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


def start_policies(parcels: Sequence[Parcel], control: Control, lossy: Lossy) -> list[Policy]:
    """Those that the parcels need, in one order on all ranks."""
    dropped = [p for p in parcels if isinstance(p, DroppedParcel)]
    picked = [p for p in parcels if isinstance(p, TopkParcel)]
    policies: list[Policy] = []
    if dropped:
        policies.append(Dropping(dropped, control, lossy.patience))
    if picked:
        policies.append(Picking(picked, lossy))
    return policies


def picking_of(policies: Sequence[Policy]) -> Picking | None:
    """What parcels of top-k share, if there are any."""
    return next((p for p in policies if isinstance(p, Picking)), None)
