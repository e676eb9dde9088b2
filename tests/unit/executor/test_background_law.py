"""The control law and the gate: no processes, a simulated foreground and a hostile background."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.executor.background.gate import LEAD_S, PERIOD_S, Gap, opening
from meshwright.executor.background.law import (
    FIRST_HELD,
    PAUSE,
    REFRESH_EVERY,
    REFRESH_HELD,
    ShareController,
    is_held,
    is_measured,
)
from meshwright.executor.background.protocol import SIZE, Kind, PacerMessage, unpacked

ALONE_S = 0.2


def step_s(law: ShareController, harm: float, undisturbed_s: float = ALONE_S) -> float:
    """Seconds of a step during which a background that is let run multiplies the time by 1 + harm:
    what is left of a step that is past its limit goes on without it."""
    if not law.share:
        return undisturbed_s
    overdue_s = law.overdue_s()
    assert overdue_s is not None
    whole_s = undisturbed_s * (1 + harm * law.share)
    if whole_s <= overdue_s:
        return whole_s
    return overdue_s + undisturbed_s - overdue_s / (1 + harm * law.share)


def run(law: ShareController, harms: list[float]) -> list[float]:
    """Slowdowns of steps in which the background does that harm, if it can."""
    found = []
    for number, harm in enumerate(harms, start=1):
        seconds = step_s(law, harm)
        law.stepped(number, seconds)
        found.append(seconds / ALONE_S)
    return found


@given(
    limit=st.floats(1.02, 2.0),
    harms=st.lists(st.floats(0, 50) | st.sampled_from([0.0, 0.05, 3.0]), min_size=30, max_size=400),
    start=st.integers(0, 200),
)
def test_no_background_slows_any_window_beyond_the_limit(limit, harms, start):
    slowdowns = run(ShareController(limit), harms)[start:]
    for n in range(1, len(slowdowns) + 1):
        # one step may be past the limit by the rest of it at most, and is paid before the next
        assert sum(slowdowns[:n]) <= limit * n + 1 + 1e-9


@given(burst=st.integers(1, 40), calm=st.integers(1, 40), harm=st.floats(0.2, 20))
def test_bursts_are_held_to_the_limit_in_the_mean(burst, calm, harm):
    """A background that waits until its share has grown and then strikes, again and again."""
    harms = ([0.0] * calm + [harm] * burst) * 60
    slowdowns = run(ShareController(1.1), harms[:2000])[FIRST_HELD:]
    assert mean(slowdowns) <= 1.1 + 1 / len(slowdowns)


@given(harm=st.floats(0.15, 5))
def test_the_share_settles_where_the_limit_is_nearly_used(harm):
    law = ShareController(1.1)
    slowdowns = run(law, [harm] * 600)
    used = mean(slowdowns[200:])
    assert 1.04 < used <= 1.1


def test_a_harmless_background_gets_everything_and_keeps_it():
    law = ShareController(1.1)
    run(law, [0.02] * 60)
    assert law.share == 1.0


def test_the_background_is_held_until_the_undisturbed_time_is_known():
    law = ShareController(1.1)
    assert law.share == 0
    for number in range(1, FIRST_HELD + 1):
        assert law.share == 0
        law.stepped(number, ALONE_S)
    assert law.share > 0
    assert law.undisturbed_s == ALONE_S


def test_a_hosts_holds_follow_from_the_number_alone():
    refreshed = [n for n in range(FIRST_HELD + 1, FIRST_HELD + REFRESH_EVERY + 1) if is_held(n)]
    assert len(refreshed) == REFRESH_HELD
    assert refreshed[-1] == FIRST_HELD + REFRESH_EVERY
    assert [n for n in refreshed if is_measured(n)] == refreshed[1:]


def test_a_foreground_that_becomes_slower_by_itself_is_measured_anew():
    law = ShareController(1.1)
    run(law, [0.0] * 50)
    for number in range(51, 51 + 4 * REFRESH_EVERY):
        law.stepped(number, step_s(law, 0.0, undisturbed_s=0.3))
    assert law.undisturbed_s == pytest.approx(0.3)
    assert law.share > 0.9


def test_one_bad_step_takes_effect_at_once_and_many_good_ones_are_needed():
    law = ShareController(1.1)
    run(law, [0.0] * 50)
    before = law.share
    law.stepped(51, 1.3 * ALONE_S)
    assert law.share == 0  # 0.2 of debt
    for number in range(52, 54):
        law.stepped(number, ALONE_S)
    law.stepped(54, ALONE_S)
    assert 0 < law.share <= before / 2
    steps = 0
    while law.share < before:
        law.stepped(55 + steps, ALONE_S)
        steps += 1
    assert steps > 10


def test_a_pause_of_the_script_is_not_the_backgrounds_doing():
    law = ShareController(1.1)
    run(law, [0.0] * 50)
    before = law.share
    law.stepped(51, (1.2 + PAUSE) * ALONE_S)
    assert (law.share, law.debt) == (before, 0)


def test_the_summary_counts_held_steps_too():
    law = ShareController(1.5)
    run(law, [1.0] * 40)
    found = law.summary()
    assert 0 < found.disturbed < found.steps
    assert 1 < found.slowdown < found.disturbed_slowdown


# -- the gate ------------------------------------------------------------------------------------


def open_part(share: float, gap: Gap | None, start_s: float, end_s: float) -> float:
    """The part of a time in which the background runs."""
    now_s, total = start_s, 0.0
    while now_s < end_s:
        found = opening(now_s, share, gap)
        until_s = min(found.until_s, end_s)
        assert until_s > now_s
        total += found.runs * (until_s - now_s)
        now_s = until_s
    return total / (end_s - start_s)


@given(share=st.floats(0, 1))
def test_gaps_are_given_before_other_times(share):
    long = Gap(0.0, 1e9)
    inside = open_part(share, long, 0.0, 50 * PERIOD_S)
    outside = open_part(share, None, 0.0, 50 * PERIOD_S)
    assert inside == pytest.approx(min(1, 2 * share), abs=0.01)
    assert outside == pytest.approx(max(0, 2 * share - 1), abs=0.01)


def test_the_background_is_out_before_a_gap_is_expected_to_end():
    gap = Gap(10.0, 0.05)
    assert opening(10.0, 0.5, gap).runs
    assert opening(10.0, 0.5, gap).until_s == pytest.approx(10.05 - LEAD_S)
    assert not opening(10.0495, 0.5, gap).runs


def test_records_survive_the_pipe():
    sent = [
        PacerMessage(Kind.BEGAN, 3, 1),
        PacerMessage(Kind.STEPPED, 3, 1, 70000, 0.125),
        PacerMessage(Kind.WAITS, 3, 1, seconds=0.01),
    ]
    data = b"".join(record.packed() for record in sent)
    assert len(data) == 3 * SIZE
    assert list(unpacked(data)) == sent
