"""Memory that a library carries, and would hold on to for a moment too long."""

# gloo's threads keep the tensors of a collective until they come to destroy it, which is some time
# after it has completed: on a busy machine long enough for the next gradient to be made beside one
# that has been applied and freed. What was waited for has arrived, and nothing reads or writes it
# any more. So the library gets tensors of its own, and their memory is taken away again: what is
# alive at a moment does not depend on when a thread gets its turn.

from collections.abc import Iterable

from torch import Tensor


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
