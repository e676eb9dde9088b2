"""What a model gains when a plan is applied to it, and the functions that take such a model."""

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame  # torch has no public name for it
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..models.compiled import CompiledForward, not_traced, unwrapped
from ..planner.schema.errors import InputError
from .compiled import take_again
from .forward import Weight, unscale_inputs
from .gradients.dropping import Dropping
from .gradients.feedback import check_held, kinds_held
from .gradients.reshard import whole_chunks
from .optimizer.state import gather_optimizer_state, scatter_optimizer_state
from .redistribution.shards import gather_state
from .run import Run

ModelT = TypeVar("ModelT", bound=nn.Module)

_RUN = "_meshwright_run"
# By parameter, the run that exchanges its gradients; weak, too.
_runs_of: Any = WeakIdKeyDictionary()
# By optimizer, the run of the model that it was given with.
_runs_of_optimizers: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Run]] = (
    weakref.WeakKeyDictionary()
)
# The run whose model was called last, for ``loss_weight``. Weak: it ends with its model.
_latest: weakref.ref[Run] | None = None


class _NotWrapped:
    """Stands where torch's DistributedDataParallel looks up what it is to leave out of a model, as
    it does first of all with a model that it is given."""

    def __iter__(self) -> Iterator[str]:
        raise InputError(
            "this model has a plan, by which it exchanges its gradients itself, and "
            "DistributedDataParallel around it would do so again: leave that out; a Trainer, an "
            "Accelerator or a strategy of Fabric leaves it out after mw.adapt (docs/frameworks.md)"
        )


