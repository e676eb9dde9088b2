"""How tensors move where units take a part of the ranks (burst parallelism, Park et al., arXiv
2112.10065).

What such a unit leaves stays where it was made until something asks for it, and goes from there
straight to where it is needed. Ranks that a move gives nothing to do not wait for it.
"""

# [Note: Burst units, idle ranks and the anchor]
#
# A rank that a unit leaves idle does not run the unit's modules (``BurstUnit.attach`` replaces
# their forward), and yet it has to issue the same collectives in the same order as all others, in
# forward and in backward, or all ranks hang:
#
# - Forward, every rank calls the model's own code with a tensor in the place of the unit's output:
#   on idle ranks one without samples, whose shape and dtype a rank that ran the unit has told it
#   (``Bursts.describe``). So every rank comes to every redistribution.
# - Backward, autograd runs only what leads to a leaf that requires a gradient. On an idle rank the
#   unit's parameters are not in the graph. So every unit's output is tied (``_Tie`` in
#   boundary.py) to what entered the unit and to the ``anchor``, a leaf that requires a gradient
#   on every rank: all ranks have the same moves in their graphs, and issue those of backward in the
#   reverse order of forward's. Idle ranks contribute gradients of no samples.
# - Two things keep parallel branches on different ranks from waiting for each other. What leaves a
#   branch is redistributed when both have been called, as outputs are lazy. And what enters the
#   branches is sent to all of them when the first is called (``RedistributionCache`` with
#   ``prefetch``: an earlier forward has told which units need a tensor). As backward does the same
#   in reverse, a rank gets to its own branch before it waits for the gradients of the others.

import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.ownership import TensorPlacement, data_parallel_placement
from ...planner.schema.layout import Layout
from ..comm.groups import Group, World
from ..comm.watchdog import Watchdog
from .cache import RedistributionCache, UnitInput
from .lazy import LazyRedistributed
from .redistribute import Meter, Mover, route


class Bursts:
    """The moves of one run. ``counts()`` are the samples that each position feeds now."""

    def __init__(
        self,
        world: World,
        watch: Watchdog,
        meter: Meter,
        issued: Callable[[str, int, Group], None],
        counts: Callable[[], tuple[int, ...]],
        cache: RedistributionCache,
    ) -> None:
        self.world, self.watch, self.counts = world, watch, counts
        self.anchor = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
        self.outside_units = data_parallel_placement(world.size)
        self._issued, self._cache = issued, cache
        self._movers = {
            span: Mover(group, watch, meter, issued, outside=world.position not in span)
            for span, group in world.crossings.items()
        }
        self._descriptions: dict[tuple[object, ...], Any] = {}

    def redistribute(self, tensor: Tensor, need: UnitInput, *, changes: bool = False) -> Tensor:
        """The tensor as it is needed, by a unit that ``changes`` it in place or not. Collective."""
        return self._cache.get(tensor, need, self._move, changes=changes)

    def _move(self, tensor: Tensor, need: UnitInput) -> Tensor:
        if isinstance(tensor, LazyRedistributed):
            dim = tensor.sharded_dim
            # A move slices one dim: slices of another one are put together before.
            fits = need.dim is None or dim is None or need.takes_slices_of(tensor)
            if fits and not tensor.changes:
                if dim is not None:
                    need = need._replace(features=int(tensor.shape[dim]), dim=dim)
                return self.move(tensor.local, tensor.source, need)
            tensor = tensor.materialize()
        return self.move(tensor, self.outside_units, need)

    def move(self, local: Tensor, source: TensorPlacement, need: UnitInput) -> Tensor:
        """What this rank has of a tensor as ``source`` says, moved to where it is needed; the
        features of ``need`` are sliced at one end. Collective."""
        span = self._span(source.layout, need.target.layout)
        position = self.world.position
        way = route(self.counts(), source, need.target, need.features, position, span.start)
        if way.quiet and way.have == way.need:
            return local
        return self._movers[span].move(local, way, need.dims, need.doing)

    def _span(self, source: Layout, target: Layout) -> range:
        """The positions that take part in a move: those of one of its ends, if they contain the
        other's."""
        for one, other in ((source, target), (target, source)):
            inside = other.first >= one.first and other.positions.stop <= one.positions.stop
            if inside and one.positions in self._movers:
                return one.positions
        return range(self.world.size)

    def describe(self, layout: Layout, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """What a unit's output looks like: ``make()`` of the layout's first position, on every
        rank. Collective the first time for each ``key``; it is kept then."""
        key = (layout, *key)
        if key not in self._descriptions:
            first = self.world.position == layout.first
            text = pickle.dumps(make()) if first else b""
            # The length goes first: others must have room for the text before it comes.
            length = torch.tensor([len(text)])
            self._broadcast(length, layout.first)
            wire = torch.frombuffer(bytearray(text or int(length)), dtype=torch.uint8)
            self._broadcast(wire, layout.first)
            self._descriptions[key] = pickle.loads(wire.numpy().tobytes())
        return self._descriptions[key]

    def _broadcast(self, tensor: Tensor, position: int) -> None:
        group = self.world.crossings[range(self.world.size)]
        on_device = tensor.to(group.device)
        doing = "the description of a unit's output"
        self._issued(doing, 0, group)
        source = self.world.placement[position]
        work = dist.broadcast(on_device, src=source, group=group.handle, async_op=True)
        self.watch.wait(work, group, doing)
        if on_device is not tensor:
            tensor.copy_(on_device)
