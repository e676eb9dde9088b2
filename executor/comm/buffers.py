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


def scatter_sums(own: Tensor, rows: Tensor, group: Group) -> tuple[dist.Work | None, list[Tensor]]:
    """Starts to add up the ``rows``, one for each rank of the group, over all ranks: the sum of its
    own row into ``own``. Collective, on a device's streams."""
    into, out = alias_for_comm(own), alias_for_comm(rows.view(-1))
    # torch 2.13 renamed it; the old name warns there.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(into, out, group=group.handle, async_op=True), [into, out]
