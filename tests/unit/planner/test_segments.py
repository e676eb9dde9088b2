"""Units recomputed together: which may be, what they hold, and which are chosen."""

import re

import msgspec
import numpy as np
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.explain.compare import decision_text
from meshwright.planner.memory.checkpoint_segments import possible_segments
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.errors import InfeasibleError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option, segments_of
from meshwright.planner.schema.profile import PieceProfile
from meshwright.planner.solve.evaluate import decisions_of, evaluation, rank_memory
from meshwright.planner.solve.heuristic import infeasible
from meshwright.planner.solve.heuristic.checkpointing import Checkpointing
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve

from tests.strategies import chain_profile, cluster, constant, linear

HOME = Option(data_parallel(2))
AGAIN = HOME._replace(memory="recompute")
KINDS = msgspec.structs.replace(
    EVERYTHING, styles=("none",), memory=("keep", "recompute"), exchange=("dense",),
    idle_positions=False, branches=False, early_release=False, micro_batches=True,
)  # fmt: skip


def pieces(names):
    """Modules one after the other."""
    return tuple(
        PieceProfile(
            modules=(name,), first=name, last=name, follows=tuple(names[max(i - 1, 0) : i])
        )
        for i, name in enumerate(names)
    )


def profile(count=6, saved=1000.0, output=100.0, linked=True):
    """Equal units of one byte of parameters: each saves 1000 bytes a sample, its output of 100
    among them, and has as many bytes of gradients in backward."""
    units = [linear(f"u{i}", 1, 1, 1e-3, saved) for i in range(count)]
    made = chain_profile(units, bytes_per_sample=output)
    return msgspec.structs.replace(made, pieces=pieces([u.name for u in units]) if linked else ())


def cost(made, limit=None, batch=2):
    goal = Goal(batch=batch, memory_limit_bytes=limit)
    return CostModel(made, cluster(2), goal, sliced=True)


def in_segments(*lengths, before=(HOME,), after=(HOME,)):
    """Decisions of segments of those lengths, one after the other."""
    found, at = [], 0
    for length in lengths:
        names = tuple(f"u{i}" for i in range(at, at + length))
        segment = names if length > 1 else ()
        found += [AGAIN._replace(segment=segment)] * length
        at += length
    return (*before, *found, *after)


def maps(model, decisions):
    """(feature maps, workspace) at each unit's forward, and at each unit's backward."""
    (found,) = rank_memory(model, decisions)
    return [
        [
            (int(p.feature_maps), int(p.workspace))
            for p in sorted((p for p in found.points if p.phase == phase), key=lambda p: p.unit)
        ]
        for phase in ("forward", "backward")
    ]


def test_units_by_themselves_keep_their_outputs():
    forward, backward = maps(cost(profile(3)), in_segments(1, 1, 1))
    assert forward == [(0, 0), (100, 900), (200, 900), (300, 900), (300, 0)]
    assert backward == forward


def test_a_segment_keeps_its_last_output_and_makes_the_rest_again():
    forward, backward = maps(cost(profile(3)), in_segments(3))
    # Inside, the output of the unit before is there, and what the unit makes.
    assert forward == [(0, 0), (0, 1000), (0, 1100), (100, 1000), (100, 0)]
    # What units before it have made again is there in a unit's backward.
    assert backward == [(0, 0), (0, 1000), (0, 2000), (100, 2900), (100, 0)]


def test_an_output_that_is_used_behind_the_segment_stays():
    made = profile(3)
    skip = msgspec.structs.replace(made.edges[1], source="u0", target="output")
    made = msgspec.structs.replace(made, edges=(*made.edges, skip))
    forward, backward = maps(cost(made), in_segments(3))
    assert forward == [(0, 0), (100, 900), (100, 1000), (200, 1000), (200, 0)]
    assert backward == [(0, 0), (100, 900), (100, 1900), (200, 2800), (200, 0)]


def test_the_widest_moment_may_be_when_the_segment_runs_again():
    """A unit inside whose temporaries are wider than all that follows it in the segment."""
    made = profile(2)
    whole = msgspec.structs.replace(made.units[1].whole, workspace=constant(9000.0))
    wide = msgspec.structs.replace(made.units[1], shares=(whole,))
    made = msgspec.structs.replace(made, units=(made.units[0], wide, *made.units[2:]))
    (found,) = rank_memory(cost(made), in_segments(2))
    (last,) = (p for p in found.points if p.phase == "backward" and p.unit == 2)
    # u0 makes 1000 bytes and has 9000 for a moment; the gradient of u1's output waits (100), which
    # has the place of that output: the first one has gone, and it is not made again yet.
    assert last.feature_maps + last.workspace + last.map_gradients == 1000 + 9000 + 100
    assert last.gradients == 0  # u1's own is not there yet


