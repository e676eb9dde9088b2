"""An exchange on gloo as messages between pairs of ranks, all under way at once."""

# [Note: Messages between pairs]
# gloo runs two collectives of a process group at a time, in two threads, and a rank asks for a
# message no earlier than its collective runs. Of many that were issued the third is asked for when
# one of the first has arrived and a thread has had its turn, which it waits for where the processor
# computes: the link is idle meanwhile, and small gradients come late (docs/results/lossy.md).
# Messages between pairs are asked for and handed over when they are issued, however many there
# are. Those of a pair arrive in the order in which they were issued.
#
# Where GLOO_SOCKET_IFNAME names several interfaces torch connects each pair by all of them, and a
# message's tag says which carries it: gloo's collectives take turns, and so do exchanges.
#
# Their works tell nothing before somebody waits for them, and a wait that runs out of time closes
# the connection. So a thread waits for them without a limit, in their order, and tells who asks.

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import combinations, product
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from .worker_threads import LINGER_S, IssueQueue


class PairwiseWork(dist.Work):
    """What one exchange has under way in ``groups``."""

    def __init__(self, *groups: dist.ProcessGroup) -> None:
        super().__init__()
        self._groups = groups  # as long as somebody waits, so that they can be closed
        self._works: list[dist.Work] = []
        self._done: Future[None] = Future()

    def add(self, work: dist.Work | None) -> None:
        """One message more."""
        if work is not None:
            self._works.append(work)

    def finish(self) -> None:
        """Waits for the messages, and tells who waits for the exchange."""
        try:
            while self._works:
                self._works[-1].wait()
                self._works.pop()  # before it is told: works hold their tensors
        except BaseException as failure:  # raised where somebody waits
            self.fail(failure)
        else:
            self._groups = ()
            self._done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """It ends with that. What other ranks may still send keeps its memory."""
        _lost.extend(self._works)
        self._works, self._groups = [], ()
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


_lost: list[dist.Work] = []
"""Messages of exchanges that have failed, as those end a run."""


class _Exchanges:
    """Those of two process groups, one for each way: the thread that waits for them, in ``queue``,
    and how many were ``started``, of which all ranks have the same number."""

    def __init__(self, group: dist.ProcessGroup, opposite: dist.ProcessGroup) -> None:
        # By weak references: what ``_exchanges`` holds must not hold its key.
        cut = partial(_close, ref(group), ref(opposite))
        self.queue = IssueQueue("meshwright messages", linger_s=LINGER_S, computes=False, cut=cut)
        self.started = 0

    def next_tag(self) -> int:
        """That of the messages of the exchange that begins."""
        self.started += 1
        return self.started % _interfaces()


_exchanges: WeakKeyDictionary[dist.ProcessGroup, _Exchanges] = WeakKeyDictionary()
"""By the process group of messages to higher ranks."""


def _interfaces() -> int:
    """By how many ways each pair of ranks is connected."""
    return len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))


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
    receive so many from them ``into``; what goes to lower ranks in ``opposite``. Collective, after
    ``connect``."""
    me = group.rank()  # which it knows even after the process has left its groups
    arriving, leaving = torch.split(into, list(received)), torch.split(out, list(sent))
    if sent[me]:
        arriving[me].copy_(leaving[me])
    others = [rank for rank in range(len(sent)) if rank != me]
    known = _exchanges[group]
    tag, work = known.next_tag(), PairwiseWork(group, opposite)
    if not any(received[rank] or sent[rank] for rank in others):
        work.finish()
        return work
    try:
        # Requests first: a message may leave at once and would stand before them.
        for rank in others:
            if received[rank]:
                way = group if rank < me else opposite
                work.add(dist.irecv(arriving[rank], group=way, group_src=rank, tag=tag))
        for rank in others:
            if sent[rank]:
                way = group if rank > me else opposite
                work.add(dist.isend(leaving[rank], group=way, group_dst=rank, tag=tag))
    except RuntimeError as error:  # a peer is lost: said where somebody waits, as if it were later
        work.fail(error)
        return work
    known.queue.submit(work.finish, in_thread=True)
    return work


def connect(group: dist.ProcessGroup, opposite: dist.ProcessGroup) -> None:
    """Makes two new process groups of the same ranks ready for exchanges. Collective."""
    if group in _exchanges:
        return
    _exchanges[group] = _Exchanges(group, opposite)
    # With TORCH_GLOO_LAZY_INIT a pair is connected by its first messages, and who issues one waits
    # until the other does: two ranks that ask each other first, each in another group, wait for
    # ever. Here all come to the pairs in one order.
    me, byte = group.rank(), torch.zeros(1, dtype=torch.uint8, device="cpu")
    pairs = combinations(range(group.size()), 2)
    for (low, high), way, tag in product(pairs, (group, opposite), range(_interfaces())):
        if me == low:
            dist.send(byte, group=way, group_dst=high, tag=tag)
        elif me == high:
            dist.recv(byte, group=way, group_src=low, tag=tag)


def _close(*groups: ref[dist.ProcessGroup]) -> None:
    """Closes the connections of process groups, and so fails what waits for their messages."""
    for group in (reference() for reference in groups):
        if group is None:
            continue
        for rank, tag in product(range(group.size()), range(_interfaces())):
            if rank == group.rank():
                continue
            never = torch.empty(1, device="cpu")
            # A wait that runs out of time closes all, and raises; a lost rank's own only raises.
            with suppress(Exception):  # the process ends: nobody is left to be told
                work = dist.irecv(never, group=group, group_src=rank, tag=tag)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
