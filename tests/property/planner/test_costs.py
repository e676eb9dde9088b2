"""What holds of every prediction, whatever the model, the cluster and the decisions."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.cost.collectives import Fabric, collective_s, groups_of, rings
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.ownership import input_placement, output_placement, position_classes
from meshwright.planner.memory.timeline import peak_bytes, timeline
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.cluster import Interference
from meshwright.planner.schema.layout import lattice
from meshwright.planner.solve.evaluate import evaluation
from meshwright.planner.solve.heuristic.space import OptionSpace, ScoredDecisions

from tests.strategies import clusters, decided
from tests.transfers import traffic, transfers

SOME = settings(max_examples=120, deadline=None)


def faster(cluster, level, factor):
    levels = tuple(
        msgspec.structs.replace(x, bytes_per_s=x.bytes_per_s * factor) if x.name == level else x
        for x in cluster.levels
    )
    return msgspec.structs.replace(cluster, levels=levels)


@SOME
@given(decided(), st.sampled_from(("intra", "inter")), st.floats(1.0, 1e4))
def test_predicted_time_never_rises_with_bandwidth(case, level, factor):
    model, chosen = case
    links = faster(model.cluster, level, factor)
    quick = CostModel(model.profile, links, model.goal, micro_batches=model.micro_batches)
    for schedule in ("barrier", "priority"):
        before = evaluation(model, chosen, schedule=schedule).prediction.step_s
        after = evaluation(quick, chosen, schedule=schedule).prediction.step_s
        slack = 1e-9 if schedule == "barrier" else 0.02 * before + 1e-9
        assert after <= before * (1 + 1e-9) + slack


@SOME
@given(decided(measured=True))
def test_a_prediction_adds_up(case):
    model, chosen = case
    found = evaluation(model, chosen).prediction
    parts = found.compute_s + found.blocking_s + found.exposed_s
    assert abs(found.step_s - parts) <= 1e-9 * max(found.step_s, 1.0)
    assert found.update_s <= found.compute_s + 1e-12
    assert len(found.peak_bytes) == model.world_size
    assert 0 <= found.gpu_seconds <= found.step_s * model.world_size * (1 + 1e-9) + 1e-12


@SOME
@given(decided())
def test_an_edge_costs_the_bytes_that_ownership_moves(case):
    model, chosen = case
    for e, (a, b) in enumerate(model.ends):
        edge = model.profile.edges[e]
        held = (
            output_placement(chosen[a].layout, chosen[a].style),
            input_placement(chosen[b].layout, chosen[b].style),
        )
        features = edge.features if "feature_shard" in (held[0].form, held[1].form) else 1
        sent, received = traffic(transfers(model.counts, *held, features), model.world_size)
        cost, element = model.edge(e, chosen[a], chosen[b]), edge.bytes_per_sample / features
        assert cost.forward.sent_bytes == max(sent) * element
        assert cost.received_bytes == max(received) * element
        assert (cost.forward.seconds > 0) == (max(sent) * element > 0)


@SOME
@given(clusters(measured=True), st.data(), st.floats(0, 1e9), st.floats(0, 1e9))
def test_collectives_take_no_less_for_more(links, data, size, more):
    fabric = Fabric(links, tuple(range(links.world_size)))
    layout = data.draw(st.sampled_from(list(lattice(links.world_size))))
    ring, pair = (
        rings(fabric, groups_of(layout)),
        rings(fabric, np.array([[0, links.world_size - 1]])),
    )
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "p2p"):
        over = pair if collective == "p2p" else ring
        least, most = (collective_s(fabric, over, collective, b) for b in (size, size + more))
        assert 0 <= least <= most + 1e-12


@SOME
@given(decided())
def test_the_peak_is_the_largest_point_of_the_timeline(case):
    model, chosen = case
    memory = MemoryModel(model)
    for group in position_classes(model.counts, [o.layout for o in chosen]):
        position = memory.position(chosen, group.samples)
        peak, _ = peak_bytes(position)
        totals = [point.total for point in timeline(position)]
        assert abs(peak - max(totals)) <= 1e-6 * max(peak, 1.0)


@SOME
@given(decided())
def test_tied_parameters_count_once(case):
    model, _ = case
    counted = [p.shared for owned in model.owned for p in owned]
    assert len(counted) == len(set(counted))
    assert sum(p.bytes for owned in model.owned for p in owned) == model.profile.parameter_bytes


@SOME
@given(decided(measured=True), st.integers(1, 20_000))
def test_the_search_scores_what_is_simulated(case, message_bytes):
    """Without interference the formula over buckets is the simulation of them."""
    model, chosen = case
    quiet = msgspec.structs.replace(model.cluster, interference=Interference())
    model = CostModel(
        model.profile,
        quiet,
        model.goal,
        micro_batches=model.micro_batches,
        message_bytes=message_bytes,
    )
    scored = ScoredDecisions(OptionSpace(model, EVERYTHING), "barrier")
    scored.move_to(chosen)
    found = evaluation(model, chosen)
    assert abs(scored.step_s() - found.prediction.step_s) <= 1e-9 * max(
        found.prediction.step_s, 1.0
    )
    fullest = max(found.prediction.peak_bytes)
    assert scored.peak() > fullest - 1.0
    if all(o.layout.size == model.world_size for o in chosen):
        assert scored.peak() <= fullest + 1.0
