"""Compiled models under a plan: where graphs end. See [Note: Compiled models] in
models/compiled.py."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..models.compiled import (
    Compilation,
    CompiledRegions,
    Prepare,
    Uncompiled,
    ancestors,
    compilation_of,
    is_compiled_anew,
    note,
)
from ..models.workload import device_of
from ..planner.schema.errors import InputError
from ..planner.schema.layout import data_parallel
from ..planner.schema.plan import Plan
from .gradients.pending import PendingParam
from .redistribution.lazy import materialize
from .run import Run


def check_compiled(model: nn.Module, plan: Plan) -> None:
    """Raises ``InputError`` for a model that is compiled in a way that ranks cannot train."""
    found = [how for how in map(compilation_of, model.modules()) if how is not None]
    if not found or plan.world_size == 1:
        return
    if device_of(model).type == "cuda" and any(how.cuda_graphs for how in found):
        raise InputError(
            "the model is compiled with CUDA graphs, whose gradients lie in memory that the next "
            "step writes while ranks still exchange them: compile with mode='default' or "
            "'max-autotune-no-cudagraphs'"
        )
    if torch._dynamo.config.compiled_autograd:
        raise InputError(
            "the model is compiled and torch._dynamo.config.compiled_autograd is set, which traces "
            "the hooks that exchange gradients: set it to False"
        )


def compile_regions(model: nn.Module, run: Run) -> None:
    """Compiles what of the model its user has compiled, in parts where the plan has something to do
    inside. Call it when all that the plan changes in modules has been changed."""
    if run.compiled is not None:
        run.compiled.remove()

    def prepare(module: nn.Module) -> Prepare:
        parameters = tuple(module.parameters())

        def ready(args: Any, kwargs: Any) -> tuple[Any, Any]:
            # Torch would trace what makes them wait.
            for parameter in parameters:
                if isinstance(parameter, PendingParam):
                    parameter._finish_for(list(parameters))
            return materialize((args, kwargs)) if run.divided else (args, kwargs)

        return ready

    run.modules = tuple(model.modules())
    run.compiled = CompiledRegions(model, _broken(model, run.plan), prepare).install()
    for module in run.compiled.modules:
        run.regions.tell_as_one(module)
    # Compiled code may give one tensor as the gradient of several parameters.
    run.kernels.eager = not len(run.compiled)


def take_again(model: nn.Module, run: Run, callback: Any) -> None:
    """Takes over what the user has compiled since the plan was applied, before a forward.
    ``callback`` is torch's where the model itself was called through ``torch.compile(model)``."""
    new = callable(callback) and compilation_of(model) is None
    if new:
        # All that is known of ``dynamic`` here is how torch has set itself for the call.
        static = torch._dynamo.config.assume_static_by_default
        either = torch._dynamo.config.automatic_dynamic_shapes
        note(model, Compilation.by(callback, None if static and either else not static))
    if new or is_compiled_anew(run.modules):
        Uncompiled(model)
        check_compiled(model, run.plan)
        compile_regions(model, run)


def _broken(model: nn.Module, plan: Plan) -> set[str]:
    """The modules that cannot be one graph, by name."""
    return ancestors(_borders(plan)) | set(_all_at_once(model, plan))


def _borders(plan: Plan) -> Iterator[str]:
    """The modules at whose ends the plan has something to do."""
    for unit in plan.units:
        if unit.memory != "keep":
            yield from unit.segment or unit.modules
        moved = unit.layout != data_parallel(plan.world_size)
        # Fully sharded ones are unsharded one after another.
        if moved or unit.exchange == "fully_sharded":
            yield from unit.modules


def _all_at_once(model: nn.Module, plan: Plan) -> Iterator[str]:
    """The modules whose gradients would leave together at the end, when no backward is left for
    them to hide under: with most of what is trained, and more than leaves in one message anyway."""
    if plan.world_size == 1:
        return
    whole = _trained_bytes(model)
    for path in ancestors(path for unit in plan.units for path in unit.modules):
        own = _trained_bytes(model.get_submodule(path))
        if own > max(plan.message_bytes, whole / 2):
            yield path


def _trained_bytes(module: nn.Module) -> int:
    sizes = (p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return sum(sizes)
