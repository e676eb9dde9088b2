"""What happens in one forward: which modules are called with which tensors, and what torch does
between them.

Hooks and a torch function mode see everything that Python does, in any model; nothing is traced
symbolically. Tensors are told apart by identity, so all of them are kept alive while recording.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...planner.schema.errors import InputError
from ..compiled import eagerly
from ..failing import in_module
from ..opened import leaves_in
from ..replay import preserved, train_whole
from ..workload import Batch
from .storages import storage_of


@dataclass(frozen=True)
class TracedTensor:
    """A tensor at one moment. ``key`` tells it apart from all others of the forward; views of one
    memory have the same ``storage``. One that is not ``plain`` is nested or sparse, or stands for
    many inside ``torch.vmap``.
    """

    key: int
    storage: int
    shape: tuple[int, ...]
    bytes: int
    gradient: bool
    dtype: torch.dtype
    plain: bool = True


@dataclass
class Event:
    """An operation of torch, or a module's call, whose events lie between ``index`` and ``end``.

    ``module`` is the module's name, None for an operation; ``name`` is the operation's.
    ``inputs`` and ``outputs`` keep the places of leaves that are no tensors, as None; ``given`` and
    ``made`` are the tensors among them. ``stack`` are
    the names of the modules in whose call it happens, the model itself (``""``) first. Of a module
    ``takes_one`` says that it is called with one positional argument and nothing else,
    ``makes_one`` that it returns one tensor by itself, ``transformed`` that it is given tensors
    with a gradient inside a transform of ``torch.func`` (vmap, grad), where these cannot be copied.
    """

    index: int
    module: str | None
    name: str
    stack: tuple[str, ...]
    inputs: list[TracedTensor | None]
    outputs: list[TracedTensor | None] = field(default_factory=list)
    parameters: tuple[str, ...] = ()
    end: int = -1
    takes_one: bool = False
    makes_one: bool = False
    transformed: bool = False

    # Asked once the event is over, and then often.
    @cached_property
    def given(self) -> list[TracedTensor]:
        return [seen for seen in self.inputs if seen is not None]

    @cached_property
    def made(self) -> list[TracedTensor]:
        return [seen for seen in self.outputs if seen is not None]


@dataclass
class Trace:
    """One forward on ``size`` samples: its events in order, the tensors that entered the model and
    that it returned."""

    events: list[Event]
    given: list[TracedTensor]
    made: list[TracedTensor]
    size: int

    def __post_init__(self) -> None:
        self._calls: dict[str, list[Event]] = {}
        for event in self.events:
            if event.module is not None:
                self._calls.setdefault(event.module, []).append(event)

    def calls(self, module: str) -> list[Event]:
        return self._calls.get(module, [])


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.stack: list[Event] = []
        self._alive: list[Tensor] = []
        self._names = {id(p): name for name, p in model.named_parameters()}

    def seen(self, tree: Any, *, whole: bool = False) -> list[TracedTensor | None]:
        # What the whole model takes and makes is opened; units take and make what torch flattens.
        leaves = leaves_in(tree) if whole else pytree.tree_leaves(tree)
        return [self._seen(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]

    def _seen(self, tensor: Tensor) -> TracedTensor:
        # id() and the storage's address tell tensors apart only while all of them are alive.
        self._alive.append(tensor)
        with torch._C.DisableTorchFunction():  # or these questions would be recorded as operations
            gradient = tensor.requires_grad and tensor.is_floating_point()
            return TracedTensor(
                id(tensor), _storage(tensor), tuple(tensor.shape), _bytes(tensor), gradient,
                tensor.dtype, _is_plain(tensor),
            )  # fmt: skip

    def _check_bags(self, symbols: Tensor) -> None:
        """Refuses an input of the model that is one list of symbols with offsets: it has no
        dimension that counts samples, so no part of a batch could be taken."""
        given = any(seen is not None and seen.key == id(symbols) for seen in self.stack[0].inputs)
        if given and symbols.ndim == 1:
            raise InputError(
                f"embedding bag {self.names[-1]!r} is given an input of the model of shape "
                f"{list(symbols.shape)} with offsets, of which no dimension counts samples: give "
                "symbols of shape (samples, length), short bags filled up with the bag's "
                "padding_idx"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(e.module for e in self.stack if e.module is not None)

    def enter(self, name: str, args: Any, kwargs: Any) -> None:
        event = Event(
            len(self.events), name, "", self.names, self.seen((args, kwargs), whole=not name)
        )
        event.takes_one = len(args) == 1 and not kwargs
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        event.transformed = inside and any(seen.gradient for seen in event.given)
        self.events.append(event)
        self.stack.append(event)

    def leave(self, output: Any) -> None:
        event = self.stack.pop()
        event.outputs = self.seen(output, whole=not event.module)
        event.makes_one = isinstance(output, Tensor)
        event.end = len(self.events)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.embedding_bag:
            self._check_bags(args[0] if args else (kwargs or {})["input"])
        result = func(*args, **(kwargs or {}))
        # An assignment to a slice returns None, but changes its first argument.
        outputs = self.seen(args[0] if func is Tensor.__setitem__ else result)
        if any(outputs):
            inputs = self.seen((args, kwargs or {}))
            used = [self._names[s.key] for s in inputs if s and s.key in self._names]
            name = getattr(func, "__name__", "")
            event = Event(len(self.events), None, name, self.names, inputs, outputs, tuple(used))
            event.end = len(self.events) + 1
            self.events.append(event)
        return result


def _storage(tensor: Tensor) -> int:
    storage = storage_of(tensor)
    # A kind of tensor without memory of its own has no views.
    return id(tensor) if storage is None else int(storage._cdata)


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided or tensor.is_nested:
        return tensor.nbytes
    return tensor._nnz() * tensor.element_size()  # of what is not zero, for which there are bytes


def _is_plain(tensor: Tensor) -> bool:
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.layout is torch.strided and not tensor.is_nested and not wrapped


@contextmanager
def _hooked(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():

        def enter(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            recorder.enter(name, args, kwargs)

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            recorder.leave(output)

        # Before the user's own hooks, so that what they compute counts to the module.
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def record(model: nn.Module, batch: Batch) -> Trace:
    """The trace of one forward of the model on ``batch``, in training mode; the model is left as it
    was. Raises ``InputError`` with the model's own error where it fails on its batch."""
    recorder = _Recorder(model)
    with preserved(model), eagerly(), torch.enable_grad():
        train_whole(model)
        try:
            with _hooked(model, recorder), recorder:
                model(*batch.args, **batch.kwargs)
        except InputError:
            raise  # a sentence of its own
        except Exception as error:
            raise InputError(
                f"the model failed on its own batch of {batch.size}"
                f"{in_module(model, error)}: {type(error).__name__}: {error}; mend what it "
                "is fed (make_batch, example_inputs) or its forward"
            ) from error
    root = next((e for e in recorder.events if e.module == ""), None)
    if root is None:
        raise InputError(
            f"calling {type(model).__name__} runs no forward of its own, as its class has another "
            "__call__, and hooks of the model do not run: call its method forward"
        )
    return Trace(recorder.events, root.given, root.made, batch.size)


def coarse_modules(trace: Trace, precision: torch.dtype) -> dict[str, torch.dtype]:
    """The modules whose own code makes activations of fewer bits than ``precision``, whatever they
    are given (norms that compute in float32, say), with the fewest that they use."""
    found: dict[str, torch.dtype] = {}
    for event in trace.events:
        for seen in event.made if event.module is None else ():
            # What has no gradient (a table of angles) is the same wherever it is computed.
            module = event.stack[-1] if event.stack else ""  # beside the forward, in ``__call__``
            if seen.gradient and _bits(seen.dtype) < _bits(found.get(module, precision)):
                found[module] = seen.dtype
    return found


def _bits(dtype: torch.dtype) -> int:
    return torch.finfo(dtype).bits
