"""Parameters that are whole only while they are used (the third stage of ZeRO, Rajbhandari et al.,
arXiv 1910.02054; FSDP): between uses each peer keeps its chunk, and the memory of the rest is free.

The exchange of gradients and the step are those of ``sharded``; what differs is that a step gathers
nothing: the chunks are put together before the unit's forward and again before its backward (see
``fetching``). The memory of a parameter is emptied and filled in place, as FSDP does, since what
autograd has saved (views too) keeps the storage and not the parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..comm.watchdog import Watchdog
from .buckets import GradParam
from .flat_shard import flat
from .pending import bare
from .sharded import ShardedGradGroup, ShardedSlice, flat_shard_spec


class FetchedSlice(ShardedSlice):
    """A part of a unit's parameters on its way to all peers, for a use."""

    def fetch(self, wholes: Mapping[GradParam, Tensor], chunks: Mapping[GradParam, Tensor]) -> None:
        """Sends this rank's elements, from its ``chunks``, to all peers, into ``wholes`` where
        peers have equal chunks there. Collective, in the order of uses."""
        (first, *more), sharing = self.strips, self.strips[0].sharing
        if more or sharing.numel != sharing.chunk * sharing.peers:
            for entry in self.entries:
                start, stop = flat_shard_spec(entry).bounds
                wholes[entry][start:stop].copy_(chunks[entry])
            self.gather(wholes)
            return
        self._wire, _ = first.rows(wholes[first.entry])
        self._exact, self._settled = True, False
        own = chunks[first.entry][first.mine]
        if own.numel():
            self._gather(own)


class FullyShardedGradGroup(ShardedGradGroup):
    """The gradients of a unit, and its parameters: a chunk of each, which lives on, and the whole
    while something uses it.

    ``there`` and ``coming`` of the whole: its memory holds the parameters; it will, once what has
    been issued has come. With neither the memory is free.
    """

    def __init__(self, unit: int, entries: Sequence[GradParam], limit_bytes: int) -> None:
        super().__init__(unit, entries, limit_bytes)
        self.fetches = tuple(FetchedSlice(s.entries, s.cut) for s in self.slices)
        for one in self.fetches:
            channels = one.entries[0].channels
            assert channels is not None
            assert channels.fetches is not None, "made for the degrees of fully sharded units"
            one.gathers = channels.fetches
        self.resident, self.coming = True, False
        self.exposed = True
        """Whether code that is not the model's forward may hold its memory."""
        self.opened = True
        """Whether anybody may have changed the whole since the chunks were made from it."""
        self.chunks = {e: bare(e.parameter).new_empty(self.sharings[e].owned) for e in entries}
        self._released = False
        self._issued = threading.Event()
        self._error: BaseException | None = None

    # -- the step ------------------------------------------------------------------------------

    def part(self, entry: GradParam) -> Tensor:
        """Where the averages of this rank's elements will stand once they have settled."""
        return self.gradients[entry] if self._released else super().part(entry)

    def own(self, entry: GradParam) -> Tensor:
        """This rank's elements of the parameter, where they lie."""
        return self.chunks[entry]

    def _gathered(self) -> dict[GradParam, Tensor]:
        """Nothing: parameters are put together when they are used."""
        return {}

    def gather(self) -> None:
        """Nothing travels after an update."""

    @property
    def sharded(self) -> tuple[ShardedSlice, ...]:
        """The slices that are gathered after a step: none."""
        return ()

    @property
    def outstanding(self) -> bool:
        """Whether gradients have been sent and are held until they have arrived."""
        return not self._released and self.trip is None and self.sent == len(self.slices)

    def release(self, watch: Watchdog) -> float:
        """Waits for the averages of this rank's elements and lets go of what has been sent, in the
        midst of backward. Returns the seconds waited."""
        self._parts = parts = {entry: self.part(entry) for entry in self.entries}
        waited = self._average(watch)
        # That they have been computed must not be forgotten.
        self.gradients, self._released = parts, True
        return waited

    def clear(self) -> None:
        """Begins anew; gradients live on where others hold them."""
        super().clear()
        self._released = False

    # -- the whole -----------------------------------------------------------------------------

    def announce(self) -> None:
        """It will be put together: ``issue`` will have been called when ``land`` is."""
        self.coming = True
        self._issued.clear()

    def issue(self) -> None:
        """Sends this rank's chunks to all peers once the last step has updated them, and gives the
        parameters memory to be filled: not before, as an update has copies of its own. Never
        raises: ``land`` does. Collective."""
        try:
            if self.trip is not None:
                self.trip.wait_for(self)
            for entry in self.entries:
                data = bare(entry.parameter)
                resize(data, data.numel())
            wholes = {e: flat(bare(e.parameter)) for e in self.entries}
            for one in self.fetches:
                one.fetch(wholes, self.chunks)
        except BaseException as error:  # raised where somebody waits for its outcome
            self._error = error
        finally:
            self._issued.set()

    @property
    def updated(self) -> bool:
        """Whether no step has still to update the chunks."""
        return self.trip is None or self.trip.past(self)

    def land(self, watch: Watchdog) -> float:
        """Waits until the parameters are whole. Returns the seconds waited."""
        self._issued.wait()  # each wait of the thread that issues has its limit
        if self._error is not None:
            raise self._error
        doing = f"putting {self.listed} together for a use (read parameters on all ranks)"
        waited = sum(one.land(watch, doing) for one in self.fetches)
        self.resident, self.coming, self.opened = True, False, False
        return waited

    def keep_chunks(self) -> None:
        """Notes in the chunks what may have been done to the whole."""
        if self.resident and self.opened:
            for entry, chunk in self.chunks.items():
                chunk.copy_(self.sharings[entry].part(bare(entry.parameter)))

    def free(self) -> None:
        """Keeps this rank's chunks, and gives the rest of the memory back: the storage's own, or
        where others may hold that one, a new one's."""
        self.keep_chunks()
        for entry in self.entries:
            if self.exposed:
                _replace(entry.parameter)
            else:
                resize(bare(entry.parameter), 0)
        self.resident = self.opened = self.exposed = False


def _replace(parameter: nn.Parameter) -> None:
    """Gives a parameter a storage of its own without memory."""
    data = bare(parameter)
    empty = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=data.device)
    resize(empty, 0)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = empty


def resize(data: Tensor, elements: int) -> None:
    """Gives a tensor's storage memory for so many elements. An operator, so that what follows the
    memory of tensors sees it."""
    torch.ops.inductor.resize_storage_bytes_(data, elements * data.element_size())