def test_what_enters_a_segment_is_kept_for_it():
    """Where nobody else saves it."""
    made = profile(3)
    quiet = msgspec.structs.replace(made.units[1], output_kept=False)
    made = msgspec.structs.replace(made, units=(made.units[0], quiet, *made.units[2:]))
    model = cost(made)
    segment = AGAIN._replace(segment=("u1", "u2"))
    forward, _ = maps(model, (HOME, HOME, segment, segment, HOME))
    assert [m for m, _ in forward] == [0, 1000, 1100, 1200, 1200]
    forward, _ = maps(model, (HOME, AGAIN, segment, segment, HOME))
    assert [m for m, _ in forward] == [0, 0, 100, 200, 200]  # by the segment, not by what made it


def test_what_enters_a_segment_from_the_host_is_there_while_it_works():
    made = profile(4)
    model = cost(made)
    away = HOME._replace(memory="offload")
    segment = AGAIN._replace(segment=("u1", "u2", "u3"))

    def beside(first):
        (found,) = rank_memory(model, (HOME, first, segment, segment, segment, HOME))
        names = "segment_outputs", "segment_remade", "segment_rerun"
        return np.array([found.memory.field(name) for name in names])

    # All that u0 made is under way while u1 works; its output is read until the segment ends.
    more = beside(away) - beside(HOME)
    assert more.tolist() == [[0, 0, 0, 100, 100, 0], [0, 0, 0, 100, 100, 0], [0] * 4 + [100, 0]]


def test_all_of_a_segment_is_computed_again_before_its_last_backward():
    model = cost(profile(3))
    chain = model.chain(in_segments(3))
    assert chain.backward_s == pytest.approx([0, 2e-3, 2e-3, 5e-3, 0])
    assert model.chain(in_segments(1, 1, 1)).backward_s == pytest.approx([0, 3e-3, 3e-3, 3e-3, 0])


def test_segments_are_runs_of_the_same_modules():
    assert segments_of(in_segments(2, 1, 3)) == [(1, 2), (4, 6)]
    assert segments_of(in_segments(2, 2)) == [(1, 2), (3, 4)]


# -- which units can be recomputed together ------------------------------------------------------


def test_windows_are_chains_of_pieces():
    found = possible_segments(profile(3))
    assert [(w.first, w.last, w.modules) for w in found] == [
        (1, 2, ("u0", "u1")), (1, 3, ("u0", "u1", "u2")), (2, 3, ("u1", "u2")),
    ]  # fmt: skip
    assert possible_segments(profile(3, linked=False)) == ()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"last": "u9"}, "a piece names unit 'u9', which is not listed"),
        ({"modules": ()}, "a piece names no modules"),
        ({"first": "u2"}, "piece 'u0' goes from 'u2' back to 'u0'"),
    ],
)
def test_pieces_are_of_units_that_are_listed(wrong, why):
    made = profile(3)
    piece = msgspec.structs.replace(made.pieces[0], **wrong)
    with pytest.raises(ValueError, match=re.escape(why)):
        msgspec.structs.replace(made, pieces=(piece, *made.pieces[1:]))


def test_a_module_that_contains_units_names_them_by_itself():
    made = profile(3)
    block = PieceProfile(modules=("block",), first="u0", last="u1")
    last = msgspec.structs.replace(made.pieces[2], follows=("u1", "block"))
    made = msgspec.structs.replace(made, pieces=(block, *made.pieces[:2], last))
    found = {(w.first, w.last): w.modules for w in possible_segments(made)}
    assert found == {(1, 2): ("block",), (1, 3): ("block", "u2"), (2, 3): ("u1", "u2")}


def test_no_segment_begins_with_what_changes_its_input():
    made = profile(3)
    first, second, third = made.pieces
    second = msgspec.structs.replace(second, opens=False)
    made = msgspec.structs.replace(made, pieces=(first, second, third))
    assert [(w.first, w.last) for w in possible_segments(made)] == [(1, 2), (1, 3)]


def test_units_that_a_segment_cannot_have():
    """Divided, on some ranks only, gathered for each use, or offloaded."""
    model = CostModel(profile(3), cluster(2), Goal(batch=2), sliced=True)
    for change in (
        {"layout": Layout(groups=1, degree=2), "style": "column"},
        {"layout": Layout(groups=1)},
        {"exchange": "fully_sharded"},
    ):
        chosen = (HOME, HOME, HOME._replace(**change), HOME, HOME)
        found = Checkpointing(model, chosen, KINDS).moves
        assert all(not move.joined for row in found for move in row), change
    found = Checkpointing(model, (HOME,) * 5, KINDS).moves
    assert {move.joined for row in found for move in row} == {0, 2, 3}
    forbidden = msgspec.structs.replace(KINDS, memory=("keep",))
    found = Checkpointing(model, (HOME,) * 5, forbidden).moves
    assert all(len(row) == 1 for row in found)


