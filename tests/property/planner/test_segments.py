"""What is recomputed in which segments, against every way there is."""

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.memory.checkpoint_segments import possible_segments
from meshwright.planner.memory.timeline import peak_bytes
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.curve import proportional
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import EdgeProfile, PieceProfile
from meshwright.planner.solve.heuristic.checkpointing import Checkpointing
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.planner.solve.unit_options import with_policies

from tests.strategies import chain_profile, cluster, constant, linear, share

KINDS = msgspec.structs.replace(
    EVERYTHING, styles=("none",), memory=("keep", "recompute"), exchange=("dense",),
    idle_positions=False, branches=False, early_release=False, micro_batches=True,
)  # fmt: skip


@st.composite
def units(draw, name, glue):
    """A unit whose bytes are whole numbers, so that sums of them are exact."""
    figures = st.integers(0, 40).map(lambda n: 25.0 * n)
    unit = linear(name, draw(st.integers(1, 4)), 4, draw(st.integers(1, 9)) * 1e-3, draw(figures))
    whole = msgspec.structs.replace(
        unit.whole, gradient=proportional(draw(figures)), workspace=constant(draw(figures)),
    )  # fmt: skip
    if glue and draw(st.integers(0, 3)) == 0:
        bare = share("none", 1, whole.forward, whole.backward, draw(figures))
        return msgspec.structs.replace(
            unit, kind="glue", modules=(), parameters=(), splits=(), shares=(bare,)
        )
    return msgspec.structs.replace(unit, shares=(whole,))


@st.composite
def models(draw, kept=True):
    """Small chains with skips, some of whose units can be recomputed together."""
    count = draw(st.integers(2, 5))
    made = [draw(units(f"u{i}", glue=0 < i < count - 1)) for i in range(count)]
    if not kept:
        made = [msgspec.structs.replace(u, output_kept=draw(st.booleans())) for u in made]
    profile = chain_profile(made, bytes_per_sample=1.0)
    edges = [
        msgspec.structs.replace(e, bytes_per_sample=25.0 * draw(st.integers(0, 30)))
        for e in profile.edges
    ]
    names = [u.name for u in profile.units]
    a, b = sorted((draw(st.integers(0, count)), draw(st.integers(1, count + 1))))
    if b > a + 1:
        edges.append(EdgeProfile(
            source=names[a], target=names[b], bytes_per_sample=50.0, gradient_bytes_per_sample=50.0,
        ))  # fmt: skip
    profile = msgspec.structs.replace(profile, edges=tuple(edges), pieces=_pieces(draw, made))
    limits = draw(st.sampled_from((1, 2))), draw(st.sampled_from(("sgd", "adam")))
    goal = Goal(batch=4, optimizer=limits[1], micro_batches=(limits[0],))
    return CostModel(profile, cluster(2), goal, micro_batches=limits[0], sliced=draw(st.booleans()))


def _pieces(draw, made):
    """One for each unit with modules, linked to the one before more often than not."""
    named = [u.name for u in made if u.modules]
    found = []
    for i, name in enumerate(named):
        linked = i > 0 and draw(st.integers(0, 4)) > 0
        found.append(PieceProfile(
            modules=(name,), first=name, last=name, follows=(named[i - 1],) if linked else (),
            opens=draw(st.integers(0, 4)) > 0,
        ))  # fmt: skip
    return tuple(found)


def ways(model):
    """Every way to keep or recompute each unit by itself, or several as one segment."""
    home = Option(data_parallel(2))
    count = len(model.profile.units)
    from_ = {}
    for segment in possible_segments(model.profile):
        from_.setdefault(segment.first, []).append(segment)

    def after(k):
        if k == count:
            yield ()
            return
        alone = (o for o in (home, home._replace(memory="recompute"))
                 if o in with_policies(model, k, home, KINDS))  # fmt: skip
        moves = [(k + 1, (option,)) for option in alone]
        for segment in from_.get(k, ()):
            inside = home._replace(memory="recompute", segment=segment.modules)
            moves.append((segment.last + 1, (inside,) * (segment.last + 1 - k)))
        for end, options in moves:
            for rest in after(end):
                yield (*options, *rest)

    return list(after(0))


def again_s(model, decisions):
    """Seconds of what is computed again."""
    home = model.baseline
    return sum(
        model.unit(k, o).backward_s - model.unit(k, home[k]).backward_s
        for k, o in enumerate(decisions)
    )


def peak(model, decisions):
    samples = {data_parallel(2): max(model.counts)}
    return peak_bytes(MemoryModel(model).position(decisions, samples))[0]


@settings(max_examples=60, deadline=None)
@given(models(), st.floats(0, 1))
def test_the_choice_is_the_best_of_all(model, where):
    """The lowest peak, and under any limit the least that is computed again."""
    every = ways(model)
    peaks = [peak(model, decisions) for decisions in every]
    known = Checkpointing(model, model.baseline, KINDS)
    assert peak(model, known.least()) == pytest.approx(min(peaks))
    limit = sorted(peaks)[round(where * (len(peaks) - 1))]
    best = min(again_s(model, d) for d, p in zip(every, peaks, strict=True) if p <= limit)
    found = known.quickest(limit)
    assert peak(model, found) <= limit
    assert again_s(model, found) == pytest.approx(best)
    assert peak(model, known.fitting(limit)) <= limit
    assert known.quickest(min(peaks) - 1) is None
    assert known.fitting(min(peaks) - 1) is None


@settings(max_examples=60, deadline=None)
@given(models(kept=False), st.floats(0, 1))
def test_what_is_said_to_fit_fits(model, where):
    """Also where a segment has to keep what enters it, which the search counts for all."""
    peaks = sorted(peak(model, decisions) for decisions in ways(model))
    limit = peaks[0] + where * (peaks[-1] - peaks[0])
    found = Checkpointing(model, model.baseline, KINDS).quickest(limit)
    assert found is None or peak(model, found) <= limit


@settings(max_examples=25, deadline=None)
@given(models(), st.floats(0, 1), st.sampled_from(("heuristic", "integer")))
def test_segments_never_make_a_plan_worse(model, where, solver):
    """A plan where there was one, within its limits and no slower."""
    assume(possible_segments(model.profile))
    peaks = sorted(peak(model, decisions) for decisions in ways(model))
    limit = int(peaks[0] + where * (peaks[-1] - peaks[0])) + 1
    goal = msgspec.structs.replace(model.goal, memory_limit_bytes=limit)
    schedule = "priority" if model.sliced else "barrier"
    bare = msgspec.structs.replace(model.profile, pieces=())
    alone, together = (
        solve(Problem(p, model.cluster, goal, KINDS, schedule=schedule, tie_tolerance=0.0), solver)
        for p in (bare, model.profile)
    )
    assert together.plan is not None  # the lowest peak of all ways is below the limit
    assert max(together.plan.prediction.peak_bytes) <= limit
    if alone.plan is not None:
        assert together.objective_s <= alone.objective_s * (1 + 1e-9)
        steps = [found.plan.prediction.step_s for found in (together, alone)]
        assert steps[0] <= steps[1] * (1 + 1e-9)
