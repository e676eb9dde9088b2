"""Momentum before the choice of what is sent (Deep Gradient Compression, Lin et al., arXiv
1712.01887, section 3.2)."""

# [Note: Momentum before the choice]
# An element that is held back for many steps and then added would miss the momentum that it should
# have gathered meanwhile. So each rank applies the momentum of SGD to its own gradients,
# u ← m·u + g, what it holds back and sends are sums of these u, and the optimizer updates these
# parameters without momentum. Of an element that was held back, u is forgotten when it is sent, so
# that old momentum does not push on for long. Unlike there, an element that is sent as soon as it
# is computed keeps its u: where all is sent in every step this is torch's SGD, weight decay
# included.
#
# A mirror takes the whole local update at once, so weight decay and the rate come before the choice
# for it, without momentum too.

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ...planner.schema.errors import InputError, RunError
from .flat_shard import laid_as

Groups = list[dict[str, Any]]


class Momentum:
    """The momentum of an optimizer, for the parameters whose gradients it corrects: those of
    ``mirrored`` ones in any case."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        mirrored: Iterable[nn.Parameter] = (),
    ) -> None:
        self._optimizer = optimizer
        self._candidates = set(parameters)
        self._mirrored = set(mirrored)
        self.groups: dict[nn.Parameter, dict[str, Any]] = {}
        """The group of each parameter whose momentum is applied here, in this backward."""
        self.stepped = True
        """Whether the optimizer has stepped since gradients were exchanged."""

    def include(
        self, parameters: Iterable[nn.Parameter], mirrored: Iterable[nn.Parameter] = ()
    ) -> None:
        """Corrects more parameters, where they belong to the optimizer."""
        self._candidates |= set(parameters)
        self._mirrored |= set(mirrored)

    def begin(self) -> None:
        """Before a backward: reads the hyperparameters that are in force."""
        self.groups = {
            p: group
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p in (self._candidates if group["momentum"] else self._mirrored)
        }
        gathering = (p for p, group in self.groups.items() if group["momentum"])
        if not self.stepped and any(p.grad is not None and p.grad.any() for p in gathering):
            raise RunError(
                "gradients were exchanged twice before one step, which top-k with momentum would "
                "take for two steps: run all backwards but the last under no_sync (micro_batches "
                "does)"
            )

    def rate(self, parameter: nn.Parameter, name: str) -> float:
        if parameter not in self.groups:
            raise RunError(
                f"parameter {name!r} is mirrored and no longer in the optimizer that the plan was "
                "applied with: leave it there, or plan with feedback 'in_place'"
            )
        return float(self.groups[parameter]["lr"])

    def gathers(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has a velocity here, to which gradients are added."""
        return parameter in self.groups and bool(self.groups[parameter]["momentum"])

    def gather(
        self,
        parameter: nn.Parameter,
        velocity: Tensor | None,
        gradient: Tensor,
        *,
        first_of_step: bool,
    ) -> Tensor | None:
        """The velocity with a gradient that others of the same step will be added to;
        ``first_of_step`` for the first. None where their sum is needed by itself."""
        if self.groups[parameter]["nesterov"]:
            return None
        return self._gathered(parameter, velocity, gradient, first_of_step=first_of_step)

    def advance(
        self,
        parameter: nn.Parameter,
        velocity: Tensor | None,
        gradient: Tensor,
        *,
        first_of_step: bool = True,
    ) -> tuple[Tensor | None, Tensor]:
        """(the new velocity u, None without momentum; what is to be applied) after one more
        gradient; all of a shape. Takes ``gradient`` over. ``first_of_step`` unless others of this
        step were gathered."""
        group = self.groups[parameter]
        if group["weight_decay"]:
            # The optimizer turns the sign of what it gets where it maximises.
            rate = -group["weight_decay"] if group["maximize"] else group["weight_decay"]
            gradient.add_(parameter.detach(), alpha=rate)
        if not group["momentum"]:
            return None, gradient
        velocity = self._gathered(parameter, velocity, gradient, first_of_step=first_of_step)
        if group["nesterov"]:
            return velocity, gradient.add_(velocity, alpha=group["momentum"])
        return velocity, gradient.copy_(velocity)

    def _gathered(
        self,
        parameter: nn.Parameter,
        velocity: Tensor | None,
        gradient: Tensor,
        *,
        first_of_step: bool,
    ) -> Tensor:
        group = self.groups[parameter]
        if velocity is None:
            # Goes on from what a run without correction has gathered, if there was one.
            velocity = torch.zeros_like(gradient)
            known = self._optimizer.state.get(parameter, {}).pop("momentum_buffer", None)
            if known is not None:
                velocity.copy_(known).mul_(-1 if group["maximize"] else 1)
        velocity = laid_as(gradient, velocity)
        return velocity.mul_(group["momentum"] if first_of_step else 1).add_(gradient)

    def without_momentum(self, groups: Groups) -> Groups:
        """The optimizer's groups, parted so that those corrected have no momentum of their own."""
        found = []
        for group in groups:
            mine = [p for p in group["params"] if p in self.groups]
            others = [p for p in group["params"] if p not in self.groups]
            found.append({**group, "params": others})
            if mine:
                plain = {"momentum": 0, "nesterov": False, "weight_decay": 0, "params": mine}
                found.append({**group, **plain})
        return found


def has_momentum(optimizer: Optimizer) -> bool:
    """Whether it is torch's SGD, whose momentum can be applied before the choice."""
    own: Any = type(optimizer).step
    return own is SGD.step


def check_momentum(optimizer: Optimizer) -> None:
    """Refuses what a momentum that is applied before the choice cannot do."""
    if not has_momentum(optimizer):
        return
    for group in optimizer.param_groups:
        if group["momentum"] and group["dampening"]:
            raise InputError(
                f"a top-k exchange applies momentum before it chooses what to send, without the "
                f"dampening of {group['dampening']:g}: set dampening to 0, or plan without top-k"
            )
