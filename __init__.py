"""Meshwright decides how to train a PyTorch model on the machines at hand, and runs it so.

Public names load when they are first used, so that ``import meshwright.planner`` never loads torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import (
        advise,
        auto_parallelize,
        calibrate,
        compare,
        compare_losses,
        describe_cluster,
        explain,
        front,
        launch,
        memory_timeline,
        multiplex,
        plan,
        probe,
        profile,
        report,
        sizes,
        trace,
        verify,
    )
    from .cli.demonstration import demo
    from .executor.checkpoint.checkpoint import Checkpoint, checkpoint
    from .executor.checkpoint.weights import export, load_model, save_model
    from .executor.frameworks.adapt import adapt
    from .executor.gradients.feedback import Lossy
    from .executor.launch.background import Background
    from .executor.launch.hosts.settings import Hosts
    from .executor.launch.restarts import Restarts
    from .executor.launch.training_progress import TrainingProgress, progress
    from .executor.micro import join, micro_batches
    from .executor.parallel import (
        agreed_state_dict,
        exchange_state_dict,
        full_optimizer_state_dict,
        full_state_dict,
        load_exchange_state_dict,
        load_full_optimizer_state_dict,
        loss_weight,
    )
    from .models.workload import Batch, Workload
    from .planner.schema.cluster import Cluster
    from .planner.schema.errors import InfeasibleError, InputError, MeshwrightError, RunError
    from .planner.schema.goal import Goal
    from .planner.schema.plan import Plan
    from .planner.schema.profile import ModelProfile
    from .planner.schema.record import load, save
    from .planner.schema.report import RunReport

__version__ = "0.1.0"

_HOMES = {
    ".api": (
        "advise auto_parallelize calibrate compare compare_losses describe_cluster explain "
        "front launch memory_timeline multiplex plan probe profile report sizes trace verify"
    ),
    ".executor.launch.background": "Background",
    ".executor.launch.hosts.settings": "Hosts",
    ".executor.launch.restarts": "Restarts",
    ".executor.launch.training_progress": "TrainingProgress progress",
    ".cli.demonstration": "demo",
    ".executor.checkpoint.checkpoint": "Checkpoint checkpoint",
    ".executor.checkpoint.weights": "export load_model save_model",
    ".executor.frameworks.adapt": "adapt",
    ".executor.gradients.feedback": "Lossy",
    ".executor.micro": "join micro_batches",
    ".executor.parallel": (
        "agreed_state_dict exchange_state_dict full_optimizer_state_dict full_state_dict "
        "load_exchange_state_dict load_full_optimizer_state_dict loss_weight"
    ),
    ".planner.schema.cluster": "Cluster",
    ".planner.schema.errors": "InfeasibleError InputError MeshwrightError RunError",
    ".planner.schema.goal": "Goal",
    ".planner.schema.record": "load save",
    ".planner.schema.report": "RunReport",
    ".planner.schema.plan": "Plan",
    ".planner.schema.profile": "ModelProfile",
    ".models.workload": "Batch Workload",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "Background",
    "Batch",
    "Checkpoint",
    "Cluster",
    "Goal",
    "Hosts",
    "InfeasibleError",
    "InputError",
    "Lossy",
    "MeshwrightError",
    "ModelProfile",
    "Plan",
    "Restarts",
    "RunError",
    "RunReport",
    "TrainingProgress",
    "Workload",
    "adapt",
    "advise",
    "agreed_state_dict",
    "auto_parallelize",
    "calibrate",
    "checkpoint",
    "compare",
    "compare_losses",
    "demo",
    "describe_cluster",
    "exchange_state_dict",
    "explain",
    "export",
    "front",
    "full_optimizer_state_dict",
    "full_state_dict",
    "join",
    "launch",
    "load",
    "load_exchange_state_dict",
    "load_full_optimizer_state_dict",
    "load_model",
    "loss_weight",
    "memory_timeline",
    "micro_batches",
    "multiplex",
    "plan",
    "probe",
    "profile",
    "progress",
    "report",
    "save",
    "save_model",
    "sizes",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home, __name__), name)
    globals()[name] = value  # a second look-up no longer comes here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
