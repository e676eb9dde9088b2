"""Plans how to train a model on a cluster. Pure: no torch, no files beyond JSON, no processes."""

from .capability import EVERYTHING, PLAIN, Capability
from .cluster import Cluster, CollectiveCurve, Device, Interference, Level, Node
from .compare import Comparison, compare
from .cost import CostModel
from .curve import Curve
from .errors import InfeasibleError, InputError, MeshwrightError, RunError
from .evaluate import Evaluation, decisions_of, evaluate, evaluation, make_plan
from .explain import Explanation, explain
from .goal import Goal
from .layout import Layout, data_parallel, lattice
from .noun import decode, encode, fingerprint, load, save
from .options import Decisions, Option
from .placement import place
from .plan import Plan, Prediction, Provenance, UnitPlan
from .problem import Infeasibility, Problem, Result
from .profile import EdgeProfile, ModelProfile, ShareProfile, SplitProfile, UnitProfile
from .solver import Solver, solve, solvers
from .step import barrier_step, priority_bound, priority_step
from .tables import profile_of_table

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
