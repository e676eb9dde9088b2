"""Whether a split computes what the whole unit does: all members in one process, as threads.

Recipes recognise modules by their looks, and looks can deceive. So a split is tried on the unit's
own recorded inputs, forward and backward, before it is offered.
"""

import contextlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree  # torch has no public name for it

from ...planner.cost.ownership import feature_bounds
from ..replay import UnitCall, copied, fix_statistics, preserved, run_modules
from ..spec import SplitSpec, UnitSpec
from . import apply_split
from .recipe import slice_parameter

# [Note: Splits are proved]
# A recipe recognises a module by its type, or by names and shapes, and names can deceive: another
# library's ``q_proj`` may be followed by a rotation over all heads. So before a split that goes by
# looks is offered to the planner, it is carried out: all members of a group run as threads of this
# process, each on its slice, with ``reduce`` as an addition over the threads instead of a
# collective. Output, gradients of inputs, and gradients of parameters must equal those of the whole
# unit: cut parameters' slice by slice, all others' as sums over members. It runs in double
# precision, so that a tolerance of 1e-9 separates rounding from a wrong formula; where the unit
# computes in less whatever it is given (a router's softmax), or not in double at all (grouped
# products), with a tolerance for that. It runs without dropout,
# which the members draw for themselves; and with random parameters, because zeros and ones (fresh
# biases and norms) hide terms that are added twice or forgotten.
#
# A forward of somebody's own may also do something else on other values (a clamp, a branch) or in
# training. So it is tried again on other, larger values, and in training where the unit computes
# something else there.

# Seconds that members wait for each other: one may never come.
_WAIT_S = 60.0
# Sequences of more positions are tried with so many.
_LONG, _SHORT = 256, 16
# Standard deviation of the parameters that a split is tried with.
_SPREAD = 0.2
# The spread of the other values that it is tried on, by that of the recorded ones.
_WIDER = 10.0


class _ThreadReduce:
    """The reduction of members that run as threads: each gets the sum for its own samples."""

    def __init__(self, degree: int, dim: int) -> None:
        self._barrier = threading.Barrier(degree)
        self._partials: dict[int, Tensor] = {}
        self._degree, self._dim = degree, dim

    def reduce(self, member: int, partial: Tensor) -> Tensor:
        self._partials[member] = partial
        # The first barrier: all partial sums are there. The second: all have read them.
        self._barrier.wait(_WAIT_S)
        parts = [self._partials[m] for m in range(self._degree)]
        self._barrier.wait(_WAIT_S)
        left, right = feature_bounds(partial.shape[self._dim], self._degree, member)
        own = [part.narrow(self._dim, left, right - left) for part in parts]
        return sum(own[1:], own[0])

    def abort(self) -> None:
        self._barrier.abort()


class SplitMembers:
    """A unit divided over ``degree`` members: the part of each, and what it made in the last run.

    ``holder``, which has the unit's modules under their names, is copied for each.
    """

    def __init__(self, holder: nn.Module, unit: UnitSpec, spec: SplitSpec, degree: int) -> None:
        self._unit, self._spec = unit, spec
        self._meeting = _ThreadReduce(degree, unit.batch_dim)
        self.models = [copied(holder) for _ in range(degree)]
        self.outputs: list[Any] = [None] * degree
        for member, model in enumerate(self.models):
            reduce = partial(self._meeting.reduce, member)
            apply_split(model, unit.modules, spec, degree, member, reduce)

    def run(self, call: UnitCall) -> Tensor:
        """The whole unit's main output on ``call``'s inputs, of which each gets its part. Keeps
        graphs where gradients are on. Raises what a member raises."""
        errors: list[BaseException] = []
        gradients = torch.is_grad_enabled()

        def work(member: int, given: UnitCall) -> None:
            try:
                with _NoDropout(), torch.set_grad_enabled(gradients):
                    made = run_modules(self.models[member], self._unit.modules, given)
                    self.outputs[member] = made
            except BaseException as error:
                errors.append(error)
                self._meeting.abort()

        threads = []
        for member in range(len(self.models)):
            given = member_call(self._unit, self._spec, call, len(self.models), member)
            # Daemons: one that hangs in a look-alike's forward must not keep the process.
            threads.append(threading.Thread(target=work, args=(member, given), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_WAIT_S)
        # One that fails leaves the others before a broken barrier: its own error comes first.
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return joined(self._spec, self.outputs, self._unit.batch_dim)


def member_call(
    unit: UnitSpec, spec: SplitSpec, call: UnitCall, degree: int, member: int
) -> UnitCall:
    """The call as a member gets it: whole, or with its slice of the first input's features."""
    if spec.style != "row":
        return call
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    first = unit.batched_inputs[0]
    left, right = feature_bounds(spec.features, degree, member)
    leaves[first] = leaves[first].narrow(spec.feature_dim, left, right - left)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return UnitCall(args, kwargs)


def joined(spec: SplitSpec, outputs: Sequence[Any], batch_dim: int = 0) -> Tensor:
    """The whole unit's main output from the members' own."""
    tensors = [main_output(output) for output in outputs]
    return torch.cat(tensors, spec.feature_dim if spec.style == "column" else batch_dim)


def main_output(output: Any) -> Tensor:
    """The first tensor of a unit's output."""
    return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))


