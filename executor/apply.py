"""Applies a plan to a model and its optimizer, in place."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..planner.schema.errors import InputError
from ..planner.schema.layout import Layout
from ..planner.schema.plan import SHARDING, Plan
from ..planner.schema.record import fingerprint
from .background.signals import tell_pacer
from .capability import CAPABILITY
from .comm.broadcast import broadcast, changing_buffers
from .comm.control import digest
from .comm.groups import Group, Place, flat, make_world, place_of
from .comm.watchdog import Watchdog, time_limit
from .comm.worker_threads import finish_all
from .division import check_ties, divide, divided, split_of, tensor_named
from .gradients.buckets import GradParam
from .gradients.feedback import check_feedback, settle_feedback
from .gradients.momentum import check_momentum
from .gradients.residual import Lossy
from .gradients.sharded import shard
from .gradients.topk import MOST_ELEMENTS
from .headroom import check_headroom, watch_memory
from .memory.install import check_memory, install_memory
from .mismatch import check_optimizer_state
from .optimizer import sharded_steps
from .optimizer import state as optimizers
from .optimizer.chunks import install_chunks
from .optimizer.lazy import releases_not
from .parallel import ModelT, adopt, is_parallel
from .redistribution.boundary import crosses
from .redistribution.parts import Division
from .redistribution.shard_gradient import Members
from .redistribution.shards import Shard
from .redistribution.state import install
from .redistribution.statistics import Statistics, normalise_globally, norms_of, tolerate_nothing
from .redistribution.subset_shard import SubsetShard
from .run import Run
from .subset_units import check_narrowed, lives_at, narrowed

_runs = count()


def apply(
    model: ModelT,
    optimizer: Optimizer | None,
    plan: Plan,
    *,
    timeout_s: float | None = None,
    lossy: Lossy | None = None,
) -> tuple[ModelT, Optimizer | None]:
    """Makes ``model`` train as ``plan`` says, on all ranks of the process group. Collective.

    The model and the optimizer stay the same objects with the same parameters; divided parameters
    keep this rank's slice, and what state and gradients there are is sliced alike. Parameters and
    buffers become rank 0's. ``timeout_s`` is how long a rank waits for the others before it says
    where they are (default: MESHWRIGHT_TIMEOUT_S, or ten minutes), ``lossy`` the settings of
    exchanges that send a part. Raises ``InputError`` where the
    plan does not fit the model or the ranks; nothing is changed then.
    """
    limit = time_limit(timeout_s)
    check(model, optimizer, plan)
    finish_all(limit)
    run = _make_run(model, plan, limit, lossy)
    _agree(run, model)
    check_headroom(run, model, optimizer)
    if run.world.rank == 0:
        check_optimizer_state(optimizer, plan)
    everything = [*model.parameters(), *model.buffers()]
    broadcast(everything, run.world.likes[1], run.watch, "the broadcast of rank 0's parameters")
    division = divide(model, run)
    run.shards, run.divided_parameters = division.by_name, division.parameters
    if optimizer is not None:
        optimizers.slice_state(optimizer, division.parameters)
    _prepare_norms(model, run, division)
    run.regions = install_memory(model, plan, _device(model), lambda: run.forward, run.as_now)
    install(model, division.by_name)
    entries = settle_feedback(entries_of(model, run, division), optimizer)
    entries = shard(entries, optimizer, run.world, run.watch)
    run.start(entries, _buffers(model, plan, division))
    install_chunks(model, run.sharings)
    adopt(model, run)
    watch_memory(run, model, optimizer)
    if optimizer is not None:
        run.make_lazy(optimizer)
    tell_pacer(run.watch, model.parameters(), optimizer, run.watch.number)
    return model, optimizer


def _make_run(model: nn.Module, plan: Plan, limit: float, lossy: Lossy | None) -> Run:
    device = _device(model)
    places = {unit.name: place_of(unit.layout, plan.world_size) for unit in plan.units}
    degrees = {place for place in places.values() if isinstance(place, int)}
    sharded = {places[unit.name] for unit in plan.units if unit.exchange in SHARDING}
    fetched = {places[unit.name] for unit in plan.units if unit.exchange == "fully_sharded"}
    # What a divided unit has whole (a bias behind partial sums) is shared by all of its ranks.
    sharded, fetched = ({*some, *map(_undivided, some)} for some in (sharded, fetched))
    parts = {unit.layout for unit in narrowed(plan)}
    crossing = any(crosses(unit, rest) for unit, rest in divided(plan))
    world = make_world(
        plan.placement, degrees, device, limit, sharded, fetched, parts, crossing=crossing
    )
    return Run(plan, world, Watchdog(world.rank, world.size, limit, run=next(_runs)), lossy)


def _undivided(place: Place) -> Place:
    return flat(place) if isinstance(place, Layout) else 1


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _agree(run: Run, model: nn.Module) -> None:
    """All ranks must have built the same model and got the same plan."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    text = ";".join(f"{n}{tuple(t.shape)}{t.dtype}{t.requires_grad}" for n, t in tensors)
    run.control.agree(
        "the model (names, shapes and types of its parameters and buffers)",
        digest(text),
        "build the same model on every rank",
    )
    plan = digest(fingerprint(run.plan))
    run.control.agree("the plan", plan, "give every rank the same file")


