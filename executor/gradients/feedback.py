"""Where top-k keeps what it has not sent, and what becomes of the gradient's memory meanwhile.

    residual      the gradient is added to a buffer; its memory lives on for the average that comes
    in_place      the buffer is the memory of the first gradient, which is never freed: later ones
                  are added to it and gone at once; the average is put together for the step only
    mirror        a local copy of the parameter takes the local update at once, and the gradient is
                  gone; the parameter itself moves by what all ranks have sent, and the copy with it
    host_mirror   the same, kept on the host

The mirror is kept as its difference from the parameter, which is what has not been sent. A copy m
of a parameter w that takes m ← m − rate·g, sends elements of w − m, and is put right by what was
sent as w is, is here d = w − m ← d + rate·g, of which what is sent is taken out; where w moves by
the average, m = w − d moves with it. That takes the same bytes. Nothing is rounded away where an
update is small beside its parameter, and a parameter that is loaded, clamped or averaged between
steps takes its mirror along, where a copy would send the change back as an update.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...planner.schema.errors import InputError
from ...planner.schema.plan import AT_ONCE, MIRRORS, Plan
from .buckets import GradParam
from .momentum import has_momentum
from .residual import Feedback, Residual, flat_of


class HostMirror:
    """Feedback that is kept on the host, in pinned memory where the parameter is on a GPU, and is
    on the device only from ``add`` to ``take``."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._here: Tensor | None = None
        self._source: torch.device | None = None
        """The device that it is copied from."""

    @property
    def held(self) -> Tensor | None:
        """What has not been sent, on the host."""
        if self._source is not None and self._source.type == "cuda":
            torch.cuda.synchronize(self._source)  # it may still be on its way
        return self._host

    def add(self, computed: Tensor, rate: float = 1.0) -> Tensor:
        """Adds ``rate`` times what was computed, and returns what is held now, on the device."""
        if self._host is None:
            self._host = _on_host(computed)
            self._here = computed.mul_(rate)
        else:
            here = torch.empty_like(computed).copy_(self._host, non_blocking=True)
            self._here = here.add_(computed, alpha=rate)
        return self._here

    def take(self, index: Tensor) -> Tensor:
        """Takes the elements at ``index`` out, to be sent; the others go back to the host."""
        assert self._here is not None
        assert self._host is not None
        flat = flat_of(self._here)
        taken = flat[index]
        flat[index] = 0
        self._host.copy_(self._here, non_blocking=True)
        self._here, self._source = None, flat.device
        return taken

    def take_all(self, gradient: Tensor) -> None:
        """Takes everything out and adds it to ``gradient``."""
        if (held := self.held) is not None:
            gradient.add_(held.to(gradient.device))
        self._host = None

    def restore(self, held: Tensor | None) -> None:
        """Holds that, as after a checkpoint."""
        self._host = None if held is None else _on_host(held).copy_(held)


def _on_host(like: Tensor) -> Tensor:
    """A new tensor on the host, in the memory format of ``like``."""
    return torch.empty_strided(
        like.shape, like.stride(), dtype=like.dtype, device="cpu", pin_memory=like.is_cuda
    )


def feedback_of(entry: GradParam) -> Feedback:
    """Where an entry's feedback is kept. A host that is the device needs no copies."""
    if entry.feedback == "host_mirror" and entry.parameter.device.type != "cpu":
        return HostMirror()
    return Residual()


def folds(entry: GradParam) -> bool:
    """Whether an entry's gradient is taken in as soon as it is computed, and not kept."""
    return not entry.whole and entry.exchange == "topk" and entry.feedback in AT_ONCE


def mirrors(entry: GradParam) -> bool:
    """Whether updates are held back of an entry, and not gradients."""
    return folds(entry) and entry.feedback in MIRRORS


def check_feedback(optimizer: Optimizer | None, plan: Plan) -> None:
    """Raises ``InputError`` where a unit's feedback cannot be with its exchange, or with this
    optimizer.

    A mirror holds back updates, and adds up those that ranks have sent: that is right where the
    update is linear in the gradient. Adam's is not: its second moments are of the average gradient,
    which no rank has of what was not sent.
    """
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


def settle_feedback(entries: Sequence[GradParam], optimizer: Optimizer | None) -> list[GradParam]:
    """The entries; those whose mirror could not be updated hold back gradients instead: what the
    optimizer does not hold, and parameters that do not lie in one piece."""
    held = set[nn.Parameter]()
    if optimizer is not None:
        held = {p for group in optimizer.param_groups for p in group["params"]}
    loose = [e for e in entries if mirrors(e) and e.parameter not in held]
    if loose:
        warnings.warn(
            f"the plan mirrors {loose[0].name!r}, which the optimizer that was passed along does "
            f"not update: of {len(loose)} parameters gradients are held back instead",
            stacklevel=4,
        )
    return [
        replace(e, feedback="in_place")
        if mirrors(e) and (e in loose or not _in_one_piece(e.parameter))
        else e
        for e in entries
    ]


def _in_one_piece(parameter: nn.Parameter) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(parameter.detach()))