class _Wrappers:
    """Refuses DistributedDataParallel around what holds a model with a plan, which it does not look
    up there: it would make all ranks' parts of divided parameters those of rank 0."""

    def __init__(self) -> None:
        self._looking = False

    def look(self) -> None:
        """From now on."""
        if not self._looking:  # for good: torch cannot bear hooks to go while it calls them
            self._looking = True
            register_module_module_registration_hook(self._registered)

    def _registered(self, owner: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is None or not isinstance(owner, DistributedDataParallel):
            return
        planned = (part for part in module.named_modules() if _RUN in vars(part[1]))
        for place, _ in planned:
            raise InputError(
                f"{place!r} of this {type(module).__name__} has a plan, by which it exchanges its "
                "gradients itself, and DistributedDataParallel around all of it would do so again: "
                "give auto_parallelize the whole module"
            )


_wrappers = _Wrappers()


class _NotSetUp:
    """Stands where Lightning's ``Fabric.setup`` asks whether a model wants to know of it."""

    def __get__(self, model: nn.Module, owner: type) -> Any:
        # Who asks is seen nowhere else. Under a strategy that knows of no plan ranks would train
        # all the same, on the same samples.
        strategy = getattr(sys._getframe(1).f_locals.get("self"), "strategy", None)
        adapted = getattr(strategy, "leaves_models_to_their_plan", False)
        if strategy is not None and not adapted and run_of(model).world.size > 1:
            raise InputError(
                f"this model has a plan, of which the {type(strategy).__name__} of Fabric does not "
                "know: give Fabric mw.adapt(strategy) (docs/frameworks.md)"
            )
        raise AttributeError


class ParallelModule(nn.Module):
    """Mixed into the class of a model that a plan was applied to; the object stays the same, and an
    instance of its own class.
    """

    _ddp_params_and_buffers_to_ignore = _NotWrapped()
    _fabric = _NotSetUp()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """What the user's class does where somebody derives from it (a registry of models, say) is
        not for the class that the model gets with its plan."""

    @not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _RUN not in self.__dict__:  # another model, made by ``type(model)(...)``
            return super().__call__(*args, **kwargs)
        # Through ``torch.compile(model)`` of after the plan all that follows would be traced.
        callback = eval_frame.set_eval_frame(None)
        try:
            return self._forward_as_planned(args, kwargs, callback)
        finally:
            eval_frame.set_eval_frame(callback)

    def _forward_as_planned(self, args: Any, kwargs: Any, callback: Any) -> Any:
        run = run_of(self)
        if run.inside:  # the model calls itself: one forward to the outside
            return super().__call__(*args, **kwargs)
        take_again(self, run, callback)
        _set_latest(run)
        with run.around(self, args, kwargs) as forward:
            if forward is not None:
                args, kwargs = unscale_inputs((args, kwargs), forward)
            output = super().__call__(*args, **kwargs)
            return run.finish(self, output, forward)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards in here leave gradients unexchanged: they add up on each rank until the first
        backward whose forward was outside, which exchanges the sum.
        """
        run = run_of(self)
        before, run.synchronise = run.synchronise, False
        try:
            yield
        finally:
            run.synchronise = before

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """What ``to``, ``half`` and ``bfloat16`` convert by: other types than what ranks exchange
        are refused."""
        run = self.__dict__.get(_RUN)
        if run is not None and run.world.size > 1:
            for dtype in {parameter.dtype for parameter in self.parameters()}:
                made = fn(torch.empty(1, dtype=dtype)).dtype
                if made != dtype:
                    raise InputError(
                        f"this model has a plan, by which ranks exchange its {_named(dtype)} "
                        f"parameters, and cannot become {_named(made)}: convert it before "
                        "auto_parallelize, or let that do so (precision='bf16')"
                    )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain copy that no plan looks after: a moving average of the weights, say."""
        run = self.__dict__.get(_RUN)
        # A copy of divided parameters would have this rank's slices and no way to the others'.
        if run is not None and run.shards:
            raise InputError(
                "a model whose parameters are divided over ranks cannot be copied: build it anew "
                "and load full_state_dict into it"
            )
        parallel_class = type(self)
        # Without its run and in its own class for a moment, so that the copy knows of neither.
        self.__dict__.pop(_RUN, None)
        self.__class__ = parallel_class.__mro__[2]  # after the class that adopt made and this one
        try:
            plain = copy.deepcopy(self, memo)
        finally:
            self.__class__ = parallel_class
            if run is not None:
                self.__dict__[_RUN] = run
        for own, module in zip(self.modules(), plain.modules(), strict=True):
            if isinstance(vars(own).get("forward"), CompiledForward):
                vars(module).pop("forward", None)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as such a copy: its class is not one that another process could import."""
        # By the first protocol, as later ones insist on the class of the object that is pickled.
        return copy.deepcopy(self).__reduce_ex__(0)

    def __copy__(self) -> nn.Module:
        """Not as pickled: a shallow copy shares all that the model has."""
        made: nn.Module = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made


def adopt(model: ModelT, run: Run, optimizer: Optimizer | None) -> None:
    """Makes ``model`` a ``ParallelModule`` that ``run`` looks after, as it does the optimizer."""
    if optimizer is not None:
        _runs_of_optimizers[optimizer] = weakref.ref(run)
    mix_in(model, ParallelModule)
    model.__dict__[_RUN] = run
    _wrappers.look()
    for parameter in model.parameters():
        _runs_of[parameter] = weakref.ref(run)
    _set_latest(run)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def planned_parameter(model: nn.Module) -> str | None:
    """The first parameter whose gradients the plan of another model, or of a part of this one,
    exchanges."""
    for name, parameter in model.named_parameters():
        run = _runs_of.get(parameter)
        if run is not None and run() is not None:
            return name
    return None


def has_plan(optimizer: Optimizer) -> bool:
    """Whether a plan was applied to a model that is still there with this optimizer."""
    run = _runs_of_optimizers.get(optimizer)
    return run is not None and run() is not None


def mix_in(thing: Any, mixin: type) -> None:
    """Puts ``mixin`` before the class of an object, which stays the same."""
    # The class is swapped and not the object, which the user and optimizers hold; under the same
    # name, which some libraries write into configurations.
    cls = type(thing)
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    thing.__class__ = type(cls.__name__, (mixin, cls), body)


def is_parallel(model: nn.Module) -> bool:
    """Whether a plan was applied to this model object."""
    return _RUN in unwrapped(model).__dict__


def run_of(model: nn.Module) -> Run:
    """The run that looks after ``model``; ``InputError`` where no plan was applied to it."""
    run = unwrapped(model).__dict__.get(_RUN)
    if not isinstance(run, Run):
        raise InputError(
            f"no plan was applied to this {type(model).__name__}: call auto_parallelize first"
        )
    return run


def _set_latest(run: Run) -> None:
    global _latest
    _latest = weakref.ref(run)


def loss_weight(count: float, model: nn.Module | None = None) -> None:
    """Says what this rank's loss is a mean over: ``count`` tokens, say, instead of its samples.

    Call it on every rank after the forward and before its backward, with the count of this rank's
    share (zero is allowed). The gradient is then that of the mean over all ranks' counts.
    Collective. Of several forwards before it the last is weighted. Of several micro-batches
    ``micro_batches`` is given the ``counts`` instead; inside its loop this raises ``InputError``.
    ``model`` may be left out where only one model is trained.
    """
    run = run_of(model) if model is not None else (_latest() if _latest is not None else None)
    if run is None or run.forward is None:
        raise InputError("loss_weight was called before any forward: call the model first")
    if run.in_pieces:
        raise InputError(
            "loss_weight would count each of several micro-batches as a whole batch: give the "
            "counts of all of them to micro_batches(model, batch, parts, counts=...) instead"
        )
    number = float(count)
    if not 0 <= number < float("inf"):
        raise InputError(f"loss_weight got {count}, expected a count of zero or more")
    # The header goes first: control vectors are matched in the order in which ranks send them.
    run.forward.announce()
    counts = run.control.gather([number], "loss_weight", whole=False)
    run.forward.weight = Weight.of(number, counts)


def full_state_dict(model: nn.Module, *, rank0_only: bool = False) -> dict[str, Any]:
    """``model.state_dict()`` with every divided tensor whole. Collective: call it on every rank.

    With ``rank0_only`` the other ranks get an empty dict, and keep none of it in memory.
    """
    run, own = run_of(model), unwrapped(model)
    only = 0 if rank0_only else None
    # Entry by entry, the chunks of a fully sharded parameter are put together before its slices
    # are: it was divided among a group's members first, and among their peers then.
    state = whole_chunks(own, run.flat_shards)
    whole = gather_state(state, run.shards, run.watch, rank=run.world.rank, only=only)
    # What torch.compile(model) returned has the model inside, and its names say so.
    return whole if own is model else {f"_orig_mod.{name}": t for name, t in whole.items()}


def agreed_state_dict(model: nn.Module) -> dict[str, Any]:
    """``full_state_dict`` with the parameters that hosts have agreed on, and the means of all
    hosts' buffers: the same on all ranks, under a plan with local steps, while each host's own go
    on from there. To save, evaluate or publish. New tensors; collective: call it on every rank,
    between steps. Under another plan it is ``full_state_dict``.
    """
    run = run_of(model)
    run.finish_steps()  # what is put back afterwards must be what the last step has made
    with run.apart.agreed_values() if run.apart is not None else nullcontext():
        return {
            name: value.detach().clone() if isinstance(value, Tensor) else value
            for name, value in full_state_dict(model).items()
        }


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with the state of divided parameters whole, as a single process
    would save it. Collective: call it on every rank.
    """
    run = run_of(model)
    return gather_optimizer_state(optimizer, run.divided_parameters, run.flat_shards, run.watch)


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> None:
    """Loads an optimizer's whole state: each rank takes its slices. Communicates nothing."""
    scatter_optimizer_state(optimizer, run_of(model).divided_parameters, state)


def exchange_state_dict(model: nn.Module) -> dict[str, Any]:
    """What this rank's exchange of gradients depends on beyond the state of model and optimizer:
    what it has computed and not sent, and what the ranks have agreed on for the next backward.

    Each rank saves its own, beside the model's, as what was not sent differs from rank to rank.
    Take it between ``optimizer.step()`` and the next forward, on every rank; it sends nothing.
    Under a plan without lossy exchange and local steps it is almost empty. With local steps each
    host's model and optimizer differ, so every rank saves those too.
    """
    run = run_of(model)
    run.conclude()  # what gradients that are still coming turn or change belongs to this step
    state: dict[str, Any] = {"rank": run.world.rank, "world_size": run.world.size}
    if run.priority is not None:
        state["residuals"] = run.priority.held()
        state["policies"] = {p.name: p.state() for p in run.priority.policies}
    if run.apart is not None:
        state["local_steps"] = run.apart.state()
    return state


def load_exchange_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Goes on from what ``exchange_state_dict`` gave on this rank, under the same plan.

    Raises ``InputError`` where it was another rank's, or of another number of ranks.
    """
    run = run_of(model)
    run.conclude()  # it would change what is loaded
    for what, here in (("rank", run.world.rank), ("world_size", run.world.size)):
        saved = state.get(what)
        if saved != here:
            raise InputError(
                f"the exchange state was saved with {what} {saved}, this is {what} {here}: load "
                "on each rank what that rank saved, or let all ranks train on without it"
            )
    # Checked whole before anything is loaded, so that a state that is refused leaves all as it was.
    strange_steps = run.apart.check(state.get("local_steps")) if run.apart is not None else None
    if strange_steps is not None:
        raise InputError(
            f"the exchange state {strange_steps}, unlike this plan: load it under the plan that "
            "saved it"
        )
    _load_unsent(run, state)
    if run.apart is not None:
        run.apart.load(state["local_steps"])


def _load_unsent(run: Run, state: dict[str, Any]) -> None:
    """Loads what was not sent yet of gradients, of parameters that are frozen now too.
    ``InputError`` where any of it does not fit: then nothing is loaded."""
    if run.priority is None:
        return
    residuals, policies = state.get("residuals", {}), state.get("policies", {})
    lossy = run.priority.lossy_groups
    frozen = {param.name: param for param in run.frozen if kinds_held(param)}
    names = {param.name for grad_group in lossy for param in grad_group.feedback} | set(frozen)
    strange = next((name for name in residuals if name not in names), None)
    missing = next((p.name for p in run.priority.policies if p.name not in policies), None)
    if lossy and "residuals" not in state:
        missing = "residuals"
    if strange is not None or missing is not None:
        what = f"says nothing of {missing!r}" if strange is None else f"holds parts of {strange!r}"
        raise InputError(
            f"the exchange state {what}, unlike this plan: load it under the plan that saved it"
        )
    for grad_group in lossy:
        grad_group.check(residuals)
    for name, param in frozen.items():
        check_held(param, residuals.get(name, {}))
    for policy in run.priority.policies:
        if isinstance(policy, Dropping):
            policy.check(policies[policy.name])
    for grad_group in lossy:
        grad_group.load(residuals)
    run.priority.held_of_frozen = {
        name: copy.deepcopy(residuals[name]) for name in frozen if name in residuals
    }
    for policy in run.priority.policies:
        policy.load(policies[policy.name])
