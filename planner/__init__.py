"""Plans how to train a model on a cluster. Pure: no torch, no files beyond JSON, no processes."""

from .cost.cost import CostModel
from .cost.placement import place
from .cost.step_time import barrier_step, priority_bound, priority_step
from .explain.compare import Comparison, compare
from .explain.why import Explanation, explain
from .schema.capability import EVERYTHING, PLAIN, Capability
from .schema.cluster import Cluster, CollectiveCurve, Device, Interference, Level, Node
from .schema.curve import Curve
from .schema.errors import InfeasibleError, InputError, MeshwrightError, RunError
from .schema.goal import Goal
from .schema.layer_times import profile_of_table
from .schema.layout import Layout, data_parallel, lattice
from .schema.options import Decisions, Option
from .schema.plan import Plan, Prediction, Provenance, UnitPlan
from .schema.profile import EdgeProfile, ModelProfile, ShareProfile, SplitProfile, UnitProfile
from .schema.record import decode, encode, fingerprint, load, save
from .solve.evaluate import Evaluation, decisions_of, evaluate, evaluation, make_plan
from .solve.problem import Infeasibility, Problem, Result
from .solve.solver import Solver, solve, solvers

__all__ = [
    "EVERYTHING",
    "PLAIN",
    "Capability",
    "Cluster",
    "CollectiveCurve",
    "Comparison",
    "CostModel",
    "Curve",
    "Decisions",
    "Device",
    "EdgeProfile",
    "Evaluation",
    "Explanation",
    "Goal",
    "Infeasibility",
    "InfeasibleError",
    "InputError",
    "Interference",
    "Layout",
    "Level",
    "MeshwrightError",
    "ModelProfile",
    "Node",
    "Option",
    "Plan",
    "Prediction",
    "Problem",
    "Provenance",
    "Result",
    "RunError",
    "ShareProfile",
    "Solver",
    "SplitProfile",
    "UnitPlan",
    "UnitProfile",
    "barrier_step",
    "compare",
    "data_parallel",
    "decisions_of",
    "decode",
    "encode",
    "evaluate",
    "evaluation",
    "explain",
    "fingerprint",
    "lattice",
    "load",
    "make_plan",
    "place",
    "priority_bound",
    "priority_step",
    "profile_of_table",
    "save",
    "solve",
    "solvers",
]
