"""What gradients take besides themselves: copies for communication, and feedback of top-k.

Copies live from a unit's backward until its exchange has been waited for. Gradients that leave in
slices are sent from where they lie; what is packed, received or put in another order needs memory
of its own. Per parameter, with P its shard's bytes and G peers:

    dense     P where it is packed with others (small ones)
              By host besides for two slices, one in each stage, while the unit's leave
    sharded   P (G - 1)/G received from peers; as much that is sent, and one's own P/G, take the
              gradient's place before anything is received. Rounded to travel, both are smaller
              by the same share, and what is sent leaves a part of the gradient's place free
    top-k     what all peers send: G · ratio · P with indices, and one's own message; the ratio
              is largest at the beginning, while top-k warms up
    int8      what all peers send, a little more than a quarter of P each where elements have 32
              bits: one's own message is made where it stands among them
    low rank  the message, up to twice ratio · P as matrices are not square; with 16 bits a copy of
              the largest parameter in 32 as it is made
    dropped   nothing besides what dense has

With buckets instead of slices gradients are views of the buckets (``UnitBytes.phases.bucketed``).

What rounding to eight bits leaves is kept beside the gradients: P always. So is what low rank
leaves, with the directions of both sides, 2 · ratio · P. Top-k keeps what it has not sent. For P
bytes of a unit's trained parameters (a member's):

    residual      P always, beside gradients that live as those of a dense exchange do
    in_place      P always, which is the gradients' own memory; and while the unit's update is at
                  work P of the dense average
    mirror        P always: the parameter moves by what was sent, as it came
    host_mirror   P on the host, which is copied to the device and back in the unit's backward: P
                  while that is at work

Gradients of ``dropped`` are kept in their own memory: what is kept of a parameter is added to its
gradient when that is sent, so that there is one of the two at any time.
"""

from math import ceil
from typing import NamedTuple

from ..cost.compute import shard_bytes
from ..cost.cost import CostModel
from ..cost.exchange import packed
from ..schema.options import Option

# The share that top-k sends in its first backwards: more than the plan's ratio, and buffers must
# hold it.
FIRST_RATIO = 0.25


def comm_buffer_bytes(model: CostModel, k: int, option: Option) -> float:
    """What unit ``k`` holds besides its gradients while they travel, under ``option``."""
    layout = option.layout
    if not model.sliced or layout.groups == 1 or option.gathers:
        return 0.0  # fully sharded gradients arrive in backward: ``gathered`` counts them
    unit = model.profile.units[k]
    trained = [p for p in model.owned[k] if p.trainable]
    sizes = [shard_bytes(unit, option.style, layout.degree, (p,)) for p in trained]
    if option.exchange == "topk":
        return (layout.groups + 1) * _message_bytes(model, option, sum(sizes))
    if option.exchange == "int8":
        return layout.groups * model.int8_share * sum(sizes)
    if option.exchange == "low_rank":
        return 2 * option.ratio * model.thin_bytes_share * sum(sizes)
    if option.exchange != "sharded":
        return float(sum(s for s in sizes if packed(s, model.message_bytes)))
    # What is received, less what the part that is sent leaves of the gradient's place.
    return sum(sizes) * (1 - 1 / layout.groups) * (2 * model.wire_share(option.wire) - 1)


def _message_bytes(model: CostModel, option: Option, shard_bytes: float) -> float:
    """What a rank sends of a shard under top-k, at most."""
    early = option._replace(ratio=max(option.ratio, FIRST_RATIO))
    return model.payload_bytes(early, ceil(shard_bytes)) / max(option.layout.groups, 1)


def topk_choice_bytes(model: CostModel, option: Option, largest_bytes: float) -> float:
    """What top-k's choice among the largest parameter of a unit takes at most, beside what the
    unit's gradients take as they travel."""
    if option.exchange != "topk":
        return 0.0
    # It chooses parameter by parameter, so the largest counts alone.
    message = _message_bytes(model, option, largest_bytes)
    values = max(option.ratio, FIRST_RATIO) * largest_bytes
    indices = message - values
    # A copy of the gradient and the magnitudes, and of what is chosen the values and int64 indices.
    # These are then there beside the message, whose indices are int32.
    choosing = 2 * largest_bytes + values + 2 * indices
    later = (option.layout.groups + 1) * message if model.sliced else 0.0
    return max(choosing - later, values + 3 * indices)


def received_elements_bytes(model: CostModel, option: Option, trained_bytes: float) -> float:
    """What elements that have come by top-k take outside their messages."""
    if option.exchange != "topk":
        return 0.0
    # Those of all peers are copied out of the messages.
    return option.layout.groups * _message_bytes(model, option, trained_bytes)


class FeedbackBytes(NamedTuple):
    """Bytes of a unit on a device: ``always``; ``gradients`` that live from its backward to the end
    of the step; of others as they are ``computed``, and for a ``moment`` as they are taken in."""

    always: float
    gradients: float
    computed: float
    moment: float


def wide_bytes(model: CostModel, largest_bytes: float) -> float:
    """What a gradient of 16 bits takes as low rank multiplies it; others are multiplied where they
    lie."""
    return largest_bytes * model.thin_bytes_share if model.thin_bytes_share > 1 else 0.0


def feedback_bytes(
    model: CostModel,
    option: Option,
    trained_bytes: float,
    largest_bytes: float,
    choice_bytes: float,
) -> FeedbackBytes:
    """What gradients and feedback of a unit take under an exchange whose choice takes
    ``choice_bytes``."""
    # Gradients of micro-batches add up in what is kept, or in the velocity: no copies of their own.
    if option.exchange == "dropped":
        return FeedbackBytes(trained_bytes, 0.0, trained_bytes, trained_bytes)
    if option.exchange == "int8":
        return FeedbackBytes(trained_bytes, trained_bytes, 0.0, 0.0)
    if option.exchange == "low_rank":
        kept = trained_bytes * (1 + 2 * option.ratio * model.thin_bytes_share)
        # What is left of it is rounded before it is stored.
        wide = wide_bytes(model, largest_bytes)
        return FeedbackBytes(kept, trained_bytes, 0.0, wide and wide + largest_bytes)
    if option.exchange != "topk":
        return FeedbackBytes(0.0, trained_bytes, 0.0, 0.0)
    if option.feedback == "residual":
        return FeedbackBytes(trained_bytes, trained_bytes, 0.0, choice_bytes)
    if option.feedback == "host_mirror":
        return FeedbackBytes(0.0, 0.0, largest_bytes, trained_bytes + choice_bytes)
    return FeedbackBytes(trained_bytes, 0.0, largest_bytes, choice_bytes)
