"""The integer program as a solver: proved best over micro-batches, slice sizes and all decisions.

One program for each number of micro-batches and slice size; each must beat the best plan known by
then (at first the heuristic's), so that most are over when their relaxation is worse. A plan is
called optimal only where every program was solved or shown to be no better. Then, among plans
within the share ``near`` of the best, one with the fewest changes of layout is taken, and of these
one that loses least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pulp

from ...cost.cost import CostModel
from ..answer import Choice, DisagreementError, answer, choice
from ..choices import all_may_have
from ..evaluate import evaluation
from ..heuristic.infeasible import explain
from ..heuristic.segmented import fitting_in_segments
from ..heuristic.splits import search
from ..highs import Interruption, Solved, run
from ..option_table import OptionTable
from ..problem import Infeasibility, Problem, Result
from .infeasible import IntegerEvidence
from .integer import Program

ROUNDING = 1e-6
# A program must reach the best objective so far, with this much room for rounding.
AT_LEAST_AS_GOOD = 1e-5
# Of a step, what the program may have it shorter or longer than the formula: integers are such to
# ``highs.INTEGRAL``, times what the options of a unit differ by.
AGREES = 1e-5
# How often a solution over a limit by rounding is excluded before that is taken for a bug.
CUTS = 50


class Integer:
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
        self.start = time.perf_counter()
        self.deadline = self.start + (time_limit_s if time_limit_s is not None else float("inf"))
        self.interruption = Interruption()
        self.best: Choice | None = None
        self.known: list[Choice] = []
        self.bound_s = float("inf")
        self.proved = True

    @property
    def left_s(self) -> float:
        return self.deadline - time.perf_counter()

    def result(self) -> Result:
        with self.interruption.listening():
            every = list(self.problem.cost_models())
            self._begin(every)
            for i, model in enumerate(every):
                self._case(model, i / len(every), 1 / len(every))
            if self.best is None:
                return self._none()
            chosen = self._as_run(self._simpler(self.best))
        bound_s = max(min(self.bound_s, self.best.objective_s), 0.0)
        return answer(
            self.problem,
            chosen,
            Integer.name,
            bound_s,
            proved=self.proved and chosen.objective_s <= bound_s * (1 + self.problem.near + 1e-6),
            seconds=time.perf_counter() - self.start,
        )

    def _none(self) -> Result:
        """No plan: because there is none, or because time was up before one was found."""
        rescued = fitting_in_segments(self.problem, Integer.name, self.start)
        if rescued is not None:
            return rescued
        why = explain([self.problem], IntegerEvidence()) if self.problem.explains else None
        seconds = time.perf_counter() - self.start
        reason = "" if self.proved else "the time limit came before a plan or a proof"
        return Result.without_plan(Integer.name, why, seconds, reason)

    def _begin(self, every: list[CostModel]) -> None:
        """What the heuristic finds, and plain data parallelism, under every model."""
        quiet = replace(self.problem, progress=None)
        found = search(quiet, max(min(self.left_s / 4, 10.0), 0.0)).evaluation.decisions
        for model in every:
            for decisions in dict.fromkeys((model.baseline, found)):
                if all_may_have(model, decisions, self.problem.capability):
                    self._offer(choice(model, decisions, self.problem.schedule))

    def _offer(self, new: Choice) -> bool:
        """Takes a choice if it keeps all limits and is better."""
        if not new.feasible:
            return False
        self.known.append(new)
        if self.best is None or new.objective_s < self.best.objective_s:
            self.best = new
        return True

    def _as_run(self, chosen: Choice) -> Choice:
        """Of the plans come across, the one that is quickest as it is run, where formula and
        simulation may differ by the size of buckets or by interference: the plan found for the
        formula, unless another is better by more than ``near`` (buckets: by more than rounding)."""
        if self.problem.near <= 0 or self.problem.goal.objective != "time":
            return chosen

        def simulated_s(each: Choice) -> float:
            done = evaluation(each.model, each.decisions, schedule=self.problem.schedule)
            return done.prediction.step_s

        best = min(self.known, key=simulated_s)
        room = 1 - (self.problem.near if self.problem.schedule == "priority" else ROUNDING)
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
        if self.best is not None:
            program.within(self.best.objective_s * (1 + AT_LEAST_AS_GOOD))

        def progress(gap: float) -> None:
            # HiGHS gives infinity until it has a solution.
            if 0 <= gap < 1e6:
                self.problem.report(f"{label}: gap {gap:.1%}", done + part * max(1 - gap, 0.0))

        solved = self._solve(program, progress)
        self.proved &= solved.outcome in ("optimal", "infeasible")
        self.bound_s = min(self.bound_s, solved.bound * program.time_unit_s)

    def _solve(self, program: Program, progress: Callable[[float], None]) -> Solved:
        """Solves until the solution is one that keeps the limits to the byte."""
        for _ in range(CUTS):
            solved = run(program.problem, self.left_s, self.interruption, progress)
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
        near = AGREES * new.step_s + 1e-9 * program.time_unit_s
        # T may be above the formula where nothing presses it down.
        if said < new.step_s - near or (
            solved.outcome == "optimal" and said > new.step_s + near and program.presses
        ):
            raise DisagreementError(
                f"the integer program has {said!r} s for a step that the cost model gives "
                f"{new.step_s!r} s: this is a bug of the planner, please report it"
            )

    def _simpler(self, best: Choice) -> Choice:
        """A plan nearly as good that changes layout less and loses less, if time is left."""
        if self.problem.near <= 0 or self.left_s <= 0 or not self.proved:
            return best
        program = Program(self.problem, OptionTable(best.model, self.problem.capability))
        program.within(best.objective_s * (1 + self.problem.near))
        program.simplest()
        solved = run(program.problem, min(self.left_s, 10.0), self.interruption)
        if solved.value is None:
            return best
        new = choice(best.model, program.chosen(), self.problem.schedule)
        near = best.objective_s * (1 + self.problem.near) * (1 + 1e-8)
        return new if new.feasible and new.objective_s <= near else best
