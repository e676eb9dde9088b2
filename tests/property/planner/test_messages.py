"""How many messages the cost of hosts counts for a unit, and how many are cut."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.exchange import PACKED_BYTES
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.schema.profile import ParameterProfile
from meshwright.planner.simulate.slicing import cut, cut_lossy

from tests.strategies import chain_profile, cluster, linear

MESSAGE_BYTES = 1 << 20
ROWS = st.integers(1, 1 << 12)


def model_of(rows: list[int], biases: list[int]) -> CostModel:
    """A unit with matrices of so many rows of 1 KiB, and vectors of so many elements."""
    shapes = [*((n, 256) for n in rows), *((n,) for n in biases)]
    parameters = tuple(
        ParameterProfile(name=f"p{i}", shared=f"p{i}", shape=s, bytes=4 * s[0] * (s[1:] or (1,))[0])
        for i, s in enumerate(shapes)
    )
    profile = chain_profile([linear("a"), linear("b")])
    unit = msgspec.structs.replace(profile.units[1], parameters=parameters, splits=())
    units = profile.units[0], unit, *profile.units[2:]
    profile = msgspec.structs.replace(profile, units=units)
    return CostModel(profile, cluster(2), Goal(batch=4), sliced=True, message_bytes=MESSAGE_BYTES)


@pytest.mark.parametrize("exchange", ["dense", "sharded", "topk", "int8", "dropped"])
@given(st.lists(ROWS, min_size=1, max_size=4), st.lists(ROWS, max_size=3))
def test_units_of_their_own_have_as_many_messages_as_are_cut(
    exchange: str, rows: list[int], biases: list[int]
) -> None:
    model = model_of([PACKED_BYTES // 1024 + 1, *rows], biases)
    option = Option(data_parallel(2), exchange=exchange)
    found = model.gradients(1, option)
    sizes, whole = [g.shared_bytes for g in found], [g.whole for g in found]
    if option.lossy:
        expected = len(cut_lossy(option.exchange, sizes, whole, MESSAGE_BYTES))
    else:
        expected = len(cut(sizes, MESSAGE_BYTES))
    # Those that are whole may share a pack with other units' where they are few.
    counted = model.own_messages(1, option)
    shared = sum(size for size, alone in zip(sizes, whole, strict=True) if alone)
    if option.lossy and 0 < shared <= PACKED_BYTES:
        assert expected - 1 <= counted <= expected
    else:
        # Packs are filled in order: room may be left at their ends.
        assert counted <= expected <= counted + 1


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_on_streams_large_parameters_are_gathered_whole(rows: list[int]) -> None:
    model = model_of([n + PACKED_BYTES // 1024 for n in rows], [])
    assert model.own_gathers(1, Option(data_parallel(2), exchange="sharded")) == len(rows)
