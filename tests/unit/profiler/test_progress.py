"""The bar of a measurement in stages: at half of the time it is at half."""

from __future__ import annotations

from itertools import pairwise

import pytest
from meshwright.profiler.progress import PARTS, StageProgress


def shown(expected: dict[str, float], real: dict[str, float]) -> list[tuple[float, float, str]]:
    """(share of the time, share shown, stage) of stages that take ``real``, each told in tenths."""
    now, seen = 0.0, []
    clock = lambda: now  # noqa: E731
    told: list[tuple[int, str]] = []
    bar = StageProgress(lambda done, total, what: told.append((done, what)), expected, clock)
    for stage, seconds in real.items():
        for tenth in range(1, 11):
            now += seconds / 10
            bar.at(stage, tenth / 10)
            seen.append((now / sum(real.values()), told[-1][0] / PARTS, told[-1][1]))
    bar.end("over")
    assert told[-1] == (PARTS, "over")
    return seen


def test_stages_that_take_what_was_expected() -> None:
    for truth, share, _ in shown({"a": 1.0, "b": 3.0}, {"a": 1.0, "b": 3.0}):
        assert share == pytest.approx(truth, abs=0.01)


def test_a_slow_stage_does_not_leave_the_bar_at_its_end() -> None:
    seen = shown({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 30.0})
    assert all(a[1] <= b[1] for a, b in pairwise(seen))
    for truth, share, stage in seen:
        if stage == "b":
            # It knows from the first tenth of the stage on; what it has shown it takes not back.
            assert share == pytest.approx(max(truth, 0.5), abs=0.01)


def test_without_a_report_nothing_is_told() -> None:
    StageProgress(None, {"a": 1.0}).at("a", 0.5)