class Tolerance(NamedTuple):
    """What rounding may do to a number: |Δ| of ``relative`` times itself, and of ``of_largest``
    times the largest beside it."""

    relative: float
    of_largest: float

    def same(self, a: Tensor, b: Tensor) -> bool:
        largest = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        return a.shape == b.shape and torch.allclose(a, b, self.relative, self.of_largest * largest)


# By the bits of the coarsest numbers that a unit computes with.
_TOLERANCES = {64: Tolerance(1e-9, 1e-10), 32: Tolerance(1e-4, 1e-5), 16: Tolerance(3e-2, 1e-2)}


_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
}  # fmt: skip


class _NoDropout(TorchFunctionMode):
    """Dropout gives what it gets. Of this thread only, as any such mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                given["dropout_p"] = 0.0
        return func(*args, **given)


class _Coarsest(TorchFunctionMode):
    """The fewest bits of activations that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.bits = 64

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
                self.bits = min(self.bits, torch.finfo(leaf.dtype).bits)
        return made


def is_equivalent(
    model: nn.Module, unit: UnitSpec, spec: SplitSpec, call: UnitCall, degree: int = 2
) -> bool:
    """Whether the split's output and gradients equal the whole unit's on ``call``'s inputs."""
    if not spec.uneven and spec.parts % degree:
        return False
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    # The default device may be meta.
    with torch.device("cpu"):
        for dtype in dict.fromkeys((torch.float64, torch.float32, own)):
            # A look-alike's own forward may fail in any way, on its parts or in this precision.
            with contextlib.suppress(Exception):
                holder = _prepared(isolated(model, unit.modules), dtype)
                return _is_equivalent(holder, unit, spec, call, degree, dtype)
    return False


def _is_equivalent(
    holder: nn.Module,
    unit: UnitSpec,
    spec: SplitSpec,
    call: UnitCall,
    degree: int,
    dtype: torch.dtype,
) -> bool:
    """The same in one precision. Raises what the whole unit raises there."""

    def shown(call: UnitCall) -> bool:
        return _SplitTrial(holder, unit, spec, degree).always_agrees(_with_values(call).to(dtype))

    if _adds_to_what_it_is_given(holder, unit, _with_values(call).to(dtype)):
        return False  # each member would add its own to a copy
    short = _shortened(call, holder)
    if short is not call:
        with contextlib.suppress(Exception):  # its forward may need the whole length
            return shown(short)
    return shown(call)


def _adds_to_what_it_is_given(holder: nn.Module, unit: UnitSpec, call: UnitCall) -> bool:
    """Whether a run of the unit leaves something in a list or a dict that it was called with, such
    as a loss of its own."""
    containers = [
        v for v in (*call.args, *call.kwargs.values()) if isinstance(v, list | dict | tuple)
    ]
    if not containers:
        return False
    before = pytree.tree_leaves(containers)
    versions = [leaf._version for leaf in before if isinstance(leaf, Tensor)]
    with torch.no_grad():
        run_modules(copied(holder), unit.modules, call)
    after = pytree.tree_leaves(containers)
    same = len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True))
    return not same or versions != [leaf._version for leaf in after if isinstance(leaf, Tensor)]


