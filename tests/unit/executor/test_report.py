"""What the ranks of a script left becomes the report of its run."""

import warnings

import msgspec
import pytest
from meshwright.executor.launch.report import (
    PLAN_VARIABLE,
    RankFigures,
    given_plan,
    report_of_script,
)
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.record import save
from meshwright.planner.schema.report import Figures
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear


def left(steps, step_s, blocking_s, exposed_s, peak_bytes):
    figures = Figures(
        step_s=step_s, blocking_s=blocking_s, exposed_s=exposed_s, peak_bytes=peak_bytes
    )
    return RankFigures(steps=steps, figures=figures)


def test_the_parts_are_of_the_slowest_rank_so_that_they_add_up():
    plan = make_plan(chain_profile([linear("fc")]), cluster(2), Goal(batch=8))
    found = report_of_script(plan, [left(9, 1.0, 0.2, 0.5, 7), left(8, 1.1, 0.3, 0.1, 5)])
    expected = Figures(step_s=1.1, blocking_s=0.3, exposed_s=0.1, peak_bytes=7)
    assert (found.steps, found.measured) == (8, expected)
    unknown = report_of_script(plan, [left(9, 1.0, 0.2, 0.5, None)])
    assert unknown.measured.peak_bytes is None


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """The plan of a launcher, which has told this rank of it."""
    plan = make_plan(chain_profile([linear("fc")]), cluster(2), Goal(batch=8))
    save(plan, tmp_path / "launched.json")
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "launched.json"))
    monkeypatch.setenv("RANK", "0")
    return plan


def test_the_launchers_plan_is_applied_before_the_scripts(launched, tmp_path, monkeypatch):
    other = msgspec.structs.replace(launched, target="again")
    save(other, tmp_path / "other.json")
    for named in (other, tmp_path / "other.json"):
        with pytest.warns(UserWarning, match="names another plan than the launched one"):
            assert given_plan(named) == launched
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert given_plan(launched) == given_plan(None) == launched
        monkeypatch.setenv("RANK", "1")
        assert given_plan(other) == launched
        monkeypatch.delenv(PLAN_VARIABLE)
        assert given_plan(other) == other
        assert given_plan(None) is None


def test_a_second_models_plan_is_the_scripts(launched):
    second = msgspec.structs.replace(launched, model="f" * len(launched.model))
    assert given_plan(second) == second
