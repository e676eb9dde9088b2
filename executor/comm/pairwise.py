"""An exchange on gloo as messages between pairs of ranks, all under way at once."""

# [Note: Messages between pairs]
# gloo runs two collectives of a process group at a time, in two threads, and a rank asks for a
# message no earlier than its collective runs. Of many that were issued the third is asked for when
# one of the first has arrived and a thread has had its turn, which it waits for where the processor
# computes: the link is idle meanwhile, and small gradients come late (docs/results/lossy.md).
# Messages between pairs are asked for and handed over when they are issued, however many there
# are. Those of a pair arrive in the order in which they were issued.
#
# Their works tell nothing before somebody waits for them, and a wait that runs out of time closes
# the connection. So a thread waits for them without a limit, in their order, and tells who asks.

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .worker_threads import LINGER_S, IssueQueue


class PairwiseWork(dist.Work):
    """What one exchange has under way."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works
        self._done: Future[None] = Future()

    def finish(self) -> None:
        """Waits for the messages, and tells who waits for the exchange."""
        error: BaseException | None = None
        try:
            while self._works:
                self._works.pop().wait()
        except BaseException as failure:  # raised where somebody waits
            error = failure
        self._works.clear()  # before it is told: works hold their tensors
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises ``RuntimeError`` where a message has failed or time has run out, as others do."""
        try:
            self._done.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("messages between ranks are still under way") from None
        return True

    def is_completed(self) -> bool:
        return self._done.done()

    def get_future(self) -> Any:
        """As of other works, to be told of its end."""
        return self._done


_waiting: WeakKeyDictionary[dist.ProcessGroup, IssueQueue] = WeakKeyDictionary()
"""By the process group of messages to higher ranks, the thread that waits for what goes in both."""


def exchange(
    into: Tensor,
    out: Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    *,
    group: dist.ProcessGroup,
    opposite: dist.ProcessGroup,
) -> PairwiseWork:
    """Starts to send ``sent`` rows of ``out`` to the ranks of ``group``, in torch's order, and to
    receive so many from them ``into``; what goes to lower ranks in ``opposite``. Collective."""
    me = group.rank()  # which it knows even after the process has left its groups
    arriving, leaving = torch.split(into, list(received)), torch.split(out, list(sent))
    if sent[me]:
        arriving[me].copy_(leaving[me])
    others = [rank for rank in range(len(sent)) if rank != me]
    # Requests first: a message may leave at once and would stand before them.
    works = [
        dist.irecv(arriving[rank], group=group if rank < me else opposite, group_src=rank)
        for rank in others
        if received[rank]
    ]
    works += [
        dist.isend(leaving[rank], group=group if rank > me else opposite, group_dst=rank)
        for rank in others
        if sent[rank]
    ]
    work = PairwiseWork([one for one in works if one is not None])
    if works:
        _queue_of(group, opposite).submit(work.finish, in_thread=True)
    else:
        work.finish()
    return work


def _queue_of(group: dist.ProcessGroup, opposite: dist.ProcessGroup) -> IssueQueue:
    queue = _waiting.get(group)
    if queue is None:
        # By weak references: what the dictionary holds must not hold its key.
        cut = partial(_close, ref(group), ref(opposite))
        queue = IssueQueue("meshwright messages", linger_s=LINGER_S, computes=False, cut=cut)
        _waiting[group] = queue
    return queue


def _close(*groups: ref[dist.ProcessGroup]) -> None:
    """Closes the connections of process groups, and so fails what waits for their messages."""
    for group in (reference() for reference in groups):
        if group is None:
            continue
        other = (group.rank() + 1) % group.size()
        # A wait that runs out of time does it, and raises.
        with suppress(Exception):  # the process ends: nobody is left to be told
            never = dist.irecv(torch.empty(1), group=group, group_src=other)
            if never is not None:
                never.wait(timedelta(milliseconds=1))
