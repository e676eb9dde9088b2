"""What ``verify`` allows a model that amplifies rounding, and values that are no finite numbers."""

import sys

import pytest
import torch
from meshwright.executor.launch.verify import Deviation, Yardstick, _within_spread, deviations

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
    judged, told = _within_spread((deviation(found),), (deviation(own),))
    assert judged[0].passed == passed
    assert bool(told) == (1 / 3 < own <= 100)


def test_the_largest_of_all_kinds_counts():
    own = (deviation(0.1), deviation(2.0, "parameters"))
    judged, _ = _within_spread((deviation(5.0), deviation(7.0, "parameters")), own)
    assert [d.passed for d in judged] == [True, False]


def judged(found: list[float], reference: list[float]) -> Deviation:
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (found, reference))
    return deviations({"x": a}, {"x": b}, ALLOWED, lambda name: "buffers")[0]


def test_the_same_infinity_is_equal_and_what_is_no_number_is_not():
    inf, nan = float("inf"), float("nan")
    assert judged([inf, -inf, 1.0], [inf, -inf, 1.0]).of_allowed == 0
    assert judged([inf], [-inf]).of_allowed == sys.float_info.max
    assert judged([1.0], [inf]).of_allowed == sys.float_info.max
    assert judged([nan], [nan]).of_allowed == sys.float_info.max
