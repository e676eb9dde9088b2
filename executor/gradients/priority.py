"""Priority exchange: gradients leave in slices, in an order fixed ahead, and nobody waits for them
until they are needed (P3, Jayarajan et al., arXiv 1905.03960).

Slices leave as soon as they are ready and it is their turn; those left over leave when backward
ends. The library then carries them in that order, while the next forward waits unit by unit.
"""

# [Note: Who issues collectives on which group]
# Collectives of one process group must be issued in the same order on all of its ranks. Each line
# below has process groups of its own, so that on gloo no order between the lines is ever needed.
# The thread that trains is the one that calls the model; backward's hooks run in it too, or on CUDA
# in the thread of autograd's that stands in for it meanwhile.
#
# - gradients (``GradParam.group``): the thread that runs backward, in the order of slots, from the
#   hooks of parameters, from ``foresee`` and from ``end``; buckets in their order, from the same
#   places. Nobody else, so all of a step's slices have been issued when backward is over, and a
#   rank can wait for its parameters (to save them, say) without any other rank's help;
# - gradients that are added up on hosts first (``World.hosts``): an ``IssueQueue`` for each stage
#   ([Note: The three stages of a slice] in by_host.py);
# - redistributions, what crosses between layouts, buffers and batch statistics
#   (``World.redistribution``, ``crossings``, ``statistics``): the thread that trains or runs
#   backward, in the order of the model's own operations. The same groups carry, outside of
#   forwards and backwards, norms and states of what they hold the parts of;
# - updated chunks of sharded parameters (``Channels.updated_chunks``): the pipeline's thread, or on
#   NCCL and with a gradient scaler the thread that trains ([Note: Sharded steps pipeline] in
#   sharded.py);
# - parameters that are whole only while they are used (``Channels.unshards``): one ``IssueQueue``,
#   in the order of use, which issues from the thread that uses them or, while their chunk waits for
#   its update, from one of its own ([Note: Unshard and reshard] in unshard.py);
# - what a user asks of sharded gradients, parameters and states (``Channels.full_gradients``): the
#   thread that asks, which must then ask on all ranks;
# - votes, agreements and forwards' headers, and where hosts train apart what all hosts agree on:
#   ``Control`` (``World.control``, ``everyone``), from the thread that trains;
# - what hosts that train apart average (``apart``, ``agreed``): the thread that calls the
#   optimizer's step, at the inner steps at which a fragment leaves or arrives;
# - what ranks tell each other while they write a checkpoint (``checkpoint_group``): the thread that
#   writes it, and when one is read the thread that trains, which has waited for that.
#
# [Note: One order on a device's streams]
# With NCCL, communicators share a device: collectives of several that wait for each other must be
# launched in one order on all ranks. Where every rank has every unit, all issue from the threads of
# one graph that is the same on all of them, and autograd runs the same nodes in the same order: a
# gradient is complete between the same two redistributions everywhere, and leaves there (a test
# takes the orders of all ranks together and finds no circle). What a rank computes no gradient for
# leaves when its backward is over, later than on others; kernels of several communicators run side
# by side then, as they do wherever two dimensions of parallelism are combined.
#
# Where a unit leaves ranks idle, all graphs still have the same redistributions in the same order
# ([Note: Burst units, idle ranks and the anchor] in bursts.py), and a unit's gradient is complete
# between the same two of them on all ranks that have the unit. So gradients that are all-reduced
# leave there too (a test draws random plans of that kind and looks for circles). Not where
# exchanges are sharded: parameters that are gathered for the next forward have an order of their
# own on each rank then, and the same test found circles. There nothing leaves in the midst of a
# backward (``eager`` off).
#
# Nor do threads issue, and the order of slices stays the plan's: a clock of the host sees waits
# that take no time.

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.schema.errors import RunError
from ...planner.schema.plan import ExchangePolicy
from ..comm.control import Control
from ..comm.groups import Group
from ..comm.watchdog import Watchdog
from .buckets import Exchange, GradParam, Votes
from .by_host import HostGradGroup, Stages
from .dropping import DroppedGradGroup, Dropping
from .feedback import Held, Lossy, LossyGradGroup, hand_over
from .flat_shard import ShardedGradient
from .fully_sharded import FullyShardedGradGroup
from .int8 import Int8GradGroup
from .low_rank import LowRankGradGroup, LowRankState
from .order import Orders, SendOrder
from .pending import WaitingGradient, vacating, weakly
from .release import Release
from .sharded import ShardedGradGroup, ShardedStepPipeline
from .slices import GradGroup, as_sent, make_grad_groups
from .topk import SparseGradient, TopkGradGroup, TopkState, make_dense
from .unshard import UnshardManager

