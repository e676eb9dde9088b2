"""Top-k exchange with error feedback: of each parameter every rank sends the largest elements of
what it has computed and not sent, and keeps the rest (Deep Gradient Compression, Lin et al., arXiv
1712.01887)."""

# Ranks choose different elements, so values and numbers are gathered, and added up on every rank in
# the order of ranks: all get the same sum, bit for bit.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.schema.errors import RunError
from ...planner.schema.pins import forbidding
from ...planner.simulate.slicing import SliceSpec
from ..redistribution.shard_gradient import ShardGradient
from .buckets import GradParam
from .feedback import (
    Lossy,
    LossyGradGroup,
    drop_what_overflowed,
    folds_at_once,
    in_format_of,
    mirrors,
)
from .flat_shard import flat
from .momentum import Groups, Momentum
from .pending import WaitingGradient, vacating
from .slices import GatheredSlice, Slice, exact_slice, padded_bytes

STRIDE, SPARSE, SAMPLED_FROM = 61, 8, 10_000
"""Of parameters from ``SAMPLED_FROM`` elements on one in ``STRIDE`` is looked at for the threshold,
where at most one in ``SPARSE`` is sent: of a million elements, choosing one in twenty takes 3.4 ms
so, and 12.2 ms among all; one in four takes the same (one core, torch 2.13)."""


def ratio_at(ratio: float, backwards: int, lossy: Lossy) -> float:
    """The share that is sent after so many backwards: from ``first_ratio`` down to ``ratio``."""
    stage = backwards // lossy.stage_backwards
    if stage >= lossy.stages or ratio >= lossy.first_ratio:
        return ratio
    return float(lossy.first_ratio * (ratio / lossy.first_ratio) ** (stage / lossy.stages))


class TopkState:
    """What the groups of top-k share: how far the warm-up is, and the optimizer's momentum."""

    name = "topk"

    def __init__(self, grad_groups: Sequence[TopkGradGroup], lossy: Lossy) -> None:
        self._lossy = lossy
        self._backwards = 0
        self.momentum: Momentum | None = None
        self.parameters = [p.parameter for g in grad_groups for p in g.feedback]
        self.mirrored = [p.parameter for g in grad_groups for p in g.feedback if mirrors(p)]
        for grad_group in grad_groups:
            grad_group.topk = self

    def share(self, param: GradParam) -> float:
        """The share of a parameter's elements that each rank sends in this backward."""
        return ratio_at(param.ratio, self._backwards, self._lossy)

    def rate(self, param: GradParam) -> float:
        """The learning rate that is in force for a mirror."""
        assert self.momentum is not None, "checked when the plan was applied"
        return self.momentum.rate(param.parameter, param.name)

    def begin(self) -> None:
        if self.momentum is not None:
            self.momentum.begin()

    def end(self) -> None:
        self._backwards += 1
        if self.momentum is not None:
            self.momentum.stepped = False

    def state(self) -> dict[str, Any]:
        return {"backwards": self._backwards}

    def load(self, state: dict[str, Any]) -> None:
        self._backwards = int(state["backwards"])