def check(model: nn.Module, optimizer: Optimizer | None, plan: Plan) -> None:
    """Raises ``InputError`` unless the plan can be applied to this model by these ranks."""
    if not dist.is_initialized():
        raise InputError(
            "no process group was started: start the script with torchrun, or call "
            "torch.distributed.init_process_group first"
        )
    ranks = dist.get_world_size()
    if ranks != plan.world_size:
        raise InputError(
            f"a plan for {plan.world_size} ranks was started on {ranks}: start {plan.world_size} "
            f"processes, or make a plan for {ranks}"
        )
    if is_parallel(model):
        raise InputError("a plan was applied to this model already: build the model anew")
    refusals = CAPABILITY.refusals(plan)
    if refusals:
        raise InputError(f"this plan cannot be run: {refusals[0]}; plan without hypothetical")
    _check_modules(model, plan)
    check_memory(model, plan, _device(model))
    _check_tensors(model)
    check_narrowed(model, plan)
    check_ties(model, plan)
    _check_norms(model, plan)
    _check_release(optimizer, plan)
    check_feedback(optimizer, plan)
    if optimizer is not None:
        optimizers.check_holds(optimizer, model)
    if optimizer is not None and any(unit.exchange == "topk" for unit in plan.units):
        check_momentum(optimizer)
    if optimizer is not None:
        cuts = [c.name for u, _ in divided(plan) for c in split_of(model, u).cuts]
        tensors = [tensor_named(model, name) for name in (*cuts, *lives_at(model, plan))]
        optimizers.check(optimizer, {t for t in tensors if isinstance(t, nn.Parameter)})
        if any(unit.exchange in SHARDING for unit in plan.units):
            sharded_steps.check(optimizer)


def _check_release(optimizer: Optimizer | None, plan: Plan) -> None:
    """Early release needs gradients that travel one by one, and an optimizer that takes them so."""
    early = [unit for unit in plan.units if unit.early_release]
    if not early:
        return
    shared = next((unit for unit in early if unit.exchange in SHARDING), None)
    if shared is not None or plan.schedule != "priority":
        name = (shared or early[0]).name
        what = f"the exchange {shared.exchange!r}" if shared else f"the schedule {plan.schedule!r}"
        raise InputError(
            f"unit {name!r} is planned with early release and {what}, which do not go together: "
            "plan with --forbid early-release"
        )
    reason = releases_not(optimizer)
    if reason is not None:
        raise InputError(reason)


def _check_modules(model: nn.Module, plan: Plan) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for unit in plan.units:
        missing = next((m for m in unit.modules if m not in known), None)
        if missing is not None:
            raise InputError(
                f"the plan is for another model: this {type(model).__name__} has no module "
                f"{missing!r}; make a plan for it"
            )


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                f"parameter {name!r} has no shape yet: run one batch through the model first"
            )
        if tensor.is_meta:
            raise InputError(f"{name!r} is on the meta device: give it memory and values first")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise InputError(
                f"embedding {name!r} makes sparse gradients, which are not exchanged: build it "
                "with sparse=False"
            )


def _check_norms(model: nn.Module, plan: Plan) -> None:
    """Local statistics are those of a rank's own samples, which a divided unit does not see."""
    if plan.goal.batch_statistics == "global":
        return
    inside = {m for unit, _ in divided(plan) if unit.style == "column" for m in unit.modules}
    for name, _ in norms_of(model):
        if any(name == m or name.startswith(f"{m}.") for m in inside):
            raise InputError(
                f"batch normalisation {name!r} is in a divided unit, which sees the samples of a "
                "whole group: plan with batch_statistics 'global', or without dividing that unit"
            )


