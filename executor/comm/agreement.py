"""Rank 0 decides and all ranks know: one process works, the others get its answer or its error."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ...planner.schema.errors import InfeasibleError, InputError, MeshwrightError, RunError

Answer = TypeVar("Answer")


def rank_zero_decides(work: Callable[[], Answer]) -> Answer:
    """``work()`` of rank 0, on every rank of the default group; collective.

    Where it raises, every rank raises the same sentence: of the same class for Meshwright's own
    errors, else ``RunError``. The answer must survive pickling. Records do.
    """
    if dist.get_world_size() == 1:
        return work()
    outcome: list[Any] = [None]
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome = [work()]
        except Exception as error:
            outcome, failed = [_for_others(error)], error
    dist.broadcast_object_list(outcome, src=0)
    if failed is not None:
        raise failed  # and not what the others get: its traceback would be lost
    if isinstance(outcome[0], MeshwrightError):
        raise outcome[0]
    answer: Answer = outcome[0]
    return answer


def together(work: Callable[[], Answer]) -> Answer:
    """``work()`` of this rank, once all ranks have succeeded; collective.

    Where some ranks failed, these raise their own errors and all others the first one's sentence.
    """
    failed: Exception | None = None
    try:
        answer = work()
    except Exception as error:
        failed = error
    # Also where this rank has failed: the others would wait for ever for one that has left.
    errors = every_rank_tells(_for_others(failed) if failed else None)
    if failed is not None:
        raise failed
    for theirs in errors:
        if theirs is not None:
            raise theirs
    return answer


def every_rank_tells(told: Answer) -> list[Answer]:
    """What each rank tells, by rank; collective over the default group. Pickled on its way."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, told)
    return found


def _for_others(error: Exception) -> MeshwrightError:
    # One of three plain classes, which can be pickled whatever the error itself carries.
    for kind in (InputError, InfeasibleError, RunError):
        if isinstance(error, kind):
            return kind(str(error))
    return RunError(f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}")
