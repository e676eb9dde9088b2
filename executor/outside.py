"""What a loss may use of a model besides its output: results that modules keep, and parameters.

The gradient that enters by the model's output is weighted there by the samples that this rank has;
what enters by an attribute of a module (``layer.aux_loss``) is weighted at that attribute. A
parameter that is divided over ranks has a part of its values only, which a loss must not take for
the whole: it is refused at the first step.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..models.units.kept import has_graph, kept_results
from ..planner.schema.errors import InputError
from .gradients.pending import PARAM_METADATA, PendingParam, resume, suspend
from .redistribution.lazy import LazyRedistributed, materialize


class KeptResults:
    """The attributes in which a model's modules keep results, found in its first forward."""

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str]] | None = None
        self._old: dict[int, weakref.ref[Any]] = {}

    def begin(self, model: nn.Module) -> None:
        """Before a forward: what is there already is not its result."""
        if self._places is None:
            self._old = _weakly(list(kept_results(model, _is_result)))

    def scale(self, model: nn.Module, scale: Callable[[Any], Any]) -> None:
        """After a forward: ``scale`` on what it has left in attributes."""
        if self._places is None:
            self._places = list(kept_results(model, _is_result))
        if not self._places:
            return

        def scaled(leaf: Any) -> Any:
            if not _is_result(leaf):
                return leaf
            # What was not made anew has been weighted already.
            known = self._old.get(id(leaf))
            return leaf if known and known() is leaf else scale(materialize(leaf))

        for module, name in self._places:
            attributes = vars(module)
            if name in attributes:
                # Past ``__setattr__``, which some modules have of their own.
                attributes[name] = pytree.tree_map(scaled, attributes[name])
        self._old = _weakly(self._places)


def _is_result(leaf: object) -> bool:
    return isinstance(leaf, LazyRedistributed) or has_graph(leaf)


def _weakly(places: list[tuple[nn.Module, str]]) -> dict[int, weakref.ref[Any]]:
    """The tensors there, by identity, which means nothing once they are gone."""
    leaves = pytree.tree_leaves([vars(module).get(name) for module, name in places])
    return {id(leaf): weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)}


class _GuardedParam(PendingParam):
    """Mixed into the class of a divided parameter between the first forward and its backward."""

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
        f"the loss uses parameter {parameter.__dict__[_NAME]!r}, which is divided over ranks, so "
        "each has a part of it only: let the optimizer decay weights (weight_decay), or keep the "
        "parameter's unit whole (--forbid with its name and style, such as 'fc1=column')"
    )


class Guard:
    """Watches the divided parameters between the first forward and its backward."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._armed, self._over = dict(parameters), False, not parameters

    def arm(self) -> None:
        """After a forward whose backward will follow."""
        if self._over:
            return
        self._armed = True
        for name, parameter in self._parameters.items():
            # What waits for something else is read in its own way.
            if not isinstance(parameter, PendingParam):
                parameter.__dict__[_NAME] = name
                suspend(parameter, partial(resume, parameter), _GuardedParam)

    def disarm(self, *, over: bool) -> None:
        """Before the next forward; ``over`` once a backward has begun: the loss is known then."""
        self._over = self._over or over
        if self._armed:
            self._armed = False
            for parameter in self._parameters.values():
                if isinstance(parameter, _GuardedParam):
                    resume(parameter)