GROUP_CLASSES: Mapping[ExchangePolicy, type[GradGroup]] = {
    "dense": GradGroup,
    "sharded": ShardedGradGroup,
    "fully_sharded": FullyShardedGradGroup,
    "dropped": DroppedGradGroup,
    "topk": TopkGradGroup,
    "int8": Int8GradGroup,
    "low_rank": LowRankGradGroup,
}
"""Which class carries out an exchange policy: the place to add one."""


_owners: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors and storages have a memory, which torch tells to no public name."""

Policy = Dropping | TopkState | LowRankState
"""What the groups of one policy share. It is told of the begin and the end of every backward; its
``state``, but for what groups hold, is what the next backwards depend on."""


class PriorityExchange(Exchange):
    """Sends slices in the agreed order and shows gradients that wait when touched.

    ``issued(text, sent, group)`` is told of each collective before it is issued, and the bytes that
    a ring sends for it. With ``eager`` off nothing leaves before backward is over (see
    ``BucketExchange``).
    """

    def __init__(
        self,
        params: Iterable[GradParam],
        message_bytes: int,
        orders: Orders,
        control: Control,
        watch: Watchdog,
        issued: Callable[[str, int, Group], None],
        lossy: Lossy | None = None,
        *,
        eager: bool = True,
    ) -> None:
        self._eager = eager
        self.grad_groups = make_grad_groups(
            params, message_bytes, GROUP_CLASSES, by_host=HostGradGroup
        )
        self.policies: list[Policy] = []  # in one order on all ranks
        # Of what is frozen now, to go on when it is trained again.
        self.held_of_frozen: Held = {}
        self._topk_before: TopkState | None = None
        self.topk: TopkState | None = None
        self.low_rank: LowRankState | None = None
        lossy = lossy or Lossy()
        if dropped := [g for g in self.grad_groups if isinstance(g, DroppedGradGroup)]:
            self.policies.append(Dropping(dropped, control, lossy.patience))
        if topk := [g for g in self.grad_groups if isinstance(g, TopkGradGroup)]:
            self.topk = TopkState(topk, lossy)
            self.policies.append(self.topk)
        if thin := [g for g in self.grad_groups if isinstance(g, LowRankGradGroup)]:
            self.low_rank = LowRankState(thin)
            self.policies.append(self.low_rank)
        self.group_of = {
            param: grad_group for grad_group in self.grad_groups for param in grad_group.params
        }
        by_host = [group for group in self.grad_groups if isinstance(group, HostGradGroup)]
        stages = {hosts: Stages(hosts, watch) for hosts in {group.hosts for group in by_host}}
        for group in by_host:
            group.go_through(stages[group.hosts])
        self.release = Release(self.grad_groups)
        self._waited_s = 0.0
        self._orders = SendOrder(orders, self.grad_groups, control)
        self._watch, self._issued = watch, issued
        self._next = 0
        self._start_s = 0.0
        self._in_backward = False
        self._votes: Votes | None = None
        self._unused: set[GradParam] = set()
        self._computed: set[GradParam] = set()
        """What backwards have computed of which nothing was exchanged, since one has exchanged."""
        self._unsent: set[GradGroup] = set()
        """Of which no rank has a gradient in this step: their turns pass without a message."""
        self._just_packed: ShardedGradGroup | None = None
        """Packed just now; sent at the next gradient, when autograd has freed its last one."""
        fully = [g for g in self.grad_groups if isinstance(g, FullyShardedGradGroup)]
        # Peers may wait for such in their backward, for which this rank must send all it has left,
        # zeros too, before it waits for them to vote.
        self._awaited_in_backward = bool(fully) or any(g.released for g in self.grad_groups)
        self.unshard_manager = UnshardManager(fully, watch, issued, self.finish)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for gradients, and for parameters put together."""
        return self._waited_s + self.unshard_manager.waited_s

    @property
    def busy(self) -> bool:
        """Whether slices are on their way, or a step's are still to be sent."""
        for grad_group in self.grad_groups:
            stepping = isinstance(grad_group, ShardedGradGroup) and grad_group.pipeline is not None
            if stepping and not grad_group.is_completed:
                return True
            if any(not one.is_completed for one in grad_group.slices):
                return True
        return False

    @property
    def lossy_groups(self) -> list[LossyGradGroup]:
        """The groups that hold something of their gradients for later steps."""
        return [g for g in self.grad_groups if isinstance(g, LossyGradGroup)]

    def held(self) -> Held:
        """Copies of all that lossy exchanges hold, of parameters that are frozen now too."""
        found = copy.deepcopy(self.held_of_frozen)
        for grad_group in self.lossy_groups:
            found |= grad_group.state()
        return found

    def follow(self, before: PriorityExchange) -> None:
        """Goes on with what another exchange, of other parameters of the same model, has held."""
        self.held_of_frozen = hand_over(before.grad_groups, self.grad_groups, before.held_of_frozen)
        self.release.updater = before.release.updater
        if self.low_rank is not None and before.low_rank is not None:
            self.low_rank.load(before.low_rank.state())
        old, new = before.topk or before._topk_before, self.topk
        self._topk_before = old if new is None else None
        if old is not None and new is not None:
            new.load(old.state())
            new.momentum = old.momentum
            if new.momentum is not None:
                new.momentum.include(new.parameters, new.mirrored)

    # -- backward ------------------------------------------------------------------------------

    def reset(self) -> None:
        self._in_backward = False
        self.release.begin()
        self._forget_failed()
        self.finish_all()
        self.complete()
        self._check_votes()
        self._orders.begin()
        for policy in self.policies:
            policy.begin()
        self._next, self._unused, self._unsent, self._just_packed = 0, set(), set(), None
        for param in (p for p in self.group_of if p.idle):  # must not hold back what comes after it
            self._take_unused(param)
        self._start_s, self._in_backward = time.perf_counter(), True

    def abandon(self) -> None:
        self._in_backward = False

    def forget_unsent(self) -> None:
        """Forgets what a backward that failed has gathered and not sent."""
        for grad_group in self.grad_groups:
            if not grad_group.sent:
                grad_group.clear()

    def _forget_failed(self) -> None:
        self.forget_unsent()
        for grad_group in self.grad_groups:
            if 0 < grad_group.sent < len(grad_group.slices):
                raise RunError(
                    f"the last backward ended when a part of the gradient of {grad_group.listed} "
                    "had been sent, and ranks cannot go on from there: go on from a checkpoint, or "
                    "plan with --schedule barrier (schedule='barrier')"
                )

    def sent(self, param: GradParam) -> bool:
        grad_group = self.group_of[param]
        return grad_group.in_flight or self.release.is_applied(grad_group)

    def holds(self, param: GradParam) -> bool:
        return self.group_of[param].holds(param)

    def ready(self, param: GradParam) -> None:
        # Once its group is full, its slices leave in their turn; packed (sharded) ones with the
        # next gradient, when autograd has freed this.
        grad_group = self.group_of[param]
        if self._just_packed is not None:
            self._just_packed = None
            self._advance()
        self._take(param, _alone(param))
        if isinstance(grad_group.gradients[param], SparseGradient) or not grad_group.sends(param):
            self._show(param)  # its memory is free from here on
        if grad_group.full:
            grad_group.ready_s = time.perf_counter() - self._start_s
        if self._eager and grad_group.full:
            self.unshard_manager.make_room(grad_group)
            if isinstance(grad_group, ShardedGradGroup):
                self._show_all(grad_group)
                grad_group.pack()
                self._just_packed = grad_group
            self._advance()
            self._release(ended=False)

    def foresee(self) -> None:
        # Sends zeros now for fully sharded gradients that this backward will not compute: peers
        # wait for them during backward, so that few gradients are held.
        if not self.unshard_manager.grad_groups:
            return
        absent = out_of_backward([param.parameter for param in self.group_of])
        with torch.no_grad():
            for grad_group in self.unshard_manager.grad_groups:
                # Of these a backward inside backward may still compute gradients.
                if grad_group not in self.unshard_manager.used_without_grad:
                    for param in grad_group.params:
                        if param.parameter in absent:
                            self._take_unused(param)
            if self._eager:
                self._advance()

    def order_digest(self) -> int:
        manager = self.unshard_manager
        found, manager.order_digest = manager.order_digest, 0
        return found

    def absorb(self, param: GradParam) -> None:
        self._computed.add(param)
        if self.group_of[param].absorb(param, _alone(param)):
            param.parameter.grad = None  # it is part of what is held

    def _take(self, param: GradParam, gradient: Tensor) -> None:
        grad_group = self.group_of[param]
        if isinstance(grad_group, TopkGradGroup):
            sparse = grad_group.fold(param, gradient, weakly(self.finish, grad_group))
            gradient = gradient if sparse is None else sparse
        grad_group.gradients[param] = gradient

    def _advance(self) -> None:
        slots = self._orders.slots
        while self._next < len(slots):
            slot = slots[self._next]
            grad_group = self.grad_groups[slot.group]
            if grad_group in self._unsent:
                self._next += 1
                continue
            if not grad_group.full or grad_group is self._just_packed:
                return
            following = grad_group.following(slot.number)
            if not following.skipped:
                param = following.params[0]
                text = f"slice {slot.number} of {param.name!r}"
                self._issued(text, following.sent_bytes, param.group)
            if not grad_group.in_flight:  # from now on its memory is the library's
                self._show_all(grad_group)
            grad_group.send(slot.number)
            self._next += 1

    def _show_all(self, grad_group: GradGroup) -> None:
        for param in grad_group.params:
            if param not in self._unused:
                self._show(param)

    def end(self, votes: Votes) -> None:
        self._votes, somewhere = votes, set[GradParam]()
        absent = [
            param
            for param, grad_group in self.group_of.items()
            if param not in grad_group.gradients and not self.release.is_applied(grad_group)
        ]
        # The votes are waited for only where this rank must know whether others have a gradient
        # that it has not; else when the first gradient is. What no rank has, every rank lacks: so
        # all of them know that its group need not be sent, if they look before they send.
        if absent and not self._awaited_in_backward:
            somewhere = self._check_votes()
            groups = {self.group_of[param] for param in absent}
            self._unsent = {g for g in groups if _may_stay(g, somewhere)}
        # The rest leaves: zeros, or what had accumulated before, for what was not computed here.
        for param in absent:
            if self.group_of[param] not in self._unsent:
                self._take_unused(param)
        self._just_packed = None
        self._advance()
        assert self._next == len(self._orders.slots), "a slice was left behind"
        self._orders.end(self.grad_groups, self._start_s)
        if self._unused:
            somewhere |= self._check_votes()
            for param in self._unused & somewhere:
                self._show(param)
            for param in self._unused - somewhere:
                self.group_of[param].forget(param)
        self._release(ended=True)
        for policy in self.policies:
            policy.end()
        self._in_backward = False
        self._computed.clear()

    def _release(self, *, ended: bool) -> None:
        """Waits for the gradients that are released early and have left, and applies them."""
        for grad_group in self.release.due(ended=ended):
            shown = [p for p in grad_group.params if isinstance(p.parameter.grad, WaitingGradient)]
            self.finish(grad_group)
            if self.release.updater is not None:
                self.release.updater.update(shown)

    def _take_unused(self, param: GradParam) -> None:
        # A copy, as what is in ``grad`` may have to stay as it is.
        gradient = as_sent(param)
        self._unused.add(param)
        if param not in self._computed:
            self.group_of[param].idle.add(param)
        self._take(param, gradient.clone() if gradient is param.parameter.grad else gradient)

    def _check_votes(self) -> set[GradParam]:
        votes, self._votes = self._votes, None
        return votes.counted() if votes is not None else set()

    def _check_votes_if_due(self, wanted: GradGroup) -> None:
        """Counts the votes if they have come, or when the last group is ``wanted``."""
        # They have left last, and so come behind all slices that are on their way: the first layers
        # of the next forward would wait for the gradients of all others. This rank has a gradient
        # for every parameter, or it had waited already: all they can tell is that ranks have gone
        # different ways, and that is told before another backward begins.
        if self._votes is None:
            return
        if self._votes.have_come() or not any(
            group.in_flight for group in self.grad_groups if group is not wanted
        ):
            self._check_votes()

    # -- gradients -----------------------------------------------------------------------------

    def _show(self, param: GradParam) -> None:
        # Weak references, as Python's garbage collector does not see through a parameter's grad.
        grad_group, parameter = self.group_of[param], param.parameter
        if isinstance(grad_group, ShardedGradGroup):
            self._show_chunk(grad_group, param)
            return
        if not grad_group.sends(param):
            grad_group.hold(param)
            parameter.grad = None
            return
        if isinstance(grad_group.gradients[param], SparseGradient):
            parameter.grad = grad_group.gradients[param]
            return
        wait = weakly(self._finish_for_reader, grad_group)
        gradient = param.show(grad_group.gradients[param])

        def arrive() -> Tensor:
            wait()
            return gradient

        vacate = vacating(parameter, lambda: torch.zeros_like(gradient))
        waiting = WaitingGradient.of(gradient, arrive, vacate)
        waiting.not_to_be_unscaled = grad_group.not_to_be_unscaled(param)
        parameter.grad = waiting

    def _show_chunk(self, grad_group: ShardedGradGroup, param: GradParam) -> None:
        average, grad_group.changed = grad_group.average_of(param), True
        myself, mine = weakref.ref(self), weakref.ref(grad_group)

        def wait() -> None:
            exchange, grad_group = myself(), mine()
            if exchange is not None and grad_group is not None and grad_group.awaits(average):
                exchange._finish_for_reader(grad_group)

        param.parameter.grad = ShardedGradient.stand_for(
            param.parameter, grad_group.specs[param], average, wait
        )

    def complete(self) -> None:
        """Puts gradients together that ranks still have in chunks or in parts, as more will be
        added to them. Collective; nothing to do where ``zero_grad`` has come between."""
        for param, grad_group in self.group_of.items():
            make_dense(param.parameter)
            gradient = param.parameter.grad
            if isinstance(grad_group, ShardedGradGroup) and isinstance(gradient, ShardedGradient):
                param.parameter.grad = gradient.complete()

    def step_pipeline(
        self, updates: Mapping[ShardedGradGroup, Callable[[], None]]
    ) -> ShardedStepPipeline:
        """The step of sharded groups, in forward order, with what updates their chunks. Their
        gathers count as issued now: the debug mode compares what ranks have issued at points of the
        thread that trains."""
        self._check_votes()
        for grad_group in updates:
            for number, one in enumerate(grad_group.gathered_slices):
                text = f"gathering {number} of {one.params[0].name!r}"
                self._issued(text, one.gathered_bytes, one.gather_group)
        # A copy: its thread's waits are not those of the thread that trains.
        return ShardedStepPipeline(updates, copy.copy(self._watch), self._orders.arrived)

    def _finish_for_reader(self, grad_group: GradGroup) -> None:
        """``finish``, for somebody who reads or changes one of the gradients."""
        # In backward what is computed later is still to be added, or the group to be sent.
        if self._in_backward and grad_group.in_flight:
            raise _touched(grad_group)
        self.finish(grad_group)

    def finish(self, grad_group: GradGroup) -> None:
        """Waits for a group, applies the step that took it over, and shows plain gradients."""
        if not grad_group.in_flight:
            return
        # In the midst of anybody's forward: state that is made here outlives that forward.
        with torch.inference_mode(False), torch.no_grad():
            if not grad_group.on_stream:
                self._work_while_waiting(grad_group)
            self._arrive(grad_group)

    def finish_all(self) -> None:
        """The same for every group, in the order in which they are needed."""
        for grad_group in self.grad_groups:
            self.finish(grad_group)

    def _work_while_waiting(self, wanted: GradGroup) -> None:
        """Applies other updates that have to be applied anyway, while the wanted group comes."""
        for grad_group in self.grad_groups:
            if wanted.is_completed:
                return
            early = (
                grad_group is not wanted
                and grad_group.update is not None
                and not grad_group.needs_room
            )
            if early and grad_group.is_completed:
                self._arrive(grad_group)

    def _arrive(self, grad_group: GradGroup) -> None:
        if grad_group.sent < len(grad_group.slices):
            raise _touched(grad_group)
        self._check_votes_if_due(grad_group)
        waited_s = grad_group.wait_and_average(self._watch)
        self._waited_s += waited_s
        self._orders.arrived(grad_group, waited_s)
        update, gradients = grad_group.update, grad_group.gradients
        grad_group.clear()
        for param, gradient in gradients.items():
            shown = param.parameter.grad
            if isinstance(shown, WaitingGradient) and not isinstance(shown, SparseGradient):
                param.parameter.grad = param.show(gradient)
        if update is not None:
            update()


