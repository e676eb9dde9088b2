"""Where a batch has its samples: the dimension of every tensor that counts them, found by two batch
sizes or by running the model on a part of the samples.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ..compiled import eagerly, uncompiled
from ..opened import map_tensors, tensors_in
from ..replay import preserved
from ..trial_sizes import SEVERAL
from ..workload import Batch, Workload, device_of

# [Note: Where the samples are]
# - A workload draws batches of any size: what is as long as the batch in batches of several sizes
#   counts samples (``LocatedBatches``).
# - Of a model with one example, each dim of each input is tried: the model is run on some of the
#   samples along it, in another order, and must give for each what it gave in the whole batch
#   (``with_dims``). That tells samples from time: a recurrent layer minds the order of steps, and
#   attention how many there are. An example of equal values (zeros, say) would tell anything, so
#   other values are tried before it (``_trials``).
# - Inside the model discovery compares the shapes of two forwards (``sample_dim``).
# Plans keep the dims (``batch_dims`` of units), so that running one finds nothing anew.

MakeBatch = Callable[[int], Batch]
Dims = tuple[int | None, ...]

# What rounding may do to the same sample in another batch, in parts of the largest output: so much,
# or so many units in the last place of coarse types.
_ROUNDING, _LAST_PLACES = 1e-3, 4
# Guesses at where an example has its samples: a forward each.
_TRIES = 12


def located(workload: Workload) -> Workload:
    """The workload with batches that say where their samples are."""
    if isinstance(workload.make_batch, LocatedBatches):
        return workload
    make_batch, data = LocatedBatches(workload.make_batch), workload.data

    def located_data(part: str) -> Batch:
        assert data is not None
        return make_batch.say(data(part))

    return replace(workload, make_batch=make_batch, data=located_data if data else None)


class LocatedBatches:
    """A ``make_batch`` whose batches have ``batch_dims``, found when the first is drawn; batches
    that say it themselves, or of which no dimension counts the samples, are left as they are."""

    def __init__(self, make_batch: MakeBatch) -> None:
        self._make_batch = make_batch
        self._dims: Dims | None = None
        self._looked = False

    def __call__(self, size: int) -> Batch:
        return self.say(self._make_batch(size))

    def say(self, batch: Batch) -> Batch:
        """The batch with its dims."""
        # What a user's function returns may be anything: others say what is wrong with it.
        if not isinstance(batch, Batch) or batch.batch_dims is not None:
            return batch
        if not self._looked:
            self._looked = True
            self._dims = self._find(batch)
        if self._dims is None:
            return batch
        with suppress(ValueError):  # it is not like those that were looked at
            return replace(batch, batch_dims=self._dims)
        return batch

    def _find(self, batch: Batch) -> Dims | None:
        for sizes in SEVERAL:
            # A workload may refuse a size.
            with suppress(Exception), torch.random.fork_rng(devices=[]):
                drawn = [self._make_batch(size).tensors() for size in sizes[:2]]
                counted = _counted(drawn, sizes)
                if any(len(dims) > 1 for dims in counted):
                    drawn.append(self._make_batch(sizes[2]).tensors())
                    counted = _counted(drawn, sizes)
                # Where several still do (scores of all samples against all), the first.
                found = tuple(min(dims, default=None) for dims in counted)
                inputs = len(tensors_in((batch.args, dict(batch.kwargs))))
                # A target alone is no batch.
                return found if any(dim is not None for dim in found[:inputs]) else None
        return None


def _counted(drawn: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[list[int]]:
    """For each tensor of batches of several sizes the dims that are as long as the batch."""
    # The rank may change from batch to batch, too.
    return [
        [
            d
            for d in range(min(t.ndim for t in same))
            if all(t.shape[d] == size for t, size in zip(same, sizes, strict=False))
        ]
        for same in zip(*drawn, strict=True)
    ]


def sample_dim(
    shape: Sequence[int], other: Sequence[int], sizes: tuple[int, int]
) -> tuple[int | None, bool]:
    """The dim that counts the samples of a tensor, by its shapes in forwards of two sizes (None
    where it has none), and whether that is sure: not where several dims grow with the batch, or
    one does that does not count the samples."""
    if len(shape) != len(other):
        return None, False
    few, many = sizes
    # Other dims may differ too, where batches have lengths of their own.
    grows = [
        d for d, (a, b) in enumerate(zip(shape, other, strict=True)) if a and a * many == b * few
    ]
    if len(grows) == 1 and shape[grows[0]] == few:
        return grows[0], True
    return None, tuple(shape) == tuple(other)


def with_dims(model: nn.Module, batch: Batch) -> Batch:
    """The example ``batch`` with the dims that count its samples, found by running ``model``; as it
    is where the model's outputs do not tell."""
    if batch.batch_dims is not None or any(p.is_meta for p in model.parameters()):
        return batch
    try:
        with uncompiled(model) as own, preserved(own), eagerly(), torch.enable_grad():
            own.eval()
            for given in _trials(batch.to(device_of(own))):
                dims = _told(own, given)
                if dims is not None:
                    return replace(batch, batch_dims=dims)
    except Exception:  # the model's own, which whoever measures it will say
        return batch
    return batch


