"""Parameters that are whole only while a unit needs them (the third stage of ZeRO, Rajbhandari et
al., arXiv 1910.02054; FSDP): otherwise each peer keeps its chunk, and the rest takes no memory.

The exchange of gradients and the step are those of ``sharded``; what differs is that a step gathers
nothing: the chunks are put together before the unit's forward and again before its backward. See
[Note: Unshard and reshard] in unshard.py and [Note: Resharded parameters] in reshard.py.
"""

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from ..comm.watchdog import Watchdog
from .buckets import GradParam
from .flat_shard import flat
from .pending import bare
from .sharded import ShardedGradGroup, ShardedSlice, gathers_of


class FullyShardedGradGroup(ShardedGradGroup):
    """The gradients of a unit, and its parameters: a chunk of each, which lives on, and the whole
    while something needs it.

    ``resident``: the memory of the whole holds the parameters. ``coming``: it will, once what has
    been issued has come. With neither that memory is free.
    """

    def __init__(self, unit: int, params: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, params, limit_bytes)
        channels = params[0].channels
        assert channels is not None
        assert channels.unshards is not None, "made for the degrees of fully sharded units"
        # Of their own, on another process group: the gradients of the last backward may still be on
        # their way while the parameters are put together.
        self.unshard_slices = gathers_of(self.slices, channels.unshards)
        self.resident, self.coming = True, False
        self.exposed = True
        """Whether code that is not the model's forward may hold its memory."""
        self.opened = True
        """Whether anybody may have changed the whole since the chunks were made from it."""
        self.chunks = {
            param: bare(param.parameter).new_empty(spec.own_numel)
            for param, spec in self.specs.items()
        }
        self._released = False
        self._issued: Future[None] = Future()

    # -- the step ------------------------------------------------------------------------------

    def average_of(self, param: GradParam) -> Tensor:
        return self.gradients[param] if self._released else super().average_of(param)

    def chunk_of(self, param: GradParam) -> Tensor:
        return self.chunks[param]

    def _gathered(self) -> tuple[ShardedSlice, ...]:
        return ()  # parameters are put together when they are needed

    @property
    def outstanding(self) -> bool:
        """Whether gradients have been sent and are held until they have arrived."""
        return not self._released and self.pipeline is None and self.sent == len(self.slices)

    def release(self, watch: Watchdog) -> float:
        """Waits for the averages of this rank's elements and frees what has been sent, in the midst
        of backward. Returns the seconds waited."""
        self._averages = averages = {param: self.average_of(param) for param in self.params}
        waited = self.wait_for_averages(watch)
        # Stay among the gradients: at the end of backward what has none is sent as zeros.
        self.gradients, self._released = averages, True
        return waited

    def clear(self) -> None:
        super().clear()
        self._released = False

    # -- the whole -----------------------------------------------------------------------------

    def announce(self) -> None:
        """Marks it as coming; ``issue`` must follow, or ``wait_for_unshard`` never ends."""
        self.coming, self._issued = True, Future()

    def issue(self) -> None:
        """Sends this rank's chunks to all peers once the last step has updated them, and gives the
        parameters memory to be filled. Never raises: ``wait_for_unshard`` does. Collective."""
        try:
            pipeline = self.pipeline  # the thread that trains may end it now
            if pipeline is not None:
                pipeline.wait_for(self)
            # Memory not before that, as an update has copies of its own.
            for param in self.params:
                data = bare(param.parameter)
                resize(data, data.numel())
            wholes = {p: flat(bare(p.parameter)) for p in self.params}
            for one in self.unshard_slices:
                one.gather(wholes, self.chunks)
            self._issued.set_result(None)
        except BaseException as error:  # raised where somebody waits for its outcome
            self._issued.set_exception(error)

    @property
    def updated(self) -> bool:
        """Whether no step has still to update the chunks."""
        pipeline = self.pipeline
        return pipeline is None or pipeline.has_sent(self)

    def wait_for_unshard(self, watch: Watchdog) -> float:
        """Waits until the parameters are whole. Returns the seconds waited."""
        self._issued.result()  # without a limit, as each wait of the thread that issues has one
        doing = f"putting {self.listed} together for a use (read parameters on all ranks)"
        waited = sum(one.wait_for_params(watch, doing) for one in self.unshard_slices)
        self.resident, self.coming, self.opened = True, False, False
        return waited

    def keep_chunks(self) -> None:
        """Notes in the chunks what may have been done to the whole."""
        if self.resident and self.opened:
            for param, chunk in self.chunks.items():
                chunk.copy_(self.specs[param].chunk_of(bare(param.parameter)))

    def reshard(self) -> None:
        """Keeps this rank's chunks, and gives the rest of the memory back."""
        self.keep_chunks()
        for param in self.params:
            data = bare(param.parameter)
            if self.exposed:
                # Code outside the model's forward may hold a tensor on this storage, which must
                # stay as it is. So the parameter gets a storage of its own, which is emptied.
                data = data.new_empty_strided(data.shape, data.stride())
                with torch._C.DisableTorchFunctionSubclass():
                    param.parameter.data = data
            # In place, as FSDP does: what autograd has saved, views too, has the storage and not
            # the parameter, and finds it filled again after the next unshard.
            resize(data, 0)
        self.resident = self.opened = self.exposed = False


def resize(data: Tensor, elements: int) -> None:
    """Gives a tensor's storage memory for so many elements."""
    # An operator of torch's and not ``UntypedStorage.resize_``: dispatch modes that follow the
    # memory of tensors see operators only.
    torch.ops.inductor.resize_storage_bytes_(data, elements * data.element_size())