def _with_other_values(unit: UnitSpec, call: UnitCall) -> UnitCall:
    """The call with other activations; masks, positions and indices stay."""
    generator = torch.Generator().manual_seed(2)
    entering = pytree.tree_leaves((call.args, dict(call.kwargs)))[unit.batched_inputs[0]]

    def drawn(t: Tensor) -> Tensor:
        if not (t.requires_grad or t is entering) or not t.is_floating_point():
            return t
        wide = _WIDER * float(t.detach().double().std()) if t.numel() > 1 else _WIDER
        made = torch.randn(t.shape, generator=generator, dtype=torch.double) * wide
        return made.to(t.device, t.dtype).requires_grad_(t.requires_grad)

    return call.map(drawn)


def _in_training(model: nn.Module) -> nn.Module:
    """The model in training, but for batch normalisation: over which samples it is taken is for the
    plan to say, and the executor's part."""
    fix_statistics(model.train())
    return model


def _shortened(call: UnitCall, holder: nn.Module) -> UnitCall:
    """The call with the first few positions of long sequences. The call itself where nothing is
    long, or where a length of what may be no sequences is also that of a parameter."""
    # What a split computes does not depend on how many positions there are, and the time that it
    # takes does.
    first = next((t for t in call.tensors() if t.ndim > 2), None)
    length = first.shape[1] if first is not None else 0
    known = {size for p in (*holder.parameters(), *holder.buffers()) for size in p.shape}
    if first is None or length <= _LONG:
        return call
    # A model may be as wide as its sequences are long. The middle dimension has the positions then;
    # where it has not, the forward on what is cut fails.
    as_wide = length in known or length in first.shape[2:]
    if as_wide and first.ndim > 3:
        return call

    def cut(tensor: Tensor) -> Tensor:
        for dim, size in enumerate(tensor.shape):
            if size == length and (not as_wide or (tensor.ndim == 3 and dim == 1)):
                tensor = tensor.narrow(dim, 0, _SHORT)
        return tensor.detach().requires_grad_(tensor.requires_grad)

    return call.map(cut)


def isolated(model: nn.Module, modules: Sequence[str]) -> nn.Module:
    """The unit's modules alone, copied, under their names."""
    if list(modules) == [""]:  # the model is one unit itself
        return copied(model)
    root = nn.Module()
    copies = copied([model.get_submodule(name) for name in modules])  # keeps ties
    for name, module in zip(modules, copies, strict=True):
        holder = root
        *path, last = name.split(".")
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(last, module)
    return root


def _prepared(holder: nn.Module, dtype: torch.dtype) -> nn.Module:
    """In that precision, with other parameters and statistics; meta tensors get memory."""
    # Without dropout, which members draw for themselves.
    holder.to(dtype).eval()
    if any(t.is_meta for t in (*holder.parameters(), *holder.buffers())):
        holder.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    # Many start as zeros or ones, which would hide a bias that is added twice.
    with torch.no_grad():
        for parameter in holder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.double))
            parameter.mul_(_SPREAD).grad = None
        for name, buffer in holder.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.copy_(torch.rand(buffer.shape, generator=generator, dtype=torch.double))
                buffer.add_(0.5)
    return holder


def _with_values(call: UnitCall) -> UnitCall:
    """The call itself, or one with random numbers where it was recorded without memory."""
    generator = torch.Generator().manual_seed(1)

    def fill(t: Tensor) -> Tensor:
        if not t.is_meta:
            return t
        if not t.is_floating_point():
            return torch.zeros(t.shape, dtype=t.dtype)
        drawn = torch.randn(t.shape, generator=generator, dtype=torch.double)
        return drawn.to(t.dtype).requires_grad_(t.requires_grad)

    return call.map(fill)


