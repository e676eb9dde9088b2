"""A batch in micro-batches whose gradients add up to the batch's, and loops that end together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from ..models.workload import Batch
from ..planner.schema.errors import InputError
from .forward import Weight
from .parallel import run_of
from .run import Run


def micro_batches(
    model: nn.Module, batch: Any, parts: int, counts: Sequence[float] | None = None
) -> Iterator[Any]:
    """Yields ``parts`` pieces of this rank's ``batch``, in order; call the model, the loss and
    backward on each, then step once.

    Each piece's gradient counts as its samples do within all ranks' whole batch, so that uneven
    pieces and uneven ranks give the gradient of the mean over all samples. ``counts`` are what each
    piece's loss is a mean over, where that is not its samples (tokens, say). Gradients are
    exchanged in the last piece's backward. Pieces may be empty: all ranks must ask for the same
    ``parts``. Collective.

    ``batch`` is a ``Batch``, or what a loader gives: a tuple such as ``(x, y)``, a list or a dict,
    whose tensors with the batch's dim 0 are cut. Pieces are of its kind. Where the model has its
    samples elsewhere, only a ``Batch`` with ``batch_dims`` says where to cut.
    """
    if parts < 1:
        raise InputError(f"a batch cannot be cut into {parts} micro-batches: use at least 1")
    run = run_of(model)
    _check_dims(run, batch)
    whole = _whole(batch)
    bounds = [whole.size * i // parts for i in range(parts + 1)]
    mine = [bounds[i + 1] - bounds[i] for i in range(parts)] if counts is None else list(counts)
    if len(mine) != parts:
        raise InputError(f"{len(mine)} counts were given for {parts} micro-batches: give one each")
    # Not waited for before backward: on a busy link it would stand behind slices.
    gathered = run.control.gather([sum(mine)], "the start of a step", whole=False)
    before = run.synchronise
    run.in_pieces = parts > 1
    try:
        for i in range(parts):
            run.synchronise = before and i == parts - 1
            run.weight_next = Weight.of(mine[i], gathered)
            piece = whole.slice(bounds[i], bounds[i + 1])
            yield piece if whole is batch else piece.args[0]
    finally:
        run.synchronise, run.weight_next, run.in_pieces = before, None, False


def _whole(batch: Any) -> Batch:
    if isinstance(batch, Batch):
        return batch
    nested = isinstance(batch, tuple | list | Mapping)
    if not nested or not any(isinstance(t, Tensor) and t.ndim for t in pytree.tree_leaves(batch)):
        raise InputError(
            f"micro_batches cannot cut this {type(batch).__name__}: give inputs and target as one"
            " tuple (x, y), a dict of tensors, or a meshwright.Batch(args, target)"
        )
    return Batch((batch,), None)


def _check_dims(run: Run, item: Any) -> None:
    known = isinstance(item, Batch) and item.batch_dims is not None
    if any(run.input_dims.values()) and not known:
        raise InputError(
            "the model has its samples in another dim than 0, so where to cut must be said: give "
            "a meshwright.Batch(args, target, batch_dims=...) with the dim of samples of each "
            "tensor"
        )


def join(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """Yields this rank's batches, then empty ones until every rank has used up its own.

    So that ranks with fewer batches take part to the end, as they must where others need them. An
    empty batch is the last one with no samples: every tensor that has the batch's dim 0 is cut to
    none (of a ``Batch``, every tensor that has samples by its ``batch_dims``). Collective: iterate
    to the end on every rank.
    """
    run = run_of(model)
    last: Any = None
    # Each rank asks all others once a batch whether they have one; a rank that has none answers 0
    # and goes on asking, so every question has as many answers as there are ranks.
    for item in batches:
        last = item
        run.everyone.gather([1], "the end of its batches").rows()
        yield item
    while any(row[0] for row in run.everyone.gather([0], "the end of its batches").rows()):
        if last is None:
            raise InputError(
                f"rank {run.world.rank} has no batch at all while others do, so an empty one "
                "cannot be made: give every rank at least one batch"
            )
        _check_dims(run, last)
        yield _emptied(last)


def _emptied(item: Any) -> Any:
    if isinstance(item, Batch):
        return item.slice(0, 0)
    size = next(
        (t.shape[0] for t in pytree.tree_leaves(item) if isinstance(t, Tensor) and t.ndim), None
    )

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:0] if tensor.ndim and tensor.shape[0] == size else tensor

    return pytree.tree_map_only(Tensor, cut, item)
