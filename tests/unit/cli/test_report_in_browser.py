"""The report as a browser shows it: on a phone, on a wide screen, light and dark."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from meshwright.cli.render.charts import COLOURS, NARROW, WIDE

from tests.browser import browser, look, screenshot

PHONE, SMALL, SCREEN = 360, 600, 1000
DARK = "--blink-settings=preferredColorScheme=0"
CHARTS = {
    "The parts of a step", "Which part of each unit a rank has",
    "The step over bandwidth between nodes", "The step over memory of a rank",
    "The step over number of ranks",
}  # fmt: skip


@pytest.fixture
def page(meshwright, plan_file, tmp_path):
    browser()
    out = tmp_path / "report.html"
    assert meshwright("report", plan_file, "-o", out, "--time-limit", 30).code == 0
    return out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_report_is_drawn_in_both_widths_light_and_dark(page, tmp_path):
    for width, drawn in ((PHONE, NARROW), (SMALL, NARROW), (SCREEN, WIDE)):
        check_drawn(look(page, width), width, drawn)
    check_colours(screenshot(page, SCREEN, 5200, tmp_path / "wide.png"), "#ffffff")
    check_colours(screenshot(page, PHONE, 8000, tmp_path / "dark.png", DARK), "#16181b")


def check_drawn(found: dict[str, Any], width: int, drawn: int) -> None:
    assert found["console"] == ""
    assert found["width"] == width
    # Nothing is wider than the screen.
    assert found["scrolls"] <= width
    assert found["wide"] == []
    assert found["broken"] == []
    assert {chart["name"] for chart in found["charts"]} >= CHARTS
    assert len(found["charts"]) == 7
    for chart in found["charts"]:
        assert 0.95 * drawn <= chart["width"] <= drawn
        assert chart["shapes"] >= 2, chart
        assert chart["letters"] >= 11, chart
        assert chart["outside"] == [], chart
        assert chart["covered"] == [], chart


def check_colours(found: Counter[str], paper: str) -> None:
    assert found[paper] > 0.5 * found.total()
    # Computing, blocking communication, updates, exchange, backward.
    for number in (0, 1, 2, 3, 4):
        assert found[COLOURS[number]] > 50, COLOURS[number]
