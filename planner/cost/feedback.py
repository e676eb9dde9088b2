"""What it takes to keep what a lossy exchange has not sent, and which ways are worth planning.

For P bytes of a unit's trained parameters (a member's), in each of top-k's ways:

    residual      P always, beside gradients that live as those of a dense exchange do
    in_place      P always, which is the gradients' own memory; and while the unit's update is at
                  work P of the dense average
    mirror        P always: the parameter moves by what was sent, as it came
    host_mirror   P on the host, which is copied to the device and back in the unit's backward: P
                  while that is at work

In each, the choice takes more than twice the unit's largest parameter for a moment at the end of
its backward (see ``travelling.chosen_bytes``).

So in place never holds more than a residual, and a mirror never more than in place, in the same
time: of those that the executor has, and the optimizer allows, one is planned. A mirror takes the
update of SGD; Adam's is not linear in the gradient. With the host it is a choice, as copies take
time.

Gradients of ``dropped`` are held in their own memory: what is held of a parameter is added to its
gradient when that is sent, so that there is one of the two at any time.
"""

from __future__ import annotations

from typing import NamedTuple

from ..schema.plan import ExchangePolicy, FeedbackPolicy

AT_ONCE: tuple[FeedbackPolicy, ...] = ("in_place", "mirror", "host_mirror")
"""Those in which a gradient is taken in as soon as it is computed, and its memory is free."""
MIRRORS: tuple[FeedbackPolicy, ...] = ("mirror", "host_mirror")
"""Those that hold back updates, of torch's SGD."""
LINEAR = ("sgd", "momentum")
"""Optimizers whose update is linear in the gradient."""


class FeedbackBytes(NamedTuple):
    """Bytes of a unit on a device: ``always``; ``gradients`` that live from its backward to the end
    of the step; of others as they are ``computed``, and for a ``moment`` as they are taken in."""

    always: float
    gradients: float
    computed: float
    moment: float


def held_bytes(
    exchange: ExchangePolicy,
    feedback: FeedbackPolicy,
    trained_bytes: float,
    largest_bytes: float,
    chosen_bytes: float,
) -> FeedbackBytes:
    """What gradients and feedback of a unit take under an exchange whose choice takes
    ``chosen_bytes``. Those of micro-batches add up in what is held, or in the velocity."""
    if exchange == "dropped":
        return FeedbackBytes(trained_bytes, 0.0, trained_bytes, trained_bytes)
    if exchange != "topk":
        return FeedbackBytes(0.0, trained_bytes, 0.0, 0.0)
    if feedback == "residual":
        return FeedbackBytes(trained_bytes, trained_bytes, 0.0, chosen_bytes)
    if feedback == "host_mirror":
        return FeedbackBytes(0.0, 0.0, largest_bytes, trained_bytes + chosen_bytes)
    return FeedbackBytes(trained_bytes, 0.0, largest_bytes, chosen_bytes)


def averaged_bytes(
    exchange: ExchangePolicy, feedback: FeedbackPolicy, trained_bytes: float
) -> float:
    """The dense average of what came, which is there while the unit is updated; of residuals it
    takes the gradient's place."""
    return trained_bytes if exchange == "topk" and feedback == "in_place" else 0.0


def copied_bytes(feedback: FeedbackPolicy, trained_bytes: float) -> float:
    """What travels between device and host in a step, both ways, while backward waits."""
    return 2.0 * trained_bytes if feedback == "host_mirror" else 0.0


def feedbacks(
    exchange: str,
    optimizer: str,
    known: tuple[FeedbackPolicy, ...],
    host_bytes_per_s: float | None,
) -> tuple[FeedbackPolicy, ...]:
    """The ways that are worth planning of those known, the one without copies first."""
    if exchange != "topk":
        return ("residual",)
    able = [f for f in known if f not in MIRRORS or optimizer in LINEAR]
    order: tuple[FeedbackPolicy, ...] = ("mirror", "in_place", "residual")
    best: FeedbackPolicy = next((f for f in order if f in able), "residual")
    if "host_mirror" in able and host_bytes_per_s is not None:
        return best, "host_mirror"
    return (best,)
