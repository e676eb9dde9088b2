"""The formulas and the event simulation agree on random chains."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.step_time import (
    LINKS,
    barrier_step,
    priority_bound,
    priority_step,
    step_terms,
)
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.schedule import Message, Step, plain_messages, work_of

from tests.strategies import step_chains

MANY = settings(max_examples=300, deadline=None)
micro_batch_counts = st.integers(1, 3)


def close(a, b):
    return abs(a - b) <= 1e-9 * max(1.0, abs(a), abs(b))


def run(chain, micro_batches, schedule, messages=None, preempt=True, steps=None):
    messages = plain_messages(chain) if messages is None else messages
    work = work_of(chain, micro_batches, schedule)
    return simulate(Step(work, messages, schedule, preempt), steps=steps)


@MANY
@given(step_chains(), micro_batch_counts)
def test_priority_formula_is_the_preemptive_simulation(chain, micro_batches):
    found = run(chain, micro_batches, "priority").step_s
    assert close(found, priority_step(chain, micro_batches))


@MANY
@given(step_chains("both"), micro_batch_counts)
def test_barrier_formula_is_the_fifo_simulation_with_one_bucket_a_unit(chain, micro_batches):
    found = run(chain, micro_batches, "barrier").step_s
    assert close(found, barrier_step(chain, micro_batches))


@MANY
@given(step_chains(), micro_batch_counts, st.floats(0, 300))
def test_a_step_is_never_shorter_than_what_its_host_takes(chain, micro_batches, issued_s):
    units = len(chain.forward_s)
    issued = chain._replace(host_s=np.full(units, issued_s / units))
    for schedule, formula in (("priority", priority_step), ("barrier", barrier_step)):
        found = run(chain, micro_batches, schedule).issued_in(issued_s)
        assert close(found.step_s, formula(issued, micro_batches))
        parts = found.compute_s + found.blocking_s + found.exposed_s
        assert close(parts, found.step_s)
        assert close(found.host_s, max(issued_s - formula(chain, micro_batches), 0.0))
    assert priority_bound(issued, micro_batches) >= issued_s - 1e-9


@MANY
@given(step_chains("both"), micro_batch_counts)
def test_no_schedule_beats_the_bound(chain, micro_batches):
    bound = priority_bound(chain, micro_batches) - 1e-9
    assert run(chain, micro_batches, "priority").step_s >= bound
    assert run(chain, micro_batches, "priority", preempt=False).step_s >= bound
    assert run(chain, micro_batches, "barrier").step_s >= bound
    assert priority_step(chain, micro_batches) >= bound


@MANY
@given(step_chains("both"))
def test_priority_is_never_slower_than_the_barrier(chain):
    assert priority_step(chain) <= barrier_step(chain) + 1e-9


@settings(max_examples=60, deadline=None)
@given(step_chains(), st.integers(2, 40))
def test_finite_slices_cost_at_most_about_one_slice(chain, pieces):
    messages = tuple(
        Message(m.units, m.link, m.seconds / pieces, m.urgency)
        for m in plain_messages(chain)
        for _ in range(pieces)
    )
    found = run(chain, 1, "priority", messages, preempt=False).step_s
    ideal, slice_s = priority_step(chain), chain.exchange_s.max() / pieces
    assert ideal - 1e-9 <= found <= ideal + 2 * slice_s + 1e-9


@MANY
@given(step_chains("both"))
def test_linear_terms_give_the_formula(chain):
    terms, units = step_terms(chain, 1, priority=True), len(chain.forward_s)
    found = [terms.always.sum()]
    for link in range(len(LINKS)):
        for j in range(units):
            before, after = terms.before[link, :j], terms.after[link, j + 1 :]
            found.append(before.sum() + terms.at[link, j] + after.sum())
    assert close(max(found), priority_step(chain))


@MANY
@given(step_chains("both"), micro_batch_counts, st.integers(0, 4), st.integers(0, 6))
def test_a_shorter_communication_never_lengthens_the_step(chain, micro_batches, part, unit):
    slow = run(chain, micro_batches, "barrier").step_s
    chain[3 + part][:, unit % len(chain.forward_s)] /= 2
    assert run(chain, micro_batches, "barrier").step_s <= slow + 1e-9
