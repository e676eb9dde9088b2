"""What the ranks of a script left becomes the report of its run."""

from meshwright.executor.launch.report import RankFigures, report_of_script
from meshwright.planner.schema.goal import Goal
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
