"""An applied plan on this rank: what happens around every forward of the model."""

# What happens from one backward to the next forward, in order and by function, stands in
# docs/executor.md under that name.

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..models.compiled import CompiledRegions
from ..models.opened import mapped
from ..planner.cost.ownership import TensorPlacement, boxes
from ..planner.schema.errors import InputError
from ..planner.schema.layout import Layout, data_parallel
from ..planner.schema.local_steps import LocalSteps
from ..planner.schema.plan import SHARDING, Plan, leave_after_backward
from ..planner.simulate.slicing import by_urgency
from .comm.broadcast import BufferPlace, broadcast, tensors_at
from .comm.control import Control, Header, RankRow, digest
from .comm.groups import Group, World
from .comm.steps import after_each_step
from .comm.watchdog import Watchdog
from .comm.worker_threads import LEAVE_S
from .forward import Forward, Weight, input_dims, samples_of, scale_output, shapes_of
from .functions import values_for_functions
from .gradients.buckets import BucketExchange, Exchange, GradParam, make_buckets
from .gradients.feedback import Lossy
from .gradients.flat_shard import FlatShardSpec
from .gradients.momentum import Momentum, has_momentum
from .gradients.order import Orders
from .gradients.priority import PriorityExchange
from .gradients.sharded import flat_shard_spec
from .local_steps import HostsApart
from .memory.regions import Regions
from .optimizer.lazy import LazySteps
from .outside import (
    Guard,
    KeptResults,
    LateParameters,
    check_steps,
    tell_of_unexchanged_gradients,
    watch_others,
)
from .redistribution.bursts import Bursts
from .redistribution.cache import RedistributionCache
from .redistribution.lazy import materialize
from .redistribution.redistribute import Meter
from .redistribution.shards import Shard, SubsetShard
from .step_clock import StepClock
from .synchronise import GradientSynchroniser, Kernels, LocalBatchCheck, MicroBatchCheck

# Of a forward's mode: the model is in training mode, and gradients are asked for.
TRAINING = 3


