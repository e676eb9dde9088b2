"""Why training on shares of a batch cannot equal training on all of it, asked of one process: what
gives other answers for the same inputs, what looks at the batch as a whole, and what adds up over
samples."""

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...models.opened import tensors_in
from ...models.replay import fix_statistics, preserved
from ...models.target import default_loss, trial
from ...models.trial_sizes import SIZES
from ...models.workload import Batch, Workload, device_of
from ...planner.schema.errors import InputError

# Other sizes round in another order: beyond so many times what is allowed it is no rounding.
ROUNDING = 100.0

# In parts of the loss, what must grow with the samples to count as a sum, by whether anything is
# computed in 16 bits; and how far two steps of that may be apart, in parts of one.
SUM_SHARE = {False: 1e-4, True: 3e-2}
LINEAR = 0.05

_Made = TypeVar("_Made")


class _Call(NamedTuple):
    """One call of a module, in the order in which calls end."""

    module: str
    given: list[Tensor]
    made: list[Tensor]


def restless_module(model: nn.Module, batch: Batch) -> str | None:
    """The first module that gives other outputs for inputs that are the same; None where two
    forwards are equal."""

    def each(work: Callable[[nn.Module, Batch], _Made]) -> list[_Made]:
        found = []
        for seed in range(2):
            # Buffers are put back after each: what changes with them is not random.
            with torch.enable_grad(), preserved(model):
                torch.manual_seed(seed)
                found.append(work(model, batch))
        return found

    def made(model: nn.Module, batch: Batch) -> list[Tensor]:
        return [t.detach() for t in tensors_in(model(*batch.args, **batch.kwargs))]

    first, second = each(made)
    if len(first) == len(second) and all(map(torch.equal, first, second)):
        return None
    # Only then, as it keeps what every module is given and makes.
    before, after = each(_calls)
    return _first_change(before, after, torch.equal)


def mixing_cause(workload: Workload, batch: Batch, share: Callable[[Tensor, Tensor], float]) -> str:
    """A sentence where the loss of the whole ``batch`` is not the mean of its parts', weighted by
    their sizes, whatever plan trains it; empty where it is. ``share`` as in ``_mixing``."""
    found = _mixing(workload, batch, share)
    if found is None:
        return ""
    if found.module is None:
        return (
            f"the loss of {batch.size} samples is not the mean of the losses of its parts (it is a "
            "sum, compares samples with each other, or weighs them unequally), so no training on "
            "shares of a batch equals that of the whole: write it as a mean over samples, or of a "
            "weighted mean let your own loop say with mw.loss_weight(sum of its weights) what a "
            "share counts"
        )
    what = f"module {found.module!r}" if found.module else "the model"
    return (
        f"{what} computes over the batch as a whole (what it gives for a sample changes with the "
        "others there), so no training on shares of a batch equals that of the whole"
    )


class _Mixing(NamedTuple):
    """Where samples meet: the first module that computes over the batch as a whole; None where
    none does, so that it is the loss."""

    module: str | None


def _mixing(
    workload: Workload, batch: Batch, share: Callable[[Tensor, Tensor], float]
) -> _Mixing | None:
    """Why the loss of the whole ``batch`` is not the mean of its parts', weighted by their sizes;
    None where it is. Batch normalisation does not count: its statistics can be of the whole batch.
    ``share`` says how far a tensor is from another, in parts of what rounding may do to it."""
    model, size = workload.model, batch.size
    cut = size // 2
    parts = batch.slice(0, cut), batch.slice(cut, size)
    with torch.enable_grad(), preserved(model):
        fix_statistics(model)
        whole = _loss(workload, batch)
        mean = sum(_loss(workload, part) * (part.size / size) for part in parts)
        assert isinstance(mean, Tensor)
        if share(mean, whole) <= ROUNDING:
            return None
        calls = _calls(model, batch), _calls(model, parts[0])

    def same(found: Tensor, all_samples: Tensor) -> bool:
        rows = _rows(all_samples, found, cut, size)
        return rows is not None and share(found, rows) <= ROUNDING

    return _Mixing(_first_change(calls[1], calls[0], same))


