"""Layer dropping sends no more than its budget, the largest gradients first."""

import math

from hypothesis import given
from hypothesis import strategies as st
from meshwright.planner.simulate.dropping import DropCandidate, choose

candidates = st.builds(DropCandidate, st.integers(1, 1000), st.floats(0, 1), st.integers(0, 12))


@given(rows=st.lists(candidates, max_size=20), credit=st.floats(-5000, 20000))
def test_choices_keep_the_budget(rows, credit):
    sent, left = choose(rows, credit, 10)
    spent = sum(p.bytes for p, goes in zip(rows, sent, strict=True) if goes)
    assert math.isclose(credit - left, spent, abs_tol=1e-6)
    assert all(goes for p, goes in zip(rows, sent, strict=True) if p.waited >= 10)
    fresh = [(p.mean, goes) for p, goes in zip(rows, sent, strict=True) if p.waited < 10]
    least = min((mean for mean, goes in fresh if goes), default=math.inf)
    assert all(mean <= least for mean, goes in fresh if not goes)  # the threshold
    assert left <= 0 or all(sent)
