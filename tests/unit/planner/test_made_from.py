"""What a plan was made from, where it is given: another profile or cluster is told of."""

from __future__ import annotations

import warnings

import msgspec
import pytest
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import make_plan
from meshwright.planner.solve.request import made_from

from tests.strategies import chain_profile, cluster, linear


def test_what_is_given_and_is_another_is_told_of():
    profile, links = chain_profile([linear("fc")]), cluster(2)
    plan = make_plan(profile, links, Goal(batch=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made_from(plan, profile, links) == (profile, links)
    faster = msgspec.structs.replace(links, name="faster")
    with pytest.warns(UserWarning, match=r"this cluster \(faster\) is not the one .*made for: "):
        assert made_from(plan, profile, faster) == (profile, faster)
    measured = msgspec.structs.replace(profile, origin="measured", target="again")
    with pytest.warns(UserWarning, match=r"profile of again is not the one .*made from: what is"):
        assert made_from(plan, measured, links) == (measured, links)