class Run:
    """The state of a plan that has been applied to a model.

    ``synchronise`` is False inside ``no_sync``. ``forward`` is the forward that ran last,
    ``weight_next`` how the next one counts where that is not by its samples, ``in_pieces`` whether
    several forwards make one batch now. ``priority`` is the exchange of gradients where it is by
    priority. ``plan`` is that part of ``whole_plan`` which the ranks of this host train by where
    hosts train apart; ``apart`` is then what they average, and ``control`` of this host while
    ``everyone`` is of all.
    """

    def __init__(
        self, whole_plan: Plan, world: World, watch: Watchdog, lossy: Lossy | None = None
    ) -> None:
        self.whole_plan = whole_plan
        self.plan = plan = whole_plan.inside_host
        self.world, self.watch = world, watch
        self.lossy = lossy or Lossy()
        # Where a wait does not hold the host, its clock tells nothing of links and gradients.
        self.orders = Orders(
            plan,
            urgent=by_urgency(unit.exchange for unit in plan.units),
            measured=not self.on_stream,
        )
        self.control = Control(world, watch)
        self.everyone = Control(world, watch, world.everyone)
        self.meter = Meter()
        self.divided = any(unit.layout != data_parallel(world.size) for unit in plan.units)
        self.input_dims = input_dims(plan)
        self.synchronise = True
        self.inside = False
        self.forward: Forward | None = None
        self.redistribution_cache = RedistributionCache(world.size, prefetch=bool(world.crossings))
        self.bursts: Bursts | None = None
        if world.crossings:
            self.bursts = Bursts(
                world, watch, self.meter, self.issued, self.counts, self.redistribution_cache
            )
        self.shards: dict[str, Shard] = {}
        self.divided_parameters: dict[nn.Parameter, Shard] = {}
        self.flat_shards: dict[nn.Parameter, FlatShardSpec] = {}
        self.regions = Regions()
        self.modules: tuple[nn.Module, ...] = ()
        self.compiled: CompiledRegions | None = None
        self.kernels = Kernels()
        self._kept = KeptResults()
        self._guard: Guard | None = None
        self.late_parameters: LateParameters | None = None
        self.weight_next: Weight | None = None
        self.in_pieces = False
        self._micro_batches = MicroBatchCheck(plan)
        self.local_batches = LocalBatchCheck(whole_plan, world.rank)
        self._number = 0
        self._buffers: list[BufferPlace] = []
        self._all_params: list[GradParam] = []
        self._trainable: list[bool] = []
        self._gradients: GradientSynchroniser | None = None
        self.priority: PriorityExchange | None = None
        self.apart: HostsApart | None = None
        self.step_clock: StepClock | None = None
        self.steps_done = 0
        """Steps of the training as the clock counts them, with those that were made before the
        checkpoint from which it goes on."""
        self.progress: object | None = None
        """What shows how far the training is, where something does."""
        # Weak: else no run, with its model, would end before the process.
        atexit.register(_let_finish, weakref.ref(self))

    def start(self, params: Sequence[GradParam], buffers: list[BufferPlace]) -> None:
        """Takes over the parameters (in the order in which backward finishes them) and the buffers
        that follow rank 0's.
        """
        self._all_params = list(params)
        sharded = [param for param in params if param.exchange in SHARDING and not param.idle]
        self.flat_shards = {param.parameter: flat_shard_spec(param) for param in sharded}
        self._buffers = buffers
        self._watch_gradients()

    @property
    def on_stream(self) -> bool:
        """Whether gradients travel on a device's streams."""
        return any(group.on_stream for group in self.world.gradients.values())

    @property
    def gradients(self) -> GradientSynchroniser:
        assert self._gradients is not None
        return self._gradients

    def issued(self, what: str, sent_bytes: int = 0, group: Group | None = None) -> None:
        """Notes a collective that is about to be issued, in ``group`` or that of all ranks for
        gradients; in debug mode ranks compare what they issue."""
        self.meter.sent_bytes += sent_bytes
        self.meter.exchanged_bytes += sent_bytes
        self.watch.issued(what, group or self.world.gradients[1])

    def counts(self) -> tuple[int, ...]:
        """The samples that each position feeds in the forward that runs. Raises ``InputError``
        where none does, nor a backward that runs a part of one again."""
        again = torch._C._current_graph_task_id() >= 0  # in a backward
        if self.forward is None or not (self.inside or again):
            raise InputError(
                "a part of the model that is divided over ranks was called outside of the model's "
                "own call (by model.forward(x), or a module of it by itself), so nothing is known "
                "of the samples that other ranks feed: call the model, model(x), on every rank"
            )
        return self.world.by_position(self.forward.counts())

    def group_counts(self, layout: Layout) -> tuple[int, ...]:
        """The samples of each member of this rank's group in that layout."""
        counts, place = self.counts(), layout.place(self.world.position)
        if place is None:
            return ()
        own = boxes(counts, TensorPlacement(layout, "batch_shard"), 1)[:, layout.group(place[0])]
        return tuple((own[1] - own[0]).tolist())

    def _watch_gradients(self) -> None:
        """(Re)makes buckets and hooks for the parameters that require a gradient now."""
        # What the exchange that is replaced has begun ends first: parameters that a step has left
        # to be updated, messages on their way, parameters that are put together ahead of use.
        self.finish_steps()
        if self.priority is not None:
            self.priority.complete()
            self.priority.unshard_manager.end()
        if self._gradients is not None:
            self._gradients.detach()
        self._trainable = [param.parameter.requires_grad for param in self._all_params]
        params = [param for param in self._all_params if param.parameter.requires_grad]
        anchor = self.bursts.anchor if self.bursts is not None else None
        # Rank 0 warns for all: every rank cuts its batches alike.
        check = self._micro_batches.exchanged if self.world.rank == 0 else None
        exchange = self._exchange_of(params)
        self._gradients = GradientSynchroniser(
            params, exchange, self.control, lambda: self.forward, anchor, check, self.kernels
        )

    def _exchange_of(self, params: Sequence[GradParam]) -> Exchange:
        limit = self.plan.message_bytes
        late = leave_after_backward(self.plan.units, self.plan.world_size)
        eager = not (self.on_stream and late)
        if self.plan.schedule == "barrier":
            buckets = make_buckets(params, limit)
            return BucketExchange(buckets, self.watch, eager=eager, issued=self.issued)
        before = self.priority
        self.priority = PriorityExchange(
            params, limit, self.orders, self.control, self.watch, self.issued, self.lossy,
            eager=eager,
        )  # fmt: skip
        if before is not None:
            self.priority.follow(before)  # what lossy groups have kept goes on with the new ones
        return self.priority

    def make_lazy(self, optimizer: Optimizer) -> None:
        """Lets the optimizer's steps be applied unit by unit, where the plan's schedule does so."""
        if self.priority is not None:
            topk = self.priority.topk
            if topk is not None and has_momentum(optimizer):
                topk.momentum = Momentum(optimizer, topk.parameters, topk.mirrored)
            momentum = topk.momentum if topk is not None else None

            def exchange() -> PriorityExchange:  # in force: another one may be made meanwhile
                assert self.priority is not None
                return self.priority

            steps = LazySteps(optimizer, exchange, self.flat_shards, momentum)
            self.priority.release.updater = steps.early

    def finish_steps(self) -> None:
        """Applies whatever a step has left pending."""
        if self.priority is not None:
            self.priority.finish_all()

    @property
    def frozen(self) -> list[GradParam]:
        """The parameters that are not trained now."""
        return [param for param in self._all_params if not param.parameter.requires_grad]

    def conclude(self) -> None:
        """Ends what the last step has left pending, and forgets a backward that failed."""
        self.finish_steps()
        if self.priority is not None:
            self.priority.forget_unsent()

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank has waited for gradients, and for what hosts average."""
        return self.gradients.exposed_s + (self.apart.waited_s if self.apart else 0.0)

    def tell_of_what_is_not_exchanged(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """From now on it is told of parameters and gradients that nobody exchanges."""
        first = self.watch.rank == 0  # it warns for all
        watch_others(model, optimizer, tell=first)
        check_steps(model, optimizer, weakref.ref(self), tell=first)
        self.late_parameters = LateParameters(model.parameters())
        if optimizer is not None and first:
            tell_of_unexchanged_gradients(optimizer, weakref.ref(self))

    def train_apart(self, local: LocalSteps, optimizer: Optimizer) -> None:
        """From now on hosts average what they have learnt as ``local`` says."""
        self.apart = HostsApart(
            local, self.world, self.watch, self._all_params, self._buffers, self.issued
        )

        def stepped(_: Optimizer) -> None:
            assert self.apart is not None
            self.apart.stepped(self.finish_steps)

        after_each_step((), optimizer, stepped)

    @property
    def busy(self) -> bool:
        """Whether collectives that this rank has started are still on their way."""
        sending = self.priority is not None and self.priority.busy
        return sending or self.watch.busy

    @contextmanager
    def around(self, model: nn.Module, args: Any, kwargs: Any) -> Iterator[Forward | None]:
        """Prepares one forward of the whole model; None where it concerns this rank alone."""
        self.inside = True
        complete = False
        recorder = self.watch.recorder
        if recorder is not None and torch.is_grad_enabled():
            recorder.forward_begins()
        try:
            forward = self._begin(model, args, kwargs)
            if forward is not None and torch.is_grad_enabled():
                self._kept.begin(model)
            unshards: AbstractContextManager[None] = nullcontext()
            if self.priority is not None:
                unshards = self.priority.unshard_manager.around_forward()
            with unshards, self._functions(), self.regions.around():
                yield forward
            complete = True
        finally:  # also where the forward raised: the next one must find nothing of it
            self.inside = False
            self.redistribution_cache.end(complete=complete)

    def resume_later(self) -> Callable[[], AbstractContextManager[None]]:
        """What makes the forward that runs now the current one later, when parts of it run again
        in backward: how many samples ranks have in it, say."""
        forward = self.forward

        @contextmanager
        def again() -> Iterator[None]:
            before, self.forward = self.forward, forward
            try:
                with self._functions():
                    yield
            finally:
                self.forward = before

        return again

    def _functions(self) -> AbstractContextManager[None]:
        """What functions of the model's own need where tensors are lazy or parameters wait."""
        waits = self.divided or self.priority is not None
        return values_for_functions() if waits else nullcontext()

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> Forward | None:
        grad = torch.is_grad_enabled()
        self.guard.disarm()
        if grad:
            if self.late_parameters is not None:
                self.late_parameters.check(model)
            self.gradients.abandon()
            if [param.parameter.requires_grad for param in self._all_params] != self._trainable:
                self._watch_gradients()
            if self.apart is not None:
                self.apart.agree_before_first_step()
        if not (grad or self.divided):
            return None  # evaluation of a model that every rank has whole: it may evaluate alone
        forward = self._new_forward(model, args, kwargs)
        # In training the header leaves now, to be there when backward needs it. Where units are
        # divided it is needed at once: it says which samples move where.
        if self.divided or model.training:
            forward.announce()
        if self.divided:
            forward.counts()
        self.redistribution_cache.begin()
        if grad and model.training and self.synchronise:
            doing = f"the buffers of forward {self._number}"
            broadcast(tensors_at(self._buffers), self.world.statistics[1], self.watch, doing)
        return forward

    def _new_forward(self, model: nn.Module, args: Any, kwargs: Any) -> Forward:
        # Shapes are compared only where tensors move between ranks: else each may have its own.
        samples = samples_of(args, kwargs, self.input_dims)
        shapes = digest(shapes_of(args, kwargs, self.input_dims)) if self.divided else 0
        mode = 2 * model.training + torch.is_grad_enabled()
        if mode == TRAINING:
            self.local_batches.fed(samples)

        def begin() -> Header:
            self._number += 1
            row = RankRow(self._number, samples, shapes, mode)
            doing = f"forward {self._number}"
            self.watch.post(f"is in {doing}")
            return Header(row, self.control.gather(row, doing), self.divided)

        self.forward = Forward(
            samples, synchronise=self.synchronise, begin=begin, weight=self.weight_next
        )
        return self.forward

    @property
    def guard(self) -> Guard:
        """What sees to it that a loss takes no part of a parameter for the whole."""
        if self._guard is None:
            # Not those that are freed between uses, whose class is swapped for that meanwhile.
            free = self.flat_shards
            cut = {p: s for p, s in self.divided_parameters.items() if p not in free}
            part = {p: s for p, s in cut.items() if s.degree > 1 or isinstance(s, SubsetShard)}
            self._guard = Guard({s.names[0]: p for p, s in part.items()})
        return self._guard

    def finish(self, model: nn.Module, output: Any, forward: Forward | None) -> Any:
        """The model's output as the user gets it."""
        output = mapped(output, materialize)
        if forward is None or not torch.is_grad_enabled():
            return output
        if forward.header is not None:
            number = forward.header.number
            self.watch.post(f"has finished forward {number} and not begun its backward")

        def scale(tree: Any) -> Any:
            return scale_output(tree, forward, self._began)

        self._kept.scale(model, scale)
        self.guard.arm()
        return scale(output)

    def _began(self, forward: Forward) -> None:
        self.guard.disarm()
        if self.watch.recorder is not None:
            self.watch.recorder.mark("loss")
        self.gradients.began(forward)


def _let_finish(reference: weakref.ref[Run]) -> None:
    """Lets the library end what is on its way (votes and slices that nobody waits for any more):
    gloo aborts a process that ends with some of it going on. Not for long: peers may be gone."""
    end_s = time.monotonic() + LEAVE_S
    while (run := reference()) is not None and run.busy and time.monotonic() < end_s:
        time.sleep(0.01)
