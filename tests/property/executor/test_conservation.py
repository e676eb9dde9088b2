"""Error feedback conserves: what was sent plus what is held is what was computed, to the bit,
wherever it is held."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.comm.groups import Group
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.feedback import ErrorFeedback, HostMirror, Lossy
from meshwright.executor.gradients.flat_shard import flat
from meshwright.executor.gradients.momentum import Momentum
from meshwright.executor.gradients.topk import TopkGradGroup, TopkState
from torch import Tensor, nn

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple)


def gradients(seed: int, shape: tuple[int, ...], steps: int, *, whole: bool) -> list[Tensor]:
    """Whole numbers add up without rounding, so that sums over steps can be compared exactly."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        made = [torch.randint(-9, 10, shape, generator=generator).double() for _ in range(steps)]
    else:
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(steps)]
    if len(shape) == 4:
        made = [m.to(memory_format=torch.channels_last) for m in made]
    return made


@given(
    shape=shapes, ratio=st.floats(0.001, 1.0), steps=st.integers(1, 12), seed=st.integers(0, 999)
)
def test_elements_that_are_taken_and_those_that_stay_are_all(shape, ratio, steps, seed):
    feedback = ErrorFeedback()
    sent = torch.zeros(shape, dtype=torch.float64)
    computed = torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients(seed, shape, steps, whole=True):
        computed += gradient
        kept = flat(feedback.add(gradient.clone()))
        index = kept.abs().topk(math.ceil(ratio * kept.numel())).indices
        part = torch.zeros_like(feedback.residual)
        flat(part)[index] = feedback.take(index)
        sent += part
        assert torch.equal(sent + feedback.residual, computed)


@given(
    shape=shapes, ratio=st.floats(0.001, 1.0), steps=st.integers(1, 12), seed=st.integers(0, 999)
)
def test_no_step_rounds_anything_away(shape, ratio, steps, seed):
    """Of any numbers: what is sent and what stays are the parts of one sum."""
    feedback = ErrorFeedback()
    for gradient in gradients(seed, shape, steps, whole=False):
        before = gradient if feedback.residual is None else feedback.residual + gradient
        kept = flat(feedback.add(gradient.clone()))
        index = kept.abs().topk(math.ceil(ratio * kept.numel())).indices
        part = torch.zeros_like(feedback.residual)
        flat(part)[index] = feedback.take(index)
        assert torch.equal(part + feedback.residual, before)


@given(shape=shapes, seed=st.integers(0, 999), sends=st.lists(st.booleans(), max_size=12))
def test_pieces_that_wait_are_sent_with_all_that_they_held(shape, seed, sends):
    feedback = ErrorFeedback()
    sent = torch.zeros(shape, dtype=torch.float64)
    computed = torch.zeros(shape, dtype=torch.float64)
    for due, new in zip(sends, gradients(seed, shape, len(sends), whole=True), strict=True):
        computed += new
        gradient = new.clone()
        if due:
            feedback.take_all(gradient)
            sent += gradient
        else:
            feedback.add(gradient)
        kept = torch.zeros(shape) if feedback.residual is None else feedback.residual
        assert torch.equal(sent + kept, computed)


RATES = [2.0**-i for i in range(5)]
"""Powers of two, by which whole numbers are multiplied without rounding."""


@given(
    shape=shapes,
    ratio=st.floats(0.001, 1.0),
    rates=st.lists(st.sampled_from(RATES), min_size=1, max_size=12),
    seed=st.integers(0, 999),
    kind=st.sampled_from([ErrorFeedback, HostMirror]),
)
def test_updates_at_the_rate_of_their_time_are_sent_or_held(shape, ratio, rates, seed, kind):
    mirror = kind()
    sent = torch.zeros(shape, dtype=torch.float64)
    computed = torch.zeros(shape, dtype=torch.float64)
    for rate, gradient in zip(rates, gradients(seed, shape, len(rates), whole=True), strict=True):
        computed += rate * gradient
        kept = mirror.add(gradient.clone(), rate)
        index = flat(kept).abs().topk(math.ceil(ratio * kept.numel())).indices
        part = torch.zeros_like(kept)
        flat(part)[index] = mirror.take(index)
        sent += part
        assert torch.equal(sent + mirror.residual, computed)
    before = mirror.residual.clone()
    mirror.restore(before)
    left = torch.zeros_like(before)
    mirror.take_all(left)
    assert torch.equal(left, before)
    assert mirror.residual is None


class Handle:
    """Stands for a process group that is never asked."""


PAIR = Group((0, 1), 0, Handle(), "exchange")


def topk_group(feedback: str, shape: tuple[int, ...], ratio: float, rate: float) -> TopkGradGroup:
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    param = GradParam(
        "w", parameter, PAIR, 1, parameter.numel(), None, 0, "topk", ratio, feedback=feedback
    )
    grad_group = TopkGradGroup(0, [param], 1000)
    topk = TopkState([grad_group], Lossy(stages=0))
    optimizer = torch.optim.SGD([parameter], lr=rate)
    topk.momentum = Momentum(optimizer, topk.parameters, topk.mirrored)
    topk.begin()
    return grad_group


@given(
    shape=shapes,
    ratio=st.floats(0.001, 1.0),
    exchanged=st.lists(st.booleans(), min_size=1, max_size=12),
    seed=st.integers(0, 999),
    feedback=st.sampled_from(["residual", "in_place", "mirror"]),
)
def test_backwards_with_and_without_exchange_conserve(shape, ratio, exchanged, seed, feedback):
    """A group's choices and what it holds are what was computed, micro-batches included, and a
    checkpoint between them loses nothing."""
    rate = 0.125
    unit = rate if feedback == "mirror" else 1.0
    grad_group = topk_group(feedback, shape, ratio, rate)
    sent = torch.zeros(shape, dtype=torch.float64)
    computed, waiting = sent.clone(), None
    for sends, new in zip(
        exchanged, gradients(seed, shape, len(exchanged), whole=True), strict=True
    ):
        (param,) = grad_group.params
        new = new.contiguous()
        computed += new
        gradient = new.clone() if waiting is None else waiting + new
        if not sends:
            waiting = None if grad_group.absorb(param, gradient) else gradient
            continue
        waiting = None
        if grad_group.fold(param, gradient, lambda: None) is not None:
            values, index = grad_group._chosen.pop(param)
        else:
            values, index = grad_group._choose(param, gradient.clone(), 1.0)
        flat(sent)[index] += values / unit
        other = topk_group(feedback, shape, ratio, rate)
        other.load(grad_group.state())
        grad_group = other
        kept = grad_group.feedback[grad_group.params[0]].residual
        assert torch.equal(sent + kept / unit, computed)
