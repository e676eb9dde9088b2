"""Which cases of a costly test run every time: a few, drawn by a seed; the long tests have the
others. ``MESHWRIGHT_SAMPLE`` is another seed than 0."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

SEED = int(os.environ.get("MESHWRIGHT_SAMPLE", "0"))


def sampled(cases: Sequence[Any], count: int) -> list[Any]:
    """All cases in their order: ``count`` of them for the slow tests, the rest for the long ones.
    A case that is a tuple has a value for each parameter."""
    drawn = set(random.Random(SEED).sample(range(len(cases)), count))
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=pytest.mark.slow if i in drawn else pytest.mark.long,
        )
        for i, case in enumerate(cases)
    ]
