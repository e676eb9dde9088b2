"""Steps on a device's streams as they are predicted: what leaves when, and what waits for it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.plan import leave_after_backward
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.rank_classes import simulate_rank_classes
from meshwright.planner.simulate.schedule import messages_of, step_of

from tests.strategies import decided

SOME = settings(max_examples=60, deadline=None)


@st.composite
def exchanged(draw, bursts=True):
    """(cost model in slices, decisions) on GPUs, in which some exchanges are sharded, some
    rounded, some neither."""
    model, chosen = draw(decided(bursts))
    model = CostModel(
        model.profile, model.cluster, model.goal, micro_batches=model.micro_batches,
        message_bytes=20_000, sliced=True,
    )  # fmt: skip
    assert model.cluster.on_gpus
    kinds = st.sampled_from([("dense", "exact"), ("sharded", "exact"), ("sharded", "bf16")])
    drawn = [draw(kinds) if o.layout.groups > 1 else ("dense", "exact") for o in chosen]
    return model, tuple(
        option._replace(exchange=exchange, wire=wire)
        for option, (exchange, wire) in zip(chosen, drawn, strict=True)
    )


@SOME
@given(exchanged())
def test_the_two_ways_of_a_sharded_exchange_are_all_of_it(case):
    """No second and no byte is lost by telling them apart."""
    model, chosen = case
    for option in chosen:
        if option.shards:
            whole, ways = model.exchange(option, 30_000), model.sharded_exchange(option, 30_000)
            assert whole.seconds == pytest.approx(sum(way.seconds for way in ways))
            assert whole.sent_bytes == pytest.approx(sum(way.sent_bytes for way in ways))
            assert {way.link for way in ways} == {whole.link}


@SOME
@given(exchanged(bursts=False))
def test_the_next_forward_waits_for_all_sharded_gradients(case):
    """In both simulations alike."""
    model, chosen = case
    messages = messages_of(model, chosen, "priority")
    for message in messages:
        if chosen[message.first].shards:
            # Its own units wait for parameters, the first of all for the sums.
            assert message.holds_forward != message.after_backward
            assert message.awaited_by[0] == (0 if message.holds_forward else message.first)
    step = step_of(model, chosen, model.chain(chosen), "priority")
    plain = simulate(step, model.cluster.interference)
    classes = simulate_rank_classes(model, chosen, messages, "priority", model.cluster.interference)
    one_link = len({message.link for message in messages}) < 2
    near = 1e-9 if one_link else 0.2
    assert classes.step_s == pytest.approx(plain.step_s, rel=near, abs=1e-15)


@SOME
@given(exchanged())
def test_what_leaves_after_backward_does(case):
    """Where ranks are idle and not all exchanges are one all-reduce."""
    model, chosen = case
    late = leave_after_backward(chosen, model.world_size)
    for message in messages_of(model, chosen, "priority"):
        assert message.after_backward or not late
        assert message.ready == (0 if message.after_backward else message.first)
