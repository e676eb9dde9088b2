"""The integer program: one plan for one number of micro-batches and one slice size, proved best.

Notation: unit k takes option o (x_ko = 1), whose *state* σ is its layout and style; f_k is what
unit k's choice amounts to (``rows.FIGURES``: seconds by kind, bytes by class), linear in x and y;
b, a, c are the coefficients of ``rows`` before, at and after a unit; l is a link, j a unit. Each
family of constraints, with the function that adds it:

 (1) one option          Σ_o x_ko = 1,  x binary                       ``Variables._options``
 (2) pairs along an      Σ_τ y_eστ = Σ_{o in σ} x_source,o
     edge e              Σ_σ y_eστ = Σ_{o in τ} x_target,o,  y ≥ 0     ``Variables._pairs``
 (3) ties                Σ x over the options of a layout and cut are
                         equal for units that share a parameter        ``Variables._ties``
 (4) step time           T ≥ Σ_{k<j} b·f_k + a·f_j + Σ_{k>j} c·f_k + d_lj
     (P3, or the         for every l and j,  and  T ≥ Σ_k always·f_k   ``Program._step``
     barrier)
 (5) slices              d_lj ≥ slice_lk for k > j, where unit j sends ``Program._slices``
 (6) memory timeline     Σ_{k<j} b·f_k + a·f_j + Σ_{k>j} c·f_k ≤ limit (1 + v)
                         for every j in forward, in backward (+ h_j),
                         and Σ_k update·f_k for the update, for each
                         class of positions; v = 0 but where it is
                         what shall be least                           ``MemoryRows.add``
 (7) bytes moved         r_k ≥ what each edge brings to unit k         ``MemoryRows._received``
                         g_k ≥ what stands side by side as the
                         gradient of k's output comes back over each
                         edge - what k's own backward has, g ≥ 0       ``MemoryRows._returned``
 (8) open buckets        h_k ≥ min(Σ_{i<k} sent_i,
                                   (layouts in use - those that the
                                   unit closes) · bucket)              ``MemoryRows._buckets``
 (9) device-seconds      W·T - Σ_k idle_k ≤ amplification · single     ``Program._budgets``
(10) fidelity            Σ_k lost_k ≤ 1 - the floor                    ``Program._budgets``
(11) step time limit     T ≤ limit                                     ``Program._budgets``
(12) moved once          c_eστ ≥ y_eστ - Σ x of earlier units that     ``Variables._moves``
                         get the same tensors in that form, c ≥ 0

(4) and (5) with b, a, c of ``step_time.step_terms`` are the step under P3's order (Jayarajan et
al., arXiv 1905.03960; the closed form is ours, derived in docs/planner.md). (9) is DeepPool's limit
on amplification (Park et al., arXiv 2112.10065); its limit on each unit takes options out of (1)
(``budget.within_unit_limit``). What (6) and (10) let a plan choose, feature maps and sparse or
dropped gradients by unit, is LaySA's (Zhao et al., IEEE Access 2021) and layer dropping's (Lee et
al., Applied Sciences 10(24):8846, 2020), reconstructed from their abstracts. The options of (1) are
GHP's groups (Joo & Youn, IEEE Access 9:52601, 2021; the abstract) and DeepPool's narrower layouts.

The objective is T, or W·T - Σ_k idle_k. Of the y, which are not integer, none needs to be: once x
is, each edge has one pair left. Sums over k < j and k > j are running sums (``Variables.track``).
Times are in units of ``time_unit_s``, bytes in units of the limit.
"""

from collections.abc import Sequence

import numpy as np
import pulp

from ...cost.budget import energy_budget, gpu_seconds_limit, lost_energy
from ...cost.cost import CostModel
from ...cost.step_time import LINKS, Vector
from ...memory.rows import AT, ENTRY, SLICES, rows, seconds_of
from ...schema.options import Option
from ..choice import choice
from ..figures import EDGE_FIGURES
from ..option_table import OptionTable
from ..problem import Problem
from .memory_rows import MemoryRows, memory_classes
from .variables import Terms, Variables, summed

# The step of plain data parallelism is so many units of time: see [Note: Tolerances of HiGHS].
SCALE = 100.0


