"""What a measured curve says between, below and beyond its sizes."""

import numpy as np
import pytest
from meshwright.planner.schema.curve import Curve
from meshwright.planner.solve.figures import _at_sizes


def test_between_sizes_and_at_none():
    curve = Curve(x=(2.0, 4.0, 8.0), y=(1.0, 2.0, 6.0))
    assert [curve(size) for size in (0, 2, 3, 6, 8)] == [0.0, 1.0, 1.5, 4.0, 6.0]


def test_below_the_first_size_a_fixed_cost_stays():
    curve = Curve(x=(4.0, 8.0), y=(3.0, 4.0))
    assert curve(1) == pytest.approx(2.25)


@pytest.mark.parametrize("size", [0.5, 1.0, 7.0])
def test_below_the_first_size_nothing_takes_less_than_its_share(size):
    """Noise, or a cache that the second size leaves, would have the line at zero from 1.5 down."""
    curve = Curve(x=(8.0, 16.0), y=(1.0, 2.3))
    assert curve(size) == pytest.approx(size / 8)


def test_beyond_the_last_size_it_never_falls():
    assert Curve(x=(1.0, 2.0), y=(2.0, 1.0))(4) == 1.0
    assert Curve(x=(1.0, 2.0), y=(1.0, 2.0))(4) == 4.0


@pytest.mark.parametrize("y", [(1.0, 2.3, 2.0), (3.0, 4.0, 9.0), (2.0, 1.0, 0.5), (0.0, 1.0, 2.0)])
def test_many_sizes_at_once_are_read_alike(y):
    curve, sizes = Curve(x=(8.0, 16.0, 24.0), y=y), np.array([0.0, 0.5, 1.0, 7.0, 8.0, 12.0, 30.0])
    found = _at_sizes(np.array(curve.x), sizes)(np.array(curve.y))
    assert found == pytest.approx([curve(size) for size in sizes])
