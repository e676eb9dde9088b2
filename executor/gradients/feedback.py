"""Error feedback: what has been computed of a gradient and not been sent yet, kept for later."""

# [Note: Error feedback]
# A lossy exchange sends a part of each gradient. What is sent and what is held are together what
# was computed, element by element: what leaves is taken out of what is held, and nothing is rounded
# away between them (the memory of Stich et al., arXiv 1809.07599). ``dropped`` holds whole
# gradients. Top-k holds elements, in one of four places, and what becomes of the gradient's memory
# meanwhile differs:
#
#     residual      the gradient is added to a buffer; its memory lives on for the coming average
#     in_place      the buffer is the memory of the first gradient, which is never freed: later ones
#                   are added to it and gone at once; the average is put together for the step only
#     mirror        a local copy of the parameter takes the local update at once, and the gradient
#                   is gone; the parameter itself moves by what all ranks have sent, the copy too
#     host_mirror   the same, kept on the host
#
# The mirror is kept as its difference from the parameter, which is what has not been sent. A copy m
# of a parameter w that takes m ← m − rate·g, sends elements of w − m, and is put right by what was
# sent as w is, is here d = w − m ← d + rate·g, of which what is sent is taken out; where w moves by
# the average, m = w − d moves with it. That takes the same bytes. Nothing is rounded away where an
# update is small beside its parameter, and a parameter that is loaded, clamped or averaged between
# steps takes its mirror along, where a copy would send the change back as an update.
#
# planner/memory/gradient_buffers.py says what each place takes in bytes.

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...planner.memory.gradient_buffers import FIRST_RATIO
from ...planner.schema.errors import InputError
from ...planner.schema.plan import AT_ONCE, LOSSY, MIRRORS, Plan
from ...planner.simulate import slicing
from ...planner.simulate.dropping import PATIENCE
from ...planner.simulate.slicing import SliceSpec
from ..comm.steps import parameters_of
from .buckets import GradParam
from .flat_shard import flat, in_one_piece, laid_as
from .momentum import has_momentum
from .slices import GradGroup, Slice, empty_like


@dataclass(frozen=True)
class Lossy:
    """Settings of the exchanges that send a part.

    ``patience``: a parameter that was not sent in so many backwards is sent in the next. The share
    that top-k sends falls from ``first_ratio`` to the plan's exponentially, in ``stages`` of
    ``stage_backwards`` each (Deep Gradient Compression's warm-up, Lin et al., arXiv 1712.01887).
    """

    patience: int = PATIENCE
    first_ratio: float = FIRST_RATIO
    stages: int = 4
    stage_backwards: int = 25


class ErrorFeedback:
    """What one parameter's exchange holds back, in a buffer of the gradient's size. ``on_stream``
    says that it is computed on a device, of which the host asks nothing."""

    _residual: Tensor | None = None

    def __init__(self, *, on_stream: bool = False) -> None:
        self._on_stream = on_stream

    @property
    def residual(self) -> Tensor | None:
        """What has not been sent, in the parameter's shape; None where that is nothing."""
        return self._residual

    def add(self, computed: Tensor, rate: float = 1.0) -> Tensor:
        """Adds ``rate`` times what was computed, and returns what is held now. Takes ``computed``
        over."""
        if self._residual is None:
            # As a plain tensor: a divided gradient knows its process group, which none can save.
            computed = computed if type(computed) is Tensor else computed.as_subclass(Tensor)
            self._residual = computed if rate == 1 else computed.mul_(rate)
        else:
            self._residual = laid_as(computed, self._residual)
            self._residual.add_(computed, alpha=rate)
        return self._residual

    def take(self, index: Tensor) -> Tensor:
        """Takes the elements at ``index`` (as they lie in memory) out, to be sent. Elements that
        are not finite count as the largest, so they are among these; any that remain become
        zero."""
        assert self._residual is not None
        elements = flat(self._residual)
        taken = elements[index]
        elements.index_fill_(0, index, 0)
        if index.numel():  # where nothing is sent, nobody would see the overflow
            drop_what_overflowed(elements, taken, on_stream=self._on_stream)
        return taken

    def put_back(self, index: Tensor, values: Tensor) -> None:
        """Holds again what ``take`` has taken out, where it was not sent."""
        residual = self.residual
        assert residual is not None
        where = residual.device
        flat(residual).index_add_(0, index.to(where), values.to(where))

    def take_all(self, gradient: Tensor) -> None:
        """Takes everything out and adds it to ``gradient``."""
        if (residual := self.residual) is not None:
            gradient.add_(residual.to(gradient.device))
        self.restore(None)

    def restore(self, residual: Tensor | None) -> None:
        """Holds that, as after a checkpoint."""
        self._residual = residual