# -- what is chosen ------------------------------------------------------------------------------


def deep(linked=True):
    """16 units that each save 1000 bytes of a sample, 500 of these their output."""
    return profile(16, output=500.0, linked=linked)


def peak(model, decisions):
    return rank_memory(model, decisions)[0].peak_bytes


def planned(limit, solver="heuristic", *, linked=True, **goal):
    goal = Goal(**{"batch": 2, "memory_limit_bytes": limit, **goal})
    problem = Problem(deep(linked), cluster(2), goal, KINDS, schedule="priority")
    return solve(problem, solver)


LEAST = 64 + 5000 + 13 * 4 + 12 * 4
"""Segments of 4, 3, 3, 2, 2, 1 and 1 units: behind the outputs of those before it, the i-th makes
again all but its last unit's maps, and that has its own 1000 and 1000 of gradients. 3000 + 2000,
500 + 2000 + 2000, 1000 + 2000 + 2000, ... none has more than 5000, and with 500 less only twelve
units would have room. Most is there in the first, with gradients of 13 units' weights (4 bytes
each), copies of 12 of them, and 64 bytes of weights."""


def test_the_lowest_peak_of_sixteen_units():
    model = cost(deep())
    assert peak(model, in_segments(*[1] * 16)) == 64 + 15 * 500 + 2000 + 4
    assert peak(model, in_segments(2, 2, 2, 2, 2, 2, 2, 2)) == 64 + 7 * 500 + 1000 + 2000 + 4
    assert peak(model, in_segments(4, 4, 4, 4)) == 64 + 3 * 500 + 3000 + 2000 + 4
    assert peak(model, in_segments(4, 3, 3, 2, 2, 1, 1)) == LEAST
    least = Checkpointing(model, (HOME,) * 18, KINDS).least()
    assert peak(model, least) == LEAST
    assert [b - a + 1 for a, b in segments_of(least)] == [4, 3, 3, 2, 2]


@pytest.mark.parametrize("solver", ["heuristic", "integer", "lagrangian"])
def test_what_fits_in_segments_only_is_planned(solver):
    with pytest.raises(InfeasibleError):
        planned(LEAST, solver, linked=False).checked()
    result = planned(LEAST, solver)
    plan = result.checked()
    assert max(plan.prediction.peak_bytes) == LEAST
    assert {u.segment for u in plan.units if u.name == "u3"} == {("u0", "u1", "u2", "u3")}
    assert (result.status, result.bound_s) == ("heuristic", None)
    assert "5 segments of units recomputed together" in result.reason
    model = cost(deep(), LEAST)
    assert rank_memory(model, decisions_of(plan))[0].peak_bytes == LEAST


def test_a_refusal_knows_segments(monkeypatch):
    # The report stops asking after some seconds of the clock, which a busy machine needs for less.
    monkeypatch.setattr(infeasible, "EXPLAIN_S", 120.0)
    why = planned(LEAST + 200, batch=8).infeasible  # 200 for gradients that micro-batches add to
    found = {r.what: r.value for r in why.relaxations}
    assert (found["batch"], found["micro_batches"]) == (2, 4)
    samples = 4
    assert found["memory_limit_bytes"] == why.needed_bytes == LEAST + 5000 * (samples - 1)
    assert planned(found["memory_limit_bytes"], batch=8).plan is not None


def test_segments_make_room_to_keep_more():
    """What is recomputed by itself needs 9568 bytes; under 9600 nearly all has to be."""
    alone, together = (planned(9600, "integer", linked=linked) for linked in (False, True))
    counts = [sum(u.memory == "recompute" for u in r.plan.units) for r in (alone, together)]
    assert counts[1] < counts[0]
    assert max(together.plan.prediction.peak_bytes) <= 9600
    assert together.plan.prediction.step_s < alone.plan.prediction.step_s
    assert together.objective_s < alone.objective_s


def test_nothing_changes_where_memory_is_plenty():
    for limit in (None, 10**6):
        alone, together = (planned(limit, linked=linked) for linked in (False, True))
        assert together.decisions == alone.decisions
        assert together.reason == alone.reason


def test_a_plan_with_segments_evaluates_as_it_was_planned():
    plan = planned(LEAST).checked()
    model = cost(deep(), LEAST)
    model = CostModel.of_plan(plan, model.profile, model.cluster)
    done = evaluation(model, decisions_of(plan), schedule="priority")
    assert done.prediction == plan.prediction


def test_a_decision_says_what_is_recomputed_together():
    plan = planned(LEAST).checked()
    assert decision_text(plan.unit("u2")) == "(2,1) recompute as u0 to u3"
    assert decision_text(plan.unit("u14")) == "(2,1) recompute"
