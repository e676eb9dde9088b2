"""What parcels have in common that send a part of their gradients and hold the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from ...planner.schema.errors import InputError
from ...planner.simulate import slicing
from ...planner.simulate.slicing import SliceSpec
from .buckets import GradParam
from .feedback import feedback_of, mirrors
from .residual import Feedback
from .slices import GradGroup, Slice, empty_like


class LossyGradGroup(GradGroup):
    """A parcel whose entries have feedback, but for those that are sent whole."""

    def __init__(self, unit: int, entries: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, entries, limit_bytes)
        self.feedback: dict[GradParam, Feedback] = {
            e: feedback_of(e) for e in entries if not e.whole
        }

    def _cut(self, limit_bytes: int) -> list[Slice]:
        sizes, whole = [e.shared_bytes for e in self.entries], [e.whole for e in self.entries]
        cuts = slicing.cut_lossy(self.entries[0].exchange, sizes, whole, limit_bytes)
        return [self._slice([self.entries[i] for i in c.parameters], c) for c in cuts]

    def _slice(self, entries: Sequence[GradParam], cut: SliceSpec) -> Slice:
        return Slice(entries, cut)

    def holds(self, entry: GradParam) -> bool:
        """Whether something of the entry waits to be sent."""
        feedback = self.feedback.get(entry)
        return feedback is not None and feedback.held is not None and bool(feedback.held.any())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of what is held, by parameter."""
        return {
            entry.name: {_held_as(entry): held.clone()}
            for entry, feedback in self.feedback.items()
            if (held := feedback.held) is not None
        }

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Holds what a ``state`` of the same parameters says."""
        for entry, feedback in self.feedback.items():
            saved = state.get(entry.name, {})
            strange = {"residual", "mirror"} & set(saved) - {_held_as(entry)}
            if strange:
                raise InputError(
                    f"the exchange state has a {strange.pop()} of {entry.name!r} and the plan "
                    f"keeps a {_held_as(entry)}: load it under the plan that saved it"
                )
            held = saved.get(_held_as(entry))
            feedback.restore(None if held is None else like(entry, held))


def _held_as(entry: GradParam) -> str:
    """Gradients are saved alike wherever they were held; updates are something else."""
    return "mirror" if mirrors(entry) else "residual"


def like(entry: GradParam, value: Any) -> Tensor:
    """A saved tensor in the memory format, type and place of the entry's gradient."""
    parameter = entry.parameter.detach()
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else value
        raise InputError(
            f"the exchange state of {entry.name!r} has shape {found}, its parameter "
            f"{tuple(parameter.shape)}: load what this rank saved under the same plan"
        )
    return empty_like(entry).copy_(value)


def hand_over(old: Iterable[GradGroup], new: Iterable[GradGroup]) -> None:
    """What the old parcels hold goes on in the new ones."""
    known: dict[str, dict[str, Tensor]] = {}
    for grad_group in old:
        if isinstance(grad_group, LossyGradGroup):
            known |= grad_group.state()
    for grad_group in new:
        if isinstance(grad_group, LossyGradGroup):
            grad_group.load(known)