def _prepare_norms(model: nn.Module, run: Run, division: Division) -> None:
    for name, module in norms_of(model):
        place = division.places.get(name, 1)
        if isinstance(place, Layout) and place.place(run.world.position) is None:
            continue  # it is not run here
        if run.plan.goal.batch_statistics == "global":
            group = _same_channels(run, division, name, module)
            statistics = Statistics(group, run.watch, run.meter)
            normalise_globally(module, name, statistics)
        elif not isinstance(module, nn.SyncBatchNorm):
            tolerate_nothing(module)


def _same_channels(run: Run, division: Division, name: str, module: nn.Module) -> Group:
    """Those who hold other samples of the channels that this module normalises here."""
    prefix = f"{name}."
    cut = any(entry.startswith(prefix) for entry in division.by_name)
    column = division.styles.get(name) == "column"
    place = division.places.get(name, 1)
    if isinstance(place, Layout):
        cut = any(n.startswith(prefix) and s.degree > 1 for n, s in division.by_name.items())
        return run.world.likes[place if cut or column else flat(place)]
    return run.world.likes[place if cut or column else 1]


def _buffers(model: nn.Module, plan: Plan, division: Division) -> list[Tensor]:
    """The buffers that follow rank 0's in each training forward; slices cannot, but for those of
    statistics (which then agree anyway) units have none that training changes.
    """
    local = plan.goal.batch_statistics == "local"
    cut = {id(tensor_named(model, name)) for name in division.by_name}
    return [b for b in changing_buffers(model, statistics=local) if id(b) not in cut]


def entries_of(model: nn.Module, run: Run, division: Division) -> list[GradParam]:
    """All parameters in the order in which backward finishes their gradients: units backwards, a
    tied one with its first user; those outside units beside what was registered before them.
    """
    place, kept = _first_users(model, run.plan), _of_norms(model)
    entries = []
    for name, parameter in model.named_parameters():
        shard = division.parameters.get(parameter)
        degree = shard.degree if shard else 1
        size = shard.full_shape.numel() if shard else parameter.numel()
        layout = _peers(shard) if isinstance(shard, SubsetShard) else None
        group, at = run.world.peers[layout or degree], place[parameter]
        unit = run.plan.units[at] if run.plan.units else None
        policy = (unit.exchange, unit.exchange_ratio) if unit else ("dense", 1.0)
        feedback = unit.feedback if unit else "residual"
        known = _members(run, shard)
        whole = parameter.ndim <= 1 or parameter in kept or size > MOST_ELEMENTS
        released = unit is not None and unit.early_release
        of = GradParam(name, parameter, group, degree, size, known, at, *policy, whole, feedback)
        groups = layout.groups if layout else run.world.size // degree
        idle = layout is not None and layout.place(run.world.position) is None
        divisor = run.world.size / groups
        of = replace(of, released=released, layout=layout, idle=idle, divisor=divisor)
        entries.append(of)
    order = sorted(range(len(entries)), key=lambda i: (place[entries[i].parameter], i))
    return [entries[i] for i in reversed(order)]


def _peers(residence: SubsetShard) -> Layout:
    """The layout whose peers exchange the gradient of what lives there."""
    return residence.layout if residence.degree > 1 else flat(residence.layout)


def _members(run: Run, shard: Shard | None) -> Members | None:
    """Who combines figures of a parameter that not every rank has whole."""
    if shard is None:
        return None
    if not isinstance(shard, SubsetShard):
        return Members(shard.group, run.watch)
    place = shard.layout.place(run.world.position)
    once = place is not None and place[0] == 0 and (shard.degree > 1 or place[1] == 0)
    return Members(shard.group, run.watch, counted=once)


def _of_norms(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of normalisations, known by their names: models bring their own."""
    norms = [m for m in model.modules() if "norm" in type(m).__name__.lower()]
    return {p for norm in norms for p in norm.parameters(recurse=False)}


def _first_users(model: nn.Module, plan: Plan) -> dict[nn.Parameter, int]:
    """The first unit in forward order that uses each parameter."""
    place: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(plan.units):
        for path in unit.modules:
            for parameter in model.get_submodule(path).parameters():
                place.setdefault(parameter, index)
    last = 0
    for parameter in model.parameters():
        last = place.setdefault(parameter, last)
    return place
