"""``mw.adapt``: a framework's object that leaves models with a plan to their plan."""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

from ...planner.schema.errors import InputError

FrameworkT = TypeVar("FrameworkT")

# By the top of the module's name and the class's own: nothing is imported that is not in use.
# Lightning's Fabric comes as a package of its own and as a part of Lightning's.
_ADAPTED = {
    ("transformers", "Trainer"): "trainer:adapt_trainer",
    ("accelerate", "Accelerator"): "accelerator:adapt_accelerator",
    ("lightning_fabric", "ModelParallelStrategy"): "fabric:adapt_strategy",
    ("lightning.fabric", "ModelParallelStrategy"): "fabric:adapt_strategy",
}


def adapt(framework: FrameworkT) -> FrameworkT:
    """Makes a framework's object train models that a plan was applied to, and returns it.

    ``framework`` is a ``Trainer`` of transformers, an ``Accelerator`` or the
    ``ModelParallelStrategy`` of Lightning Fabric, also one of a class derived from these. It stays
    the same object. It then does not wrap such a model in DistributedDataParallel, leaves gradients
    of accumulated micro-batches unexchanged until the last, and its checkpoints hold the whole
    model and the optimizer's whole state, as one process has them. Raises ``InputError`` for
    anything else, and for settings under which a plan cannot be trained.
    """
    for cls in type(framework).__mro__:
        for (package, name), home in _ADAPTED.items():
            if cls.__name__ == name and f"{cls.__module__}.".startswith(f"{package}."):
                module, _, function = home.partition(":")
                work: Any = getattr(importlib.import_module(f"{__package__}.{module}"), function)
                work(framework)
                return framework
    raise InputError(
        f"a {type(framework).__name__} cannot be adapted: give a Trainer of transformers, an "
        "Accelerator, or a ModelParallelStrategy of Lightning Fabric"
    )