def check_mean(workload: Workload, sizes: Sequence[int] = SIZES) -> None:
    """Raises ``InputError`` where the loss is, in whole or in part, a sum over samples: gradients
    are averaged over ranks, so that training with it would differ, silently, with their number.

    Asked of a few samples and of the same ones two and three times: a mean stays as it is, what is
    not of the samples too (weight decay in the loss), and a sum grows by the same twice. Of the
    first of ``sizes`` that the model takes; nothing is known of one that takes none, or is random
    in evaluation mode too. Warns where the loss compares samples with each other, or weighs them
    unequally.
    """
    unequal = False
    with trial(workload) as run:
        for size in sizes:
            # What fails here fails in training as well, where it is told.
            with suppress(Exception):
                once, twice, thrice = _repeated(run, size)
                tolerance = SUM_SHARE[_is_half(run)] * max(map(abs, (once, twice, thrice)))
                with suppress(Exception):  # halves may be smaller than it takes
                    unequal = abs(twice - once) <= tolerance != 0 and _weighs_unequally(run, size)
                break
        else:
            return
    first, second = twice - once, thrice - twice
    if abs(first) <= tolerance:
        if unequal and os.environ.get("RANK", "0") == "0":
            warnings.warn(
                f"the loss of {workload.name!r} is a mean in which samples weigh unequally (by "
                "class weights, or by tokens that count): each rank takes the mean of its own "
                "share, and shares count by their samples; for the mean over the whole batch say "
                "after each forward what the share weighs, mw.loss_weight(sum of its weights)",
                stacklevel=2,
            )
        return
    if abs(second - first) <= LINEAR * abs(first):
        raise InputError(
            f"the loss of {workload.name!r} is a sum over samples, or has a part that is "
            f"({once:.4g} for {size} samples, {twice:.4g} for the same ones twice), and gradients "
            "are averaged over ranks: write it, with losses that modules keep, as a mean over the "
            "samples that it is given (reduction='mean', .mean()), times a constant if it is to "
            "be larger"
        )
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(
            f"the loss of {workload.name!r} compares samples with each other ({once:.4g} for "
            f"{size} samples, {twice:.4g} for the same ones twice): each rank compares those of "
            "its own share",
            stacklevel=2,
        )


def _repeated(run: Workload, size: int) -> tuple[float, float, float]:
    """The loss of a batch, and of batches with each of its samples two and three times; equal where
    it is random whatever the mode, or nobody has said what the loss is."""
    batch = run.make_batch(size).to(device_of(run.model))

    def value(times: int, seed: int = 0) -> float:
        torch.manual_seed(seed)
        given = batch.take(torch.arange(times * size) % size)
        output = run.model(*given.args, **given.kwargs)
        if run.loss is default_loss and not isinstance(getattr(output, "loss", None), Tensor):
            return 0.0
        return float(run.loss(output, given.target).detach())

    if value(1) != value(1, seed=1):
        run.model.eval()  # without dropout
        if value(1) != value(1, seed=1):
            return 0.0, 0.0, 0.0
    return value(1), value(2), value(3)


def _weighs_unequally(run: Workload, size: int) -> bool:
    """Whether the loss is not the mean over two parts of a batch, where no module of the model
    computes over the batch as a whole."""
    batch = run.make_batch(size).to(device_of(run.model))
    allowed = SUM_SHARE[_is_half(run)] / ROUNDING

    def share(found: Tensor, expected: Tensor) -> float:
        scale = expected.abs().max().item() if expected.numel() else 0.0
        off = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
        return off / (allowed * scale) if off else 0.0

    found = _mixing(run, batch, share) if batch.size > 1 else None
    return found is not None and found.module is None


def _is_half(run: Workload) -> bool:
    """Whether anything in the model is computed in 16 bits."""
    return run.precision not in (None, "float32", "tf32") or any(
        p.is_floating_point() and p.element_size() < 4 for p in run.model.parameters()
    )


