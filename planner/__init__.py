"""Plans how to train a model on a cluster. Pure: no torch, no files beyond JSON, no processes."""

from .answers.compare import Comparison, compare
from .answers.explain import Explanation, explain
from .costs.cost import CostModel
from .costs.placement import place
from .costs.step import barrier_step, priority_bound, priority_step
from .evaluation.evaluate import Evaluation, decisions_of, evaluate, evaluation, make_plan
from .evaluation.problem import Infeasibility, Problem, Result
from .nouns.capability import EVERYTHING, PLAIN, Capability
from .nouns.cluster import Cluster, CollectiveCurve, Device, Interference, Level, Node
from .nouns.curve import Curve
from .nouns.errors import InfeasibleError, InputError, MeshwrightError, RunError
from .nouns.goal import Goal
from .nouns.layout import Layout, data_parallel, lattice
from .nouns.noun import decode, encode, fingerprint, load, save
from .nouns.options import Decisions, Option
from .nouns.plan import Plan, Prediction, Provenance, UnitPlan
from .nouns.profile import EdgeProfile, ModelProfile, ShareProfile, SplitProfile, UnitProfile
from .nouns.tables import profile_of_table
from .solver import Solver, solve, solvers

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
