"""Where a background's time goes, and what people are told of it."""

from __future__ import annotations

import pytest
from meshwright.executor.background.gate import FOREVER, GapChoice, Hold, RunTimes, opening
from meshwright.executor.background.law import FIRST_HELD, PAUSE
from meshwright.executor.background.pacer import Foreground
from meshwright.executor.background.protocol import Kind, PacerMessage, State, Usage
from meshwright.executor.launch.background import hardly_ran, sentence
from meshwright.executor.launch.report import background_figures

OPEN = GapChoice(True, FOREVER)


def held(why: Hold) -> GapChoice:
    return GapChoice(False, FOREVER, why)


def test_time_is_counted_by_reason_and_only_beside_a_foreground():
    tally = RunTimes(100.0)
    tally.turned(110.0, held(Hold.LEARN), True, lambda: 7.0)
    tally.turned(112.0, OPEN, True, lambda: 0.0)
    tally.turned(115.0, held(Hold.GAP), True, lambda: 0.0)
    tally.turned(116.0, held(Hold.LIMIT), True, lambda: 0.0)
    tally.turned(120.0, OPEN, False, lambda: 9.5)
    tally.turned(150.0, OPEN, False, lambda: 0.0)
    assert tally.open_s == 10 + 3 + 30
    assert tally.during_steps(30.0) == Usage(
        seconds=10.0,
        open_s=3.0,
        cpu_s=2.5,
        stops=2,
        stopped_s={Hold.LEARN: 2.0, Hold.GAP: 1.0, Hold.LIMIT: 4.0},
    )


def test_what_is_used_beside_a_foreground_that_is_still_there():
    tally = RunTimes(0.0)
    tally.turned(1.0, OPEN, True, lambda: 0.5)
    assert tally.during_steps(0.75).cpu_s == 0.25


def stepped(foreground: Foreground, *seconds: float) -> None:
    for number, taken in enumerate(seconds, start=1):
        foreground.heard(PacerMessage(Kind.STEPPED, 0, 0, number, taken), 0.0)


def test_why_it_is_held():
    foreground = Foreground(1.1)
    foreground.heard(PacerMessage(Kind.BEGAN, 0, 0), 0.0)
    assert foreground.opening(0.0) == held(Hold.LEARN)
    first = [0.1] * FIRST_HELD
    stepped(foreground, *first)
    assert foreground.opening(0.0) == GapChoice(False, pytest.approx(0.11), Hold.GAP)
    paused_s = pytest.approx(0.1 * (1.1 + PAUSE))
    assert foreground.opening(0.12) == GapChoice(False, paused_s, Hold.LIMIT)  # it is overdue
    assert foreground.opening(0.32) == held(Hold.ELSE)
    stepped(foreground, *first, 0.2)
    assert foreground.opening(0.0) == GapChoice(False, paused_s, Hold.LIMIT)  # the debt
    assert opening(0.0, 0.2, None).why is Hold.LIMIT  # cut to less than all of the gaps
    assert opening(0.0, 1.0, None).why is None


def state(during_steps: Usage, **more: object) -> State:
    told = {
        "pid": 7, "ended": "", "seconds": 30.0, "open_s": 12.0, "cpu_s": 11.0, "steps": 40,
        "disturbed": 30, "undisturbed_s": 0.1, "slowdown": 1.04, "priority": "idle class",
    }  # fmt: skip
    return State(**{**told, "during_steps": during_steps, **more})  # type: ignore[arg-type]


BUSY = Usage(20.0, 5.0, 4.0, 310, {"learn": 4.0, "limit": 3.0, "gap": 8.0})


def test_what_it_had_is_said_in_shares_of_the_time_beside_the_run():
    said = sentence(state(BUSY), 1.1)
    for words in (
        "in the 20.0 s beside the run it was let run 25% of the time",
        "4.0 s of CPU; it was stopped 310 times",
        "held 20% to learn what steps take without it, 15% to keep the limit, 40% as the run left",
        "1.04 times their 0.1 s without it (limit 1.1)",
    ):
        assert words in said
    assert hardly_ran(state(BUSY), 1.1) is None


@pytest.mark.parametrize(
    ("open_s", "stopped_s", "words"),
    [
        (0.0, {"learn": 15.0, "gap": 5.0}, "more steps"),
        (0.1, {"limit": 15.0, "learn": 4.9}, "more than 1.05 times as long; allow more with"),
        (0.1, {"gap": 15.0, "learn": 4.9}, "--objective gpu-seconds"),
        (0.0, {"else": 15.0, "learn": 5.0}, "something else than steps"),
        (9.0, {"gap": 9.0, "learn": 2.0}, "fewer ranks or threads"),
    ],
)
def test_one_that_hardly_ran_is_told_why_and_what_would_help(open_s, stopped_s, words):
    during_steps = Usage(20.0, open_s, 0.19, 3, stopped_s)
    said = hardly_ran(state(during_steps), 1.05)
    assert said is not None
    assert "0.19 s of CPU in 20.0 s" in said
    assert words in said
    assert hardly_ran(state(Usage(20.0, open_s, 0.21, 3, stopped_s)), 1.05) is None


def test_one_that_ended_or_ran_beside_no_step_did_not_hardly_run():
    assert hardly_ran(state(Usage(20.0), ended="exit code 0"), 1.1) is None
    assert hardly_ran(state(Usage()), 1.1) is None
    assert "no step of a plan ran beside it" in sentence(state(Usage(), steps=0), 1.1)


def test_a_state_survives_the_pipe_and_reaches_the_report():
    told = State.read(state(BUSY).text())
    assert told == state(BUSY)
    figures = background_figures(told, 1.2)
    assert (figures.during_steps_s, figures.during_steps_open_share, figures.stops) == (
        20.0,
        0.25,
        310,
    )
    assert figures.limit == 1.2
    assert figures.stopped_shares == {"learn": 0.2, "limit": 0.15, "gap": 0.4}