def _trials(batch: Batch) -> Iterator[Batch]:
    """The batch with other values where an input's are equal, and as it is for a model that refuses
    those or tells nothing by them."""
    given = batch.args, dict(batch.kwargs)
    for replaces in (lambda t: _are_equal(t) or _repeats(t), _repeats):
        if any(map(replaces, tensors_in(given))):
            # Of its own, so that all ranks try the same and the answer is the same tomorrow.
            draw = partial(_drawn, replaces, torch.Generator().manual_seed(0))
            args, kwargs = map_tensors(given, draw)
            yield replace(batch, args=args, kwargs=kwargs)
    yield batch


def _repeats(tensor: Tensor) -> bool:
    """Whether these are floating numbers, along some dim the same at every place."""
    if not tensor.is_floating_point() or tensor.layout is not torch.strided or not tensor.numel():
        return False
    along = (d for d, length in enumerate(tensor.shape) if length > 1)
    return any(bool((tensor == tensor.narrow(d, 0, 1)).all()) for d in along)


def _are_equal(tensor: Tensor) -> bool:
    """Whether these are integers, all of them equal, in several dims: in one they may be lengths,
    by which others are cut."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        return False
    if tensor.layout is not torch.strided or tensor.ndim < 2 or not tensor.numel():
        return False
    return bool((tensor == tensor.flatten()[0]).all())


def _drawn(
    replaces: Callable[[Tensor], bool], generator: torch.Generator, tensor: Tensor
) -> Tensor:
    """Random numbers instead of a tensor that is to be replaced, others as they are."""
    if not replaces(tensor):
        return tensor
    if tensor.is_floating_point():
        # From 0 to 1: whatever is made of them (an index, a logarithm) fails least there.
        made = torch.rand(tensor.shape, generator=generator)
        return made.to(tensor.device, tensor.dtype).requires_grad_(tensor.requires_grad)
    # An index past a table's end raises on a CPU, and on a GPU ends all work of the process there.
    most = max(int(tensor.flatten()[0]), int(tensor.device.type == "cpu"))
    drawn = torch.randint(most + 1, tensor.shape, generator=generator)
    return drawn.to(tensor.device, tensor.dtype)


def _told(model: nn.Module, given: Batch) -> Dims | None:
    """The dims of ``given`` along which the model tells samples; None where it fails on it, too."""
    with suppress(Exception):
        whole = _made(model, given)
        for dims in _guesses(given):
            with suppress(Exception):  # cut there, the model's inputs may not fit together
                if _tells_samples(model, replace(given, batch_dims=dims), whole):
                    return dims
    return None


def _made(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The tensors in the model's output, without their graph."""
    return [t.detach() for t in tensors_in(model(*batch.args, **batch.kwargs))]


def _guesses(batch: Batch) -> Iterator[Dims]:
    """Where the samples may be, likely places first."""
    tensors = batch.tensors()
    inputs = tensors_in((batch.args, dict(batch.kwargs)))
    seen: set[Dims] = set()
    for one in inputs:
        for dim, size in enumerate(one.shape):
            choices: list[list[int | None]] = [
                [dim] if t is one else _dims_of(t, size, dim) for t in tensors
            ]
            for dims in product(*choices):
                if dims not in seen and len(seen) < _TRIES:
                    seen.add(dims)
                    yield dims


def _dims_of(tensor: Tensor, size: int, dim: int) -> list[int | None]:
    """Where a tensor may have its samples beside one that has ``size`` of them in ``dim``."""
    fitting: list[int | None] = [d for d, length in enumerate(tensor.shape) if length == size]
    fitting.sort(key=lambda d: d != dim)
    return fitting or [None]


def _tells_samples(model: nn.Module, batch: Batch, whole: Sequence[Tensor]) -> bool:
    """Whether the model gives for some samples of the batch, backwards, what it gave for them among
    all (``whole``)."""
    size = batch.size
    index = torch.arange(size).flip(0)[: -(-size // 2)] if size > 1 else torch.tensor([0, 0])
    part = batch.take(index)
    found = _made(model, part)
    if len(found) != len(whole):
        return False
    changed = [(a, b) for a, b in zip(whole, found, strict=True) if a.shape != b.shape]
    return bool(changed) and all(_same_samples(a, b, index, size) for a, b in changed)


def _same_samples(whole: Tensor, part: Tensor, index: Tensor, size: int) -> bool:
    """Whether ``part`` holds the samples ``index`` of ``whole``, which has ``size``; they may share
    their dimension with another."""
    index = index.to(whole.device)
    others = [d for d in range(whole.ndim) if whole.shape[d] != part.shape[d]]
    if whole.ndim != part.ndim or len(others) != 1:
        return False
    dim = others[0]
    per_sample, rest = divmod(whole.shape[dim], size)
    if rest or part.shape[dim] != per_sample * len(index):
        return False
    before, after = whole.shape[:dim], whole.shape[dim + 1 :]
    outer = whole.reshape(*before, size, per_sample, *after).index_select(dim, index)
    inner = whole.reshape(*before, per_sample, size, *after).index_select(dim + 1, index)
    return any(_close(way.flatten(dim, dim + 1), part) for way in (outer, inner))


def _close(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    # Of what is no number nothing can be told, and infinity would allow anything.
    largest = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    allowed = max(_ROUNDING, _LAST_PLACES * torch.finfo(a.dtype).eps)
    return torch.allclose(a, b, allowed, allowed * largest)
