"""The integer program as a solver: proved best over micro-batches, slice sizes and all decisions.

One program for each number of micro-batches and slice size; each must beat the best plan known by
then (at first the heuristic's), so that most are over when their relaxation is worse. A plan is
called optimal only where every program was solved or shown to be no better. Then, among plans
within the share ``tie_tolerance`` of the best, one with the fewest changes of layout is taken, and
of these one that loses least.

Where nothing keeps the limits, the program is solved again without one of its limits, with what
that limit bounds as its objective, for every number of micro-batches and slice size: the least of
these is the smallest relaxation there is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import msgspec
import pulp

from ...cost.cost import CostModel
from ...schema.goal import Goal
from ...schema.options import Decisions, ties_agree
from ..answer import DisagreementError, answer
from ..choice import Choice, choice, over_bytes
from ..evaluate import evaluation, limits_bytes, rank_memory
from ..heuristic.checkpointing import fits_in_segments
from ..heuristic.infeasible import Closest, explain, needed
from ..heuristic.least_memory import LeastMemory, least_memory, memory_models, never_fits
from ..heuristic.segmented import fitting_in_segments
from ..heuristic.splits import search
from ..highs import Interruption, Solved, run
from ..option_table import OptionTable
from ..problem import Infeasibility, Problem, Result
from ..unit_options import all_may_have
from .integer import Program
from .least_options import least_options, only_memory

ROUNDING = 1e-6
# A program must reach the best objective so far, with this much room for rounding.
AT_LEAST_AS_GOOD = 1e-5
# Of a step, what the program may have it shorter or longer than the formula: integers are such to
# ``highs.INTEGRAL``, times what the options of a unit differ by.
AGREES = 1e-5
# How often a solution over a limit by rounding is excluded before that is taken for a bug.
CUTS = 50
# A relaxed limit is this share above what the plan needs, against rounding.
MARGIN = 1e-6
# Seconds that a program may take at least, though the deadline is near.
LAST_S = 1.0
# Plans that the heuristic may score before the program is solved: of 37 golden problems none gets
# another plan than after three times as many, which took longer than most programs.
BEGINNING = 1000
# Iterations of the simplex, over the programs of a search, after which those that follow end with a
# plan that is good enough for the problem: about a second.
PATIENCE = 2000


class IntegerSolver:
    """The solver of that name."""

    name = "integer"

    def solve(self, problem: Problem, time_limit_s: float | None = None) -> Result:
        """See ``solver.Solver``."""
        return IntegerSearch(problem.placed(), time_limit_s).result()

    def explain(self, problems: Sequence[Problem]) -> Infeasibility:
        """See ``solver.Solver``."""
        return explain([problem.placed() for problem in problems], IntegerEvidence())


class IntegerSearch:
    """One search: the cases, the best choice so far, what is proved, the time that is left."""

    def __init__(self, problem: Problem, time_limit_s: float | None) -> None:
        self.problem = problem
        self.deadline = time.perf_counter() + (time_limit_s if time_limit_s is not None else inf)
        self.interruption = Interruption()
        self.best: Choice | None = None
        self.known: list[Choice] = []
        self.bound_s = inf
        self.proved = True
        self.iterations = 0

    @property
    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def _most_wanted_s(self) -> float:
        return self.problem.wanted_s * (1 + AT_LEAST_AS_GOOD)

    def result(self) -> Result:
        with self.interruption.listening():
            if self._ruled_out():
                return self._none()
            every = list(self.problem.cost_models())
            # Where only what is better than a known plan is wanted, there mostly is nothing, which
            # the programs prove sooner than the heuristic looks for it.
            if self.problem.wanted_s == inf:
                self._begin(every)
            for i, model in enumerate(every):
                self._case(model, i / len(every), 1 / len(every))
            if self.best is None and not self.proved:
                self._begin(every)
            if self.best is None:
                return self._none()
            chosen = self._as_run(self._simpler(self.best))
        bound_s = max(min(self.bound_s, self.best.objective_s), 0.0)
        return answer(
            self.problem,
            chosen,
            IntegerSolver.name,
            bound_s,
            proved=self.proved
            and chosen.objective_s <= bound_s * (1 + self.problem.tie_tolerance + 1e-6),
        )

    def _ruled_out(self) -> bool:
        """Whether memory is proved to rule out every plan by programs without seconds, which are
        much smaller than those that find the quickest."""
        for model in memory_models(self.problem):
            if not only_memory(model) or over_bytes(model, model.baseline) <= 0:
                return False
            bound = least_memory(self.problem, model)
            if bound is None:
                return False  # it is not memory that is missing
            if bound.over_bytes > 0:
                continue
            if _is_fitting_plan(self.problem, model, bound.decisions):
                return False
            program = _memory_program(self.problem, model)
            assert program is not None, "the bound has options"
            if run(program.problem, self.left_s, self.interruption).outcome != "infeasible":
                return False
        return True

    def _none(self) -> Result:
        """No plan: because there is none, or because time was up before one was found."""
        rescued = fitting_in_segments(self.problem, IntegerSolver.name)
        if rescued is not None and rescued.objective_s is not None:
            wanted = rescued.objective_s <= self._most_wanted_s
            return rescued if wanted else Result.without_plan(IntegerSolver.name, None)
        why = explain([self.problem], IntegerEvidence()) if self.problem.explains else None
        reason = "" if self.proved else "the time limit came before a plan or a proof"
        return Result.without_plan(IntegerSolver.name, why, reason)

    def _begin(self, every: list[CostModel]) -> None:
        """What the heuristic finds, and plain data parallelism, under every model."""
        quiet = replace(self.problem, progress=None)
        limit_s = max(min(self.left_s / 4, 10.0), LAST_S if self.problem.wanted_s < inf else 0.0)
        found = search(quiet, limit_s, BEGINNING).evaluation.decisions
        for model in every:
            for decisions in dict.fromkeys((model.baseline, found)):
                if all_may_have(model, decisions, self.problem.capability):
                    self._offer(choice(model, decisions, self.problem.schedule))

    def _offer(self, new: Choice) -> bool:
        """Takes a choice if it keeps all limits and is better."""
        if not new.feasible or new.objective_s > self._most_wanted_s:
            return False
        self.known.append(new)
        if self.best is None or new.objective_s < self.best.objective_s:
            self.best = new
        return True

    def _as_run(self, chosen: Choice) -> Choice:
        """Of the plans come across, the one that is quickest as it is run, where formula and
        simulation may differ by the size of buckets or by interference: the plan found for the
        formula, unless another is better by more than ``tie_tolerance`` (buckets: by more than
        rounding)."""
        if self.problem.tie_tolerance <= 0 or self.problem.goal.objective != "time":
            return chosen

        def simulated_s(each: Choice) -> float:
            done = evaluation(each.model, each.decisions, schedule=self.problem.schedule)
            return done.prediction.step_s

        best = min(self.known, key=simulated_s)
        room = 1 - (self.problem.tie_tolerance if self.problem.schedule == "priority" else ROUNDING)
        return best if simulated_s(best) < simulated_s(chosen) * room else chosen

    def _case(self, model: CostModel, done: float, part: float) -> None:
        """Solves one program against the best so far, and takes its bound."""
        label = f"{model.micro_batches} micro-batches, slices of {model.message_bytes:,} bytes"
        self.problem.report(label, done)
        table = OptionTable(model, self.problem.capability)
        if not all(table.options):
            return  # a unit's own limit leaves it no option
        program = Program(self.problem, table)
        program.problem.setObjective(pulp.LpAffineExpression(program.objective))
        known_s = inf if self.best is None else self.best.objective_s
        most_s = min(known_s, self.problem.wanted_s)
        if most_s < inf:
            program.within(most_s * (1 + AT_LEAST_AS_GOOD))

        def progress(gap: float) -> None:
            # HiGHS gives infinity until it has a solution.
            if 0 <= gap < 1e6:
                self.problem.report(f"{label}: gap {gap:.1%}", done + part * max(1 - gap, 0.0))

        solved = self._solve(program, progress)
        self.proved &= solved.outcome in ("optimal", "infeasible")
        self.bound_s = min(self.bound_s, solved.bound * program.time_unit_s)

    def _solve(self, program: Program, progress: Callable[[float], None]) -> Solved:
        """Solves until the solution is one that keeps the limits to the byte."""
        enough = self.problem.good_enough if self.iterations > PATIENCE else 0.0
        for _ in range(CUTS):
            solved = run(program.problem, self.left_s, self.interruption, progress, enough=enough)
            self.iterations += solved.iterations
            if solved.value is None:
                return solved
            new = choice(program.model, program.chosen(), self.problem.schedule)
            self._compare(new, program, solved)
            if self._offer(new):
                return solved
            program.forbid(new.decisions)
        raise DisagreementError(
            f"{CUTS} solutions of the integer program break a limit that it has: "
            "this is a bug of the planner, please report it with the profile and the cluster"
        )

    def _compare(self, new: Choice, program: Program, solved: Solved) -> None:
        """Holds the program's step against the formula's."""
        said = (program.step.value() or 0.0) * program.time_unit_s
        margin = AGREES * new.step_s + 1e-9 * program.time_unit_s
        # Only where a larger T is worse does it equal the largest row in the best solution.
        pressed = solved.outcome == "optimal" and program.problem.objective.get(program.step, 0.0)
        if said < new.step_s - margin or (pressed and said > new.step_s + margin):
            raise DisagreementError(
                f"the integer program has {said!r} s for a step that the cost model gives "
                f"{new.step_s!r} s: this is a bug of the planner, please report it"
            )

    def _simpler(self, best: Choice) -> Choice:
        """A plan nearly as good that changes layout less and loses less, if time is left."""
        if self.problem.tie_tolerance <= 0 or self.left_s <= 0 or not self.proved:
            return best
        program = Program(self.problem, OptionTable(best.model, self.problem.capability))
        program.within(best.objective_s * (1 + self.problem.tie_tolerance))
        program.simplest()
        # Its solutions are far apart, and quickly found by these.
        left_s = min(self.left_s, 10.0)
        solved = run(program.problem, left_s, self.interruption, heuristics=True)
        if solved.value is None:
            return best
        new = choice(best.model, program.chosen(), self.problem.schedule)
        most = best.objective_s * (1 + self.problem.tie_tolerance) * (1 + 1e-8)
        return new if new.feasible and new.objective_s <= most else best


# -- where nothing keeps the limits ----------------------------------------------------------------


class IntegerEvidence:
    """What the integer program tells of problems without a plan; see ``infeasible.Evidence``."""

    proves = True

    def closest(self, problems: Sequence[Problem], what: str, deadline: float) -> Closest | None:
        if what == "memory_limit_bytes":
            memory = [(p, model) for p in problems for model in memory_models(p)]
            return _least_memory(memory, deadline)
        best: Closest | None = None
        proved = True
        for problem, model in ((p, m) for p in problems for m in p.cost_models()):
            chosen, known = _least(problem, model, what, deadline)
            proved &= known
            if chosen is not None:
                limit = needed(what, chosen) * (1 + MARGIN)
                if best is None or limit < (best.limit or inf):
                    best = Closest(chosen, limit)
        return None if best is None else best._replace(proved=proved)

    def fits(self, problem: Problem, deadline: float) -> bool:
        models = (m for m in memory_models(problem) if not never_fits(problem, m))
        bounds = [(model, least_memory(problem, model)) for model in models]
        known = [(model, bound) for model, bound in bounds if bound is not None]
        # The program is asked only where the bound from below does not rule a plan out.
        return any(
            _has_plan(problem, model, deadline, bound.decisions)
            for model, bound in known
            if bound.over_bytes <= 0
        ) or any(
            fits_in_segments(problem, model)
            for model, bound in known
            if bound.over_bytes_in_segments <= 0
        )


def _least_memory(every: Sequence[tuple[Problem, CostModel]], deadline: float) -> Closest | None:
    """The plan that is least over the memory limits of its ranks."""
    best: Choice | None = None
    proved = True
    bounds = ((least_memory(problem, model), problem, model) for problem, model in every)
    known = [(bound, problem, model) for bound, problem, model in bounds if bound is not None]
    # A program is solved only where the bound from below leaves room for a plan that is better than
    # those known; the lowest bound first, so that few are. Before all, though, those of the problem
    # that allows most: knowing its plan, the others' programs are soon shown to have none as good.
    widest = every[-1][0]
    for bound, problem, model in sorted(
        known, key=lambda each: (each[1] is not widest, each[0].over_bytes)
    ):
        if best is not None and bound.over_bytes >= best.over_bytes:
            continue
        easiest = choice(model, bound.decisions, problem.schedule)
        chosen: Choice | None = easiest
        if not _is_plan(easiest) or easiest.over_bytes > bound.over_bytes:
            over = None if best is None else best.over_bytes
            chosen, solved = _least(problem, model, "memory_limit_bytes", deadline, bound, over)
            proved &= solved
        if chosen is not None and (best is None or chosen.over_bytes < best.over_bytes):
            best = chosen
    if best is None:
        return None
    peak = max(each.peak_bytes for each in rank_memory(best.model, best.decisions))
    return Closest(best, peak, proved)


def _is_plan(chosen: Choice) -> bool:
    """Whether tied units agree and all limits but memory's are kept."""
    model = chosen.model
    agree = all(
        ties_agree([model.profile.units[u] for u in ties], [chosen.decisions[u] for u in ties])
        for ties in model.ties
        if len(ties) > 1
    )
    return agree and chosen._replace(over_bytes=0).feasible