class HostMirror(ErrorFeedback):
    """What is held back lies on the host, in pinned memory where the parameter is on a GPU, and is
    on the device only from ``add`` to ``take``."""

    _host: Tensor | None = None
    _source: torch.device | None = None
    """The device that it is copied from."""

    @property
    def residual(self) -> Tensor | None:
        if self._source is not None and self._source.type == "cuda":
            torch.cuda.synchronize(self._source)  # it may still be on its way
        return self._host

    def add(self, computed: Tensor, rate: float = 1.0) -> Tensor:
        if self._host is None:
            self._host = _on_host(computed)
        else:
            self._residual = torch.empty_like(computed).copy_(self._host, non_blocking=True)
        return super().add(computed, rate)

    def take(self, index: Tensor) -> Tensor:
        assert self._residual is not None
        assert self._host is not None
        taken = super().take(index)
        self._host.copy_(self._residual, non_blocking=True)
        self._residual, self._source = None, taken.device
        return taken

    def restore(self, residual: Tensor | None) -> None:
        self._host = None if residual is None else _on_host(residual).copy_(residual)


def drop_what_overflowed(held: Tensor, taken: Tensor, *, on_stream: bool) -> None:
    """Puts zeros for what is infinite or no number in ``held``, of which the largest elements are
    ``taken``. These show the overflow to all ranks, in the step that it belongs to; what stays
    would spoil every later one."""
    # On a CPU looking is quicker than writing. For a device's answer the host would wait.
    if on_stream or not bool(torch.isfinite(taken).all()):
        held.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _on_host(like: Tensor) -> Tensor:
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device="cpu", pin_memory=like.is_cuda
    )


def l1(tensor: Tensor) -> Tensor:
    """The sum of absolute values, where the tensor is: its value would make the host wait."""
    found: Tensor = torch.linalg.vector_norm(flat(tensor), 1)
    return found.double()


def feedback_of(param: GradParam) -> ErrorFeedback:
    """Where a parameter's feedback is kept."""
    # A host that is the device needs no copies.
    if param.feedback == "host_mirror" and param.parameter.device.type != "cpu":
        return HostMirror(on_stream=param.group.on_stream)
    return ErrorFeedback(on_stream=param.group.on_stream)


def folds_at_once(param: GradParam) -> bool:
    """Whether a parameter's gradient is taken in as soon as it is computed, and not kept."""
    return not param.whole and param.exchange == "topk" and param.feedback in AT_ONCE


def mirrors(param: GradParam) -> bool:
    """Whether updates are held back of a parameter, and not gradients."""
    return folds_at_once(param) and param.feedback in MIRRORS


def check_feedback(optimizer: Optimizer | None, plan: Plan) -> None:
    """Raises ``InputError`` where a unit's feedback cannot be with its exchange, or with this
    optimizer."""
    # A mirror holds back updates, and adds up those that ranks have sent: that is right where the
    # update is linear in the gradient. Adam's is not: its second moments are of the average
    # gradient, which no rank has of what was not sent.
    for unit in plan.units:
        if unit.feedback != "residual" and unit.exchange != "topk":
            raise InputError(
                f"unit {unit.name!r} has feedback {unit.feedback!r} with exchange "
                f"{unit.exchange!r}: only 'topk' keeps it so, use 'residual'"
            )
        if unit.feedback in MIRRORS and (optimizer is None or not has_momentum(optimizer)):
            what = "no optimizer was passed"
            if optimizer is not None:
                what = f"the optimizer is {type(optimizer).__name__}"
            raise InputError(
                f"unit {unit.name!r} has feedback {unit.feedback!r}, which takes the update of "
                f"torch's SGD at once, and {what}: pass SGD, or plan for the optimizer that you "
                "have, which keeps gradients 'in_place'"
            )


def replace_impossible_mirrors(
    params: Sequence[GradParam], optimizer: Optimizer | None
) -> list[GradParam]:
    """The parameters; those whose mirror could not be updated hold back gradients instead: what the
    optimizer does not hold, and parameters that do not lie in one piece."""
    residual = parameters_of(optimizer)
    loose = [p for p in params if mirrors(p) and p.parameter not in residual]
    if loose:
        warnings.warn(
            f"the plan mirrors {loose[0].name!r}, which the optimizer that was passed along does "
            f"not update: of {len(loose)} parameters gradients are held back instead",
            stacklevel=4,
        )
    return [
        replace(p, feedback="in_place")
        if mirrors(p) and (p in loose or not in_one_piece(p.parameter))
        else p
        for p in params
    ]