def batch_buffers(
    workload: Workload, batch: Batch, share: Callable[[Tensor, Tensor], float]
) -> dict[str, str]:
    """The buffers that a forward in training mode sets by what it finds in the samples there (the
    range of activations, say), so that a part of the batch leaves others than all of it; each with
    a sentence. Those of batch normalisation do not count; ``share`` as in ``mixing_cause``."""
    model, size = workload.model, batch.size
    # Both halves, as what is largest of all samples is the largest of one of them too.
    parts = batch.slice(0, size // 2), batch.slice(size // 2, size)

    def left(samples: Batch) -> dict[str, Tensor]:
        with torch.enable_grad(), preserved(model):
            fix_statistics(model)
            torch.manual_seed(0)
            model(*samples.args, **samples.kwargs)
            named = model.named_buffers(remove_duplicate=False)
            return {name: buffer.detach().clone() for name, buffer in named}

    def differ(found: Tensor, buffer: Tensor) -> bool:
        if found.is_floating_point() and found.shape == buffer.shape:
            return share(found, buffer) > ROUNDING
        return not torch.equal(found, buffer)

    whole, halves = left(batch), [left(part) for part in parts]
    found = {n for n, buffer in whole.items() if any(differ(half[n], buffer) for half in halves)}
    # What a module rounds to whole numbers may be equal by chance (where zero lies, quantized).
    modules = {name.rpartition(".")[0] for name in found}
    return {
        name: (
            f"module {name.rpartition('.')[0]!r} keeps in buffer {name!r} what it finds in all "
            "samples of a forward, of which each rank sees its own only, so no training on shares "
            "of a batch leaves the buffer of the whole; parameters and losses are equal"
        )
        for name, buffer in sorted(whole.items(), key=lambda item: item[0] not in found)
        if name in found or (_is_whole(buffer) and name.rpartition(".")[0] in modules)
    }


def used_buffers(workload: Workload, batch: Batch, names: Collection[str]) -> str:
    """A sentence where the model computes with what it keeps in the buffers of these names (which
    ``batch_buffers`` has found): the loss of a part of the batch is another when they begin with
    what all of it leaves. Empty where it does not."""
    model, part = workload.model, batch.slice(0, batch.size // 2)

    def loss(start: Mapping[str, Tensor]) -> Tensor:
        for name, value in start.items():
            model.get_buffer(name).resize_(value.shape).copy_(value)
        torch.manual_seed(0)
        return _loss(workload, part)

    with torch.enable_grad(), preserved(model):
        fix_statistics(model)
        before = {name: model.get_buffer(name).clone() for name in names}
        model(*batch.args, **batch.kwargs)
        left = {name: model.get_buffer(name).clone() for name in names}
        if torch.equal(loss(before), loss(left)):
            return ""
    name = next(iter(names))
    return (
        f"module {name.rpartition('.')[0]!r} keeps in buffer {name!r} what it finds in all samples "
        "of a forward, of which each rank sees its own only, and the model computes with it, so no "
        "training on shares of a batch equals that of the whole"
    )


def _is_whole(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex())


def _loss(workload: Workload, batch: Batch) -> Tensor:
    return workload.loss(workload.model(*batch.args, **batch.kwargs), batch.target).detach()


def _first_change(
    found: list[_Call], reference: list[_Call], same: Callable[[Tensor, Tensor], bool]
) -> str | None:
    """The first module with equal inputs in both and other outputs, those inside it first; the
    model where the two took other ways."""
    for a, b in zip(found, reference, strict=False):
        if a.module != b.module:
            return ""
        pairs = [(a.given, b.given), (a.made, b.made)]
        given, made = (
            len(x) == len(y) and all(same(p, q) for p, q in zip(x, y, strict=True))
            for x, y in pairs
        )
        if given and not made:
            return a.module
    return None if len(found) == len(reference) else ""


def _rows(whole: Tensor, part: Tensor, cut: int, size: int) -> Tensor | None:
    """What of ``whole`` belongs to the first ``cut`` of ``size`` samples, which have ``part``; None
    where no dimension tells samples apart."""
    if whole.ndim != part.ndim:
        return None
    others = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
    if not others:
        return whole
    dim = others[0]
    if len(others) > 1 or whole.shape[dim] * cut != part.shape[dim] * size:
        return None
    return whole.narrow(dim, 0, part.shape[dim])


def _calls(model: nn.Module, batch: Batch) -> list[_Call]:
    """What every module is given and makes in one forward."""
    found: list[_Call] = []

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
            # Copies, as what follows may change them in place. A scalar is of all samples by right.
            given, out = (
                [t.detach().clone() for t in tensors_in(tree) if t.ndim] for tree in
                ((args, kwargs), made)
            )  # fmt: skip
            found.append(_Call(name, given, out))

        return hook

    hooks = [
        module.register_forward_hook(keep(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        model(*batch.args, **batch.kwargs)
    finally:
        for handle in hooks:
            handle.remove()
    return found
