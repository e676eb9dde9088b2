"""The tables that set figures beside each other."""

import pytest
from meshwright.cli.render.comparisons import measured_table
from meshwright.planner.schema.report import Figures, RunReport


@pytest.mark.parametrize(
    ("steps", "title"),
    [(5, "mlp on 2 ranks, over 5 steps after the first ones"), (1, "mlp on 2 ranks, over one ste")],
)
def test_a_title_does_not_take_means_for_medians(steps, title):
    """The figures of hosts that train apart are means, of which a report says nothing."""
    one = Figures(step_s=1.0)
    report = RunReport(
        target="mlp", world_size=2, steps=steps, predicted=one, measured=one, data_parallel=one
    )
    assert str(measured_table(report).title).startswith(title)
