"""torch.compile on a model: what its user compiles, and compiled code that lies between hooks."""

# [Note: Compiled models]
# torch.compile traces a call with all that happens in it: hooks of inner modules, collectives,
# parameters that wait for their values. None of these can be in a graph. So what a user has
# compiled is taken off the model and noted at its modules (``Uncompiled``), and ``CompiledRegions``
# compiles as much of it as lies between the places where a plan or a profile has something to do:
# the largest modules without such a place inside. Of a module its ``forward`` is compiled, so that
# hooks at its own ends run outside. What must run inside all the same, as the sum within a divided
# unit, is ``eager``: torch breaks the graph there.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper, wraps
from types import FunctionType, MethodType
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame  # torch has no public name for what it tells threads by

CallableT = TypeVar("CallableT", bound=Callable[..., Any])
Prepare = Callable[[Any, Any], tuple[Any, Any]]
"""Makes the arguments and keyword arguments of a call ready for compiled code."""

_NOTE = "_meshwright_compilation"


@dataclass(frozen=True, eq=False)
class Compilation:
    """How a module was compiled: with which backend and its options, and whether sizes are taken to
    vary (torch's ``dynamic``)."""

    backend: Any
    dynamic: bool | None

    @staticmethod
    def by(callback: Any, dynamic: bool | None = None) -> Compilation:
        """By what torch.compile has told torch to call for each frame."""
        while hasattr(callback, "_torchdynamo_orig_backend"):
            callback = callback._torchdynamo_orig_backend
        return Compilation(callback, dynamic)

    @property
    def described(self) -> str:
        """The same for the same settings in another process."""
        name = getattr(self.backend, "compiler_name", type(self.backend).__name__)
        return f"{name} {self._options} dynamic={self.dynamic}"

    @property
    def _options(self) -> dict[str, Any]:
        options = getattr(self.backend, "config", None) or getattr(self.backend, "kwargs", None)
        return options if isinstance(options, dict) else {}

    @property
    def cuda_graphs(self) -> bool:
        """Whether the backend replays CUDA graphs."""
        return bool(self._options.get("triton.cudagraphs")) or "cudagraphs" in self.described

    def compiled(self, function: Callable[..., Any], parameters: Iterable[nn.Parameter]) -> Any:
        """The function, which uses the ``parameters``, compiled so; without ``fullgraph``, as a
        plan may need breaks."""
        # With the backend as it is: ``torch.compile`` would wrap it again.
        optimize: Any = torch._dynamo.optimize
        context = optimize(backend=self.backend, dynamic=self.dynamic)
        context.callback = _WithoutGradients(context.callback, parameters)
        return context(function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compilation:
        return self


class _WithoutGradients:
    """What torch calls to compile a frame, which then sees no gradients: it would look into these
    too, and under a plan they may be on their way."""

    def __init__(self, callback: Any, parameters: Iterable[nn.Parameter]) -> None:
        # By this name torch finds the backend, by which it tells apart what it has compiled.
        self._torchdynamo_orig_backend = callback
        self._parameters = tuple(parameters)

    def __call__(self, *frame: Any) -> Any:
        gradients = [p.grad for p in self._parameters]
        try:
            for parameter in self._parameters:
                parameter.grad = None
            return self._torchdynamo_orig_backend(*frame)
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient


def eager(function: CallableT) -> CallableT:
    """``function``, which torch.compile does not trace: the graph breaks, and it runs as it is with
    all that it calls."""

    # Not torch.compiler.disable, which would import the whole compiler here.
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    return not_traced(run)  # type: ignore[return-value]


def not_traced(function: CallableT) -> CallableT:
    """``function``, whose own frame torch.compile leaves alone; what it calls is traced unless it
    prevents that."""
    if not hasattr(eval_frame, "_FrameExecStrategy"):  # torch does not promise to keep it
        return torch.compiler.disable(function, recursive=False)  # type: ignore[no-untyped-call,no-any-return]
    skip = eval_frame._FrameExecStrategy(
        eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    )
    eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def eagerly() -> AbstractContextManager[Any]:
    """Within it nothing is compiled, and what was runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # then nothing has been
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


# -- what the user has compiled --------------------------------------------------------------------


def _is_wrapper(module: object) -> bool:
    """Whether it is what ``torch.compile(module)`` returns."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return False
    # What torch.compiler.disable returns is one too, and has nothing to compile with.
    return callable(module.dynamo_ctx.callback)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, of what ``torch.compile(model)`` returned."""
    while _is_wrapper(model):
        model = model._orig_mod  # type: ignore[assignment]
    return model


class Uncompiled:
    """A model whose compilation was taken off and noted at its modules: ``model``, without torch's
    wrappers, so that names are those of its own modules. ``restore`` puts it back."""

    def __init__(self, model: nn.Module) -> None:
        self._undo: list[Callable[[], None]] = []
        self.model = self._unwrap(model)
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if child is not None and _is_wrapper(child):
                    module._modules[name] = self._unwrap(child)
                    self._undo.append(partial(module._modules.update, {name: child}))
        for module in self.model.modules():
            call = module._compiled_call_impl
            if call is not None:
                self._compiled_in_place(module, call)

    def _unwrap(self, module: Any) -> nn.Module:
        while _is_wrapper(module):
            context, module = module.dynamo_ctx, module._orig_mod
            self._note(module, Compilation.by(context.callback, context._dynamic))
        assert isinstance(module, nn.Module)
        return module

    def _compiled_in_place(self, module: nn.Module, call: Any) -> None:
        # Torch keeps the settings of ``module.compile()`` nowhere but in the closure of what it
        # made; with ``disable=True`` it made nothing.
        code: Any = getattr(call, "__code__", None)
        cells = dict(zip(code.co_freevars, call.__closure__ or (), strict=False)) if code else {}
        if "self" in cells:
            context = cells["self"].cell_contents
            self._note(module, Compilation.by(context.callback, context._dynamic))
        module._compiled_call_impl = None
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", call))

    def _note(self, module: nn.Module, how: Compilation) -> None:
        before = compilation_of(module)
        vars(module)[_NOTE] = how
        self._undo.append(
            lambda: vars(module).update({_NOTE: before}) if before else vars(module).pop(_NOTE)
        )

    def redirect(self, wrapper: nn.Module) -> None:
        """Makes what ``torch.compile(model)`` returned call the model as it is."""
        model = self.model
        if wrapper is not model:
            wrapper.forward = lambda *args, **kwargs: model(*args, **kwargs)

    def restore(self) -> None:
        """The model as its user had compiled it."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


def compilation_of(module: nn.Module) -> Compilation | None:
    """How the user has compiled this module, as it was noted."""
    return vars(module).get(_NOTE)


def note(module: nn.Module, how: Compilation) -> None:
    """Notes that a module is to be compiled."""
    vars(module)[_NOTE] = how


def is_compiled_anew(modules: Iterable[nn.Module]) -> bool:
    """Whether the user has compiled some of them since that was taken off."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    wrapper = dynamo.OptimizedModule
    return any(
        module._compiled_call_impl is not None
        or any(type(child) is wrapper and _is_wrapper(child) for child in module._modules.values())
        for module in modules
    )


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[nn.Module]:
    """The model without its compilation, which is noted at its modules and put back at the end."""
    taken = Uncompiled(model)
    try:
        yield taken.model
    finally:
        taken.restore()


def described(model: nn.Module) -> list[tuple[str, str]]:
    """What of a model is noted as compiled, and how; empty for an eager one."""
    named = ((name, compilation_of(module)) for name, module in model.named_modules())
    return [(name, how.described) for name, how in named if how is not None]


# -- compiled regions ------------------------------------------------------------------------------


def ancestors(paths: Iterable[str]) -> set[str]:
    """The names of the modules that contain those of these names."""
    found: set[str] = set()
    for path in paths:
        parts = path.split(".") if path else []
        found.update(".".join(parts[:n]) for n in range(len(parts)))
    return found


def regions(model: nn.Module, broken: Iterable[str]) -> dict[nn.Module, Compilation]:
    """The modules to compile: the largest ones that their user has compiled, by themselves or
    within another, without those that are ``broken`` and whose parts are compiled instead."""
    apart = set(broken)
    found: dict[nn.Module, Compilation] = {}

    def walk(path: str, module: nn.Module, how: Compilation | None) -> None:
        how = compilation_of(module) or how
        has_forward = "forward" in vars(module) or type(module).forward is not nn.Module.forward
        if how is not None and path not in apart and has_forward:
            # What has another forward that is not to be traced stays as it is.
            if not hasattr(module.forward, "_torchdynamo_disable"):
                found.setdefault(module, how)
            return
        for name, child in module._modules.items():
            if child is not None:
                walk(f"{path}.{name}" if path else name, child, how)

    walk("", model, None)
    return found


class CompiledForward:
    """Stands for a module's ``forward``: the same, compiled. ``prepare`` sees the call before."""

    def __init__(
        self, module: nn.Module, compiled: Callable[..., Any], prepare: Prepare | None
    ) -> None:
        self.module, self.eager, self._compiled = module, module.forward, compiled
        self._own = vars(module).get("forward")
        self._prepare = prepare
        update_wrapper(self, self.eager)  # libraries read the signature of a forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._prepare is not None:
            args, kwargs = self._prepare(args, kwargs)
        # What wants to see each operator (a dispatch mode) sees none in a graph. Torch compiles
        # nothing new under one, either.
        if torch._C._len_torch_dispatch_stack():
            return self.eager(*args, **kwargs)
        return self._compiled(self.eager, *args, **kwargs)

    def install(self) -> None:
        self.module.forward = self

    def remove(self) -> None:
        """The module's own forward again."""
        if self._own is None:
            vars(self.module).pop("forward", None)
        else:
            self.module.forward = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return forward_of_copy(self.module, memo, self.eager)


def forward_of_copy(
    module: nn.Module, memo: dict[int, Any], otherwise: Callable[..., Any]
) -> Callable[..., Any]:
    """For ``__deepcopy__`` of what stands for the ``forward`` of ``module``: that of the class, for
    the module's copy; ``otherwise`` where the module is not copied with it."""
    copied = memo.get(id(module))
    return MethodType(type(copied).forward, copied) if copied is not None else otherwise


class CompiledRegions:
    """The ``regions`` of a model, compiled where they are installed; within it as a context."""

    def __init__(
        self,
        model: nn.Module,
        broken: Iterable[str] = (),
        prepare: Callable[[nn.Module], Prepare] | None = None,
    ) -> None:
        entries: dict[tuple[object, ...], Callable[..., Any]] = {}
        self._forwards = []
        for module, how in regions(model, broken).items():
            entry = entries.setdefault(_kind(module), _entry())
            own = prepare(module) if prepare is not None else None
            self._forwards.append(
                CompiledForward(module, how.compiled(entry, module.parameters()), own)
            )

    def __len__(self) -> int:
        return len(self._forwards)

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The module that each region is."""
        return tuple(forward.module for forward in self._forwards)

    def install(self) -> Self:
        """Compiles the regions from now on."""
        for forward in self._forwards:
            forward.install()
        return self

    def remove(self) -> None:
        """Leaves them as they were."""
        for forward in self._forwards:
            forward.remove()

    def __enter__(self) -> Self:
        return self.install()

    def __exit__(self, *error: object) -> None:
        self.remove()


def _entry() -> FunctionType:
    """A function of its own that calls a forward."""

    def call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # Torch keeps what it compiles, and counts how often, at the code. Modules of one kind share
    # theirs, so that repeated blocks are compiled once; others must not use up each other's limit.
    call.__code__ = call.__code__.replace()
    return call  # type: ignore[return-value]


def _kind(module: nn.Module) -> tuple[object, ...]:
    """What modules have in common that compile alike."""
    tensors = (*module.parameters(), *module.buffers())
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
    how = compilation_of(module)
    return getattr(module.forward, "__code__", module), str(module), shapes, how and how.described
