"""Explaining and comparing plans, and the published schemas."""

import time
from pathlib import Path

import meshwright as mw
import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.step_time import barrier_step, binding_term, priority_step
from meshwright.planner.explain import why
from meshwright.planner.explain.compare import compare
from meshwright.planner.explain.why import explain
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option
from meshwright.planner.solve.evaluate import decisions_of, evaluate, make_plan
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.profiler.estimate import load_table

from tests import json_schemas as schemas
from tests.strategies import chain_profile, cluster, linear

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "schemas"


@pytest.fixture(scope="module")
def case():
    profile, links = load_table("vgg16"), cluster(8)
    return solve(Problem(profile, links, Goal(batch=256))).plan, profile, links


def test_alternatives_are_what_evaluating_them_gives(case):
    plan, profile, links = case
    found = explain(plan, profile, links)
    assert found.step_s == plan.prediction.step_s
    unit = next(u for u in found.units if u.name == "32.linear")
    assert 0 < len(unit.alternatives) <= 3
    k = [u.name for u in plan.units].index("32.linear")
    for other in unit.alternatives:
        assert (other.layout, other.style) != (unit.layout, unit.style)
        chosen = list(decisions_of(plan))
        chosen[k] = Option(other.layout, other.style)
        assert evaluate(profile, links, plan.goal, chosen).step_s == other.step_s
        assert other.step_s >= plan.prediction.step_s * (1 - 1e-6)
        assert other.fits


def test_what_is_exposed_adds_up(case):
    plan, profile, links = case
    found = explain(plan, profile, links)
    assert found.bound_by == "exchange"
    exposed = sum(e.seconds for e in found.exposed)
    assert exposed == pytest.approx(plan.prediction.exposed_s)
    names = {u.name for u in profile.units}
    assert all(set(e.units) <= names for e in found.exposed)


def test_what_waits_for_the_slowest_is_told_beside_what_is_exposed():
    """A plan has both as exposed: links that take no time leave only the wait."""
    units = [linear(f"fc{i}", 512, 512, 1e-4) for i in range(3)]
    links = cluster(4, inter=1e15, latency_s=0.0)
    profile = msgspec.structs.replace(chain_profile(units), spread=0.1)
    plan = make_plan(profile, links, Goal(batch=64))
    found = explain(plan, profile, links)
    assert found.waiting_s == plan.prediction.waiting_s > 0
    exposed = sum(e.seconds for e in found.exposed)
    assert plan.prediction.exposed_s == pytest.approx(exposed + found.waiting_s)


def test_memory_that_binds_is_named():
    profile = chain_profile([linear(f"fc{i}", 512, 512, 1e-4) for i in range(3)])
    links = cluster(4, inter=1e12, latency_s=0.0)
    free = make_plan(profile, links, Goal(batch=16, optimizer="adam"))
    limit = max(free.prediction.peak_bytes) * 9 // 10
    goal = Goal(batch=16, optimizer="adam", memory_limit_bytes=limit)
    plan = solve(Problem(profile, links, goal)).plan
    found = explain(plan, profile, links, best=8)
    assert found.needed_bytes <= found.available_bytes == limit
    over_limit = [a for u in found.units for a in u.alternatives if not a.fits]
    binds = "memory_limit_bytes" in found.binding
    assert binds == any(a.step_s < plan.prediction.step_s for a in over_limit)


def test_pins_that_bind_are_named(case):
    _, profile, links = case
    whole = Layout(groups=8)
    goal = Goal(batch=256, pins=(Pin(unit="32.linear", only=(whole,)),))
    found = explain(solve(Problem(profile, links, goal)).plan, profile, links)
    assert found.binding == ("pins",)
    pinned = next(u for u in found.units if u.name == "32.linear")
    assert pinned.layout == whole
    assert pinned.alternatives[0].breaks == ("pins",)
    assert pinned.alternatives[0].step_s < found.step_s


def test_limits_say_what_is_used(case):
    plan, profile, links = case
    step = plan.prediction.step_s
    goal = Goal(batch=256, time_limit_s=1.1 * step, unit_amplification_limit=1e6)
    made = solve(Problem(profile, links, goal)).plan
    found = explain(made, profile, links)
    uses = {use.limit: use for use in found.limits}
    assert set(uses) == {"memory_limit_bytes", "unit_amplification_limit", "time_limit_s"}
    assert uses["time_limit_s"].used == made.prediction.step_s
    assert all(use.kept and use.used > 0 for use in found.limits)
    tight = msgspec.structs.replace(made, goal=Goal(batch=256, time_limit_s=step / 2))
    assert not explain(tight, profile, links).limits[1].kept


@pytest.mark.parametrize("schedule", ["barrier", "priority"])
def test_the_binding_term_is_one_that_helps(case, schedule):
    """Taking exchange from the units up to the one named shortens the step by formula, taking it
    from those behind it does not."""
    plan, profile, links = case
    sliced = schedule == "priority"
    model = CostModel(profile, links, plan.goal, message_bytes=2**20, sliced=sliced)
    decisions = decisions_of(plan)
    chain = model.chain(decisions)._replace(slice_s=None)
    link, unit = binding_term(chain, priority=sliced)
    formula = priority_step if sliced else barrier_step
    for k in range(len(decisions)):
        less = chain.exchange_s.copy()
        less[link, k] /= 2
        shorter = formula(chain._replace(exchange_s=less)) < formula(chain) * (1 - 1e-12)
        assert shorter == (k <= unit and chain.exchange_s[link, k] > 0)


