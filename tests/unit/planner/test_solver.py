"""The solver interface, and what is said where nothing fits."""

import time
from dataclasses import replace
from math import ceil, inf

import meshwright as mw
import msgspec
import pytest
from meshwright.planner.schema.capability import PLAIN
from meshwright.planner.schema.errors import InfeasibleError, InputError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import leave_after_backward
from meshwright.planner.simulate import schedule
from meshwright.planner.solve.answer import answer
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.heuristic import infeasible
from meshwright.planner.solve.heuristic import least_memory as bounds
from meshwright.planner.solve.heuristic.heuristic import Heuristic
from meshwright.planner.solve.heuristic.infeasible import more_nodes
from meshwright.planner.solve.heuristic.least_memory import least_memory, never_fits, nothing_fits
from meshwright.planner.solve.heuristic.resize import resized_problem
from meshwright.planner.solve.ilp import solver as integer
from meshwright.planner.solve.ilp.solver import IntegerSolver
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import Solver, _without_needless_offload, solve, solvers
from meshwright.planner.solve.unit_options import all_options
from meshwright.profiler.estimate import load_table

from tests.brute import best
from tests.problems import problem as random_problem
from tests.strategies import chain_profile, cluster, linear


@pytest.fixture
def problem():
    units = [linear(f"fc{i}", 512, 512, 1e-4, saved=2.0**16) for i in range(4)]
    goal = Goal(batch=64, optimizer="adam", micro_batches=(1,))
    return Problem(chain_profile(units), cluster(4), goal)


def limited(problem, **changes):
    return Problem(
        problem.profile, problem.cluster, msgspec.structs.replace(problem.goal, **changes)
    )


def test_auto_says_what_it_took(problem):
    result = solve(problem)
    assert result.solver == "integer"
    assert (result.status == "optimal") == (result.gap <= problem.tie_tolerance + 1e-6)
    assert "integer" in result.reason
    assert result.plan.provenance.solver == "integer"
    quick = solve(problem, "heuristic").plan
    assert result.plan.prediction.step_s <= quick.prediction.step_s * (1 + 1e-6)


def test_the_heuristic_proves_nothing(problem):
    result = solve(problem, "heuristic")
    assert result.solver == result.status == result.plan.provenance.solver == "heuristic"
    assert result.objective_s == pytest.approx(result.plan.prediction.step_s, rel=0.2)
    assert result.bound_s is None
    assert result.plan.provenance.bound_s is None


def test_solvers_satisfy_the_protocol():
    solver: Solver = Heuristic()
    assert solver.name in solvers()


def test_an_unknown_solver_is_refused(problem):
    with pytest.raises(InputError, match="choose from"):
        solve(problem, "oracle")


def test_micro_batches_that_leave_no_samples_are_refused(problem):
    with pytest.raises(InputError, match="at most 16"):
        solve(limited(problem, micro_batches=(32,)))


def test_some_micro_batch_counts_may_be_too_many(problem):
    assert solve(limited(problem, micro_batches=(1, 64))).plan.micro_batches == 1


def test_a_wrong_placement_is_refused(problem):
    wrong = Problem(problem.profile, problem.cluster, problem.goal, placement=(0, 0, 1, 2))
    with pytest.raises(InputError, match="placement"):
        solve(wrong)


@pytest.mark.parametrize("part", [0.2, 0.5, 0.9])
def test_each_relaxation_named_does_help(problem, part):
    need = min(solve(limited(problem, memory_limit_bytes=1)).infeasible.needed_bytes, 10**12)
    tight = limited(problem, memory_limit_bytes=int(need * part))
    result = solve(tight)
    assert result.status == "infeasible"
    why = result.infeasible
    assert 0 <= why.rank < 4
    assert why.unit in [u.name for u in problem.profile.units]
    assert why.needed_bytes > why.available_bytes == int(need * part)
    assert any(r.what == "memory_limit_bytes" for r in why.relaxations)
    for change in why.relaxations:
        value = (change.value,) if change.what == "micro_batches" else change.value
        assert solve(limited(tight, **{change.what: value})).plan is not None


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["integer", "heuristic"])
@pytest.mark.parametrize("part", [0.35, 0.8])
def test_more_ranks_that_are_named_do_help_and_fewer_do_not(problem, solver, part, monkeypatch):
    # What is asked about nodes in a second depends on the machine; what is named must not.
    monkeypatch.setattr(infeasible, "EXPLAIN_S", 60.0)
    monkeypatch.setattr(infeasible, "NODES_S", 60.0)
    need = solve(limited(problem, memory_limit_bytes=1)).infeasible.needed_bytes
    tight = limited(problem, memory_limit_bytes=int(need * part))
    more = solve(tight, solver).infeasible.enlargement
    assert "enough" not in more.sentence
    assert more.ranks == more.nodes > 4
    assert more.sentence in solve(tight, solver).infeasible.sentence
    assert solve(resized_problem(tight, more.ranks), solver).plan is not None
    assert solve(resized_problem(tight, more.ranks - 1), solver).plan is None


