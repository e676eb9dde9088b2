"""Pins as they are written, and the units that they come to concern."""

import msgspec
import pytest
from meshwright.planner.schema.capability import EVERYTHING, PLAIN
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.pins import forbidding, nearest, parse_wishes, spelled_out, without
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import expand_pins, solve, solvers

from tests.strategies import chain_profile, cluster, linear, norm


def wish(pin=(), forbid=()):
    return parse_wishes(pin, forbid).pins


@pytest.mark.parametrize("text", ["4x2", "(4,2)", "4,2", "( 4 , 2 )"])
def test_layouts_are_read_as_people_write_them(text):
    assert wish([f"fc={text}"]) == (Pin(unit="fc", only=(Layout(groups=4, degree=2),)),)


def test_layouts_styles_and_both():
    both = (Layout(groups=8), Layout(groups=4, degree=2))
    assert wish(["fc=8x1/4x2"]) == (Pin(unit="fc", only=both),)
    assert wish(["a=b=column"]) == (Pin(unit="a=b", styles=("column",)),)
    assert wish(["fc=4x2:row"]) == (Pin(unit="fc", only=both[1:], styles=("row",)),)
    assert wish((), ["fc=4x2"]) == (Pin(unit="fc", never=both[1:]),)
    assert wish((), ["row"]) == (Pin(unit="*", never_styles=("row",)),)


def test_policies_are_forbidden_for_all():
    found = parse_wishes((), ["recompute", "topk", "early-release", "bf16"])
    assert found.pins == ()
    less = without(EVERYTHING, found.without)
    assert less.memory == ("keep", "offload")
    assert less.exchange == ("dense", "sharded", "fully_sharded", "dropped", "int8", "low_rank")
    assert less.wire == ("exact",)
    assert not less.early_release


@pytest.mark.parametrize("text", ["fc", "=4x2", "fc=", "fc=4x", "fc=4x2:tall", "fc=recompute"])
def test_what_cannot_be_read_is_refused_with_an_example(text):
    with pytest.raises(InputError, match="4x2"):
        wish([text])


@pytest.fixture
def profile():
    return chain_profile([linear("fc.a"), norm("norm"), linear("fc.b"), linear("head")])


def units_of(profile, pin):
    goal = Goal(batch=16, pins=(pin,))
    return [p.unit for p in spelled_out(goal, profile, PLAIN, 4).pins]


def test_how_to_forbid_is_told_for_the_command_line_and_for_python():
    told = forbidding("offload", "host_mirror")
    assert told.startswith("--forbid offload --forbid host_mirror (")
    assert "forbidden=['offload', 'host_mirror']" in told


def test_a_pattern_concerns_the_units_that_can(profile):
    divided = (Layout(groups=2, degree=2),)
    assert units_of(profile, Pin(unit="fc.?", only=divided)) == ["fc.a", "fc.b"]
    assert units_of(profile, Pin(unit="*", only=divided)) == ["fc.a", "fc.b", "head"]
    assert units_of(profile, Pin(unit="*", never=divided)) == [u.name for u in profile.units]


def test_a_name_must_be_able(profile):
    with pytest.raises(InputError, match=r"'norm' cannot be \(2,2\) on 4 ranks"):
        units_of(profile, Pin(unit="norm", only=(Layout(groups=2, degree=2),)))
    with pytest.raises(InputError, match="cannot be"):
        units_of(profile, Pin(unit="n*m", only=(Layout(groups=2, degree=2),)))
    with pytest.raises(InputError, match="try 'head'"):
        units_of(profile, Pin(unit="hea", only=(Layout(groups=4),)))


def test_pins_that_leave_nothing_together_are_refused(profile):
    pins = (Pin(unit="head", only=(Layout(groups=4),)), Pin(unit="head", styles=("row",)))
    with pytest.raises(InputError, match=r"\(4,1\) and row"):
        spelled_out(Goal(batch=16, pins=pins), profile, PLAIN, 4)