def _least(
    problem: Problem,
    model: CostModel,
    what: str,
    deadline: float,
    bound: LeastMemory | None = None,
    most_over_bytes: int | None = None,
) -> tuple[Choice | None, bool]:
    """The plan of one model that needs the least of a limit and keeps the others, and whether the
    program for it was solved to the end. ``bound`` is known of memory; plans that are further over
    its limits than ``most_over_bytes`` are not looked for."""
    free = msgspec.structs.replace(problem.goal, **{what: None})
    table = OptionTable(_with_goal(problem, model, free), problem.capability)
    if not all(table.options):
        return None, True
    limits = model
    if bound is not None and model.goal.memory_limit_bytes is not None and bound.over_bytes > 0:
        # The largest limit that every plan is known to be over changes no order of plans. Bytes are
        # counted in units of the limit, and thousands of millions of them are no numbers to solve
        # with.
        scaled = model.goal.memory_limit_bytes + bound.over_bytes
        wider = msgspec.structs.replace(model.goal, memory_limit_bytes=scaled)
        limits = _with_goal(problem, model, wider)
    excess, untimed = what == "memory_limit_bytes", False
    if excess and only_memory(model):
        table, untimed = least_options(problem, table, limits), True
    program = Program(problem, table, excess=excess, limits_of=limits, untimed=untimed)
    program.minimise(what)
    if program.excess is not None and most_over_bytes is not None:
        there = zip(limits_bytes(model), limits_bytes(limits), strict=True)
        share = max((limit + most_over_bytes) / higher - 1 for limit, higher in there)
        program.excess.upBound = max(share, 0.0) + MARGIN
    solved = _run(program, deadline)
    done = solved.outcome in ("optimal", "infeasible")
    if solved.value is None:
        return None, done
    return choice(model, program.chosen(), problem.schedule), done


