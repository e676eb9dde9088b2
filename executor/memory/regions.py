"""Where a policy looks after what forward saves: from the entry of a module to the exit of another.

What autograd saves in between goes to the policy, which gives it back when backward asks for it.
Regions lie inside the ends of a divided unit: what enters one is in the form that the unit needs.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...models.compiled import eager
from ..redistribution.lazy import materialize


class Saver(Protocol):
    """What becomes of the tensors that one forward through a region saves."""

    def pack(self, tensor: Tensor) -> Any:
        """Takes a tensor that backward will need; what is returned stands for it."""

    def unpack(self, packed: Any) -> Tensor:
        """The tensor again."""

    def leave(self, output: Any) -> None:
        """The forward has left the region with ``output``."""


class Region:
    """Modules that are called one after another, each with what the one before returned: a unit, or
    a segment of several. ``name`` is that of its (first) unit."""

    def __init__(self, name: str, modules: Sequence[nn.Module]) -> None:
        self.name = name
        self.modules = tuple(modules)
        self.ends = -1, -1
        """The numbers of the hooks at its entry and at its exit."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Their forward once more, from the hook at its entry to the one at its exit: others of the
        first and the last module may lie on either side."""
        first, last = self.modules[0], self.modules[-1]
        entered, left = self.ends
        before = list(first._forward_pre_hooks)
        after = list(last._forward_hooks)
        inside_first = before[before.index(entered) + 1 :] if entered in before else before
        inside_last = after[: after.index(left)] if left in after else []
        if first is last:
            return _called(first, args, kwargs, inside_first, inside_last)
        output = _called(first, args, kwargs, inside_first, list(first._forward_hooks))
        for module in self.modules[1:-1]:
            output = module(output)
        return _called(last, (output,), {}, list(last._forward_pre_hooks), inside_last)

    def inner(self) -> list[nn.Module]:
        """All modules in it, each once."""
        return list(dict.fromkeys(m for module in self.modules for m in module.modules()))


def _called(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: Sequence[int],
    after: Sequence[int],
) -> Any:
    """What a call of the module gives, of whose hooks those of these numbers run, but for those
    that look after regions."""
    for number in before:
        hook = module._forward_pre_hooks[number]
        if isinstance(hook, OfThisModel):
            continue
        if number in module._forward_pre_hooks_with_kwargs:
            changed = hook(module, args, kwargs)
            args, kwargs = (args, kwargs) if changed is None else changed
        elif (changed := hook(module, args)) is not None:
            args = changed if isinstance(changed, tuple) else (changed,)
    output = module.forward(*args, **kwargs)
    for number in after:
        hook = module._forward_hooks[number]
        if isinstance(hook, OfThisModel):
            continue
        named = (kwargs,) if number in module._forward_hooks_with_kwargs else ()
        changed = hook(module, args, *named, output)
        output = output if changed is None else changed
    return output


# Begins a forward through a region, with what enters it.
Start = Callable[[Region, tuple[Any, ...], dict[str, Any]], Saver]


class Regions:
    """The regions of one model, and which of them a forward is in. ``around`` is what a forward of
    the whole model needs besides, and ``left`` wants to be told of each unit that it has left."""

    def __init__(
        self,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        left: Callable[[], None] | None = None,
    ) -> None:
        self._around, self._left = around, left
        self._open: list[tuple[Region, Saver, ExitStack]] = []
        self._told = 0

    def add(self, region: Region, start: Start, *, whole: bool) -> None:
        """Lets ``start``'s savers look after every forward through ``region`` that may have a
        backward. Its hook at the entry comes before those that its user has put there (they may
        compute weights), unless it is not ``whole`` here: then after those that bring its input
        into the form that it needs. The one at its exit comes first."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # Before the saver looks at them: it keeps values, which lazy tensors do not have yet.
            args, kwargs = materialize((args, kwargs))
            if torch.is_grad_enabled():
                context = ExitStack()
                context.enter_context(caching_casts(False))
                saver = start(region, args, kwargs)
                context.enter_context(hooked(saver.pack, saver.unpack))
                self._open.append((region, saver, context))
            return args, kwargs

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # Not where gradients were off at the entry, and not after ``abandon``.
            if self._open and self._open[-1][0] is region:
                _, saver, context = self._open.pop()
                context.close()
                saver.leave(output)

        first, last = region.modules[0], region.modules[-1]
        entry = first.register_forward_pre_hook(OfThisModel(enter), with_kwargs=True, prepend=whole)
        # Where one module is both ends, its exit hook runs even if its forward raises. Of several
        # modules the last may never be reached; ``abandon`` then leaves the region.
        single = len(region.modules) == 1
        hook = OfThisModel(leave)
        end = last.register_forward_hook(hook, prepend=True, always_call=single)
        region.ends = entry.id, end.id

    def tell(self, module: nn.Module) -> None:
        """Each forward of ``module`` that may have a backward leaves a unit."""

        def after(module: nn.Module, args: Any, output: Any) -> None:
            # Of what is compiled as one, the inside is not told: each number of units that have
            # been left would be compiled anew.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._tell()

        module.register_forward_hook(OfThisModel(after))

    def tell_as_one(self, module: nn.Module) -> None:
        """From now on ``module`` is compiled as one, so its end stands for those of all units that
        end in it."""
        if self._left is None:
            return
        before = 0

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal before
            before = self._told

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if torch.is_grad_enabled() and self._told == before:
                self._tell()

        module.register_forward_pre_hook(OfThisModel(enter))
        module.register_forward_hook(OfThisModel(after))

    def _tell(self) -> None:
        assert self._left is not None
        self._told += 1
        self._left()

    @contextmanager
    def around(self) -> Iterator[None]:
        """A forward of the whole model. Where it fails, it leaves the regions that it has
        entered."""
        training = self._around() if torch.is_grad_enabled() else nullcontext()
        with training:
            try:
                yield
            finally:
                while self._open:
                    self._open.pop()[2].close()


def hooked(
    pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> AbstractContextManager[None]:
    """``saved_tensors_hooks`` that torch.compile does not look into."""
    if "torch._dynamo" in sys.modules:  # else nothing has been compiled
        pack, unpack = eager(pack), eager(unpack)
    context: AbstractContextManager[None] = saved_tensors_hooks(pack, unpack)
    return context


@contextmanager
def caching_casts(cached: bool) -> Iterator[None]:
    """Where autocast's cache holds the casts of weights, or does not: it would hold them until the
    model's forward is over, whatever becomes of what is saved here."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(cached)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class OfThisModel:
    """A module's hook that copies of the module do not have: it looks after the original."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _does_nothing


def _does_nothing(*args: Any) -> None:
    """The hook of a copy. It has a name of its own, by which copies can be pickled."""
