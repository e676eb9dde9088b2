"""What bounds a step, in one line, without planning again."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
from meshwright.cli.render.documents import bound_sentence
from meshwright.planner.explain.what_if import with_bandwidth
from meshwright.planner.explain.why import StepBottleneck, bottleneck, largest_part
from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.estimate import load_table


def cluster(gbit_s: float, nodes: int = 8) -> Cluster:
    device = Device(name="a100", memory_bytes=40 * 2**30)
    return Cluster(
        name="hosts",
        nodes=tuple(Node(name=f"host{i}", devices=(device,)) for i in range(nodes)),
        levels=(Level(name="inter", latency_s=50e-6, bytes_per_s=gbit_s * 1e9 / 8),),
    )


@pytest.fixture(scope="module")
def profile():
    return load_table("vgg16")


def test_a_slow_link_bounds_by_its_exchange(profile):
    links = cluster(1)
    plan = make_plan(profile, links, Goal(batch=256))
    start = time.perf_counter()
    found = bottleneck(plan, profile, links)
    assert time.perf_counter() - start < 2  # a few hundredths where nothing else runs
    assert (found.part, found.link) == ("exchange", "inter")
    assert found.part_s == plan.prediction.exposed_s
    assert found.step_s == plan.prediction.step_s
    # what twice the bandwidth saves is what the same decisions take there
    faster = with_bandwidth(links, "inter", links.levels[0].bytes_per_s)
    assert found.faster_s == make_plan(profile, faster, Goal(batch=256)).prediction.step_s
    assert found.faster_s < 0.6 * found.step_s
    sentence = bound_sentence(found)
    assert sentence.startswith("Bound by gradient exchange between nodes (")
    assert "twice the bandwidth saves 3" in sentence
    assert sentence.endswith(", or try --allow-lossy.")


def test_rounding_is_named_where_it_saves_bytes_and_was_not_allowed(profile):
    links = cluster(1)
    plan = make_plan(profile, links, Goal(batch=256))
    lossy = msgspec.structs.replace(plan, goal=Goal(batch=256, allow_lossy=True, min_fidelity=0.9))
    assert bound_sentence(bottleneck(lossy, profile, links)).endswith(", or raise --batch.")
    half = msgspec.structs.replace(profile, dtype="bfloat16")
    plan = make_plan(half, links, Goal(batch=256))
    assert bound_sentence(bottleneck(plan, half, links)).endswith(", or raise --batch.")


def test_a_larger_batch_takes_micro_batches_where_memory_is_full(profile):
    links = cluster(1)
    plan = make_plan(profile, links, Goal(batch=256, allow_lossy=True, min_fidelity=0.9))
    peak = max(plan.prediction.peak_bytes)
    for limit, full in ((2 * peak, False), (int(1.05 * peak), True)):
        goal = msgspec.structs.replace(plan.goal, memory_limit_bytes=limit)
        found = bottleneck(msgspec.structs.replace(plan, goal=goal), profile, links)
        assert found.full == full
        more = ", in more --micro-batches as memory is full" if full else ""
        assert bound_sentence(found).endswith(f"or raise --batch{more}.")
    # What was recomputed or offloaded to fit is not there to be had twice, however much is left.
    saving = tuple(msgspec.structs.replace(unit, memory="recompute") for unit in plan.units)
    assert bottleneck(msgspec.structs.replace(plan, units=saving), profile, links).full


def test_a_fast_link_leaves_computing(profile):
    links = cluster(10_000)
    plan = make_plan(profile, links, Goal(batch=512))
    found = bottleneck(plan, profile, links)
    assert found.part == "compute"
    assert bound_sentence(found).startswith("Bound by computing (")
    assert bound_sentence(found).endswith("more or faster devices shorten it.")


def test_its_seconds_are_those_of_the_prediction(profile):
    """A median rank computes less than the slowest, and waits for it."""
    uneven, links = msgspec.structs.replace(profile, spread=0.1), cluster(10_000)
    plan = make_plan(uneven, links, Goal(batch=512))
    found = bottleneck(plan, uneven, links)
    assert plan.prediction.waiting_s > 0
    assert (found.part, found.part_s) == ("compute", plan.prediction.compute_s)


def test_where_ranks_mostly_wait_for_a_slower_one_the_seconds_are_its(profile):
    """Of eight ranks one takes some of ten times as long: the others wait for most of the step."""
    uneven, links = msgspec.structs.replace(profile, spread=10.0), cluster(10_000)
    plan = make_plan(uneven, links, Goal(batch=512))
    predicted = plan.prediction
    assert predicted.compute_s < max(predicted.blocking_s, predicted.exposed_s)
    found = bottleneck(plan, uneven, links)
    assert found.part == "compute"
    assert found.on_slowest
    assert predicted.step_s / 2 < found.part_s <= predicted.step_s
    assert "on the slowest rank, for which the others wait): " in bound_sentence(found)


def test_one_device_waits_for_nothing(profile):
    device = Device(name="a100", memory_bytes=80 * 2**30)
    alone = Cluster(name="one", nodes=(Node(name="host", devices=(device,)),), levels=())
    found = bottleneck(make_plan(profile, alone, Goal(batch=32)), profile, alone)
    assert (found.part, found.link, found.faster_s) == ("compute", None, None)
    assert bound_sentence(found).endswith("): more or faster devices shorten it.")


def test_what_memory_costs_is_said():
    found = StepBottleneck("compute", 0.8, 1.0, 0.3, "intra", 0.9)
    assert bound_sentence(found) == (
        "Bound by computing (800.00 ms of 1.00 s): 300.00 ms of it recomputes what memory has no "
        "room for, twice the bandwidth inside nodes saves 100.00 ms, more or faster "
        "devices shorten it."
    )


def test_blocking_communication_is_named_with_its_link():
    found = StepBottleneck("blocking", 0.5, 1.0, 0.0, "intra", 1.0)
    assert bound_sentence(found) == (
        "Bound by blocking communication inside nodes (500.00 ms of 1.00 s): twice the bandwidth "
        "saves nothing."
    )


@pytest.mark.parametrize(
    ("compute_s", "blocking_s", "exposed_s", "expected"),
    [
        (0.5, 0.47, 0.06, ("communication", 0.53)),
        (0.5, 0.3, 0.1, ("compute", 0.5)),
        (0.4, 0.5, 0.1, ("blocking", 0.5)),
        (0.4, 0.1, 0.5, ("exchange", 0.5)),
    ],
)
def test_computing_is_compared_with_all_communication(compute_s, blocking_s, exposed_s, expected):
    times = SimpleNamespace(
        compute_s=compute_s, blocking_s=blocking_s, exposed_s=exposed_s, copies_s=0.0
    )
    part, part_s, on_slowest = largest_part(SimpleNamespace(simulation=times, prediction=times))
    assert (part, pytest.approx(part_s), on_slowest) == (*expected, False)


def test_communication_tells_its_parts():
    found = StepBottleneck("communication", 0.53, 1.0, 0.0, "inter", 0.8, blocking_s=0.47)
    assert bound_sentence(found) == (
        "Bound by communication (530.00 ms of 1.00 s, 470.00 ms blocking and 60.00 ms of "
        "gradients): twice the bandwidth between nodes saves 200.00 ms."
    )
    assert bound_sentence(found._replace(blocking_s=0.2)).endswith(", or raise --batch.")