def _run(program: Program, deadline: float) -> Solved:
    left_s = max(deadline - time.perf_counter(), LAST_S)
    return run(program.problem, left_s, Interruption())


def _with_goal(problem: Problem, model: CostModel, goal: Goal) -> CostModel:
    return replace(problem, goal=goal).cost_model(model.micro_batches, model.message_bytes)


def _has_plan(problem: Problem, model: CostModel, deadline: float, easiest: Decisions) -> bool:
    """Whether the program has any solution; much quicker than the one that needs least."""
    # The options that hold least where memory is fullest are often a plan, and seen without it.
    if _is_fitting_plan(problem, model, easiest):
        return True
    program = _memory_program(problem, model)
    if program is None:
        return False
    if _run(program, deadline).value is None:
        return False
    if choice(model, program.chosen(), problem.schedule).feasible:
        return True
    # The solution is over the limit by rounding: another may not be.
    closest, _ = _least(problem, model, "memory_limit_bytes", deadline)
    return closest is not None and closest.feasible


def _is_fitting_plan(problem: Problem, model: CostModel, decisions: Decisions) -> bool:
    tried = choice(model, decisions, problem.schedule)
    return _is_plan(tried) and tried.feasible


def _memory_program(problem: Problem, model: CostModel) -> Program | None:
    """The program of which any solution keeps the limits; None where a unit has no option."""
    table = OptionTable(model, problem.capability)
    if not all(table.options):
        return None
    untimed = only_memory(model)
    if untimed:
        table = least_options(problem, table, model)
    program = Program(problem, table, untimed=untimed)
    program.minimise("memory_limit_bytes")  # without excess there is nothing to make small
    return program
