"""Which parameters layer dropping sends, and what a mean step with it takes."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import FidelityProfile
from meshwright.planner.simulate.dropping import (
    PATIENCE,
    Budget,
    DropCandidate,
    choose,
    expected_turns,
)
from meshwright.planner.simulate.events import simulate
from meshwright.planner.simulate.schedule import COMPUTE, Message, Step, Work, messages_of

from tests.strategies import chain_profile, cluster, linear


def test_the_largest_means_go_first_until_the_credit_is_used_up():
    candidates = [
        DropCandidate(100, 0.1, 0),
        DropCandidate(50, 0.4, 0),
        DropCandidate(30, 0.3, 0),
        DropCandidate(20, 0.2, 0),
    ]
    assert choose(candidates, 80, 10) == ([False, True, True, False], 0)
    assert choose(candidates, 60, 10) == ([False, True, True, False], -20)  # overdrawn by the last
    assert choose(candidates, 0, 10) == ([False] * 4, 0)
    assert choose(candidates, 200, 10) == ([True] * 4, 0)


def test_what_has_waited_too_long_goes_first_and_is_paid_for():
    candidates = [DropCandidate(100, 0.1, 3), DropCandidate(50, 0.4, 2)]
    assert choose(candidates, 60, 3) == ([True, False], -40)
    assert choose(candidates, 120, 3) == ([True, True], -30)


def test_equal_means_are_sent_in_their_order():
    assert choose([DropCandidate(10, 1.0, 0)] * 3, 15, 9)[0] == [True, True, False]


def test_the_share_that_is_sent_is_the_ratio_over_time_whatever_the_sizes():
    """One piece is most of the bytes, so no single backward can send a fifth."""
    sizes, fixed = (3200, 400, 400), 80
    budget = Budget(0.2, sizes, fixed)
    waited = [0, 0, 0]
    steps, sent_bytes = 200, 0
    for _ in range(steps):
        # Each new gradient is as large as the last.
        sent = budget.choose([1.0 + held for held in waited], waited, 50)
        waited = [0 if goes else held + 1 for goes, held in zip(sent, waited, strict=True)]
        sent_bytes += sum(size for size, goes in zip(sizes, sent, strict=True) if goes) + fixed
    assert sent_bytes / (steps * (sum(sizes) + fixed)) == pytest.approx(0.2, rel=0.02)


def test_a_piece_waits_no_longer_than_allowed():
    budget = Budget(0.5, (400, 400), 0)
    waited, longest = [0, 0], 0
    for _ in range(30):
        sent = budget.choose([100.0, 0.0], waited, 4)
        waited = [0 if goes else held + 1 for goes, held in zip(sent, waited, strict=True)]
        longest = max(longest, waited[1])
    assert longest == 4


def test_debts_for_stale_pieces_do_not_grow_for_ever():
    """With a patience of 1 every other backward sends all, far more than the ratio of a tenth."""
    budget = Budget(0.1, (400,), 0)
    for step in range(50):
        budget.choose([1.0], [step % 2], 1)
    assert budget.credit_bytes >= -2 * 400


def test_of_two_equal_parameters_at_half_each_goes_in_turn():
    first, second = expected_turns(Budget(0.5, (100, 100), 0), (1.0, 1.0))
    assert sum(first) == sum(second) == len(first) / 2
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_what_is_hardly_ever_chosen_goes_when_its_patience_ends():
    first, second = expected_turns(Budget(0.5, (100, 100), 0), (1.0, 1e-6))
    assert sum(first) > sum(second)
    ones = [i for i, goes in enumerate(second) if goes]
    assert {b - a for a, b in pairwise(ones)} == {PATIENCE + 1}


def test_a_step_that_sends_all_hides_no_more_of_it_than_another():
    """Computing takes 1 s in forward and 1 s in backward; a message of 6 s goes every third step.
    The mean, 2 s in each step, would be hidden under the other unit's backward and forward. So are
    2 s of the 6 only, and the step after it waits for the rest."""
    work = (
        Work(COMPUTE, 0, "forward", 1.0),
        Work(COMPUTE, 1, "update", 0.0, awaits=(1,)),
        Work(COMPUTE, 1, "forward", 1.0),
        Work(COMPUTE, 1, "backward", 1.0, frees=True),
        Work(COMPUTE, 0, "backward", 1.0, frees=True),
    )
    lump = Message((1,), "intra", 2.0, 1.0, 200.0, (True, False, False))
    assert lump.whole_s == pytest.approx(6.0)
    found = simulate(Step(work, (lump,), "priority"))
    assert found.step_s == pytest.approx((4 + 4 + 4 + 4) / 3)
    assert found.compute_s == pytest.approx(4.0)
    assert found.exposed_s == pytest.approx(4.0 / 3)
    assert found.steps == 3
    even = simulate(Step(work, (lump._replace(turns=()),), "priority"))
    assert even.step_s == pytest.approx(4.0)


def test_a_plan_sends_the_asked_share_of_its_bytes_in_the_mean_step():
    """Of four equal layers at a quarter, one goes in each step."""
    kept = FidelityProfile(exchange="dropped", ratios=(0.25,), kept=(0.5,))
    units = [
        msgspec.structs.replace(linear(f"fc{i}", 64, 64), fidelity=(kept,), gradient_energy=1.0)
        for i in range(4)
    ]
    goal = Goal(batch=32, allow_lossy=True, min_fidelity=0.4)
    model = CostModel(chain_profile(units), cluster(4), goal, message_bytes=4096, sliced=True)
    whole = Option(data_parallel(4))
    none = Option(data_parallel(4))
    dropped = whole._replace(exchange="dropped", ratio=0.25)
    trained = [k for k, owned in enumerate(model.owned) if owned]

    def sent(option: Option) -> list[Message]:
        chosen = [option if k in trained else none for k in range(len(model.profile.units))]
        return list(messages_of(model, chosen, "priority"))

    dense, part = sent(whole), sent(dropped)
    assert sum(m.sent_bytes for m in part) == pytest.approx(
        0.25 * sum(m.sent_bytes for m in dense), rel=0.05
    )
    assert {len(m.turns) for m in part if m.turns} == {32}
    for step in range(32):
        assert len({m.units for m in part if m.turns and m.goes(step)}) == 1
