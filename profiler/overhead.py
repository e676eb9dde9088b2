"""What the executor's own work adds to a step, measured by running it.

Toy models (few parameters, many, large ones, divided ones) are trained plainly and under a plan, in
turns. What the step takes longer under the plan, less the waits in it for gradients and
redistributions (which predictions count by themselves), is the executor's: the ranks' agreement on
samples and on used parameters, hooks, the filling and averaging of buckets, and what goes on in
Python around a redistribution.

What a byte costs the executor is little beside what it costs the wire, and would drown in the
wire's own unsteadiness: for bytes only the work between waits is counted, without the agreements,
which wait behind the gradients on the same links. Toys are as large as the links carry quickly.
Of redistributions the copies are timed alone, small and large ones: a toy that moved as much would
compute for longer than it copies. Of what is recomputed the second forward is not counted.

On GPUs all of this is the host's work, which the device does not wait for unless it has less to do:
there it is timed until the host has issued a step. Nothing is counted for bytes, which the device
copies. For each message of gradients, for each parameter that is exchanged otherwise than densely,
and for each redistribution the same toy is trained with and without. Where such an exchange asks
its device for a number, the host waits until the device is that far, which is short for a toy.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, sqrt
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..executor.apply import apply
from ..executor.comm.groups import given_back
from ..executor.memory import offload
from ..executor.optimizer.kinds import optimizer_for
from ..executor.parallel import run_of
from ..executor.redistribution.redistribute import Dims, Mover, group_route
from ..planner.cost.collectives import ring_steps
from ..planner.schema.cluster import ExchangeHostTime, HostedExchange, StepOverhead
from ..planner.schema.goal import Goal
from ..planner.schema.layout import Layout, data_parallel
from ..planner.schema.plan import (
    LOSSY,
    SHARDING,
    MemoryPolicy,
    Plan,
    Prediction,
    Provenance,
    ScheduleName,
    UnitPlan,
)
from .collectives import slowest, synchronise

CPU = torch.device("cpu")
ROUNDS, UNCOUNTED = 25, 3
# No further round is begun once a toy has taken so long, unless it has had the fewest.
TOY_S, FEWEST = 1.0, 5
# What the exchange of the large toy's gradients takes at most.
EXCHANGE_S = 0.1
# What travels at once: all of a toy, and slices as plans mostly choose them.
MESSAGE_BYTES: dict[ScheduleName, int] = {"barrier": 25 * 2**20, "priority": 4 * 2**20}


class _Toy(NamedTuple):
    """So many square linear layers of that width, each with a bias, and each recomputed, offloaded
    or kept; every third one divided over ``degree`` ranks. ``rows`` are each rank's samples.
    Gradients are exchanged by ``exchange``, in messages of ``message_bytes`` (zero: as plans mostly
    choose them)."""

    layers: int
    width: int = 8
    degree: int = 1
    memory: MemoryPolicy = "keep"
    rows: int = 2
    exchange: HostedExchange | Literal["dense"] = "dense"
    message_bytes: int = 0

    @property
    def parameters(self) -> int:
        return 2 * self.layers

    @property
    def bytes(self) -> int:
        return 4 * self.layers * self.width * (self.width + 1)


SMALL, MANY, AGAIN = _Toy(4), _Toy(48), _Toy(48, memory="recompute")
# Each layer saves its input, which is just large enough to be offloaded.
AWAY = _Toy(48, width=64, memory="offload", rows=offload.LEAST_BYTES // (4 * 64))
# Of lossy exchanges such a share is sent.
RATIO = 0.25
# As large as a layer's matrix and bias, so that each layer has a slice.
IN_SLICES = MANY._replace(message_bytes=MANY.bytes // MANY.layers)
# Each layer by itself is more than small units of which several are gathered together.
WIDE = MANY._replace(width=192)
# The large toy has as many layers as the small one; the width is bounded on both sides.
WIDTHS = (64, 1024)
DIVIDED_LAYERS = 12
# What a member has after a redistribution: at least, and at most, as far as links carry it in
# ``MOVED_S``.
MOVED_BYTES, MOVED_S = (2**14, 2**21), 0.02


def _large(ranks: int, bytes_per_s: float) -> _Toy:
    """The toy whose gradients are all-reduced in ``EXCHANGE_S`` over links of that rate."""
    exchanged = EXCHANGE_S * bytes_per_s * ranks / ring_steps("all_reduce", ranks)
    # By the bytes of its matrices.
    width = int(sqrt(min(exchanged / (4 * SMALL.layers), WIDTHS[1] ** 2)))
    return SMALL._replace(width=max(width, WIDTHS[0]))


class _Excess(NamedTuple):
    """Seconds that a step is longer under a plan, waiting for tensors left out; those of them that
    are no agreement among ranks; those of a plain forward; and the redistributions in a step."""

    seconds: float
    local_s: float
    forward_s: float
    moves: int


def measure_overheads(
    rounds: int = ROUNDS,
    bytes_per_s: float = inf,
    tick: Callable[[float], None] = lambda share: None,
    device: torch.device | None = None,
) -> tuple[StepOverhead, StepOverhead]:
    """Of steps with a barrier and by priority (updates one parameter at a time included), on ranks
    joined by links of that rate (the slowest counts), as the slowest rank sees them; of one rank,
    which exchanges and moves nothing, those of its hooks. Ranks are CPUs unless each names its
    ``device``. ``tick`` is told the share that is over. Collective over the default group."""
    if device is not None and device.type == "cuda":
        with given_back():
            return _of_hosts(device, rounds, tick)
    ranks = dist.get_world_size()
    large = _large(ranks, bytes_per_s) if ranks > 1 else None
    exchanging = (SMALL, MANY, large) if large else (SMALL, MANY)
    toys = (*exchanging, AGAIN, *(_divided(ranks) if large else ()))
    every = len(toys) + len(exchanging)
    by_barrier = _excesses(toys, rounds, "barrier", lambda done: tick(done / every))
    by_priority = _excesses(
        exchanging, rounds, "priority", lambda done: tick((len(toys) + done) / every)
    )
    # What is around a redistribution or a second forward is the same whatever the schedule.
    same = {"rerun_s": _rerun_s(by_barrier[1], by_barrier[len(exchanging)])}
    if large:
        same["move_s"] = _move_s(*by_barrier[-2:])
        same["move_byte_s"] = _move_byte_s(toys[-1].degree, rounds, bytes_per_s)
    more_bytes = large.bytes - SMALL.bytes if large else 0
    barrier, priority = (
        msgspec.structs.replace(_overhead(found, more_bytes), **same)
        for found in (by_barrier, by_priority)
    )
    return barrier, priority


def _of_hosts(
    device: torch.device, rounds: int, tick: Callable[[float], None]
) -> tuple[StepOverhead, StepOverhead]:
    """What hosts take around what they issue."""
    ranks = dist.get_world_size()
    toys = SMALL, MANY, AGAIN, AWAY
    sent = (*_exchanging(), *_divided(ranks)) if ranks > 1 else ()
    every = 2 * len(toys) + len(sent)

    def of(schedule: ScheduleName, begun: int) -> tuple[StepOverhead, _Excess]:
        def told(done: int) -> None:
            tick((begun + done) / every)

        small, many, again, away = _excesses(toys, rounds, schedule, told, device)
        found = msgspec.structs.replace(
            _overhead((small, many), 0),
            rerun_s=_rerun_s(many, again),
            copy_s=max((away.seconds - many.seconds) / AWAY.layers, 0.0),
        )
        return found, many

    barrier, _ = of("barrier", 0)
    priority, plain = of("priority", len(toys))
    if not sent:
        return barrier, priority
    found = _excesses(
        sent, rounds, "priority", lambda done: tick((every - len(sent) + done) / every), device
    )
    same = _around_collectives(plain, found)
    return msgspec.structs.replace(barrier, **same), msgspec.structs.replace(priority, **same)


def _exchanging() -> tuple[_Toy, ...]:
    """The toys of many layers whose gradients travel otherwise than in one dense message."""
    others = get_args(HostedExchange)
    return (IN_SLICES, WIDE, *(_without(name)._replace(exchange=name) for name in others))


def _without(exchange: HostedExchange) -> _Toy:
    """The toy that another one with that exchange is compared with."""
    return {"bf16": IN_SLICES, "fully_sharded": WIDE}.get(exchange, MANY)


def _more_messages(exchange: HostedExchange) -> float:
    """The messages of the toy of that exchange more than those of the other in a step."""
    # Sums and parameters; of each matrix and each bias, for both uses; and lossy ones apart from
    # biases, but for low rank's, of which a share travels in turns or which travel together.
    apart = {"topk": MANY.layers, "int8": MANY.layers, "dropped": RATIO * MANY.layers}
    both = {"sharded": 1.0, "fully_sharded": 2.0 * WIDE.parameters, "low_rank": 1.0}
    return {**apart, **both}.get(exchange, 0.0)


def _divided(ranks: int) -> tuple[_Toy, _Toy]:
    """The toy with redistributions, and the same without."""
    degree = next(d for d in range(2, ranks + 1) if ranks % d == 0)
    whole = _Toy(DIVIDED_LAYERS, max(8, degree))
    return whole, whole._replace(degree=degree)


def _around_collectives(plain: _Excess, found: Sequence[_Excess]) -> dict[str, Any]:
    """What a message, a parameter exchanged in each way and a redistribution take more than what
    the ``plain`` toy has: the same whatever the schedule."""
    *exchanged, undivided, divided = found
    in_slices, *others = exchanged
    wide, *others = others
    dense = {MANY: plain, IN_SLICES: in_slices, WIDE: wide}
    message_s = max(in_slices.seconds - plain.seconds, 0.0) / (IN_SLICES.layers - 1)

    def each_s(name: HostedExchange, other: _Excess) -> float:
        more_s = other.seconds - dense[_without(name)].seconds - _more_messages(name) * message_s
        # Lossy exchanges send biases whole, and each layer has a message where there are several.
        return max(more_s, 0.0) / (MANY.parameters if name in SHARDING else MANY.layers)

    return {
        "message_s": message_s,
        "exchanges": tuple(
            ExchangeHostTime(exchange=name, each_s=each_s(name, other))
            for name, other in zip(get_args(HostedExchange), others, strict=True)
        ),
        "move_s": _move_s(undivided, divided),
    }


def _overhead(found: Sequence[_Excess], more_bytes: int) -> StepOverhead:
    """What is around parameters, and bytes where a third toy has more of them, and once a step."""
    small, many = (one.seconds for one in found[:2])
    each = max((many - small) / (MANY.parameters - SMALL.parameters), 0.0)
    bytes_s = found[2].local_s - found[0].local_s if more_bytes else 0.0
    return StepOverhead(
        step_s=max(small - SMALL.parameters * each, 0.0),
        parameter_s=each,
        byte_s=max(bytes_s, 0.0) / max(more_bytes, 1),
    )


def _rerun_s(kept: _Excess, recomputed: _Excess) -> float:
    """Seconds around the second forward of a layer that is recomputed."""
    more_s = recomputed.seconds - kept.seconds - recomputed.forward_s
    return max(more_s / AGAIN.layers, 0.0)


def _move_s(undivided: _Excess, divided: _Excess) -> float:
    """Seconds around each redistribution."""
    return max((divided.seconds - undivided.seconds) / divided.moves, 0.0)


def _move_byte_s(degree: int, rounds: int, bytes_per_s: float) -> float:
    """Seconds for each byte of what a member has after a redistribution, the waits left out: those
    of a large one more than those of a small one, there and back, the same on every rank."""
    ranks = dist.get_world_size()
    toy, _ = apply(_model(SMALL), None, _plan(SMALL._replace(degree=degree), ranks, "barrier"))
    run = run_of(toy)
    mover = Mover(run.world.redistribution[degree], run.watch, run.meter, run.issued)
    least, most = MOVED_BYTES
    sizes = (least, int(max(min(MOVED_S * bytes_per_s, most), 4 * least)))
    found: tuple[list[float], ...] = ([], [])
    for _ in range(rounds):
        for size, seconds in zip(sizes, found, strict=True):
            dist.barrier()
            seconds.append(_copying_s(mover, torch.ones(size // 4 // degree)))
    small, large = slowest([median(seconds) for seconds in found], CPU)
    return max(large - small, 0.0) / (2 * (sizes[1] - sizes[0]))


def _copying_s(mover: Mover, part: Tensor) -> float:
    """Seconds besides the waits in which every member gets all parts of a group's tensor and gives
    them back, as a gradient goes."""
    group = mover.group
    there = group_route((len(part),) * group.size, "batch_shard", "replicate", 1, group.member)
    samples = Dims(0, None)
    start, waited = time.perf_counter(), mover.meter.seconds
    whole = mover.move(part, there, samples, "measuring copies")
    mover.move(whole, there.reversed(), samples, "measuring copies", add=True)
    return time.perf_counter() - start - (mover.meter.seconds - waited)


def _excesses(
    toys: Sequence[_Toy],
    rounds: int,
    schedule: ScheduleName,
    tick: Callable[[int], None],
    device: torch.device = CPU,
) -> list[_Excess]:
    """What each toy's step is longer by, the same on every rank: the slowest one's."""
    found = []
    with torch.random.fork_rng(devices=[]):
        for done, toy in enumerate(toys, 1):
            found.append(_excess(toy, dist.get_world_size(), rounds, schedule, device))
            tick(done)
    # Of the rank that each takes longest on: numbers of redistributions are equal.
    worst = slowest([float(figure) for one in found for figure in one], device)
    size = len(_Excess._fields)
    rows = [worst[at : at + size] for at in range(0, len(worst), size)]
    return [_Excess(own, local, forward, round(moves)) for own, local, forward, moves in rows]


def _excess(
    toy: _Toy, ranks: int, rounds: int, schedule: ScheduleName, device: torch.device
) -> _Excess:
    """How much longer a step under a plan is than a plain one and the waits in it."""
    plain, batch = _model(toy).to(device), torch.ones(toy.rows, toy.width, device=device)
    by_hand = _updated(plain)
    model = _model(toy).to(device)
    planned, optimizer = apply(model, _updated(model), _plan(toy, ranks, schedule))
    assert optimizer is not None, "an optimizer comes back where one was given"
    meter, gradients = run_of(planned).meter, run_of(planned).gradients
    timed_under = partial(_timed, planned, optimizer, in_use=toy.exchange == "fully_sharded")
    plainly, under, local, forward = (list[float]() for _ in range(4))
    begun = time.perf_counter()
    while len(plainly) < rounds + UNCOUNTED:
        seconds, forward_s = _timed(plain, by_hand, batch)
        plainly.append(seconds)
        forward.append(forward_s)
        if device.type == "cuda":  # the host waits for nothing
            seconds, _ = timed_under(batch)
            local.append(seconds)
            under.append(seconds)
        else:
            before = meter.seconds, gradients.exposed_s, gradients.voting_s
            seconds, _ = timed_under(batch)
            moving, exposed, voting = meter.seconds, gradients.exposed_s, gradients.voting_s
            local.append(seconds - (moving - before[0]) - (exposed - before[1]))
            under.append(local[-1] + voting - before[2])
        # Agreed, as a rank that stops alone leaves the others waiting in the next round.
        spent_s = slowest([time.perf_counter() - begun], device)[0]
        if spent_s > TOY_S and len(plainly) >= FEWEST + UNCOUNTED:
            break
    usual, own, apart, once = (
        median(seconds[UNCOUNTED:]) for seconds in (plainly, under, local, forward)
    )
    return _Excess(own - usual, apart - usual, once, meter.moves // len(plainly))


def _updated(model: nn.Module) -> torch.optim.Optimizer:
    # A rate of nothing: however many steps are made, values stay as they are.
    return optimizer_for("momentum", model.parameters(), 0.0)


def _model(toy: _Toy) -> nn.Module:
    return nn.Sequential(*(nn.Linear(toy.width, toy.width) for _ in range(toy.layers)))


def _timed(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, *, in_use: bool = False
) -> tuple[float, float]:
    """Seconds of one whole step, which all ranks begin together, and of its forward: what an
    optimizer that returns at once leaves to do is waited for, but ``in_use``, which looking at
    parameters would gather; on GPUs, until it is issued."""
    dist.barrier()
    synchronise(batch.device)
    start = time.perf_counter()
    output: Tensor = model(batch)
    forward_s = time.perf_counter() - start
    loss = output.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    # Any use of a parameter waits for its update, where the optimizer returned before it was done.
    for parameter in () if in_use else model.parameters():
        parameter.detach()
    return time.perf_counter() - start, forward_s


def _plan(toy: _Toy, ranks: int, schedule: ScheduleName) -> Plan:
    """Data parallelism, but for the layers that are divided."""
    whole, divided = data_parallel(ranks), Layout(groups=ranks // toy.degree, degree=toy.degree)
    units = []
    for i in range(toy.layers):
        cut = toy.degree > 1 and i % 3 == 1
        units.append(
            UnitPlan(
                name=str(i),
                kind="linear",
                modules=(str(i),),
                batched_inputs=(0,),
                layout=divided if cut else whole,
                style="column" if cut else "none",
                memory=toy.memory,
                wire="bf16" if toy.exchange == "bf16" else "exact",
                exchange="dense" if toy.exchange == "bf16" else toy.exchange,
                exchange_ratio=RATIO if toy.exchange in LOSSY else 1.0,
            )
        )
    goal = Goal(batch=toy.rows * ranks, optimizer="momentum")
    message_bytes = toy.message_bytes or MESSAGE_BYTES[schedule]
    return plan_by_hand(units, goal, schedule, message_bytes, "toy")


# The figures of a plan that nobody predicted.
UNPREDICTED = Prediction(
    step_s=0.0,
    compute_s=0.0,
    blocking_s=0.0,
    exposed_s=0.0,
    update_s=0.0,
    exchange_s=0.0,
    wire_bytes=0,
    peak_bytes=(),
    gpu_seconds=0.0,
    samples_per_s=0.0,
)


def plan_by_hand(
    units: Iterable[UnitPlan], goal: Goal, schedule: ScheduleName, message_bytes: int, target: str
) -> Plan:
    """The plan of these units on the ranks as they are numbered, without predictions."""
    ranks = dist.get_world_size()
    return Plan(
        target=target,
        model=target,
        schedule=schedule,
        message_bytes=message_bytes,
        world_size=ranks,
        goal=goal,
        placement=tuple(range(ranks)),
        units=tuple(units),
        prediction=UNPREDICTED,
        baseline=UNPREDICTED,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )
