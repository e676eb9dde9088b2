"""The tables that set figures beside each other."""

import msgspec
import pytest
from meshwright.cli.render.comparisons import comparison_tables, measured_rows, measured_table
from meshwright.planner.explain.compare import Comparison, UnitDifference
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


def test_pins_of_many_units_are_counted_and_layouts_are_explained():
    pins = ", ".join(f"fc{i} (8,1) none" for i in range(19))
    unit = UnitDifference(name="fc0", first="(1,8) row", second="(8,2) row", first_s=1, second_s=2)
    found = Comparison(
        same_model=True, same_cluster=True, figures=(), settings=(("goal.pins", "", pins),),
        units=(unit,),
    )  # fmt: skip
    _, settings, units = comparison_tables(found, "a", "b")
    assert list(settings.columns[2].cells) == [
        "fc0 (8,1) none, fc1 (8,1) none … fc18 (8,1) none (19)"
    ]
    assert str(units.title) == "Units decided differently: layout is (groups, members of each)"


def test_pins_that_differ_are_shown_before_those_of_both_plans():
    shared = [f"fc{i} (8,1) none" for i in range(5)]
    first, second = (", ".join([*shared, f"last {layout}"]) for layout in ("(8,1)", "(1,8)"))
    found = Comparison(
        same_model=True, same_cluster=True, figures=(), settings=(("goal.pins", first, second),),
        units=(),
    )  # fmt: skip
    settings = comparison_tables(found, "a", "b")[1]
    shown = [next(iter(column.cells)) for column in settings.columns[1:]]
    assert shown == [
        f"last {layout}, fc0 (8,1) none … fc4 (8,1) none (6)" for layout in ("(8,1)", "(1,8)")
    ]


def test_a_run_shows_what_of_its_step_is_computing():
    predicted = Figures(step_s=1.0, blocking_s=0.25, exposed_s=0.25)
    measured = Figures(step_s=1.5, blocking_s=0.25, exposed_s=0.5)
    report = RunReport(
        target="mlp", world_size=2, steps=5, predicted=predicted, measured=measured,
        data_parallel=predicted,
    )  # fmt: skip
    assert measured_rows(report)[1] == ("  computing", "500.00 ms", "750.00 ms", "1.50")
    # Where a step's parts are not known there is nothing to take off.
    unknown = msgspec.structs.replace(report, predicted=Figures(step_s=1.0), measured=predicted)
    assert measured_rows(unknown)[1] == ("  computing", "-", "500.00 ms", "")
    neither = msgspec.structs.replace(unknown, measured=Figures(step_s=1.0))
    assert "computing" not in str(measured_rows(neither))