def _touched(grad_group: GradGroup) -> RunError:
    return RunError(
        f"a gradient of {grad_group.listed} was read or changed in backward after it had been "
        "sent: do that after backward, or plan with --schedule barrier (schedule='barrier'); if a "
        "reentrant checkpoint computes it twice, use checkpoint(..., use_reentrant=False)"
    )


def _alone(param: GradParam) -> Tensor:
    """The parameter's gradient, in memory that no other tensor has."""
    # Autograd gives views of one gradient to parameters that are added up: in its place the sum
    # over ranks would be made for one of them while another is still to read its own.
    gradient = as_sent(param)
    return gradient.clone() if shares_memory(gradient) else gradient


def shares_memory(gradient: Tensor) -> bool:
    """Whether another tensor has (a part of) the memory of a gradient that autograd has just put
    into ``grad``."""
    # A new gradient has one owner, and the storage that is made here to ask is another.
    return _owners is not None and _owners(gradient.untyped_storage()._cdata) > 2


def _may_stay(grad_group: GradGroup, somewhere: Collection[GradParam]) -> bool:
    """Whether a group need not be sent where ``somewhere`` are the parameters that some rank has a
    gradient of. Others than dense ones count on being sent: they hold residuals, or update chunks
    together."""
    return (
        type(grad_group) is GradGroup
        and not grad_group.gradients
        and not any(param in somewhere for param in grad_group.params)
    )


def out_of_backward(parameters: Collection[nn.Parameter]) -> set[nn.Parameter]:
    """Those of the parameters that the backward which is going on will not add a gradient to. None
    where it adds to none at all, as ``torch.autograd.grad`` does."""
    try:
        found = {parameter for parameter in parameters if not _will_come(parameter)}
    except RuntimeError:  # one of them is what torch.autograd.grad was asked for
        return set()
    return set() if len(found) == len(parameters) else found


def _will_come(parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        made = parameter.view_as(parameter).grad_fn
        assert made is not None
        node: Any = made.next_functions[0][0]  # the same one for as long as any graph has it
    return bool(torch._C._will_engine_execute_node(node))
