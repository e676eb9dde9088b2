"""Copies to the host's memory and back: how long a step waits for them, and who says so."""

from __future__ import annotations

import msgspec
import pytest
from meshwright.cli.render.documents import bound_sentence, prediction_table
from meshwright.cli.render.explanations import explanation_tables
from meshwright.planner.explain.compare import compare
from meshwright.planner.explain.what_if import gains
from meshwright.planner.explain.why import (
    HostCopies,
    HostsWait,
    StepBottleneck,
    bottleneck,
    device_time,
    explain,
)
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.options import Decisions
from meshwright.planner.solve.answer import answer
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.evaluate import evaluation, make_plan
from meshwright.planner.solve.problem import Problem
from rich.console import Console

from tests.strategies import chain_profile, cluster, linear

RATE = 1e9
SAVED = 2.0**20
PROFILE = chain_profile([linear(f"fc{i}", 64, 64, 1e-3, saved=SAVED) for i in range(4)])


def links(rate: float):
    there = cluster(4, inter=1e9)
    device = msgspec.structs.replace(there.devices[0], host_bytes_per_s=rate)
    nodes = tuple(msgspec.structs.replace(node, devices=(device,)) for node in there.nodes)
    return msgspec.structs.replace(there, nodes=nodes)


def problem(rate: float = RATE, **goal) -> Problem:
    asked = Goal(batch=64, **goal)
    return Problem(PROFILE, links(rate), asked, capability=EVERYTHING).placed()


def away(case: Problem, units: int = 4, **policy) -> Decisions:
    """Plain data parallelism with the policy, offload unless another is named, of the first units
    that have parameters."""
    model, left, found = case.cost_model(), units, []
    for option, unit in zip(model.baseline, PROFILE.units, strict=True):
        takes = bool(unit.parameters) and left > 0
        left -= takes
        found.append(option._replace(**(policy or {"memory": "offload"})) if takes else option)
    return tuple(found)


def plan_of(case: Problem, decisions: Decisions | None = None):
    return make_plan(PROFILE, case.cluster, case.goal, decisions)


def printed(parts) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return " ".join(capture.get().split())


def test_a_prediction_says_how_long_copies_are_waited_for():
    """Of four units the feature maps of 16 samples travel to the host and back."""
    case = problem()
    plain, made = plan_of(case), plan_of(case, away(case))
    copies_s = 2 * 4 * 16 * SAVED / RATE
    assert made.prediction.copies_s == pytest.approx(copies_s)
    assert made.prediction.compute_s == pytest.approx(plain.prediction.compute_s + copies_s)
    assert plain.prediction.copies_s == 0.0


def test_mirrors_on_the_host_are_copied_too():
    case = problem(allow_lossy=True, min_fidelity=0.5)
    mirrored = away(case, 1, feedback="host_mirror")
    bytes_ = 4 * 64 * 64
    found = evaluation(case.cost_model(), mirrored).prediction
    assert found.copies_s == pytest.approx(2 * bytes_ / RATE, rel=0.1)


def test_device_time_tells_copies_from_smaller_shares():
    case = problem()
    model = case.cost_model()
    plain, found = (device_time(evaluation(model, d)) for d in (model.baseline, away(case)))
    assert found.copies_s == pytest.approx(4 * plan_of(case, away(case)).prediction.copies_s)
    assert found.shares_s == pytest.approx(plain.shares_s)


def test_copies_that_take_most_of_computing_bound_the_step():
    case = problem(RATE / 10, memory_limit_bytes=10**9)
    made = plan_of(case, away(case))
    found = bottleneck(made, PROFILE, case.cluster)
    quicker = problem(RATE / 5, memory_limit_bytes=10**9)
    assert found.copies.faster_s == pytest.approx(plan_of(quicker, away(case)).prediction.step_s)
    sentence = bound_sentence(found)
    assert sentence.startswith("Bound by copies to the host and back (1.34 s of ")
    told = printed(explanation_tables(explain(made, PROFILE, case.cluster)))
    assert " is copying to the host's memory and back." in told
    assert "twice the bandwidth to the host's memory saves 671." in sentence
    assert "--forbid offload recomputes or shards instead" in sentence
    assert "--forbid host_mirror" not in sentence
    assert sentence.endswith("a higher --memory-limit needs fewer copies.")
    nothing_asked = found._replace(copies=found.copies._replace(limited=False))
    assert bound_sentence(nothing_asked).endswith("more memory on devices needs fewer copies.")


def test_copies_beside_something_larger_are_told_besides():
    case = problem(5 * RATE)
    sentence = bound_sentence(bottleneck(plan_of(case, away(case)), PROFILE, case.cluster))
    assert sentence.startswith("Bound by computing (")
    assert ". Copies to the host and back take 26.84 ms of the step: twice the " in sentence
    # What is not worth a word gets none.
    quick = problem(1e3 * RATE)
    sentence = bound_sentence(bottleneck(plan_of(quick, away(quick)), PROFILE, quick.cluster))
    assert "host" not in sentence


def test_what_is_waited_for_other_hosts_is_told_beside_copies():
    """Of a step of 1 s copies take most of what it computes, and other hosts 0.3 s."""
    copies, hosts = HostCopies(0.4, 0.8, ("offload",), False), HostsWait(0.3, 8, 0.9, 0.95)
    found = StepBottleneck("copies", 0.4, 1.0, 0.0, hosts=hosts, copies=copies)
    sentence = bound_sentence(found)
    assert sentence.startswith("Bound by copies to the host and back (400.00 ms of 1.00 s): ")
    assert ". Waiting for other hosts takes 300.00 ms of the step: --inner-steps 16 " in sentence
    assert sentence.count("opies to the host and back") == 1


def test_tables_name_copies_where_there_are_any():
    case = problem()
    plain, made = plan_of(case), plan_of(case, away(case))
    assert "copies to the host and back" in printed([prediction_table(made)])
    assert "copies" not in printed([prediction_table(plain)])
    said = {figure.name: figure.second for figure in compare(plain, made).figures}
    assert said["copies_s"] == made.prediction.copies_s
    found = explain(made, PROFILE, case.cluster, capability=EVERYTHING)
    assert found.copies_s == made.prediction.copies_s
    text = printed(explanation_tables(found))
    assert "For 134.22 ms of the step a rank waits for copies to its host's memory and back" in text
    assert "--forbid offload plans without" in text
    assert text.count("copies to the host and back") == 1
    text = printed(explanation_tables(explain(plain, PROFILE, case.cluster)))
    assert "copies" not in text


def test_a_quicker_link_to_the_host_is_asked_for_where_it_is_waited_for():
    roomy = problem()
    peaks = (max(plan_of(roomy, d).prediction.peak_bytes) for d in (away(roomy), None))
    tight = problem(memory_limit_bytes=sum(peaks) // 2)
    for case, decisions in ((tight, away(tight)), (roomy, roomy.cost_model().baseline)):
        chosen = choice(case.cost_model(), decisions, case.schedule)
        found = gains(case, answer(case, chosen, "heuristic", 0.0, proved=False), "heuristic")
        asked = any(gain.change == "twice the bandwidth to the host's memory" for gain in found)
        assert asked == (case is tight)
