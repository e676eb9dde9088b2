"""What a redistribution moves, and what moves once, is said in one place: cost model and executor
follow where that is changed."""

import pytest
import torch
from meshwright.executor.redistribution import cache
from meshwright.executor.redistribution.redistribute import route
from meshwright.planner.cost import redistribution
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.ownership import TensorPlacement, input_placement, output_placement
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option

from tests.strategies import chain_profile, cluster, linear

DATA, COLUMN = Option(data_parallel(4)), Option(Layout(groups=1, degree=4), "column")


def model(batch=4):
    profile = chain_profile([linear("a", 8, 8, 0.0), linear("b", 8, 8, 0.0)], features=8)
    return CostModel(profile=profile, cluster=cluster(1, 4), goal=Goal(batch=batch))


def first_half(owned, needed):
    """Half of what moves: as if the first half of the samples would do."""
    lo, hi, left, right = true_overlap(owned, needed)
    return lo, lo + (hi - lo) // 2, left, right


true_overlap = redistribution.overlap


def test_cost_model_and_executor_move_the_same_overlap(monkeypatch):
    source, target = output_placement(*DATA[:2]), input_placement(*COLUMN[:2])
    counts = (2, 2, 2, 2)

    def moved():
        route.cache_clear()
        made = model(batch=sum(counts))
        # Two targets at once are counted node by node, as the solver for large problems asks.
        table = redistribution.traffic(made.fabric, counts, (source,), (target, source), 1)
        way = route(counts, source, target, 1, 1)
        received = sum(t.box.hi - t.box.lo for t in way.receive if t.peer != 1)
        return made.edge(1, DATA, COLUMN).received_bytes, table, received

    charged, table, received = moved()
    monkeypatch.setattr(redistribution, "overlap", first_half)
    half_charged, half_table, half_received = moved()
    route.cache_clear()
    assert (received, half_received) == (6, 3)
    assert half_charged == charged / 2
    assert half_table.received[0, 0] != table.received[0, 0]


@pytest.mark.parametrize("prefetch", [False, True])
def test_planner_and_executor_share_by_one_rule(monkeypatch, prefetch):
    """A rule by which nothing is the same makes both move everything."""
    layout = Layout(groups=1, degree=4)

    def moves():
        moved = []
        known = cache.RedistributionCache(4, prefetch=prefetch)
        known.begin()
        tensor = torch.empty(0)
        for name in "qk":
            need = cache.UnitInput(name, 0, TensorPlacement(layout, "replicate"), 1, None, "")
            known.get(tensor, need, lambda t, need: moved.append(need) or torch.empty(0))
        known.end(complete=True)
        return len(moved)

    def alike():
        edge = model().profile.edges[1]
        ends = output_placement(*DATA[:2]), input_placement(*COLUMN[:2])
        first, second = (redistribution.edge_redistribution(edge, *ends) for _ in range(2))
        return first == second

    assert (moves(), alike()) == (1, True)
    for module in (redistribution, cache):
        monkeypatch.setattr(module, "shared_redistribution", lambda *given: object())
    assert (moves(), alike()) == (2, False)
