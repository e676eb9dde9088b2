"""What it takes to keep what a lossy exchange has not sent, and which way a plan keeps it.

For P bytes of a unit's trained parameters (a member's), in each of top-k's ways:

    residual      P always, beside gradients that live as those of a dense exchange do
    in_place      P always, which is the gradients' own memory; and P when the average is applied
    mirror        P always, and nothing else: the parameter moves by what was sent, as it came
    host_mirror   P on the host; P on the device while the unit's backward takes its gradient in

Gradients of ``dropped`` are held in their own memory as well: what is held of a parameter is added
to its gradient when that is sent, so that there is one of the two at any time.
"""

from __future__ import annotations

from typing import NamedTuple

from .goal import Goal
from .plan import ExchangePolicy, FeedbackPolicy

AT_ONCE: tuple[FeedbackPolicy, ...] = ("in_place", "mirror", "host_mirror")
"""Those in which a gradient is taken in as soon as it is computed, and its memory is free."""
MIRRORS: tuple[FeedbackPolicy, ...] = ("mirror", "host_mirror")
"""Those that hold back updates, of torch's SGD."""


class Held(NamedTuple):
    """Bytes of a unit on a device: ``always``, of ``gradients`` that live from its backward to the
    end of the step, and for a ``moment`` in its backward or at its update."""

    always: float
    gradients: float
    moment: float


def held_bytes(exchange: ExchangePolicy, feedback: FeedbackPolicy, trained_bytes: float) -> Held:
    """What gradients and feedback of a unit take under an exchange."""
    if exchange == "dropped":
        return Held(trained_bytes, 0.0, trained_bytes)
    if exchange != "topk":
        return Held(0.0, trained_bytes, 0.0)
    if feedback == "residual":
        return Held(trained_bytes, trained_bytes, 0.0)
    return Held(0.0 if feedback == "host_mirror" else trained_bytes, 0.0, trained_bytes)


def choose_feedback(
    exchange: ExchangePolicy, goal: Goal, known: tuple[FeedbackPolicy, ...]
) -> FeedbackPolicy:
    """The way that holds least on the device without copies to the host: a mirror where the
    optimizer's update is linear in the gradient, else in place."""
    if exchange != "topk":
        return "residual"
    linear = goal.optimizer in ("sgd", "momentum")
    if linear and "mirror" in known:
        return "mirror"
    return "in_place" if "in_place" in known else "residual"
