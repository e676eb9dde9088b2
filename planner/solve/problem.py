"""What is asked of a planner, and what it answers: the problem, the result, why nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Literal, NamedTuple

import msgspec

from ..cost.cost import BUCKET_BYTES, CostModel
from ..cost.placement import place
from ..schema.capability import PLAIN, Capability
from ..schema.cluster import Cluster
from ..schema.errors import InfeasibleError
from ..schema.goal import Goal
from ..schema.layout import lattice
from ..schema.options import Decisions
from ..schema.plan import Plan
from ..schema.profile import ModelProfile
from ..simulate.schedule import ScheduleName
from .local_batches import with_balanced_batches

ResultStatus = Literal["optimal", "feasible", "heuristic", "infeasible"]
Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is over (0 to 1)."""
INTEGER_PAIRS = 20_000
"""Pairs of states along all edges up to which an integer program is taken to be quick."""


@dataclass(frozen=True)
class Problem:
    """What to plan. ``capability`` bounds the search; ``executor`` is what can be run, where the
    search is allowed more (then the plan is hypothetical). Without ``placement`` one is chosen.
    With ``any_schedule`` the better one is chosen, else ``schedule`` is given. ``shard_if_needed``
    shards the exchange only where nothing fits without, or that is clearly quicker. Among plans
    whose objective is within ``tie_tolerance`` of the best (a share) the simpler is taken. Where
    nothing fits, the answer ``explains`` why, which takes seconds. With ``even`` all ranks get
    equal shares of the batch, however fast they are. A search that has taken long may end with a
    plan that is at most the share ``good_enough`` from the best, and one may find nothing where no
    plan has an objective of at most ``wanted_s``."""

    profile: ModelProfile
    cluster: Cluster
    goal: Goal
    capability: Capability = PLAIN
    executor: Capability | None = None
    placement: tuple[int, ...] | None = None
    schedule: ScheduleName = "barrier"
    any_schedule: bool = False
    shard_if_needed: bool = False
    message_bytes: int = BUCKET_BYTES
    tie_tolerance: float = 0.01
    explains: bool = True
    even: bool = False
    good_enough: float = 0.0
    wanted_s: float = inf
    # A problem is the same whoever is told how far it is.
    progress: Progress | None = field(default=None, compare=False)

    @property
    def slice_bytes(self) -> tuple[int, ...]:
        """The sizes of slices or buckets that may be chosen from."""
        chosen = self.goal.slice_bytes if self.schedule == "priority" else ()
        return tuple(dict.fromkeys(chosen)) or (self.message_bytes,)

    def placed(self) -> Problem:
        """The problem with a placement chosen, if it left that open."""
        if self.placement is not None:
            return self
        # Which hosts a burst takes matters where their links differ: it takes the first positions.
        bursts = self.capability.idle_positions and bool(self.cluster.pair_bytes_per_s)
        world = self.cluster.world_size
        layouts = [y for y in lattice(world, bursts=bursts) if y.size == world or y.groups == 1]
        return replace(self, placement=place(self.cluster, layouts))

    def cost_model(
        self,
        micro_batches: int = 1,
        message_bytes: int | None = None,
        placement: tuple[int, ...] | None = None,
    ) -> CostModel:
        """The costs for one number of micro-batches and one size of slices or buckets; what is not
        given is the problem's own. Unequal devices share the batch out by their speed."""
        made = CostModel(
            self.profile,
            self.cluster,
            self.goal,
            micro_batches=micro_batches,
            placement=placement or self.placement,
            message_bytes=self.message_bytes if message_bytes is None else message_bytes,
            sliced=self.schedule == "priority",
        )
        return made if self.even else with_balanced_batches(made, self.schedule)

    def cost_models(self) -> Iterator[CostModel]:
        """A cost model for each number of micro-batches and each size of slices or buckets."""
        # The same ones whenever they are asked for: they remember what they have worked out.
        counts = filter(self.divides_into, sorted(set(self.goal.micro_batches)))
        for key in product(counts, self.slice_bytes):
            if key not in self._models:
                self._models[key] = self.cost_model(*key)
            yield self._models[key]

    @cached_property
    def _models(self) -> dict[tuple[int, int], CostModel]:
        return {}

    def divides_into(self, micro_batches: int) -> bool:
        """Whether the batch can be cut into so many micro-batches."""
        enough = self.goal.batch >= micro_batches * self.cluster.world_size
        return micro_batches == 1 or (enough and self.capability.micro_batches)

    @property
    def uncut(self) -> str:
        """Why the batch cannot be cut into any number of micro-batches that is allowed; empty where
        it can."""
        goal, world = self.goal, self.cluster.world_size
        if any(m == 1 or goal.batch >= world * m for m in goal.micro_batches):
            return ""
        most = max(goal.batch // world, 1)
        counts = " or ".join(map(str, goal.micro_batches))
        return (
            f"a batch of {goal.batch} on {world} ranks cannot be cut into {counts} micro-batches: "
            f"allow at most {most} (--micro-batches {most}, micro_batches=({most},))"
        )

    def report(self, what: str, share: float) -> None:
        """Tells the caller how far the search is."""
        if self.progress is not None:
            self.progress(what, share)


class Relaxation(NamedTuple):
    """A change of the goal that makes a problem feasible, checked by solving it again. ``proved``
    says that nothing less would do."""

    what: Literal[
        "memory_limit_bytes",
        "batch",
        "micro_batches",
        "amplification_limit",
        "unit_amplification_limit",
        "time_limit_s",
    ]
    value: float
    sentence: str
    proved: bool = False


class Enlargement(NamedTuple):
    """A cluster with more nodes of the same kind on which a plan keeps all limits, checked by
    planning for it, and for one node fewer in vain unless the sentence says that it is enough."""

    ranks: int
    nodes: int
    sentence: str


LIMITS = {
    "amplification_limit": "the limit on device-seconds (--amplification-limit, "
    "Goal.amplification_limit)",
    "unit_amplification_limit": "the limit on a unit's device-seconds "
    "(--unit-amplification-limit, Goal.unit_amplification_limit)",
    "time_limit_s": "the limit on a step's time (--step-limit, Goal.time_limit_s)",
}
"""What sentences call the limits of a goal that are not memory's."""
UNMEASURED = "the time of one device"
"""In place of a limit where one device takes no time, of which device-seconds are a multiple."""


class Infeasibility(NamedTuple):
    """Why no plan fits: the tightest rank and unit of the plan that comes closest, the bytes that
    it needs there (most of them of the class ``kind``) and that are available, and the smallest
    changes found that help: of the goal (``relaxations``), of the cluster (``enlargement``).
    ``limit`` is what cannot be kept: a field of the goal, memory's unless said otherwise."""

    rank: int
    unit: str
    needed_bytes: int
    available_bytes: int
    relaxations: tuple[Relaxation, ...] = ()
    limit: str = "memory_limit_bytes"
    enlargement: Enlargement | None = None
    kind: str = ""

    @property
    def sentence(self) -> str:
        """All of it for a person."""
        larger = [self.enlargement.sentence] if self.enlargement else []
        help_ = "; or ".join([*(r.sentence for r in self.relaxations), *larger])
        if self.limit == "pins":
            return f"the pins leave unit {self.unit!r} nothing that it can be: lift one of them"
        if self.limit == UNMEASURED:
            return (
                f"no plan keeps {LIMITS['amplification_limit']}, a multiple of what one device "
                "takes, which is 0 s by the profile: leave the limit out, or profile the model anew"
            )
        if self.limit != "memory_limit_bytes":
            what = LIMITS.get(self.limit, self.limit)
            return f"no plan keeps {what}: " + (help_ or "allow more, or lift another limit")
        most = f", most of it {self.kind}" if self.kind else ""
        needed, available = (
            f"{count:,} bytes ({count / 2**20:,.1f} MiB)"
            for count in (self.needed_bytes, self.available_bytes)
        )
        return (
            f"no plan found fits in memory: the closest needs {needed} on rank {self.rank} "
            f"(at unit {self.unit!r}{most}) and {available} are available: "
            + (help_ or "use devices with more memory, more of them, or a smaller model")
        )


class Result(NamedTuple):
    """What a solver found: ``objective_s`` is the value of ``plan`` by the formulas that solvers
    work with (seconds of a step, or device-seconds), ``bound_s`` what no plan can beat (None where
    nothing was proved), ``gap`` = 1 - bound / objective, ``seconds`` what all searching took, which
    ``solver.solve`` tells. What the step is predicted to take stands in the plan: there it is
    simulated as it is run."""

    solver: str
    status: ResultStatus
    objective_s: float | None = None
    bound_s: float | None = None
    gap: float | None = None
    plan: Plan | None = None
    decisions: Decisions | None = None
    seconds: float = 0.0
    infeasible: Infeasibility | None = None
    reason: str = ""

    @classmethod
    def without_plan(cls, solver: str, why: Infeasibility | None, reason: str = "") -> Result:
        """The answer of a solver that found no plan."""
        return cls(solver, "infeasible", infeasible=why, reason=reason)

    def took(self, seconds: float) -> Result:
        """The same, after all searching has taken so long; the plan tells it too."""
        plan = self.plan
        if plan is not None:
            provenance = msgspec.structs.replace(plan.provenance, solve_s=seconds)
            plan = msgspec.structs.replace(plan, provenance=provenance)
        return self._replace(plan=plan, seconds=seconds)

    def checked(self) -> Plan:
        """The plan; raises ``InfeasibleError`` where there is none."""
        if self.plan is None:
            assert self.infeasible is not None
            raise InfeasibleError(self.infeasible.sentence)
        return self.plan


def state_pairs(problem: Problem) -> int:
    """About how many pairs of layouts and styles the integer program would have."""
    bursts = problem.capability.idle_positions
    world, complete = problem.cluster.world_size, problem.goal.all_layouts
    divides = [y.degree > 1 for y in lattice(world, complete=complete, bursts=bursts)]
    whole, divided = divides.count(False), divides.count(True)
    # Memory and exchange policies are no states: they change nothing of what an edge moves.
    states = {
        unit.name: 1 if unit.fixed else whole + len(unit.splits) * divided
        for unit in problem.profile.units
    }
    return sum(states[e.source] * states[e.target] for e in problem.profile.edges)
