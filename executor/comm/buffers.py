"""Memory that a library carries, and would hold on to for a moment too long."""

# gloo's threads keep the tensors of a collective until they come to destroy it, which is some time
# after it has completed: on a busy machine long enough for the next gradient to be made beside one
# that has been applied and freed. What was waited for has arrived, and nothing reads or writes it
# any more. So the library gets tensors of its own, and their memory is taken away again: what is
# alive at a moment does not depend on when a thread gets its turn.

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from .groups import Group


def alias_for_comm(tensor: Tensor) -> Tensor:
    """The same memory as a tensor to be sent. No view, which would hold what it is a view of."""
    return tensor.detach()


def release_comm_buffers(tensors: Iterable[Tensor]) -> None:
    """Takes the memory away from tensors of ``alias_for_comm`` that have been waited for; who else
    has that memory keeps it."""
    for tensor in tensors:
        # On a device's streams a wait does not hold the host, and the library looks after the
        # memory itself: those stay.
        if tensor.device.type == "cpu":
            tensor.data = tensor.new_empty(0)


def gather_rows(rows: Tensor, own: Tensor, group: Group) -> tuple[dist.Work | None, list[Tensor]]:
    """Starts to put the ``own`` elements of every rank of the group into a row each; what is under
    way, and the tensors that the library has. Collective."""
    mine = alias_for_comm(own)
    if group.on_stream and rows.is_contiguous():
        # Into a list NCCL's backend gathers by way of memory of its own, and copies each part
        # (ProcessGroupNCCL::allgather, ``newLikeFlat``).
        into = alias_for_comm(rows.view(-1))
        # torch 2.13 renamed it; the old name warns there.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(into, mine, group=group.handle, async_op=True), [into, mine]
    parts = [alias_for_comm(row) for row in rows]
    work = dist.all_gather(parts, mine, group=group.handle, async_op=True)
    return work, [*parts, mine]


def scatter_sums(own: Tensor, rows: Tensor, group: Group) -> tuple[dist.Work | None, list[Tensor]]:
    """Starts to add up the ``rows``, one for each rank of the group, over all ranks: the sum of its
    own row into ``own``. Collective, on a device's streams."""
    into, out = alias_for_comm(own), alias_for_comm(rows.view(-1))
    # torch 2.13 renamed it; the old name warns there.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(into, out, group=group.handle, async_op=True), [into, out]
