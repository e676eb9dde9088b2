"""Gradients of one unit on their way, in slices: what is sent, and what has come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..planner.plan import ExchangePolicy
from ..planner.slices import Cut, cut, fits_together
from .exchange import Entry
from .watch import Watch


class Slice:
    """One collective: a part of a large gradient where it lies, or copies of small ones."""

    def __init__(self, entries: Sequence[Entry], cut: Cut) -> None:
        self.entries = tuple(entries)
        self.cut = cut
        self.work: dist.Work | None = None
        self._wire: Tensor | None = None
        self._settled = True

    @property
    def bytes(self) -> int:
        """What a member has of it."""
        numel = sum(e.parameter.numel() for e in self.entries)
        return numel * self.entries[0].parameter.element_size() // self.cut.parts

    def send(self, gradients: dict[Entry, Tensor]) -> None:
        """Starts the sum over the group. Collective, in the order of all slices."""
        group = self.entries[0].group
        self._wire = self._load(gradients)
        self._settled = False
        if group.handle is not None and self._wire.numel():
            self.work = dist.all_reduce(self._wire, group=group.handle, async_op=True)

    def _load(self, gradients: dict[Entry, Tensor]) -> Tensor:
        flats = [_flat(gradients[entry]) for entry in self.entries]
        if len(flats) > 1:
            return torch.cat(flats)
        start, stop = (flats[0].numel() * (self.cut.part + i) // self.cut.parts for i in (0, 1))
        return flats[0][start:stop]

    @property
    def there(self) -> bool:
        """Whether it has come back."""
        return self.work is None or self.work.is_completed()

    def settle(self, gradients: dict[Entry, Tensor], watch: Watch, doing: str) -> float:
        """Waits, and turns the sum into the average. Returns the seconds waited."""
        if self._settled:
            return 0.0
        assert self._wire is not None
        group = self.entries[0].group
        waited = watch.wait(self.work, group, doing)
        if group.handle is not None:
            self._wire.div_(group.size)
        if len(self.entries) > 1:
            flats = [_flat(gradients[entry]) for entry in self.entries]
            torch._foreach_copy_(flats, torch.split(self._wire, [f.numel() for f in flats]))
        self._settled, self._wire, self.work = True, None, None
        return waited


class Parcel:
    """The gradients of one unit (or of small ones that follow each other) that travel among the
    same peers. ``unit`` is the place of the first of them in forward order."""

    made_of: type[Slice] = Slice

    def __init__(self, unit: int, entries: Sequence[Entry], limit_bytes: int) -> None:
        self.unit = unit
        self.entries = tuple(entries)
        # Cut by shares of the undivided size, so that all members have as many slices.
        cuts = cut([e.shared_bytes for e in entries], limit_bytes)
        self.slices = tuple(self.made_of([entries[i] for i in c.parameters], c) for c in cuts)
        self.gradients: dict[Entry, Tensor] = {}
        self.ready_s = 0.0
        self.sent = 0
        self.update: Callable[[], None] | None = None
        """Applies the step that has taken these gradients over."""

    @property
    def bytes(self) -> int:
        """What a member sends of it."""
        return sum(s.bytes for s in self.slices)

    @property
    def full(self) -> bool:
        """Whether all of its gradients are computed."""
        return len(self.gradients) == len(self.entries)

    @property
    def travelling(self) -> bool:
        """Whether slices have left and not been waited for."""
        return self.sent > 0

    @property
    def there(self) -> bool:
        """Whether every slice has come back."""
        return self.sent == len(self.slices) and all(s.there for s in self.slices)

    def send(self, number: int) -> Slice:
        """Sends its next slice."""
        assert number == self.sent, "slices of a parcel leave in their order"
        self.sent += 1
        sent = self.slices[number]
        sent.send(self.gradients)
        return sent

    def settle(self, watch: Watch) -> float:
        """Waits for all slices; the gradients are averages then. Returns the seconds waited."""
        doing = f"the exchange of the gradients of {self.listed}"
        return sum(s.settle(self.gradients, watch, doing) for s in self.slices)

    @property
    def listed(self) -> str:
        """Its parameters in words."""
        names = ", ".join(repr(e.name) for e in self.entries[:2])
        more = len(self.entries) - 2
        return f"{names} and {more} more" if more > 0 else names

    def clear(self) -> None:
        """Begins anew; gradients live on where others hold them."""
        self.gradients, self.sent, self.update = {}, 0, None


def make_parcels(
    entries: Iterable[Entry], limit_bytes: int, kinds: Mapping[ExchangePolicy, type[Parcel]]
) -> list[Parcel]:
    """The parcels in forward order, each with its parameters in the order of backward.

    One for each unit and its peers; units that follow each other and are small together share one,
    as each message has its latency. ``kinds`` are the parcels of each exchange policy.
    """
    found: list[list[Entry]] = []
    open_: dict[object, int] = {}
    for entry in entries:  # the last unit comes first
        at = open_.get(entry.kind)
        if at is None or not _together(found[at], entry):
            open_[entry.kind] = at = len(found)
            found.append([])
        found[at].append(entry)
    parcels = [kinds[m[0].exchange](m[-1].unit, m, limit_bytes) for m in found]
    return sorted(parcels, key=lambda parcel: parcel.unit)


def _together(open_: Sequence[Entry], entry: Entry) -> bool:
    """Whether an entry joins an open parcel: of the same unit, or small with all that is there."""
    return open_[-1].unit == entry.unit or fits_together(
        sum(e.shared_bytes for e in open_), entry.shared_bytes
    )


def as_sent(entry: Entry) -> Tensor:
    """The parameter's gradient in the memory format in which slices are cut, the same on all peers:
    the parameter's own where that is dense. The gradient itself where it has it."""
    parameter, gradient = entry.parameter.detach(), entry.parameter.grad
    dense = bool(torch.ops.aten.is_non_overlapping_and_dense(parameter))
    wanted = parameter.stride() if dense else torch.empty(parameter.shape, device="meta").stride()
    if gradient is not None and gradient.stride() == wanted:
        return gradient
    made = torch.empty_strided(
        parameter.shape, wanted, dtype=parameter.dtype, device=parameter.device
    )
    return made.zero_() if gradient is None else made.copy_(gradient)


def _flat(gradient: Tensor) -> Tensor:
    """All elements in the order in which they lie in memory."""
    return gradient.as_strided((gradient.numel(),), (1,))