class LossyGradGroup(GradGroup):
    """A group whose parameters have feedback, but for those that are sent whole."""

    def __init__(self, unit: int, params: Sequence[GradParam], message_bytes: int) -> None:
        super().__init__(unit, params, message_bytes)
        self.feedback: dict[GradParam, ErrorFeedback] = {
            p: feedback_of(p) for p in params if not p.whole
        }

    def _cut(self, message_bytes: int) -> list[Slice]:
        sizes, whole = [p.shared_bytes for p in self.params], [p.whole for p in self.params]
        specs = slicing.cut_lossy(self.params[0].exchange, sizes, whole, message_bytes)
        return [self._slice([self.params[i] for i in spec.parameters], spec) for spec in specs]

    def _slice(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
        return Slice(params, slice_spec)

    def held(self, param: GradParam) -> Tensor:
        """What is held of a parameter, which an exchange changes in place; zeros at first."""
        feedback = self.feedback[param]
        if (residual := feedback.residual) is None:
            residual = empty_like(param).zero_()
        # Elements are sent as they lie in memory, of which the format may have changed.
        residual = laid_as(self.gradients[param], residual)
        feedback.restore(residual)
        return residual

    def holds(self, param: GradParam) -> bool:
        feedback = self.feedback.get(param)
        if feedback is None or feedback.residual is None:
            return False
        # To look whether all of it is zero would make the host wait for the device.
        return param.group.on_stream or bool(feedback.residual.any())

    def forget(self, param: GradParam) -> None:
        if param in self.feedback:
            self.feedback[param].restore(None)

    def kinds_held(self, param: GradParam) -> set[str]:
        """What ``state`` may have of a parameter."""
        return kinds_held(param)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what is held, by parameter."""
        return {
            param.name: {_saved_as(param): residual.clone()}
            for param, feedback in self.feedback.items()
            if (residual := feedback.residual) is not None
        }

    def check(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Raises ``InputError`` where a ``state`` is not of the same parameters."""
        for param in self.feedback:
            check_held(param, state.get(param.name, {}))

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Holds what a ``state`` of the same parameters says, as ``check`` has found it to be."""
        for param, feedback in self.feedback.items():
            residual = state.get(param.name, {}).get(_saved_as(param))
            feedback.restore(None if residual is None else in_format_of(param, residual))


def _saved_as(param: GradParam) -> str:
    # Gradients are saved alike wherever they were held; updates are something else.
    return "mirror" if mirrors(param) else "residual"


def kinds_held(param: GradParam) -> set[str]:
    """What may be held of a parameter, trained now or frozen."""
    if param.whole or param.exchange not in LOSSY:
        return set()
    return {_saved_as(param)} | ({"velocity"} if param.exchange == "topk" else set())


def check_held(param: GradParam, saved: Mapping[str, Any]) -> None:
    """Raises ``InputError`` where what was saved of a parameter is not what the plan holds."""
    strange = {"residual", "mirror"} & set(saved) - {_saved_as(param)}
    if strange:
        raise InputError(
            f"the exchange state has a {strange.pop()} of {param.name!r} and the plan "
            f"keeps a {_saved_as(param)}: load it under the plan that saved it"
        )
    shape = param.parameter.shape
    for value in saved.values():
        if not isinstance(value, Tensor) or value.shape != shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else value
            raise InputError(
                f"the exchange state of {param.name!r} has shape {found}, its parameter "
                f"{tuple(shape)}: load what this rank saved under the same plan"
            )


def in_format_of(param: GradParam, value: Tensor) -> Tensor:
    """A saved tensor in the memory format, type and place of the parameter's gradient."""
    return empty_like(param).copy_(value)


Held = dict[str, dict[str, Tensor]]
"""What is held, by parameter and kind (``LossyGradGroup.state``)."""


def hand_over(old: Iterable[GradGroup], new: Iterable[GradGroup], before: Held) -> Held:
    """What the old groups hold goes on in the new ones, and so what was held ``before`` of
    parameters that the old ones had not. What none of the new ones has is returned: that of
    parameters which are frozen, and may be trained again."""
    known = dict(before)
    for grad_group in old:
        known |= grad_group.state() if isinstance(grad_group, LossyGradGroup) else {}
    for grad_group in new:
        if isinstance(grad_group, LossyGradGroup):
            grad_group.check(known)
            grad_group.load(known)
            for param in grad_group.feedback:
                known.pop(param.name, None)
    return known
