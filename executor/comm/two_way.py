"""Collectives that move different bytes each way, so that gloo uses both ways of a link at once."""

# [Note: Two process groups for the two ways]
# gloo sends a message when the receiver has asked for it, and what it sends to a peer leaves in the
# order in which it was handed over. In an all-to-all each rank hands over its message first and
# asks for the other's second. Of two ranks the later one finds that it was asked already: its
# message leaves, and its own request stands behind it. So the other way is idle until the message
# has arrived, and both together take twice as long: among two hosts at 200 Mbit/s 4 MiB took 173 ms
# or 346 ms, about as often (torch 2.13; gloo's all-reduce goes in small pieces, and does not).
# Here what goes to higher ranks and what goes to lower ones have a process group each: no request
# stands behind a message. An all-gather of two ranks is the same exchange; of more ranks gloo's is
# a ring, in which a rank sends to one and receives from another. Why these are no all-to-alls of
# gloo's: see [Note: Messages between pairs] in pairwise.py.

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from . import pairwise
from .buffers import alias_for_comm
from .groups import Group

Issued = tuple[dist.Work, list[Tensor]]
"""What is under way, and the tensors that the library has."""


def all_to_all(
    into: Tensor, out: Tensor, received: Sequence[int], sent: Sequence[int], group: Group
) -> Issued:
    """Starts to send ``sent`` rows of ``out`` to the ranks of the group, in torch's order, and to
    receive so many from them. Collective."""
    into, out = alias_for_comm(into), alias_for_comm(out)
    if group.ways is not None:
        handle, opposite = group.ways
        messages = pairwise.exchange(into, out, received, sent, group=handle, opposite=opposite)
        return messages, [into, out]
    work = dist.all_to_all_single(
        into, out, list(received), list(sent), group=group.handle, async_op=True
    )
    return work, [into, out]


def gather_rows(rows: Tensor, own: Tensor, group: Group) -> Issued:
    """Starts to put the ``own`` elements of every rank of the group into a row each, where this
    rank's may lie already. Collective."""
    if group.on_stream and rows.is_contiguous():
        # Into a list NCCL's backend gathers by way of memory of its own, and copies each part
        # (ProcessGroupNCCL::allgather, ``newLikeFlat``).
        into, mine = alias_for_comm(rows.view(-1)), alias_for_comm(own)
        # torch 2.13 renamed it; the old name warns there.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(into, mine, group=group.handle, async_op=True), [into, mine]
    if group.in_pairs:
        me = group.group_ranks[group.member]
        if rows[me].data_ptr() != own.data_ptr():
            rows[me].view(-1).copy_(own.view(-1))
        # Bytes travel, so that every dtype does.
        theirs, mine = (t.view(-1).view(torch.uint8) for t in (rows[1 - me], own))
        counts = [0 if rank == me else mine.numel() for rank in range(2)]
        return all_to_all(theirs, mine, counts, counts, group)
    parts, mine = [alias_for_comm(row) for row in rows], alias_for_comm(own)
    return dist.all_gather(parts, mine, group=group.handle, async_op=True), [*parts, mine]
