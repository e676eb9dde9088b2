"""What a loss may use of a model besides its output: results that modules keep, and parameters.

The gradient that enters by the model's output is weighted there by the samples that this rank has;
what enters by an attribute of a module (``layer.aux_loss``) is weighted at that attribute. A
parameter that is divided over ranks has a part of its values only, which a loss must not take for
the whole: that is refused. What nobody exchanges is told of: gradients of a
parameter that is the loss's own, or that the model got after its plan, and those that the user has
taken by ``torch.autograd.grad`` and set.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.utils import _pytree as pytree  # torch has no public name for it
from torch.utils.weak import WeakIdKeyDictionary

from ..models.units.kept import empty_attributes, has_graph, kept_results
from ..planner.schema.errors import InputError
from .comm.steps import after_each_step, before_each_step, parameters_of
from .gradients.pending import PARAM_METADATA, PendingParam, resume, suspend
from .redistribution.lazy import LazyRedistributed, materialize

if TYPE_CHECKING:
    from .run import Run


class KeptResults:
    """The attributes in which a model's modules keep results, found in its first forward in
    training mode and in the first out of it: many keep a loss in training only. Those that were
    empty then are looked at in each forward."""

    def __init__(self) -> None:
        self._places: dict[tuple[nn.Module, str], None] = {}  # as a set that keeps its order
        self._empty: dict[tuple[nn.Module, str], None] = {}
        self._searched: set[bool] = set()
        self._old: dict[int, weakref.ref[Any]] = {}

    def begin(self, model: nn.Module) -> None:
        """Before a forward: what is there already is not its result."""
        if model.training not in self._searched:
            self._old = _weakly(kept_results(model, _is_result))

    def scale(self, model: nn.Module, scale: Callable[[Any], Any]) -> None:
        """After a forward: ``scale`` on what it has left in attributes."""
        if model.training not in self._searched:
            self._searched.add(model.training)
            self._places |= dict.fromkeys(kept_results(model, _is_result))
            self._empty |= dict.fromkeys(empty_attributes(model))
        filled = [at for at in self._empty if _holds_result(vars(at[0]).get(at[1]))]
        for at in filled:
            del self._empty[at]
        self._places |= dict.fromkeys(filled)
        if not self._places:
            return

        def scaled(leaf: Any) -> Any:
            if not _is_result(leaf):
                return leaf
            # What was not made anew has been weighted already.
            known = self._old.get(id(leaf))
            return leaf if known and known() is leaf else scale(materialize(leaf))

        done: set[int] = set()
        for module, name in self._places:
            attributes = vars(module)
            if name in attributes:
                # Past ``__setattr__``, which some modules have of their own.
                attributes[name] = _changed(attributes[name], scaled, done)
        self._old = _weakly(self._places)


def _changed(value: Any, change: Callable[[Any], Any], done: set[int]) -> Any:
    """``value`` with its leaves changed. Lists and dicts stay the same objects, which other modules
    or the training loop may hold as well; those that are ``done``, by identity, are not changed
    again."""

    def inside(one: Any) -> Any:
        if not isinstance(one, _SHARED):
            return change(one)
        if id(one) not in done:
            done.add(id(one))
            for key, held in enumerate(one) if isinstance(one, list) else list(one.items()):
                one[key] = _changed(held, change, done)
        return one

    return pytree.tree_map(inside, value, is_leaf=lambda one: isinstance(one, _SHARED))


_SHARED = (list, dict)


def _is_result(leaf: object) -> bool:
    return isinstance(leaf, LazyRedistributed) or has_graph(leaf)


def _holds_result(value: object) -> bool:
    if not isinstance(value, Tensor | list | tuple | dict):
        return False
    return any(map(_is_result, pytree.tree_leaves(value)))


def _weakly(places: Iterable[tuple[nn.Module, str]]) -> dict[int, weakref.ref[Any]]:
    """The tensors there, by identity, which means nothing once they are gone."""
    leaves = pytree.tree_leaves([vars(module).get(name) for module, name in places])
    return {id(leaf): weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


class _GuardedParam(PendingParam):
    """Mixed into the class of a divided parameter between a forward and its backward."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        if func in PARAM_METADATA or not torch.is_grad_enabled():
            return made
        if any(isinstance(leaf, Tensor) and leaf.grad_fn for leaf in pytree.tree_leaves(made)):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, cls):
                    _refuse(leaf)
        return made


_NAME = "_meshwright_guarded"


def _refuse(parameter: Any) -> None:
    raise InputError(
        f"the loss uses parameter {parameter.__dict__[_NAME]!r}, which is divided over ranks or "
        "not on all of them, so each has a part of it only: let the optimizer decay weights "
        "(weight_decay), or keep the parameter's unit whole (--forbid with its name and style, "
        "such as 'fc1=column', or a pin of the Goal with never_styles); where it is but looked at, "
        "do so under torch.no_grad()"
    )


