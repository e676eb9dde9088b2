"""What the exchange of gradients had held back when a checkpoint was made: each rank's own under
the plan that wrote it, under another the mean over the ranks."""

# An exchange averages what its peers send. So the mean of what they hold is what the optimizer has
# still to get, whoever sends it: where each rank holds that mean, the same is applied in the end.
# So with momentum that was applied before the choice of what is sent.

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..gradients.feedback import kinds_held
from ..gradients.pending import bare
from ..parallel import exchange_state_dict, load_exchange_state_dict
from ..run import Run
from .boxes import HeldPart, TensorBox
from .capture import exchange_name
from .holdings import Holding, StateTensor
from .index import CheckpointIndex, StoredTensor
from .values import dtype_of


class _HeldTensor(NamedTuple):
    """What one rank had held of a parameter, as it is read: for which parameter, what kind, and by
    how many it is divided."""

    name: str
    kind: str
    memory: Tensor
    peers: int


class HeldBack:
    """What is read, and put into the exchange of the run."""

    def __init__(
        self,
        index: CheckpointIndex,
        states: Sequence[dict[str, Any]],
        run: Run,
        holdings: Iterable[Holding],
    ) -> None:
        self._run, self._states = run, states
        self._stored = {tensor.name: tensor for tensor in index.tensors}
        self._holdings = {holding.name: holding for holding in holdings}
        self._reading: list[_HeldTensor] = []
        self._totals: dict[tuple[str, str], Tensor] = {}
        self._same_plan = False

    def ranks(self, *, same_plan: bool) -> list[int]:
        """The ranks whose parts are to be read, one after the other: as many on every rank."""
        self._same_plan = same_plan
        if not any(state["held"] for state in self._states):
            return []
        return [self._run.world.rank] if same_plan else list(range(len(self._states)))

    def wanted_of(self, rank: int, *, alone: bool) -> dict[str, StateTensor]:
        """What is to be read of one rank's part, which counts ``alone`` or in a mean."""
        wanted = {}
        for name, held in self._states[rank]["held"].items():
            part = self._holdings[name].part
            for kind in held["kinds"] if part is not None else ():
                assert part is not None
                stored = self._stored[exchange_name(rank, kind, name)]
                memory = torch.zeros(part.shape, dtype=dtype_of(stored.dtype))
                peers = 1 if alone else held["peers"]
                self._reading.append(_HeldTensor(name, kind, memory, peers))
                boxes = _in_both(part, memory, stored)
                if boxes:
                    wanted[stored.name] = StateTensor(stored.shape, memory.dtype, boxes)
        return wanted

    def add(self) -> None:
        """Adds what was read to the rest."""
        for name, kind, memory, peers in self._reading:
            own = memory if peers == 1 else memory.div_(peers)
            known = self._totals.get((name, kind))
            self._totals[name, kind] = own if known is None else known.add_(own)
        self._reading.clear()

    def hold(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Puts it into the exchange; a warning tells of what this plan cannot hold."""
        state, kinds = exchange_state_dict(model), self._kinds()
        found: dict[str, dict[str, Tensor]] = {}
        left_out = set()
        for (name, kind), total in self._totals.items():
            if kind in kinds.get(name, ()):
                found.setdefault(name, {})[kind] = total
            elif kind != "velocity" or not self._to_momentum(name, total, optimizer):
                left_out.add(name)
        if left_out and self._run.world.rank == 0:
            warnings.warn(
                f"what the run before had computed of the gradients of {len(left_out)} parameters "
                f"({min(left_out)!r}, …) and not sent is left out: this plan sends these whole, or "
                "keeps back something else",
                stacklevel=2,
            )
        if "residuals" in state:
            policies = {name: self._policy(name, own) for name, own in state["policies"].items()}
            load_exchange_state_dict(model, {**state, "residuals": found, "policies": policies})

    def _kinds(self) -> dict[str, set[str]]:
        """What this plan can hold of each parameter."""
        priority = self._run.priority
        if priority is None:
            return {}
        frozen = {param.name: kinds_held(param) for param in self._run.frozen}
        return frozen | {
            param.name: group.kinds_held(param)
            for group in priority.lossy_groups
            for param in group.feedback
        }

    def _to_momentum(self, name: str, velocity: Tensor, optimizer: Optimizer | None) -> bool:
        """Makes a velocity the optimizer's own momentum, where the plan leaves it to that. False
        where it cannot."""
        holding = self._holdings[name]
        if not isinstance(optimizer, SGD) or holding.spec is not None:
            return False
        state = optimizer.state[holding.tensor]
        # The optimizer turns the sign of what it gets where it maximises.
        turned = any(
            group["maximize"] and any(p is holding.tensor for p in group["params"])
            for group in optimizer.param_groups
        )
        buffer = torch.empty_like(bare(holding.tensor)).copy_(velocity)
        state["momentum_buffer"] = buffer.neg_() if turned else buffer
        return True

    def _policy(self, name: str, own: Any) -> Any:
        """The state of a policy as it was saved, or as it is where that is of other parameters."""
        rank = self._run.world.rank if self._same_plan else 0
        saved = self._states[rank]["policies"].get(name)
        if not isinstance(saved, dict) or saved.keys() != own.keys():
            return own
        for key, value in own.items():
            if isinstance(value, dict) and value.keys() != saved[key].keys():
                return own
        alike = len(saved.get("credit_bytes", ())) == len(own.get("credit_bytes", ()))
        return saved if alike else own


def _in_both(
    part: HeldPart, memory: Tensor, stored: StoredTensor
) -> tuple[tuple[TensorBox, Tensor], ...]:
    """The boxes of ``memory`` that were stored: under another plan a rank held other slices."""
    found = []
    for box, view in part.views(memory):
        for chunk in stored.chunks:
            inner = box.overlap(TensorBox(chunk.offsets, chunk.sizes))
            if inner is not None:
                found.append((inner, box.inside(view, inner)))
    return tuple(found)