def test_a_shorter_step_may_need_more_ranks():
    """Computing alone: three twentieths of a second for each of eight samples."""
    profile = chain_profile([linear("fc", 4, 4, 0.05)], bytes_per_sample=1.0)
    links = cluster(4, inter=1e12, latency_s=0.0)
    asked = Problem(profile, links, Goal(batch=8, time_limit_s=0.2))
    why = solve(asked).infeasible
    assert why.limit == "time_limit_s"
    assert why.enlargement.ranks == 8
    assert solve(resized_problem(asked, 8)).plan is not None
    assert solve(resized_problem(asked, 7)).plan is None


def test_no_larger_cluster_is_named_when_time_is_up(problem):
    asked = Problem(problem.profile, cluster(1), limited(problem, memory_limit_bytes=10_000).goal)
    assert more_nodes(asked, Heuristic(), 0.0) is None


def test_a_cluster_that_is_enough_is_named_where_fewer_nodes_stay_open(problem, monkeypatch):
    """Doubling has found one; of the nodes between it is not known whether they are enough."""
    asked = Problem(problem.profile, cluster(2), limited(problem, memory_limit_bytes=10**7).goal)
    monkeypatch.setattr(infeasible, "NODES_S", 60.0)
    fewest = more_nodes(asked, Heuristic(), inf)
    found_out = infeasible._enough
    monkeypatch.setattr(
        infeasible,
        "_enough",
        lambda larger, *how: found_out(larger, *how) if larger.cluster.world_size == 32 else None,
    )
    more = more_nodes(asked, Heuristic(), inf)
    assert (fewest.ranks, more.ranks) == (24, 32)
    assert more.sentence == "use 32 ranks (32 nodes like 'n0'), which is enough"
    assert solve(resized_problem(asked, more.ranks)).plan is not None


def test_no_larger_cluster_is_named_where_links_are_not_known(problem):
    lone = msgspec.structs.replace(cluster(1, 2), levels=cluster(1, 2).levels[:1])
    asked = Problem(problem.profile, lone, limited(problem, memory_limit_bytes=10_000).goal)
    assert solve(asked).infeasible.enlargement is None


def test_pins_that_leave_nothing_are_named(problem):
    pin = Pin(unit="fc1", only=(Layout(groups=3, degree=1),))
    why = solve(limited(problem, pins=(pin,))).infeasible
    assert (why.limit, why.unit) == ("pins", "fc1")
    assert "'fc1'" in why.sentence


def test_infeasible_is_one_sentence_with_the_numbers(problem):
    with pytest.raises(InfeasibleError) as caught:
        solve(limited(problem, memory_limit_bytes=10_000)).checked()
    text = str(caught.value)
    assert "10,000 bytes" in text
    assert "rank" in text
    assert "unit" in text
    assert "allow" in text
    assert caught.value.exit_code == 3