class _SplitTrial:
    """A unit and its members, tried on the same calls. Its parameters get gradients."""

    def __init__(self, holder: nn.Module, unit: UnitSpec, spec: SplitSpec, degree: int) -> None:
        self._holder, self._unit, self._spec = holder, unit, spec
        self._members = SplitMembers(holder, unit, spec, degree)

    def always_agrees(self, call: UnitCall) -> bool:
        """Whether the members' outputs equal the whole's on the call, on other values and in
        training, and their gradients too."""
        with _Coarsest() as coarsest:
            whole = self._whole(given := call.fresh())
        # Rounding stays far below, and a wrong formula is far above.
        tolerance = _TOLERANCES[coarsest.bits]
        return (
            self._gradients_agree(whole, given, call, tolerance)
            and self._agrees_on(_with_other_values(self._unit, call), tolerance)
            and self._agrees_in_training(call, tolerance)
        )

    def _whole(self, call: UnitCall) -> Tensor:
        with _NoDropout():
            return main_output(run_modules(self._holder, self._unit.modules, call))

    def _parts(self, call: UnitCall) -> Tensor | None:
        """The members' output; None where a look-alike's forward fails on its part."""
        with contextlib.suppress(Exception):
            return self._members.run(call)
        return None

    def _gradients_agree(
        self, whole: Tensor, given: UnitCall, call: UnitCall, tolerance: Tolerance
    ) -> bool:
        """Whether output and all gradients agree with ``whole``, which was made of ``given``."""
        output = self._parts(parted := call.fresh())
        if output is None or not tolerance.same(output, whole):
            return False
        # A loss of random weights: a plain sum has the same gradient everywhere and hides
        # permutations.
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(whole.shape, generator=generator, dtype=whole.dtype).to(whole.device)
        (whole * weight).sum().backward()  # type: ignore[no-untyped-call]
        (output * weight).sum().backward()  # type: ignore[no-untyped-call]
        pairs = zip(given.tensors(), parted.tensors(), strict=True)
        return all(_same(a.grad, b.grad, tolerance) for a, b in pairs) and _same_parameters(
            self._holder, self._spec, self._members.models, tolerance
        )

    def _agrees_on(self, call: UnitCall, tolerance: Tolerance) -> bool:
        """Whether the outputs agree, which is a third of the work. The whole may refuse the values:
        then it never has them."""
        with torch.no_grad():
            try:
                whole = self._whole(call.fresh())
            except Exception:
                return True
            output = self._parts(call.fresh())
        return output is not None and tolerance.same(output, whole)

    def _agrees_in_training(self, call: UnitCall, tolerance: Tolerance) -> bool:
        with torch.no_grad(), preserved(self._holder):
            plain = self._whole(call.fresh())
            _in_training(self._holder)
            first, again = (self._whole(call.fresh()) for _ in range(2))
            # What it draws there the members draw for themselves.
            if not torch.equal(first, again) or tolerance.same(plain, first):
                return True
        for model in (self._holder, *self._members.models):
            _in_training(model).zero_grad()
        return self._gradients_agree(self._whole(given := call.fresh()), given, call, tolerance)


def _same(a: Tensor | None, b: Tensor | None, tolerance: Tolerance) -> bool:
    # A gradient that one side did not compute and zeros of the other are the same.
    if a is None or b is None:
        return (a is None or not a.any()) and (b is None or not bool(b.any()))
    return tolerance.same(a, b)


def _same_parameters(
    holder: nn.Module, spec: SplitSpec, members: Sequence[nn.Module], tolerance: Tolerance
) -> bool:
    """Whether cut gradients are slices of the whole's, and the others add up to it."""
    cuts = {cut.name: cut for cut in spec.cuts}
    for name, parameter in holder.named_parameters():
        own = [dict(m.named_parameters())[name].grad for m in members]
        if parameter.grad is None:
            if any(g is not None and g.any() for g in own):
                return False
        elif name in cuts:
            for j, gradient in enumerate(own):
                part = slice_parameter(parameter.grad, cuts[name], len(members), j)
                if part.numel() and not _same(
                    part, gradient, tolerance
                ):  # an empty slice may have none
                    return False
        else:
            total = sum((g for g in own if g is not None), torch.zeros_like(parameter))
            if not _same(parameter.grad, total, tolerance):
                return False
    return True