class Guard:
    """Watches the divided parameters between each forward and its backward: a loss may begin to use
    them at any step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._armed = dict(parameters), False

    def arm(self) -> None:
        """After a forward whose backward will follow."""
        self._armed = bool(self._parameters)
        for name, parameter in self._parameters.items():
            # What waits for something else is read in its own way.
            if not isinstance(parameter, PendingParam):
                parameter.__dict__[_NAME] = name
                suspend(parameter, partial(resume, parameter), _GuardedParam)

    def disarm(self) -> None:
        """Once a backward has begun, when the loss is known, and before the next forward."""
        if self._armed:
            self._armed = False
            for parameter in self._parameters.values():
                if isinstance(parameter, _GuardedParam):
                    resume(parameter)


# The hooks on parameters that a plan was not applied to (yet), while these have had no gradient.
_watched: Any = WeakIdKeyDictionary()


def watch_others(model: nn.Module, optimizer: Optimizer | None, *, tell: bool) -> None:
    """Where one of its parameters that are not the model's gets a gradient, ``tell`` says whether
    this rank warns. Another model's plan may come later: its parameters are let alone then."""
    own = set(model.parameters())
    for parameter in own:
        if parameter in _watched:
            _watched.pop(parameter).remove()
    others = [p for p in parameters_of(optimizer) - own if p.requires_grad]

    def warn(_: Tensor) -> None:
        left = [p for p in others if p in _watched]
        for parameter in left:
            _watched.pop(parameter).remove()
        if tell:
            shapes = ", ".join(sorted(str(list(p.shape)) for p in left))
            warnings.warn(
                f"the {type(optimizer).__name__} updates parameters that are not of the model that "
                f"has the plan (of a loss, say; their shapes: {shapes}), so nobody exchanges their "
                "gradients and each rank trains its own: make one module of the model and what "
                "has them, whose forward returns the loss, and give that to auto_parallelize",
                stacklevel=2,
            )

    for other in others:
        if other not in _watched:
            leaf: Any = other  # torch has not typed its hooks
            _watched[other] = leaf.register_post_accumulate_grad_hook(warn)


class _Registrations:
    """How often any module has been given a parameter or a module, since somebody asks."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False

    def begin(self) -> None:
        # Once, and for good: torch cannot bear hooks to go while it calls them, as those would that
        # end with a model, which Python's collector may end at any moment.
        if not self._counting:
            self._counting = True
            register_module_parameter_registration_hook(self._counted)
            register_module_module_registration_hook(self._counted)

    def _counted(self, *_: Any) -> None:
        self.count += 1


_registrations = _Registrations()


class LateParameters:
    """Notices parameters that a model gets when its plan was applied already."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        _registrations.begin()
        self._known, self._count = set(parameters), _registrations.count
        self._frozen: list[tuple[str, nn.Parameter]] = []
        """New ones that were not trained when they were seen."""

    def check(self, model: nn.Module) -> None:
        """Raises ``InputError`` where the model has a parameter that is new, or has replaced one,
        and is trained."""
        # All only where something was registered since: to look at them takes its time.
        if self._count != _registrations.count:
            self._count = _registrations.count
            new = [(n, p) for n, p in model.named_parameters() if p not in self._known]
            self._frozen = new
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InputError(
                    f"parameter {name!r} came into the model after its plan was applied, which "
                    "exchanges no gradient of it: give the model all of its parameters before "
                    "auto_parallelize, and load values without load_state_dict(assign=True)"
                )


def check_steps(
    model: nn.Module, optimizer: Optimizer | None, reference: weakref.ref[Run], *, tell: bool
) -> None:
    """From now on no optimizer updates the model's parameters while the backward runs whose
    gradients ranks will average, and what ``optimizer`` gets to update besides is told of as by
    ``watch_others``. The run is referred to weakly: an optimizer may be there for longer."""
    model_of = weakref.ref(model)
    given = weakref.ref(optimizer) if optimizer is not None else lambda: None
    groups = len(optimizer.param_groups) if optimizer is not None else 0

    def begins(used: Optimizer) -> None:
        nonlocal groups
        run, planned = reference(), model_of()
        if run is None or planned is None:
            return
        if run.gradients.averages_now:
            raise InputError(
                f"this {type(used).__name__} steps while backward runs, before its gradients are "
                "averaged over ranks, whose parameters would become different: step after "
                "backward, and give the optimizer to auto_parallelize, whose plan may then update "
                "parameters in backward by itself (early release)"
            )
        # After a forward without a backward, as of a look at the accuracy before the step.
        run.guard.disarm()
        if used is given() and len(used.param_groups) > groups:
            groups = len(used.param_groups)
            watch_others(planned, used, tell=tell)

    before_each_step(model.parameters(), optimizer, begins)


def tell_of_unexchanged_gradients(optimizer: Optimizer, reference: weakref.ref[Run]) -> None:
    """Warns, once, of a step on gradients that nobody has exchanged: all backwards since the last
    step were inside ``no_sync``, or ``torch.autograd.grad`` has gone through the model since the
    last backward, and parameters have some. The run is referred to weakly: an optimizer may be
    there for longer than its model."""
    warned = False

    def stepped(used: Optimizer) -> None:
        nonlocal warned
        run = reference()
        if run is None:
            return
        how = None
        if run.gradients.unexchanged:
            how = (
                "that were left unexchanged by no_sync: those are of this rank's samples only, and "
                "ranks come to have different parameters: make the last backward before each step "
                "outside of no_sync"
            )
        elif run.gradients.taken:
            how = (
                "that no backward has made since the last one, "
                "while torch.autograd.grad has taken some: those are of this rank's samples only, "
                "and ranks come to have different parameters: call loss.backward(), or average "
                "what you set (torch.distributed.all_reduce), weighted by the samples of each rank"
            )
        if how and not warned and any(p.grad is not None for p in parameters_of(used)):
            warned = True
            warnings.warn(f"the optimizer's step used gradients {how}", stacklevel=2)
        run.gradients.taken = False

    after_each_step((), optimizer, stepped)
