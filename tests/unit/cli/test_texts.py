"""Figures as people read them."""

import pytest
from meshwright.cli.render.comparisons import QUANTITIES, _predicted_and_measured
from meshwright.planner.schema.text import seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1e-17, "0"),
        (3e-9, "3 ns"),
        (1.4e-5, "14 µs"),
        (0.25, "250.00 ms"),
        (1.5, "1.50 s"),
        (326.0, "326.00 s"),
    ],
)
def test_seconds(value, text):
    assert seconds(value) == text


def test_what_is_shown_as_nothing_has_no_ratio():
    """Differences of sums leave 1e-17 s, and a ratio to that says nothing."""
    assert _predicted_and_measured("exposed", seconds, 1e-17, 0.011) == (
        "exposed", "0", "11.00 ms", "",
    )  # fmt: skip
    assert _predicted_and_measured("step", seconds, 0.01, 0.011)[3] == "1.10"
    assert _predicted_and_measured("step", seconds, None, 0.011)[1:] == ("-", "11.00 ms", "")


def test_few_samples_per_second_keep_their_digits():
    show = QUANTITIES["samples_per_s"][1]
    assert [show(v) for v in (0.785, 3.14, 8123.4)] == ["0.79", "3.1", "8,123"]
