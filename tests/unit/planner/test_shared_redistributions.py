"""A tensor that several units need alike moves once: what that costs, by hand."""

import msgspec
import pytest
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import EdgeProfile
from meshwright.planner.simulate.rank_classes import simulate_rank_classes
from meshwright.planner.solve.evaluate import evaluation

from tests.strategies import chain_profile, cluster, linear

SAMPLES, ELEMENT, RATE = 4, 4, 1e6
ALL = Layout(groups=1, degree=4)
HOME = Option(data_parallel(4))
COLUMN = Option(ALL, "column")


def edge(source, target, tensors=0, size=40.0):
    return EdgeProfile(
        source=source, target=target, bytes_per_sample=size, gradient_bytes_per_sample=size,
        features=10, tensors=tensors,
    )  # fmt: skip


def fork(*edges):
    """input → a → (q, k) → output: two units take what a makes."""
    units = [linear(n, 10, 10, 0.0) for n in "aqk"]
    made = chain_profile(units, bytes_per_sample=40.0, features=10)
    ends = [e for e in made.edges if e.source == "input"]
    return msgspec.structs.replace(made, edges=(*ends, *edges))


def model_of(*edges):
    links = cluster(4, inter=RATE, latency_s=0.0)
    return CostModel(fork(*edges), links, Goal(batch=SAMPLES * 4))


def decided(model, **named):
    return tuple(named.get(u.name, HOME) for u in model.profile.units)


GATHER = 3 * SAMPLES * 10 * ELEMENT
"""Bytes that each of four ranks sends, and receives, to gather 4 samples of 10 numbers of each."""


def test_two_units_that_need_one_tensor_whole_gather_it_once():
    model = model_of(edge("a", "q"), edge("a", "k"))
    chain = model.chain(decided(model, q=COLUMN, k=COLUMN))
    names = [u.name for u in model.profile.units]
    forward, backward = chain.entry_forward_s[1], chain.entry_backward_s[1]
    assert forward[names.index("q")] == backward[names.index("q")] == GATHER / RATE
    assert forward[names.index("k")] == backward[names.index("k")] == 0.0


def test_what_they_need_in_other_forms_or_layouts_travels_for_each():
    model = model_of(edge("a", "q"), edge("a", "k"))
    for other in (Option(Layout(groups=2, degree=2), "column"), Option(ALL, "row")):
        chain = model.chain(decided(model, q=COLUMN, k=other))
        assert (chain.entry_forward_s[1, 2:4] > 0).all()


@pytest.mark.parametrize("second", [{"tensors": 1}, {"size": 80.0}])
def test_other_tensors_travel_for_each(second):
    model = model_of(edge("a", "q"), edge("a", "k", **second))
    chain = model.chain(decided(model, q=COLUMN, k=COLUMN))
    assert (chain.entry_forward_s[1, 2:4] > 0).all()


@pytest.mark.parametrize(
    ("style", "saved_alone", "expected"),
    [
        ("column", 0.0, 16 * 40.0),  # beside the tensor itself, which others save
        ("column", 40.0, 16 * 40.0 - 4 * 40.0),  # in place of the rank's own four samples of it
        ("row", 0.0, 16 * 12.0),  # three of ten features for the first of four
        ("row", 40.0, 0.0),  # as many bytes in another form
    ],
)
def test_what_a_divided_unit_keeps_of_an_input_that_others_share(style, saved_alone, expected):
    made = fork(edge("a", "q"), edge("a", "k"))
    units = tuple(
        msgspec.structs.replace(u, input_kept=saved_alone) if u.name == "q" else u
        for u in made.units
    )
    profile = msgspec.structs.replace(made, units=units)
    model = CostModel(profile, cluster(4, inter=RATE, latency_s=0.0), Goal(batch=SAMPLES * 4))
    to_q = next(i for i, e in enumerate(profile.edges) if e.target == "q")
    assert model.edge(to_q, HOME, Option(ALL, style)).kept_bytes == expected
    assert model.edge(to_q, HOME, HOME).kept_bytes == 0.0


def test_bytes_of_a_step_are_those_that_travel():
    both = model_of(edge("a", "q"), edge("a", "k"))
    apart = model_of(edge("a", "q"), edge("a", "k", tensors=1))
    sent = [
        evaluation(m, decided(m, q=COLUMN, k=COLUMN)).prediction.wire_bytes for m in (both, apart)
    ]
    assert sent[1] - sent[0] == 2 * GATHER


def test_rank_classes_bring_it_once_too():
    """On ranks of their own q and k get the samples of a, one after the other."""
    model = model_of(edge("a", "q"), edge("a", "k"))
    part = Option(Layout(groups=1, first=3))
    chosen = decided(model, q=part, k=part)
    other = model_of(edge("a", "q"), edge("a", "k", tensors=1))
    once, twice = (simulate_rank_classes(m, chosen, (), "barrier").step_s for m in (model, other))
    # three ranks send their 4 samples to the last one, and get the gradients back
    assert twice - once == pytest.approx(2 * GATHER / RATE)


def test_a_change_of_the_first_shows_at_those_after_it():
    model = model_of(edge("a", "q"), edge("a", "k"))
    index = model.index
    assert index["k"] in model.entered_after[index["q"]]
    assert index["q"] not in model.entered_after[index["k"]]
