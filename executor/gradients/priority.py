"""Priority exchange: gradients leave in slices, in an order fixed ahead, and nobody waits for them
until they are needed (P3, Jayarajan et al., arXiv 1905.03960).

Slices are issued by the thread that runs backward, as soon as they are ready and it is their turn;
those left over leave when backward ends. The library then carries them in that order, while the
next forward waits unit by unit. As all of a step's slices are issued by then, a rank can wait for
its parameters (to save them, say) without any other rank's help.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...planner.schema.errors import RunError
from ..comm.control import Control
from ..comm.groups import Group
from ..comm.watchdog import Watch
from .absent import AbsentParcel
from .buckets import Entry, Votes
from .foresight import left_out
from .fully_sharded import FullyShardedParcel
from .lossy import hand_over
from .order import Orders
from .policies import PARCELS, picking_of, start_policies
from .release import Release
from .residual import Lossy
from .sharded import ShardedParcel
from .sharded_gradient import ShardedGradient
from .slices import Parcel, as_sent, make_parcels
from .sparse import SparseGradient, completed, stand_for
from .step_pipeline import Stage, Trip
from .unshard import Fetcher, make_room
from .waiting import WaitingGradient, vacating


class PriorityExchange:
    """Sends slices in the agreed order and shows gradients that wait when touched.

    ``issued(text, sent, group)`` is told of each collective before it is issued, and the bytes that
    a ring sends for it. With ``eager`` off nothing leaves before backward is over (see
    ``BucketExchange``).
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        limit_bytes: int,
        orders: Orders,
        control: Control,
        watch: Watch,
        issued: Callable[[str, int, Group], None],
        lossy: Lossy | None = None,
        *,
        eager: bool = True,
    ) -> None:
        self._eager = eager
        self.parcels = make_parcels(entries, limit_bytes, PARCELS, AbsentParcel)
        self.policies = start_policies(self.parcels, control, lossy or Lossy())
        self.home = {entry: parcel for parcel in self.parcels for entry in parcel.entries}
        self.release = Release(self.parcels)
        self._waited_s = 0.0
        self._orders = orders.start(self.parcels, control)
        self._watch, self._issued = watch, issued
        self._next = 0
        self._start_s = 0.0
        self._votes: Votes | None = None
        self._unused: set[Entry] = set()
        self._fresh: ShardedParcel | None = None
        """What has just been taken, in the midst of autograd's work on one of its gradients."""
        fully = [p for p in self.parcels if isinstance(p, FullyShardedParcel)]
        self.uses = Fetcher(fully, watch, issued, self.finish) if fully else None

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for gradients, and for parameters put together."""
        return self._waited_s + (self.uses.waited_s if self.uses is not None else 0.0)

    @property
    def busy(self) -> bool:
        """Whether slices are on their way, or a step's are still to be sent."""
        away = (p for p in self.parcels if isinstance(p, ShardedParcel) and p.trip is not None)
        slices = (one for parcel in self.parcels for one in parcel.slices)
        return any(not p.there for p in away) or any(not one.there for one in slices)

    def follow(self, before: PriorityExchange) -> None:
        """Goes on with what another exchange, of other parameters of the same model, has held."""
        hand_over(before.parcels, self.parcels)
        self.release.updater = before.release.updater
        old, new = picking_of(before.policies), picking_of(self.policies)
        if old is not None and new is not None:
            new.load(old.state())
            new.momentum = old.momentum
            if new.momentum is not None:
                new.momentum.include(new.parameters, new.mirrored)

    # -- backward ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begins a backward."""
        self.release.begin()
        self.finish_all()
        self.complete()
        self._check_votes()
        self._orders.begin()
        for policy in self.policies:
            policy.begin()
        self._next, self._unused, self._fresh = 0, set(), None
        for entry in (e for e in self.home if e.idle):  # must not hold back what comes after it
            self._unused.add(entry)
            self._take_unused(entry)
        self._start_s = time.perf_counter()

    def sent(self, entry: Entry) -> bool:
        """Whether the entry's gradient has left in this backward."""
        parcel = self.home[entry]
        return parcel.travelling or self.release.over(parcel)

    def holds(self, entry: Entry) -> bool:
        """Whether this rank holds back some of what it has computed for the entry."""
        return self.home[entry].holds(entry)

    def ready(self, entry: Entry) -> None:
        """The entry's gradient is complete: its slices leave if it is their turn; those that have
        taken what they send when autograd has let go of it, which is with the next gradient."""
        parcel = self.home[entry]
        if self._fresh is not None:
            self._fresh = None
            self._advance()
        self._take(entry, as_sent(entry))
        if isinstance(parcel.gradients[entry], SparseGradient) or not parcel.sends(entry):
            self._show(entry)  # its memory is free from here on
        if parcel.full:
            parcel.ready_s = time.perf_counter() - self._start_s
        if self._eager and parcel.full:
            if self.uses is not None:
                self._waited_s += make_room(parcel, self.uses.parcels, self._watch)
            if isinstance(parcel, ShardedParcel):
                self._show_all(parcel)
                parcel.take()
                self._fresh = parcel
            self._advance()
            self._release()

    def foresee(self) -> None:
        """Fully sharded parcels leave in backward as peers wait for them there, to hold no more
        gradients than planned: what this backward will not compute is sent as zeros at once."""
        if self.uses is None:
            return
        absent = left_out([entry.parameter for entry in self.home])
        with torch.no_grad():
            for parcel in self.uses.parcels:
                for entry in () if self.uses.hidden(parcel) else parcel.entries:
                    if entry.parameter in absent:
                        self._unused.add(entry)
                        self._take_unused(entry)
            if self._eager:
                self._advance()

    def trail(self) -> int:
        """Of the uses of fully sharded parameters."""
        return self.uses.trail() if self.uses is not None else 0

    def absorb(self, entry: Entry) -> None:
        """The gradient of a backward after which nothing is exchanged: its memory is free where it
        can be added to what is held."""
        if self.home[entry].absorb(entry, as_sent(entry)):
            entry.parameter.grad = None

    def _take(self, entry: Entry, gradient: Tensor) -> None:
        parcel = self.home[entry]
        average = parcel.fold(entry, gradient)
        if average is not None:
            gradient = stand_for(average, entry, gradient, self._finishing(parcel))
        parcel.gradients[entry] = gradient

    def _advance(self) -> None:
        turns = self._orders.turns
        while self._next < len(turns):
            turn = turns[self._next]
            parcel = self.parcels[turn.load]
            if not parcel.full or parcel is self._fresh:
                return
            following = parcel.following(turn.number)
            if not following.skipped:
                entry = following.entries[0]
                text = f"slice {turn.number} of {entry.name!r}"
                self._issued(text, following.sent_bytes, entry.group)
            self._send(parcel, turn.number)
            self._next += 1

    def _send(self, parcel: Parcel, number: int) -> None:
        if not parcel.travelling:  # from now on its memory is the library's
            self._show_all(parcel)
        parcel.send(number)

    def _show_all(self, parcel: Parcel) -> None:
        for entry in parcel.entries:
            if entry not in self._unused:
                self._show(entry)

    def end(self, votes: Votes) -> None:
        """Backward is over: the rest leaves, zeros (or what had accumulated before) for gradients
        that were not computed here. Waits only where this rank must know whether others have a
        gradient that it has not."""
        for parcel in self.parcels:
            for entry in parcel.entries:
                if entry not in parcel.gradients and not self.release.over(parcel):
                    self._unused.add(entry)
                    self._take_unused(entry)
        self._fresh = None
        self._advance()
        assert self._next == len(self._orders.turns), "a slice was left behind"
        self._orders.end(self.parcels)
        self._votes = votes
        if self._unused:
            somewhere = self._check_votes()
            for entry in self._unused & somewhere:
                self._show(entry)
            for entry in self._unused - somewhere:
                self.home[entry].forget(entry)
        self._release()
        for policy in self.policies:
            policy.end()

    def _release(self) -> None:
        """Waits for the gradients that are released early and have left, and applies them."""
        for parcel in self.release.due():
            shown = [e for e in parcel.entries if isinstance(e.parameter.grad, WaitingGradient)]
            self.finish(parcel)
            if self.release.updater is not None:
                self.release.updater.update(shown)

    def _take_unused(self, entry: Entry) -> None:
        """What is sent of a gradient that may stay as it is: a copy."""
        held = as_sent(entry)
        self.home[entry].idle.add(entry)
        self._take(entry, held.clone() if held is entry.parameter.grad else held)

    def _check_votes(self) -> set[Entry]:
        votes, self._votes = self._votes, None
        return votes() if votes is not None else set()

    # -- gradients -----------------------------------------------------------------------------

    def _show(self, entry: Entry) -> None:
        # Weak references, as Python's garbage collector does not see through a parameter's grad.
        parcel, parameter = self.home[entry], entry.parameter
        if isinstance(parcel, ShardedParcel):
            self._show_part(parcel, entry)
            return
        if not parcel.sends(entry):
            parcel.hold(entry)
            parameter.grad = None
            return
        if isinstance(parcel.gradients[entry], SparseGradient):
            parameter.grad = parcel.gradients[entry]
            return
        finish, gradient = self._finishing(parcel), entry.show(parcel.gradients[entry])

        def arrive() -> Tensor:
            finish()
            return gradient

        vacate = vacating(parameter, lambda: torch.zeros_like(gradient))
        parameter.grad = WaitingGradient.of(gradient, arrive, vacate)

    def _finishing(self, parcel: Parcel) -> Callable[[], None]:
        """Finishes a parcel, if it and this exchange are still there."""
        myself, mine = weakref.ref(self), weakref.ref(parcel)

        def finish() -> None:
            exchange, parcel = myself(), mine()
            if exchange is not None and parcel is not None:
                exchange.finish(parcel)

        return finish

    def _show_part(self, parcel: ShardedParcel, entry: Entry) -> None:
        part, sharing, parcel.changed = parcel.part(entry), parcel.sharings[entry], True
        myself, mine = weakref.ref(self), weakref.ref(parcel)

        def settle() -> None:
            exchange, parcel = myself(), mine()
            if exchange is not None and parcel is not None and parcel.awaits(part):
                exchange.finish(parcel)

        vacate = vacating(entry.parameter, lambda: sharing.zeros(part))
        entry.parameter.grad = ShardedGradient.standing(sharing, part, settle, vacate)

    def complete(self) -> None:
        """Puts gradients together that ranks still have in chunks or in parts, as more will be
        added to them. Collective; nothing to do where ``zero_grad`` has come between."""
        for entry, parcel in self.home.items():
            completed(entry.parameter)
            gradient = entry.parameter.grad
            if isinstance(parcel, ShardedParcel) and isinstance(gradient, ShardedGradient):
                entry.parameter.grad = gradient.complete()

    def trip(self, updates: Mapping[ShardedParcel, Callable[[], None]]) -> Trip:
        """The way of a step's sharded parcels in forward order, with what updates their chunks.
        Their gathers count as issued now: the debug mode compares what ranks have issued at points
        of the thread that trains."""
        self._check_votes()
        for parcel in updates:
            for number, one in enumerate(parcel.sharded):
                text = f"gathering {number} of {one.entries[0].name!r}"
                self._issued(text, one.sent_bytes, one.gathers)
        stages = [Stage(parcel, apply) for parcel, apply in updates.items()]
        return Trip(stages, copy.copy(self._watch), self._orders.arrived)

    def finish(self, parcel: Parcel) -> None:
        """Waits for a parcel, applies the step that took it over, and shows plain gradients."""
        if not parcel.travelling:
            return
        # In the midst of anybody's forward: state that is made here outlives that forward.
        with torch.inference_mode(False), torch.no_grad():
            self._work_while_waiting(parcel)
            self._arrive(parcel)

    def finish_all(self) -> None:
        """The same for every parcel, in the order in which they are needed."""
        for parcel in self.parcels:
            self.finish(parcel)

    def _work_while_waiting(self, wanted: Parcel) -> None:
        """Applies other updates that have to be applied anyway, while the wanted parcel comes."""
        for parcel in self.parcels:
            if wanted.there:
                return
            early = parcel is not wanted and parcel.update is not None and not parcel.swells
            if early and parcel.there:
                self._arrive(parcel)

    def _arrive(self, parcel: Parcel) -> None:
        if parcel.sent < len(parcel.slices):
            raise RunError(
                f"the gradient of {parcel.entries[0].name!r} was touched in backward while it was "
                "on its way: read gradients after backward"
            )
        self._check_votes()
        waited_s = parcel.settle(self._watch)
        self._waited_s += waited_s
        self._orders.arrived(parcel, waited_s)
        update, gradients = parcel.update, parcel.gradients
        parcel.clear()
        for entry, gradient in gradients.items():
            shown = entry.parameter.grad
            if isinstance(shown, WaitingGradient) and not isinstance(shown, SparseGradient):
                entry.parameter.grad = entry.show(gradient)
        if update is not None:
            update()


def waiting_parcels(
    exchange: PriorityExchange, parameters: Sequence[torch.nn.Parameter]
) -> dict[Parcel, list[Entry]]:
    """The parcels that still travel and hold gradients of these parameters."""
    wanted = set(parameters)
    found: dict[Parcel, list[Entry]] = {}
    for entry, parcel in exchange.home.items():
        gradient = entry.parameter.grad
        waits = isinstance(gradient, WaitingGradient) and parcel.travelling
        if waits and entry.parameter in wanted:
            found.setdefault(parcel, []).append(entry)
    return found