class Program(Variables):
    """The program of one option table. With ``excess`` memory may be exceeded, by a variable share;
    the limits on memory may be those of another model's goal (``limits_of``). Where nothing limits
    or asks for seconds it may be ``untimed``: without the rows of (4) and (5)."""

    def __init__(
        self,
        problem: Problem,
        table: OptionTable,
        *,
        excess: bool = False,
        limits_of: CostModel | None = None,
        untimed: bool = False,
    ) -> None:
        super().__init__(table)
        plain = choice(self.model, self.model.baseline, problem.schedule)
        self.time_unit_s = max(plain.step_s, 1e-9) / SCALE
        together = table.memory.updates_together
        self.rows = rows(
            self.model.micro_batches, problem.schedule, together=together,
            hosts=self.model.hosts_take_time,
        )  # fmt: skip
        self.step = self.new("T")
        if not untimed:
            self._step(waits_for_slices=problem.schedule == "priority")
        self.excess = self.new("v") if excess else None
        memory = MemoryRows(self, self.rows, self.excess)
        for i, each in enumerate(memory_classes(table, limits_of or self.model)):
            memory.add(i, each)
        self._budgets()

    # -- seconds -------------------------------------------------------------------------------

    def _step(self, *, waits_for_slices: bool) -> None:
        """T in units of time is at least every row of seconds."""
        figures = [u.figures / self.time_unit_s for u in self.table.listed]
        # The seconds of edges likewise; their bytes stay.
        scale = [1 / self.time_unit_s if f in ENTRY else 1.0 for f in EDGE_FIGURES]
        self.moves = [
            [p._replace(figures=p.figures * np.array(scale)) for p in row] for row in self.moves
        ]
        for total in seconds_of(self.rows.totals):
            serial = (self.form(k, self.rows.totals[total], own) for k, own in enumerate(figures))
            self._bound(summed(item for form in serial for item in form.items()))
        for link in range(self.rows.timed):
            sends = [u.figures[:, AT[f"exchange.{LINKS[link]}"]] for u in self.table.listed]
            # The terms of a link, or of a unit, that gradients do not use are never the largest.
            if not any(s.any() for s in sends):
                continue
            delay = {}
            if waits_for_slices:
                delay = self._slices(link, sends, [f[:, SLICES[link]] for f in figures])
            for j, row in enumerate(self.track(f"t{link}", self.rows, link, figures)):
                if sends[j].any():
                    self._bound(row | ({delay[j]: 1.0} if j in delay else {}))

    def _bound(self, row: Terms) -> None:
        self.at_most(row | {self.step: row.get(self.step, 0.0) - 1.0}, 0.0)

    def _slices(
        self, link: int, sends: Sequence[Vector], slices: Sequence[Vector]
    ) -> dict[int, pulp.LpVariable]:
        """For each unit j the longest slice that may be on the wire before its own go."""
        found, longest = {}, 0.0
        following: pulp.LpVariable | None = None  # the longest slice of the units after j
        # From the last unit back, so that one variable is enough for all units after another.
        for j in reversed(range(len(sends) - 1)):
            if slices[j + 1].any():
                wait = self.new(f"w{link}_{j}")
                own = summed(zip(self.x[j + 1], slices[j + 1], strict=True))
                self.at_most(own | {wait: -1.0}, 0.0)
                if following is not None:
                    self.at_most({following: 1.0, wait: -1.0}, 0.0)
                longest, following = max(longest, slices[j + 1].max()), wait
            if following is not None and sends[j].any():
                delay = found[j] = self.new(f"d{link}_{j}")
                # An option that sends nothing waits for nothing: it takes the longest off.
                idle = [x for x, s in zip(self.x[j], sends[j], strict=True) if not s]
                self.at_most(
                    {following: 1.0, delay: -1.0} | dict.fromkeys(idle, -float(longest)), 0.0
                )
        return found

    # -- limits --------------------------------------------------------------------------------

    def _budgets(self) -> None:
        """Device-seconds, fidelity, and the time that a step may take."""
        goal, limit = self.model.goal, gpu_seconds_limit(self.model)
        if limit < float("inf"):
            self.at_most(self.device_seconds(), limit / self.time_unit_s)
        if goal.undisturbed_limit_s is not None:
            self.at_most({self.step: 1.0}, goal.undisturbed_limit_s / self.time_unit_s)
        lost = self.lost()
        if lost:
            self.at_most(lost, energy_budget(self.model))

    def lost(self) -> Terms:
        return summed(
            (x, lost_energy(self.model, k, option))
            for k, row in enumerate(self.x)
            for x, option in zip(row, self.table.options[k], strict=True)
        )

    def device_seconds(self) -> Terms:
        """W·T less what is idle."""
        idle = summed(
            (x, -figure / self.time_unit_s)
            for row, unit in zip(self.x, self.table.listed, strict=True)
            for x, figure in zip(row, unit.figures[:, AT["idle"]], strict=True)
        )
        return idle | {self.step: float(self.model.world_size)}

    # -- answers -------------------------------------------------------------------------------

    @property
    def objective(self) -> Terms:
        """What is to be least, in units of ``time_unit_s``."""
        if self.model.goal.objective == "time":
            return {self.step: 1.0}
        return self.device_seconds()

    def within(self, most_s: float) -> None:
        """Only what is at most that good counts from now on."""
        if self.model.goal.objective == "time":
            self.step.upBound = most_s / self.time_unit_s
        else:
            self.at_most(self.device_seconds(), most_s / self.time_unit_s)

    def minimise(self, what: str) -> None:
        """Makes what a limit of the goal bounds the objective."""
        if what == "memory_limit_bytes":
            terms: Terms = {self.excess: 1000.0} if self.excess is not None else {}
        elif what == "amplification_limit":
            terms = self.device_seconds()
        else:
            terms = {self.step: 1.0}
        self.problem.setObjective(pulp.LpAffineExpression(terms))

    def simplest(self) -> None:
        """Makes the fewest changes of layout the objective, and then the least loss; a policy
        counts a little, so that none is chosen for nothing."""
        parts: list[tuple[pulp.LpVariable, float]] = [(v, 0.5 * c) for v, c in self.lost().items()]
        for edge, pairs in zip(self.table.edges, self.pairs, strict=True):
            source, target = (self.table.states[k] for k in (edge.source, edge.target))
            parts += [(p.variable, 1.0) for p in pairs if source[p.source] != target[p.target]]
        policies = sum(len(row) for row in self.x)
        for row, options in zip(self.x, self.table.options, strict=True):
            for x, option in zip(row, options, strict=True):
                parts.append((x, 0.4 / policies * (option[2:] != Option(option.layout)[2:])))
        self.problem.setObjective(pulp.LpAffineExpression(summed(parts)))
