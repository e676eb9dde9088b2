"""The gradients that travel by priority, as the executor packs them: parcels, cut into slices.

A parcel is of one unit and the peers that hold the same values, or of small units that follow each
other; it leaves when all of its gradients are there, and whoever needs one of its units waits for
all of it. Each of its slices is a message. ``slices`` says what goes together and how it is cut,
here and in the executor alike.

What a step formula has is simpler: equal slices of each unit by itself (``slice_messages``), which
is what a sum over units can say. What a plan predicts is the simulation of the parcels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

from ..cost.compute import shard_bytes
from ..cost.cost import CostModel
from ..cost.step_time import LINKS, Chain
from ..schema.layout import Layout
from ..schema.options import Option
from ..schema.plan import ScheduleName
from ..schema.profile import ParameterProfile, UnitProfile
from .schedule import Message, Step, bucket_messages, work_of
from .slicing import SliceSpec, cut, grouped

MOST_PICKED = 2**31 - 1
"""Parameters with more elements are sent whole: picked ones are numbered in int32."""


class Gradient(NamedTuple):
    """One parameter's gradient on its way, by its canonical name. ``kind`` is what those have in
    common that can travel together (layout and exchange); ``shared_bytes`` a member's share, the
    same for all members.
    ``whole`` says that a lossy exchange does not send it in part."""

    name: str
    unit: int
    kind: Option
    shared_bytes: int
    whole: bool


class GradGroup(NamedTuple):
    """Gradients in the order of backward, and how they are cut."""

    gradients: tuple[Gradient, ...]
    cuts: tuple[SliceSpec, ...]

    @property
    def kind(self) -> Option:
        """What they have in common."""
        return self.gradients[0].kind

    @property
    def units(self) -> tuple[int, ...]:
        """The units that wait for it, in forward order."""
        return tuple(sorted({g.unit for g in self.gradients}))


def grad_groups(model: CostModel, decisions: Sequence[Option]) -> list[GradGroup]:
    """The parcels of a step, those that get ready first in front."""
    travelling = [
        g for k in reversed(range(len(decisions))) for g in _gradients(model, k, decisions)
    ]
    groups = grouped([(g.kind, g.unit, g.shared_bytes) for g in travelling])
    found = [tuple(travelling[i] for i in group) for group in groups]
    made = [GradGroup(mine, _cuts(mine, model.bucket_bytes)) for mine in found]
    return sorted(made, key=lambda p: p.units[0], reverse=True)


def _gradients(model: CostModel, k: int, decisions: Sequence[Option]) -> list[Gradient]:
    """Those of unit ``k`` that somebody else has too, in the order of backward."""
    unit, option = model.profile.units[k], decisions[k]
    found = []
    for p in reversed([p for p in model.owned[k] if p.trainable]):
        layout = _peers(unit, option, p)
        if layout.groups == 1:
            continue
        kind = Option(layout, exchange=option.exchange, ratio=option.ratio)
        kind = kind._replace(early_release=option.early_release)
        whole = len(p.shape) <= 1 or unit.kind == "norm" or prod(p.shape) > MOST_PICKED
        size = shard_bytes(unit, option.style, option.layout.degree, (p,))
        found.append(Gradient(p.shared, k, kind, size, whole))
    return found


def _peers(unit: UnitProfile, option: Option, parameter: ParameterProfile) -> Layout:
    """The layout among whose groups a parameter is averaged: what a style leaves whole is the same
    on all members."""
    layout = option.layout
    split = unit.split(option.style) if layout.degree > 1 else None
    if split is None or parameter.shared in {name for name, _ in split.sharded}:
        return layout
    return Layout(groups=layout.size, degree=1, first=layout.first)


def _cuts(gradients: Sequence[Gradient], limit_bytes: int) -> tuple[SliceSpec, ...]:
    """What a lossy exchange sends in part shares no message; top-k sends one for each parameter."""
    kind = gradients[0].kind
    if not kind.lossy:
        return cut([g.shared_bytes for g in gradients], limit_bytes)
    whole = [i for i, g in enumerate(gradients) if g.whole]
    groups = [whole, *([i] for i, g in enumerate(gradients) if not g.whole)]
    found = []
    for group in groups:
        sizes = [gradients[i].shared_bytes for i in group]
        picked = kind.exchange == "topk" and group is not whole
        cuts = (SliceSpec((0,)),) if picked else cut(sizes, limit_bytes)
        found += [c._replace(parameters=tuple(group[i] for i in c.parameters)) for c in cuts]
    return tuple(found)


def grad_group_messages(model: CostModel, decisions: Sequence[Option]) -> tuple[Message, ...]:
    """The slices of all parcels as messages, each one collective (two where the exchange is
    sharded); none of those that are waited for in backward."""
    messages = []
    for grad_group in grad_groups(model, decisions):
        if grad_group.kind.early_release:
            continue
        for one in grad_group.cuts:
            mine = [grad_group.gradients[i] for i in one.parameters]
            kind = grad_group.kind
            if mine[0].whole and kind.lossy:
                kind = Option(kind.layout)
            size = sum(g.shared_bytes for g in mine) / one.parts
            on = model.exchange(kind, model.payload_bytes(kind, ceil(size)) if kind.lossy else size)
            units, urgency = grad_group.units, grad_group.units[0]
            messages.append(Message(units, LINKS[on.link], on.seconds, urgency, on.sent_bytes))
    return tuple(messages)


def step_of(
    model: CostModel,
    decisions: Sequence[Option],
    chain: Chain,
    schedule: ScheduleName,
) -> Step:
    """The step that the executor runs under those decisions; the model's ``bucket_bytes`` is the
    size of a slice under priority."""
    by_barrier = schedule == "barrier"
    messages = (bucket_messages if by_barrier else grad_group_messages)(model, decisions)
    return Step(work_of(chain, model.micro_batches, schedule), messages, schedule)
