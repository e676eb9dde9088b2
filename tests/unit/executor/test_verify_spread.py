"""What ``verify`` allows a model that amplifies rounding, and values that are no finite numbers."""

import sys

import pytest
import torch
from meshwright.executor.launch.verify import MOST_SPREAD, _most_spread, _within_spread
from meshwright.executor.launch.yardstick import Deviation, Yardstick, deviations

ALLOWED = Yardstick(1e-9, 1e-10)


def deviation(of_allowed: float, what: str = "loss") -> Deviation:
    return Deviation(what=what, tensors=1, largest=1e-9, of_allowed=of_allowed, worst="step 3")


@pytest.mark.parametrize(
    ("found", "own", "passed"),
    [
        (1.3, 0.01, False),  # the model amplifies nothing
        (1.3, 0.5, True),
        (2.9, 1.0, True),
        (3.1, 1.0, False),
        (200.0, 90.0, True),
        (200.0, 110.0, False),  # so far from itself is no rounding
    ],
)
def test_a_plan_may_be_a_few_times_further_off_than_one_process_from_itself(found, own, passed):
    judged, told, cause = _within_spread((deviation(found),), {"rounds so": own}, MOST_SPREAD)
    assert judged[0].passed == passed
    assert bool(told) == (1 / 3 < own <= 100)
    assert bool(cause) == (own > 100)


@pytest.mark.parametrize(("found", "explained"), [(2400.0, True), (2600.0, False)])
def test_what_hides_in_the_rounding_of_a_model_is_not_passed_but_explained(found, explained):
    far = deviation(found, "parameters")
    judged, told, cause = _within_spread((deviation(1.3), far), {"rounds so": 850.0}, MOST_SPREAD)
    assert judged == (deviation(1.3), far)
    assert not told
    assert ("one process that rounds so is 8.5e+02 times" in cause) == explained


def test_the_way_that_rounds_most_counts():
    spreads = {"rounds so": 0.1, "rounds otherwise": 2.0}
    found = deviation(5.0), deviation(7.0, "parameters")
    judged, told, _ = _within_spread(found, spreads, MOST_SPREAD)
    assert [d.passed for d in judged] == [True, False]
    assert "rounds otherwise" in told[0]


def test_nothing_is_allowed_where_no_other_way_computes():
    judged, told, cause = _within_spread((deviation(1.3),), {}, MOST_SPREAD)
    assert not judged[0].passed
    assert not told
    assert not cause


def test_half_a_value_is_no_rounding():
    # What bfloat16 allows is 4% of a value, so a dozen times that is the most.
    assert _most_spread(torch.bfloat16) == pytest.approx(12.5)
    assert _most_spread(torch.float64) == MOST_SPREAD


def judged(found: list[float], reference: list[float]) -> Deviation:
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (found, reference))
    return deviations({"x": a}, {"x": b}, ALLOWED, lambda name: "buffers")[0]


def test_the_same_infinity_is_equal_and_what_is_no_number_is_not():
    inf, nan = float("inf"), float("nan")
    assert judged([inf, -inf, 1.0], [inf, -inf, 1.0]).of_allowed == 0
    assert judged([inf], [-inf]).of_allowed == sys.float_info.max
    assert judged([1.0], [inf]).of_allowed == sys.float_info.max
    assert judged([nan], [nan]).of_allowed == sys.float_info.max
