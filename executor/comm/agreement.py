"""Rank 0 decides and all ranks know: one process works, the others get its answer or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...planner.schema.errors import InfeasibleError, InputError, RunError

Answer = TypeVar("Answer")
_ERRORS = (InputError, InfeasibleError, RunError)


class _Failure(NamedTuple):
    """An error on its way to the other ranks: the index of its class, and its sentence."""

    kind: int
    message: str


def rank_zero_decides(work: Callable[[], Answer]) -> Answer:
    """``work()`` of rank 0, on every rank of the default group; collective.

    Where it raises, every rank raises the same sentence: of the same class for Meshwright's own
    errors, else ``RunError`` (rank 0 raises what happened, so that its traceback is not lost). The
    answer must survive pickling. Records do.
    """
    if dist.get_world_size() == 1:
        return work()
    outcome: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except Exception as error:
            outcome, failed = [_failure(error)], error
    dist.broadcast_object_list(outcome, src=0)
    if failed is not None:
        raise failed
    if isinstance(outcome[0], _Failure):
        raise _ERRORS[outcome[0].kind](outcome[0].message)
    answer: Answer = outcome[0]
    return answer


def together(work: Callable[[], Answer]) -> Answer:
    """``work()`` of this rank, once all ranks have succeeded; collective.

    Where some ranks failed, these raise their own errors and all others the first one's sentence,
    so that no rank goes on to wait for one that has left.
    """
    mine: list[Answer] = []
    failed: Exception | None = None
    try:
        mine.append(work())
    except Exception as error:
        failed = error
    words: list[_Failure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(words, _failure(failed) if failed else None)
    if failed is not None:
        raise failed
    for word in words:
        if word is not None:
            raise _ERRORS[word.kind](word.message)
    return mine[0]


def _failure(error: Exception) -> _Failure:
    for kind, known in enumerate(_ERRORS):
        if isinstance(error, known):
            return _Failure(kind, str(error))
    where = f"rank {dist.get_rank()} failed with {type(error).__name__}"
    return _Failure(_ERRORS.index(RunError), f"{where}: {error}")
