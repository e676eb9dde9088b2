"""Waiting for the slowest rank, and the interval in which a step is expected."""

import random
from statistics import median

import msgspec
import pytest
from meshwright.cli.render.explanations import explanation_tables
from meshwright.executor.launch.report import Figures, RunReport
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.explain.why import explain
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.text import expected, seconds
from meshwright.planner.simulate import spread
from meshwright.planner.solve.evaluate import evaluate, make_plan
from meshwright.profiler.timing import spread_of

from tests.strategies import chain_profile, cluster, linear
from tests.unit.planner.test_branches import diamond

RANKS = 4
COLUMN = Option(Layout(groups=1, degree=RANKS), "column")


def profile(spread_, **more):
    units = [linear(f"fc{i}", 64, 64, 1e-3) for i in range(3)]
    return msgspec.structs.replace(chain_profile(units), spread=spread_, **more)


def predicted(made, links=None, divided=(), schedule="barrier"):
    model = CostModel(made, links or cluster(RANKS, inter=1e9), Goal(batch=8))
    decisions = [
        COLUMN if unit.name in divided else Option(data_parallel(RANKS)) for unit in made.units
    ]
    return evaluate(made, model.cluster, Goal(batch=8), decisions, schedule=schedule)


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_the_slowest_of_several_is_the_median_of_the_largest_draws(ranks):
    draw = random.Random(0)
    largest = [max(draw.gauss(1.0, 0.05) for _ in range(ranks)) for _ in range(20_000)]
    assert spread.slowest_of(ranks, 0.05) == pytest.approx(median(largest), abs=1e-3)


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
@pytest.mark.parametrize("divided", [(), ("fc0", "fc1", "fc2")])
def test_waiting_shows_where_it_is_measured(divided, schedule):
    plain = predicted(profile(0.0), divided=divided, schedule=schedule)
    noisy = predicted(profile(0.1), divided=divided, schedule=schedule)
    assert plain.waiting_s == 0.0
    assert noisy.compute_s == pytest.approx(plain.compute_s, rel=0.05)
    assert noisy.waiting_s == pytest.approx((spread.slowest_of(RANKS, 0.1) - 1) * noisy.compute_s)
    parts = noisy.compute_s + noisy.blocking_s + noisy.exposed_s
    assert parts == pytest.approx(noisy.step_s)
    if divided:  # most of it before the redistributions
        assert noisy.blocking_s > plain.blocking_s + noisy.waiting_s / 2
    else:
        assert noisy.blocking_s == plain.blocking_s
        assert noisy.exposed_s > plain.exposed_s


def test_explaining_tells_how_long_a_median_rank_waits():
    links = cluster(RANKS, inter=1e9)
    for uneven in (0.0, 0.1):
        made = profile(uneven)
        plan = make_plan(made, links, Goal(batch=8))
        waits = f"For {seconds(plan.prediction.waiting_s)} a median rank waits for the slowest"
        said = [
            part for part in explanation_tables(explain(plan, made, links)) if isinstance(part, str)
        ]
        assert any(part.startswith(waits) for part in said) == (uneven > 0)


def test_a_slow_link_hides_the_waiting():
    """Gradients that are waited for anyway are sent while the slowest rank computes."""
    slow = cluster(RANKS, inter=1e5)
    plain, noisy = (predicted(profile(s), slow) for s in (0.0, 0.1))
    longer = noisy.step_s - plain.step_s
    assert 0 < longer < noisy.waiting_s


def test_branches_wait_for_the_slowest_too():
    problem = diamond()
    first, second = Layout(groups=2, degree=1), Layout(groups=2, degree=1, first=2)
    whole = Option(data_parallel(4))
    side_by_side = [whole, whole, Option(first), Option(second), whole, whole]
    noisy = msgspec.structs.replace(problem.profile, spread=0.1)
    plain_s, noisy_s = (
        evaluate(p, problem.cluster, problem.goal, side_by_side).step_s
        for p in (problem.profile, noisy)
    )
    assert noisy_s == pytest.approx(spread.slowest_of(4, 0.1) * plain_s, rel=0.01)


def test_an_interval_follows_what_was_measured():
    def width(links_spread=0.0, inter=1e9, **more):
        links = cluster(RANKS, inter=inter)
        levels = tuple(msgspec.structs.replace(x, spread=links_spread) for x in links.levels)
        found = predicted(profile(**more), msgspec.structs.replace(links, levels=levels))
        assert found.low_s < found.step_s < found.high_s
        return found.high_s / found.low_s

    least = width(spread_=0.0)
    assert least == pytest.approx((1 + spread.MISSED) ** 2)
    assert width(spread_=0.1) > least
    # What links do matters where they are waited for.
    assert width(spread_=0.0, links_spread=0.2, inter=1e5) > 1.1 * least
    assert width(spread_=0.0, links_spread=0.2, inter=1e12) == pytest.approx(least, rel=1e-3)
    # Computing that was not measured matters where there is much of it.
    assert width(spread_=0.0, origin="estimated") > 1.2 * least
    assert width(spread_=0.0, origin="estimated", inter=1e4) == pytest.approx(least, rel=1e-2)


def test_an_interval_is_written_beside_its_middle():
    assert expected(0.24, 0.228, 0.2594) == "240.00 ms (228 to 259)"
    assert expected(1.5, 1.4, 12.34) == "1.50 s (1.4 to 12.3)"
    assert expected(0.24, None, None) == "240.00 ms"


@pytest.mark.parametrize(("measured_s", "surprising"), [(0.1, False), (0.13, True), (0.08, True)])
def test_a_run_outside_of_its_interval_is_told(measured_s, surprising):
    report = RunReport(
        target="test", world_size=2, steps=9,
        predicted=Figures(step_s=0.1, low_s=0.09, high_s=0.11),
        measured=Figures(step_s=measured_s), data_parallel=Figures(step_s=0.2),
    )  # fmt: skip
    assert report.surprising == surprising
    bare = msgspec.structs.replace(report, predicted=Figures(step_s=0.1))
    assert not bare.surprising
    assert not msgspec.structs.replace(report, steps=4).surprising  # too few to say so


def test_the_spread_of_repetitions():
    draw = random.Random(0)
    # Of things that take a different time each, some of them disturbed badly now and then.
    repeated = [[(i + 1) * draw.gauss(1.0, 0.03) for _ in range(9)] for i in range(200)]
    assert spread_of(repeated) == pytest.approx(0.03, rel=0.1)
    for of_a_round in repeated[::5]:
        of_a_round[0] *= 5.0
    assert spread_of(repeated) == pytest.approx(0.03, rel=0.2)
    assert spread_of([[1.0, 2.0]]) == 0.0
