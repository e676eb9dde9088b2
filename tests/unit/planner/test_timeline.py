"""The memory timeline is stated once, and both numbers and the solvers' rows follow from it."""

import numpy as np
import pytest
from meshwright.planner.memory import rows, timeline
from meshwright.planner.memory.timeline import FIELD, FIELDS, UNIT_FIELDS, PositionMemory, points

CASES = [
    (many, sliced, together)
    for many in (False, True)
    for sliced in (False, True)
    for together in (False, True)
    if not (sliced and together)
]


def position(many, sliced, together, seed=0):
    """Units that hold whatever, without segments, and without buckets as rows know these only in
    part."""
    table = np.zeros((len(FIELDS), 6))
    rng = np.random.default_rng(seed)
    known = [
        *UNIT_FIELDS,
        "kept_input",
        "received",
        "returned",
        "neighbours_forward",
        "neighbours_backward",
        "neighbours_update",
    ]
    table[[FIELD[name] for name in known]] = rng.integers(0, 1000, (len(known), 6))
    table[FIELD["output_gradients"]] = 0.0
    stated = points(many=many, sliced=sliced, together=together)
    return PositionMemory(table, stated, sliced)


def figures_of(position):
    """The same as figures [unit, figure]."""
    table = position.table
    found = np.zeros((table.shape[1], len(rows.FIGURES)))
    for name in rows.FIGURES:
        if name in FIELD:
            found[:, rows.AT[name]] = table[FIELD[name]]
    found[:, rows.AT["persistent"]] = table[: len(timeline.Persistent._fields)].sum(axis=0)
    return found


def tracks_of(position, many, sliced, together):
    """The rows of bytes, evaluated, by the point that they are of."""
    schedule = "priority" if sliced else "barrier"
    stated = rows.rows(2 if many else 1, schedule, together=together)
    found = rows.values(stated, figures_of(position))
    return {p: found.tracks[stated.memory_track(p)] for p in rows.MEMORY_POINTS}, found


@pytest.mark.parametrize(("many", "sliced", "together"), CASES)
def test_rows_evaluate_to_the_numbers(many, sliced, together):
    here = position(many, sliced, together)
    totals = dict(zip(here.points._fields, here.totals(), strict=True))
    tracks, found = tracks_of(here, many, sliced, together)
    for point, track in tracks.items():
        assert track.tolist() == totals[point].tolist(), point
    most, _ = timeline.peak_bytes(here)
    assert most == max(point.total for point in timeline.timeline(here))
    assert most == max(track.max() for track in tracks.values())
    assert found.totals[rows.UPDATE] <= most


@pytest.mark.parametrize("point", rows.MEMORY_POINTS)
def test_a_change_of_the_statement_changes_numbers_and_rows(point, monkeypatch):
    """A field that is counted at one more point is in both."""
    plain = position(False, True, False)
    stated = points(many=False, sliced=True, together=False)
    one = getattr(stated, point)
    stated = stated._replace(**{point: one._replace(at=(*one.at, "recomputed"))})
    monkeypatch.setattr(timeline, "points", lambda **_: stated)
    changed = plain._replace(points=timeline.points())
    more = plain.field("recomputed")
    family = timeline.Points._fields.index(point)
    assert (changed.totals()[family] - plain.totals()[family] == more).all()
    tracks, _ = tracks_of(plain, False, True, False)
    assert (tracks[point] - plain.totals()[family] == more).all()


def test_every_field_that_counts_has_a_class():
    """Classes add up to the total at every point, of segments too."""
    for case in CASES:
        here = position(*case, seed=1)
        rng = np.random.default_rng(2)
        others = [FIELD[name] for name in timeline.OTHERS_FIELDS]
        here.table[others] = rng.integers(0, 1000, (len(others), 6))
        here.table[FIELD["output_gradients"]] = rng.integers(1, 1000, 6)
        most = np.maximum(*timeline.fullest_bytes(here))
        assert timeline.peak_bytes(here)[0] == most.max()
        found = timeline.timeline(here)
        assert max(point.total for point in found) == most.max()
        totals = here.totals()
        assert [p.total for p in found[:6]] == totals[timeline.FORWARD].tolist()