def test_a_smaller_limit_is_the_largest_batch_that_fits(problem):
    free = solve(problem)
    limit = max(free.plan.prediction.peak_bytes) - 1
    why = solve(limited(problem, memory_limit_bytes=limit // 2)).infeasible
    if why is None:
        pytest.skip("another plan fits")
    batch = next(r.value for r in why.relaxations if r.what == "batch")
    more = limited(problem, memory_limit_bytes=limit // 2, batch=batch + 4)
    assert batch % 4 == 0
    assert solve(more).plan is None


def test_progress_is_reported(problem):
    seen = []
    case = Problem(
        problem.profile,
        problem.cluster,
        msgspec.structs.replace(problem.goal, micro_batches=(1, 2, 4)),
        progress=lambda what, share: seen.append((what, share)),
    )
    solve(case, "heuristic")
    assert [share for _, share in seen] == sorted(share for _, share in seen)
    assert len(seen) == 3


def test_bursts_only_where_the_capability_allows_them(problem):
    """A model too small for its links runs on fewer ranks, if ranks may stay idle."""
    slow = Problem(problem.profile, cluster(4, inter=1e5, latency_s=1e-2), Goal(batch=4))
    everywhere = solve(slow).plan
    assert all(u.layout.size == 4 for u in everywhere.units)
    idle = msgspec.structs.replace(PLAIN, idle_positions=True)
    burst = solve(Problem(slow.profile, slow.cluster, slow.goal, capability=idle)).plan
    assert burst.prediction.step_s <= everywhere.prediction.step_s
    real = solve(
        Problem(slow.profile, slow.cluster, slow.goal, capability=idle, executor=PLAIN)
    ).plan
    assert bool(real.hypothetical) == any(u.layout.size < 4 for u in real.units)


def test_a_time_limit_still_gives_a_plan(problem):
    assert solve(problem, time_limit_s=1e-6).plan is not None


def test_no_time_at_all_is_a_limit_too(problem):
    seen = []
    goal = msgspec.structs.replace(problem.goal, micro_batches=(1, 2, 4))
    case = replace(problem, goal=goal, progress=lambda what, share: seen.append(share))
    assert solve(case, "heuristic", time_limit_s=0.0).plan is not None
    assert seen == [0.0]


def test_a_plan_without_needless_offload_claims_no_more_than_was_proved(problem):
    """There is no room to keep anything, so what is not offloaded is recomputed."""
    capability = msgspec.structs.replace(PLAIN, memory=("keep", "recompute", "offload"))
    device = msgspec.structs.replace(problem.cluster.devices[0], host_bytes_per_s=1e6)
    nodes = tuple(
        msgspec.structs.replace(node, devices=(device,)) for node in problem.cluster.nodes
    )
    links = msgspec.structs.replace(problem.cluster, nodes=nodes)
    roomy = replace(problem, capability=capability, cluster=links).placed()

    def with_all(problem, memory):
        model = problem.cost_model()
        decisions = tuple(
            o._replace(memory=memory) if unit.parameters else o
            for o, unit in zip(model.baseline, problem.profile.units, strict=True)
        )
        return choice(model, decisions, problem.schedule)

    over = max(with_all(roomy, memory).over_bytes for memory in ("recompute", "offload"))
    limit = device.memory_bytes + over
    case = replace(roomy, goal=msgspec.structs.replace(roomy.goal, memory_limit_bytes=limit))

    class Hasty(Heuristic):
        """Stops at a plan that offloads where it may, and proves all of another."""

        def solve(self, problem, time_limit_s=None):
            offloads = "offload" in problem.capability.memory
            made = with_all(problem, "offload" if offloads else "recompute")
            bound_s = 0.1 * made.objective_s if offloads else made.objective_s
            return answer(problem, made, "heuristic", bound_s, proved=not offloads)

    first = Hasty().solve(case)
    found = _without_needless_offload(case, Hasty(), lambda: None)
    assert found.objective_s < first.objective_s
    claimed = found.plan.provenance
    assert (claimed.status, claimed.bound_s) == ("feasible", first.bound_s)
    assert (found.status, found.bound_s, found.gap) == ("feasible", first.bound_s, claimed.gap)


@pytest.mark.parametrize("limit", [1, 100])
def test_a_limit_of_a_byte_is_memorys_and_the_least_is_proved_as_for_more(problem, limit):
    found = solve(limited(problem, memory_limit_bytes=limit), "integer").infeasible
    usual = solve(limited(problem, memory_limit_bytes=2**20), "integer").infeasible
    assert found.limit == "memory_limit_bytes"
    least, same = (w.relaxations[-1] for w in (found, usual))
    assert (least.what, least.value, least.proved) == (same.what, same.value, True)


def test_a_plan_records_its_solver_by_the_name_by_which_it_is_asked_for(problem):
    for name in solvers():
        assert solve(problem, name).plan.provenance.solver == name


def test_a_refusal_of_vgg16_needs_no_search_and_few_programs(monkeypatch):
    """Memory rules out every plan at a glance; what is left is to say what would help."""
    # The report stops asking after some seconds of the clock; what it costs is counted below.
    monkeypatch.setattr(infeasible, "EXPLAIN_S", 60.0)
    solves, programs = [], []
    whole, solved = IntegerSolver.solve, integer.run
    monkeypatch.setattr(IntegerSolver, "solve", lambda *args: solves.append(args) or whole(*args))
    monkeypatch.setattr(
        integer, "run", lambda *args, **how: programs.append(args) or solved(*args, **how)
    )
    links = mw.describe_cluster(device="a100-sxm-40gb", nodes=8, inter_gbit_s=1.0)
    goal = Goal(batch=256, memory_limit_bytes=300 * 2**20)
    start = time.process_time()
    with pytest.raises(InfeasibleError, match="allow at least") as caught:
        mw.plan(load_table("vgg16"), links, goal)
    assert "lower the global batch" in str(caught.value)
    assert not solves
    assert len(programs) <= 5
    assert time.process_time() - start < 30


def test_vgg16_is_divided_on_gpus_only_as_its_gradients_leave_in_backward(monkeypatch):
    """Where collectives are queued on streams; and were they late, it would still be quicker."""
    links = mw.describe_cluster(device="a100-sxm-40gb", nodes=8, inter_gbit_s=100)
    made = mw.plan(load_table("vgg16"), links, Goal(batch=256))
    assert max(unit.layout.degree for unit in made.units) > 1
    assert not leave_after_backward(made.units, made.world_size)
    monkeypatch.setattr(schedule, "leave_after_backward", lambda units, ranks: True)
    late = mw.plan(load_table("vgg16"), links, Goal(batch=256))
    assert made.prediction.step_s <= late.prediction.step_s < made.baseline.step_s


def test_where_devices_lack_memory_no_option_is_said_to_give_it():
    made = chain_profile([linear("a", 256, 256), linear("b", 256, 256)])
    for limit, told in ((2**18, "allow at least"), (None, "take devices that have at least")):
        links = cluster(2, memory_bytes=2**40 if limit else 2**18)
        with pytest.raises(InfeasibleError, match=told) as caught:
            mw.plan(made, links, Goal(batch=2, memory_limit_bytes=limit), solver="integer")
        assert "memory_limit_bytes=" in str(caught.value)


@pytest.mark.parametrize("seed", range(12))
def test_the_least_memory_is_no_more_than_that_of_any_plan(seed):
    made = random_problem(seed, most=1_000)
    free = msgspec.structs.replace(
        made.goal, memory_limit_bytes=1, amplification_limit=None, unit_amplification_limit=None
    )
    made = replace(made, goal=free).placed()
    bounds = [least_memory(made, model) for model in made.cost_models()]
    least = min(bound.over_bytes for bound in bounds if bound is not None)
    most = best(made).least_bytes
    assert 0 < least < most
    assert nothing_fits(made)
    enough = msgspec.structs.replace(made.goal, memory_limit_bytes=ceil(most))
    assert not nothing_fits(replace(made, goal=enough))


def test_a_bound_that_asks_for_very_many_options_is_no_part_of_a_search(monkeypatch):
    """All options of 200 units on 64 ranks took ten times what the search does."""
    made = random_problem(10, most=600)
    model = next(made.placed().cost_models())
    tight = limited(made, memory_limit_bytes=1)
    tight_model = next(tight.placed().cost_models())
    assert never_fits(tight, tight_model)
    options = sum(len(row) for row in all_options(model, made.capability))
    monkeypatch.setattr(bounds, "MOST_OPTIONS", options)
    assert never_fits(tight, tight_model)
    monkeypatch.setattr(bounds, "MOST_OPTIONS", options - 1)
    assert not never_fits(tight, tight_model)
    assert least_memory(tight, tight_model).over_bytes > 0
    assert solve(tight, "integer").status == "infeasible"