def largest(elements: Tensor, count: int) -> Tensor:
    """The numbers of the ``count`` elements with the largest magnitudes."""
    # As in Deep Gradient Compression a sample tells about where the threshold is. The choice among
    # those above it is exact; where they are too few, it is made among all.
    sizes = elements.abs()
    if len(sizes) >= SAMPLED_FROM and count * SPARSE <= len(sizes):
        # Half as many again as are wanted, and some more where the sample says little.
        enough = 3 * count // (2 * STRIDE) + 8
        least = sizes[::STRIDE].topk(enough, sorted=False).values.min()
        # What is no number is not below it either, and has to leave: see ``drop_what_overflowed``.
        index = torch.nonzero((sizes < least).logical_not_()).flatten()
        if len(index) >= count:
            return index[sizes[index].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def topk_elements(numel: int, share: float) -> int:
    """How many of so many elements are a share of them: at least one."""
    return min(numel, ceil(share * numel))


def packed(values: Tensor, index: Tensor) -> Tensor:
    """Values and their numbers as one message: half the latency of two."""
    parts = [values.view(torch.uint8), index.int().view(torch.uint8)]
    size_bytes = sum(map(len, parts))
    return torch.cat([*parts, parts[0].new_empty(padded_bytes(size_bytes) - size_bytes)])


def _unpacked(part: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values and the numbers of so many elements."""
    at = count * dtype.itemsize
    # Copies: numbers begin at bytes that no multiple of their type's size need be.
    values = part[:at].clone().view(dtype)
    return values, part[at : at + count * torch.int32.itemsize].clone().view(torch.int32)


Part = tuple[Tensor, Tensor]
"""The values that one peer has sent, and their numbers as they lie in memory."""


def add_parts(parts: Iterable[Part], elements: Tensor) -> None:
    """Adds what peers have sent to the flat ``elements``."""
    for values, index in parts:
        elements.index_add_(0, index, values)


class SparseGradient(WaitingGradient):
    """Stands in ``grad`` for the average of what all peers have sent of one parameter, kept as it
    came: the few elements of each."""

    # Where nothing reads the gradient, a mirrored parameter is moved by these as they are, and no
    # dense gradient is ever made. Nothing here holds the parameter, whose grad this is: Python's
    # garbage collector does not see through a parameter's grad.
    parts: list[Part] | None
    """What has come, in the order of ranks."""
    updates: bool
    """Whether a mirror has sent updates, and not gradients."""
    _rate: float
    _param_name: str
    _peers: int
    _zeros: Callable[[], Tensor]
    _finish: Callable[[], None]

    @staticmethod
    def stand_for(
        param: GradParam, rate: float, like: Tensor, finish: Callable[[], None]
    ) -> SparseGradient:
        """What stands in a parameter's ``grad``, in the form of ``like``. ``rate`` is what the
        values were multiplied with: the learning rate of a mirror, else 1. ``finish()`` waits until
        they have come."""
        shape, stride, dtype, device = like.shape, like.stride(), like.dtype, like.device
        members = param.members

        def zeros() -> Tensor:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
            return made if members is None else ShardGradient.of(made, members)

        waiting = SparseGradient.of(like, None, vacating(param.parameter, zeros))
        waiting.parts, waiting.updates, waiting._rate = None, mirrors(param), rate
        waiting._param_name, waiting._peers = param.name, param.group.size
        waiting._zeros, waiting._finish = zeros, finish
        return waiting

    def complete(self) -> Tensor:
        if self._gradient is None:
            if self.parts is None:
                self._finish()
            if self.parts is None:
                raise RunError(
                    f"the gradient of {self._param_name!r} was touched in backward before it was "
                    "sent: read gradients after backward"
                )
            self._gradient = self.dense()
        return self._gradient

    def dense(self) -> Tensor:
        """The gradient as the user sees it: the average before it was multiplied with the rate."""
        assert self.parts is not None
        gradient = self._zeros()
        elements = flat(gradient.as_subclass(Tensor))
        add_parts(self.parts, elements)
        elements.div_(self._peers)
        if self._rate:  # a rate of zero has sent zeros
            elements.div_(self._rate)
        return gradient

    def move(self, parameter: nn.Parameter, rate: float) -> None:
        """Subtracts updates from the parameter, as plain SGD would with that learning rate."""
        assert self.parts is not None
        elements = flat(parameter.detach())
        scale = rate / self._rate if self._rate else 0.0
        for values, index in self.parts:
            elements.index_add_(0, index, values, alpha=-scale / self._peers)


def make_dense(parameter: nn.Parameter) -> None:
    """Makes the gradient of a parameter an ordinary one, where it is an average in parts."""
    if isinstance(parameter.grad, SparseGradient):
        parameter.grad = parameter.grad.complete()


def applied_sparse(parameter: nn.Parameter, gradient: Tensor, groups: Groups) -> bool:
    """Moves a mirrored parameter by what was sent, in a step of these groups. False where the
    optimizer has to do it."""
    if not isinstance(gradient, SparseGradient) or not gradient.updates:
        return False
    group = next(g for g in groups if any(p is parameter for p in g["params"]))
    before = {group["momentum"], group["weight_decay"]}
    assert before == {0}, "momentum and weight decay come before the choice"
    rate = float(group["lr"])
    gradient.move(parameter, -rate if group["maximize"] else rate)
    return True


class TopkSlice(GatheredSlice):
    """Some elements of one parameter, with their numbers."""

    def __init__(self, param: GradParam) -> None:
        super().__init__(param, SliceSpec((0,)))
        self._share, self._count = 0.0, 0

    @property
    def message_bytes(self) -> int:
        parameter = self.params[0].parameter
        size = parameter.element_size() + torch.int32.itemsize
        return padded_bytes(topk_elements(parameter.numel(), self._share) * size)

    @property
    def shared_bytes(self) -> int:
        # As if the members of a divided parameter had equally much.
        (param,) = self.params
        width = param.parameter.element_size()
        count = ceil(self._share * (param.shared_bytes // width))
        return param.group.size * padded_bytes(count * (width + torch.int32.itemsize)) // 2

    def expect(self, share: float) -> None:
        """Says which share of the elements it will carry."""
        self._share = share

    def show(self, values: Tensor, index: Tensor) -> None:
        """Starts to show elements, of which all ranks choose as many. Collective."""
        self._count = len(index)
        self.gather(packed(values, index))

    def take(self, messages: Sequence[Tensor], gradient: Tensor) -> None:
        parts = [_unpacked(message, self._count, gradient.dtype) for message in messages]
        if isinstance(gradient, SparseGradient):
            gradient.parts = parts
        else:
            average = flat(gradient).zero_()
            add_parts(parts, average)
            average.div_(self.params[0].group.size)


class TopkGradGroup(LossyGradGroup):
    """Gradients of which the largest elements are sent; the others are held."""

    topk: TopkState

    def __init__(self, unit: int, params: Sequence[GradParam], message_bytes: int) -> None:
        super().__init__(unit, params, message_bytes)
        self.velocities: dict[GradParam, Tensor] = {}
        self._chosen: dict[GradParam, tuple[Tensor, Tensor]] = {}
        self._absorbed: set[GradParam] = set()
        """The parameters that backwards before this one have added to without an exchange."""

    def _slice(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
        if params[0].whole:
            return exact_slice(params, slice_spec)
        one = TopkSlice(params[0])
        one.expect(params[0].ratio)
        return one

    def clear(self) -> None:
        # Of a backward that failed: what was chosen has not left.
        for param, (values, index) in self._chosen.items():
            self.feedback[param].put_back(index, values)
        self._chosen = {}
        super().clear()

    @property
    def needs_room(self) -> bool:
        # What has come is copied out of its messages, and put together for most updates.
        return any(isinstance(one, TopkSlice) for one in self.slices)

    def following(self, number: int) -> Slice:
        one = self.slices[number]
        if isinstance(one, TopkSlice):
            one.expect(self.topk.share(one.params[0]))
        return one

    def start(self, one: Slice) -> None:
        if not isinstance(one, TopkSlice):
            super().start(one)
            return
        (param,) = one.params
        chosen = self._chosen.pop(param, None)
        one.show(*(chosen or self._choose(param, self.gradients[param].clone(), 1.0)))

    def absorb(self, param: GradParam, gradient: Tensor) -> bool:
        # Only where that equals taking it in with the last backward.
        momentum, feedback = self.topk.momentum, self.feedback.get(param)
        if feedback is None or not folds_at_once(param):
            return False
        gradient = gradient.as_subclass(Tensor)
        if momentum is not None and momentum.gathers(param.parameter):
            known = self.velocities.get(param)
            first_of_step = param not in self._absorbed
            velocity = momentum.gather(
                param.parameter, known, gradient, first_of_step=first_of_step
            )
            if velocity is None:
                return False
            self.velocities[param] = velocity
            self._absorbed.add(param)
            return True
        feedback.add(gradient, self.topk.rate(param) if mirrors(param) else 1.0)
        feedback.take(torch.empty(0, dtype=torch.int64, device=gradient.device))  # none is sent
        return True

    def not_to_be_unscaled(self, param: GradParam) -> str:
        momentum = self.topk.momentum
        if momentum is None or not momentum.groups.get(param.parameter, {}).get("weight_decay"):
            return ""
        return (
            f"the weight decay of {param.name!r} is added to its gradient before top-k chooses, "
            "and a gradient scaler would divide it by the scale: leave the scaler (bfloat16 needs "
            f"none) or the weight decay out, or plan with {forbidding('topk')}"
        )

    def holds(self, param: GradParam) -> bool:
        return param in self._absorbed or super().holds(param)

    def fold(
        self, param: GradParam, gradient: Tensor, finish: Callable[[], None]
    ) -> SparseGradient | None:
        """Takes a gradient in as soon as it is computed, where its memory is not needed for the
        average: the choice is made, and what will come of it is returned."""
        if not folds_at_once(param):
            return None
        gradient = gradient.as_subclass(Tensor)  # of a divided parameter it may know its members
        rate = self.topk.rate(param) if mirrors(param) else 1.0
        average = SparseGradient.stand_for(param, rate, gradient, finish)
        average.not_to_be_unscaled = self.not_to_be_unscaled(param)
        self._chosen[param] = self._choose(param, gradient, rate)
        return average

    def _choose(self, param: GradParam, gradient: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """The values and the numbers of what is sent of a parameter. Takes ``gradient`` over."""
        new, velocity = self._new(param, gradient)
        residual = self.feedback[param].add(new, rate)
        index = largest(flat(residual), topk_elements(residual.numel(), self.topk.share(param)))
        values = self.feedback[param].take(index)
        if velocity is not None:
            drop_what_overflowed(velocity, values, on_stream=param.group.on_stream)
        if velocity is not None and residual is not new:  # where it is, nothing was held before
            delayed = values != flat(new)[index].mul_(rate)
            # Not by a mask: on a GPU the host would wait to know how many there are.
            left = torch.where(delayed, 0, flat(velocity)[index])
            flat(velocity).index_copy_(0, index, left)
        return values, index

    def _new(self, param: GradParam, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """(what is to be applied of this backward, in the gradient's memory; the velocity behind it
        if there is one)."""
        momentum = self.topk.momentum
        # What this rank has not used leaves its velocity alone, as torch's SGD does without a grad.
        first_of_step = param not in self._absorbed
        self._absorbed.discard(param)
        unused = param in self.idle and first_of_step
        if momentum is None or unused or param.parameter not in momentum.groups:
            return gradient, None
        known = self.velocities.get(param)
        velocity, new = momentum.advance(
            param.parameter, known, gradient, first_of_step=first_of_step
        )
        if velocity is not None:
            self.velocities[param] = velocity
        return new, velocity

    def kinds_held(self, param: GradParam) -> set[str]:
        without = {"velocity"} if self.topk.momentum is None else set()
        return super().kinds_held(param) - without

    def state(self) -> dict[str, dict[str, Tensor]]:
        state = super().state()
        for param, velocity in self.velocities.items():
            state.setdefault(param.name, {})["velocity"] = velocity.clone()
        return state

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        super().load(state)
        saved = {p: state.get(p.name, {}).get("velocity") for p in self.feedback}
        self.velocities = {
            p: in_format_of(p, value) for p, value in saved.items() if value is not None
        }