def test_without_communication_the_rank_itself_binds():
    profile = chain_profile([linear("a"), linear("b")])
    found = explain(make_plan(profile, cluster(1), Goal(batch=8)), profile, cluster(1))
    assert found.term.link is None
    assert not found.exposed
    assert found.bound_by == "compute"


def test_no_formula_is_named_where_units_begin_elsewhere():
    profile = chain_profile([linear("a"), linear("b")])
    whole, last_two = Option(Layout(groups=4)), Option(Layout(groups=2, first=2))
    made = make_plan(profile, cluster(4), Goal(batch=8), [whole, whole, last_two, whole])
    assert explain(made, profile, cluster(4)).term is None


def test_tied_units_change_together():
    profile = chain_profile([linear("a", shared="w"), linear("b"), linear("c", shared="w")])
    plan = make_plan(profile, cluster(4), Goal(batch=16))
    first = explain(plan, profile, cluster(4)).units[1]
    assert first.with_it == ("c",)
    assert first.alternatives


def test_a_plan_of_something_else_is_refused(case):
    plan, profile, links = case
    with pytest.raises(InputError, match="plan again"):
        explain(plan, load_table("wide_resnet101_2"), links)
    with pytest.raises(InputError, match="8 ranks"):
        explain(plan, profile, cluster(4))


def test_compare_lists_what_differs(case):
    plan, profile, links = case
    plain = make_plan(profile, links, Goal(batch=128))
    found = compare(plain, plan)
    assert found.same_model
    assert found.same_cluster
    assert [u.name for u in found.units] == ["32.linear", "34.linear", "36.linear"]
    assert found.units[0].first == "(8,1)"
    assert found.units[0].second.startswith("(1,8) ")
    assert ("goal.batch", "128", "256") in found.settings
    steps = next(f for f in found.figures if f.name == "step_s")
    assert (steps.first, steps.second) == (plain.prediction.step_s, plan.prediction.step_s)
    assert not compare(plan, plan).units


def test_compare_of_different_models_keeps_both_sides(case):
    plan, _, links = case
    other = make_plan(load_table("wide_resnet101_2"), links, Goal(batch=256))
    found = compare(plan, other)
    assert not found.same_model
    assert any(u.first is None for u in found.units)
    assert any(u.second is None for u in found.units)


def test_published_schemas_are_up_to_date():
    files = schemas.schema_files()
    assert {p.name for p in FOLDER.glob("*.json")} == set(files)
    for name, content in files.items():
        assert (FOLDER / name).read_bytes() == content, (
            "run: python -m tests.json_schemas docs/schemas"
        )


def test_the_generator_writes_the_schemas(tmp_path):
    assert schemas.main([str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == set(schemas.schema_files())
    with pytest.raises(InputError, match="folder"):
        schemas.main(["/nowhere"])


def test_of_many_units_those_that_take_most_have_alternatives(monkeypatch):
    units = [linear(f"fc{i}", 64, 64, 1e-4 * (1 + (i % 5 == 2))) for i in range(10)]
    profile, links = chain_profile(units), cluster(2)
    plan = mw.plan(profile, links, mw.Goal(batch=16), solver="heuristic")
    every = mw.explain(plan, profile, links, what_if=False)
    assert all(unit.alternatives for unit in every.units if unit.name.startswith("fc"))
    monkeypatch.setattr(why, "MOST_SIMULATED", 29)
    few = mw.explain(plan, profile, links, what_if=False)
    told = [i for i, unit in enumerate(few.units) if unit.alternatives]
    assert [few.units[i].name for i in told] == ["fc2", "fc7"]
    assert [few.units[i] for i in told] == [every.units[i] for i in told]
    monkeypatch.setattr(why, "MOST_SIMULATED", 1)
    assert why.units_told(10) == 1


@pytest.mark.slow
def test_a_thousand_units_are_explained_in_seconds():
    units = [linear(f"fc{i}", 256, 256, 1e-5) for i in range(1000)]
    profile, links = chain_profile(units), cluster(8)
    divided, whole = Option(Layout(groups=1, degree=8), "column"), Option(Layout(groups=8))
    chosen = [divided if unit.name[-1:] == "3" else whole for unit in profile.units]
    plan = make_plan(profile, links, Goal(batch=64), chosen)
    start = time.process_time()
    found = explain(plan, profile, links)
    # A tenth of it on an idle machine.
    assert time.process_time() - start < 30
    assert [unit.name for unit in found.units] == [unit.name for unit in profile.units]


def test_compare_lists_another_precision(case):
    plan, _, _ = case
    other = msgspec.structs.replace(plan, precision="bf16")
    assert compare(plan, other).settings == (("precision", "", "bf16"),)
