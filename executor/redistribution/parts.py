"""What a rank holds of a model whose units are divided, or live on a part of the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from ...planner.schema.layout import Style
from ..comm.groups import Place
from .shards import Shard, by_name


@dataclass
class Division:
    """The slices that this rank holds."""

    parameters: dict[nn.Parameter, Shard] = field(default_factory=dict)
    buffers: dict[int, Shard] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)
    styles: dict[str, Style] = field(default_factory=dict)
    """Place and style of the unit that a module belongs to, by the module's name, where the unit is
    divided or leaves ranks idle."""

    def add(self, tensor: Tensor, shard: Shard, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Notes what this rank has of a tensor; its gradient goes to ``gradients`` meanwhile."""
        if not isinstance(tensor, nn.Parameter):
            self.buffers[id(tensor)] = shard
        elif tensor not in self.parameters:
            self.parameters[tensor] = shard
            if tensor.grad is not None:
                gradients[tensor], tensor.grad = tensor.grad, None

    def give_back(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        """Parameters get this rank's part of their gradients again."""
        for parameter, gradient in gradients.items():
            parameter.grad = self.parameters[parameter].take(gradient)

    @property
    def by_name(self) -> dict[str, Shard]:
        """Each divided parameter's and buffer's slice, under all of its names."""
        return by_name([*self.parameters.values(), *self.buffers.values()])