def test_tied_units_must_be_pinned_alike():
    profile = chain_profile([linear("a", shared="w"), linear("b"), linear("c", shared="w")])
    pins = (
        Pin(unit="a", only=(Layout(groups=4),)),
        Pin(unit="c", only=(Layout(groups=2, degree=2),)),
    )
    with pytest.raises(InputError, match="units a, c share parameters"):
        spelled_out(Goal(batch=16, pins=pins), profile, PLAIN, 4)
    same = tuple(msgspec.structs.replace(p, only=pins[0].only) for p in pins)
    assert spelled_out(Goal(batch=16, pins=same), profile, PLAIN, 4).pins == same


def test_every_number_of_groups_on_request(profile):
    """Three of eight ranks are no divisor and no power of two."""
    three = (Pin(unit="head", only=(Layout(groups=3),)),)
    goal = Goal(batch=24, pins=three)
    with pytest.raises(InputError, match=r"cannot be \(3,1\)"):
        spelled_out(goal, profile, EVERYTHING, 8)
    goal = msgspec.structs.replace(goal, all_layouts=True)
    problem = expand_pins(Problem(profile, cluster(8), goal, EVERYTHING))
    for solver in solvers():
        assert solve(problem, solver).checked().unit("head").layout == Layout(groups=3)


def test_more_layouts_are_never_worse(profile):
    few = Problem(profile, cluster(6, inter=1e9), Goal(batch=7), EVERYTHING, tie_tolerance=0.0)
    goal = msgspec.structs.replace(few.goal, all_layouts=True)
    more = Problem(profile, few.cluster, goal, EVERYTHING, tie_tolerance=0.0)
    assert solve(more, "integer").objective_s <= solve(few, "integer").objective_s * (1 + 1e-6)


def test_every_solver_keeps_pins_on_styles(profile):
    goal = Goal(batch=16, pins=(Pin(unit="fc.*", styles=("row",)), Pin(unit="head", never=())))
    problem = expand_pins(Problem(profile, cluster(4, inter=1e7), goal))
    for solver in solvers():
        plan = solve(problem, solver).checked()
        assert [plan.unit(name).style for name in ("fc.a", "fc.b")] == ["row", "row"]


NAMES = ("features.0", "features.10", "classifier.0", "classifier.3", "head", "encoder.layer.attn")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("clasifier.0", ["classifier.0", "classifier.3"]),
        ("Classifier.3", ["classifier.3", "classifier.0"]),
        ("classifer", ["classifier.0", "classifier.3"]),
        ("feature.10", ["features.10", "features.0"]),
        ("layer.atn", ["encoder.layer.attn"]),
        ("haed*", ["head"]),
        ("fc1", []),
        ("", []),
    ],
)
def test_the_nearest_names_come_first(wrong, right):
    assert nearest(wrong, NAMES)[: len(right)] == right
    assert bool(nearest(wrong, NAMES)) == bool(right)


def test_a_misspelt_unit_is_told_the_nearest_and_how_to_list_them(profile):
    for pins in (wish(["fc.c=2x2"]), wish((), ["fc.c=row"])):
        with pytest.raises(InputError, match=r"try 'fc.a' or 'fc.b'; .* lists all 4"):
            units_of(profile, pins[0])
    with pytest.raises(InputError, match=r"they are 'fc.a' to 'head'"):
        units_of(profile, wish(["zzz=2x2"])[0])


def test_a_module_inside_a_unit_is_told_its_unit(profile):
    modules = {"fc.a": ("fc.a", "fc.a_norm")}
    units = (msgspec.structs.replace(u, modules=modules.get(u.name, ())) for u in profile.units)
    profile = msgspec.structs.replace(profile, units=tuple(units))
    with pytest.raises(InputError, match=r"'fc.a_norm'.*is a module of unit 'fc.a'"):
        units_of(profile, Pin(unit="fc.a_norm", styles=("column",)))


@pytest.mark.parametrize(
    ("text", "what", "near"),
    [
        ("recomput", "is nothing that can be forbidden for all units", "recompute"),
        ("colum", "is nothing that can be forbidden for all units", "column"),
        ("fc=colum", "says no layout", "column"),
    ],
)
def test_a_misspelt_policy_or_style_is_told_the_nearest(text, what, near):
    with pytest.raises(InputError, match=rf"^'{text}' {what}: try '{near}', or "):
        wish((), [text])
