"""Applies a plan to a model and its optimizer, in place."""

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..models.compiled import Uncompiled
from ..models.splits.leaves import is_norm
from ..models.units.discover import check_gradients
from ..models.units.stays_whole import altered
from ..models.workload import device_of
from ..planner.cost.exchange import GATHERED, matrix_sides, sent_whole, thin_rank
from ..planner.schema.errors import InputError
from ..planner.schema.layout import Layout
from ..planner.schema.pins import EARLY_RELEASE, forbidding
from ..planner.schema.plan import SHARDING, Plan
from ..planner.schema.record import fingerprint
from ..planner.schema.text import option
from .background.signals import tell_pacer
from .capability import CAPABILITY
from .closures import average_losses
from .comm.broadcast import BufferPlace, broadcast, changing_buffers
from .comm.control import digest
from .comm.groups import Group, Place, flat, make_world
from .comm.setups import other_devices
from .comm.watchdog import Watchdog, time_limit
from .comm.worker_threads import finish_all
from .compiled import check_compiled, compile_regions
from .division import (
    check_subset_units,
    check_ties,
    divide,
    divided,
    split_of,
    subset_layouts,
    subset_units,
    tensor_named,
)
from .gradients.buckets import GradParam
from .gradients.feedback import Lossy, check_feedback, replace_impossible_mirrors
from .gradients.momentum import check_momentum
from .gradients.reshard import install_chunks
from .gradients.sharded import shard
from .headroom import check_headroom, check_optimizer_state, watch_memory
from .memory.install import check_memory, install_memory
from .optimizer import kinds as optimizers
from .optimizer.lazy import releases_not
from .optimizer.state import mark_state, slice_state
from .parallel import ModelT, adopt, has_plan, is_parallel, planned_parameter
from .redistribution.boundary import leaves_to_other_division
from .redistribution.shard_gradient import Members
from .redistribution.shards import ModelShards, Shard, SubsetShard, install
from .redistribution.statistics import Statistics, normalise_globally, norms_of, tolerate_nothing
from .run import Run

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
    exchanges that send a part. Raises ``InputError`` where the plan does not fit the model or the
    ranks; nothing is changed then.
    """
    taken = Uncompiled(model)
    try:
        _apply(taken.model, optimizer, plan, timeout_s, lossy)
    except BaseException:
        taken.restore()
        raise
    taken.redirect(model)
    return model, optimizer


def _apply(
    model: nn.Module,
    optimizer: Optimizer | None,
    plan: Plan,
    timeout_s: float | None,
    lossy: Lossy | None,
) -> None:
    limit = time_limit(timeout_s)
    check(model, optimizer, plan)
    finish_all(limit)
    run = _make_run(model, plan, limit, lossy)
    _agree(run, model, plan)
    local, first_host = plan.local_steps, plan.placement.index(0) // run.world.size
    plan = run.plan  # from here on that of one host
    check_headroom(run, model, optimizer)
    if run.world.rank == 0:  # it warns, which needs saying once
        check_optimizer_state(optimizer, plan)
    # Before anything is divided, as slices are cut from rank 0's values.
    everything = [*model.parameters(), *model.buffers()]
    _begin_alike(everything, run, first_host)
    shards = divide(model, run)
    run.shards, run.divided_parameters = shards.by_name, shards.parameters
    if shards.parameters:
        optimizers.check_others(run, optimizer, set(shards.parameters))
    if optimizer is not None:
        slice_state(optimizer, shards.parameters)
    _prepare_norms(model, run, shards)
    run.regions = install_memory(
        model, plan, device_of(model), lambda: run.forward, run.resume_later
    )
    install(model, shards.by_name)
    params = replace_impossible_mirrors(_grad_params(model, run, shards), optimizer)
    params = shard(params, optimizer, run.world, run.watch)
    run.start(params, _buffers(model, plan, shards))
    install_chunks(model, run.flat_shards)
    adopt(model, run, optimizer)
    compile_regions(model, run)
    watch_memory(run, model, optimizer)
    if optimizer is not None:
        run.make_lazy(optimizer)
        if run.world.size > 1:
            average_losses(optimizer, weakref.ref(run))
        if shards.parameters or run.flat_shards:
            mark_state(optimizer)
    if local is not None and optimizer is not None:
        run.train_apart(local, optimizer)
    if dist.get_world_size() > 1:
        run.tell_of_what_is_not_exchanged(model, optimizer)
    # Last, as what tells of steps wraps a step that may be lazy.
    tell_pacer(run.watch, model.parameters(), optimizer)


def _begin_alike(tensors: list[Tensor], run: Run, first_host: int) -> None:
    """Makes all ranks' tensors those of rank 0, which is on ``first_host`` of those that train
    apart. Collective."""
    doing = "the broadcast of rank 0's parameters"
    broadcast(tensors, run.world.statistics[1], run.watch, doing)
    apart = run.world.apart
    if apart is not None:  # from its host to those in the same places on other hosts
        broadcast(tensors, apart, run.watch, doing, source=apart.ranks[first_host])


def _make_run(model: nn.Module, plan: Plan, limit: float, lossy: Lossy | None) -> Run:
    device = device_of(model)
    whole, placement, local, plan = plan, plan.placement, plan.local_steps, plan.inside_host
    degrees: set[int] = set()
    sharded: set[Place] = set()
    gathered: set[Place] = set()
    fully_sharded: set[Place] = set()
    for unit in plan.units:
        # What a divided unit has whole (a bias behind partial sums) is shared by all of its ranks.
        both: set[Place] = {unit.layout, flat(unit.layout)}
        if unit.layout.size == plan.world_size:
            degrees.add(unit.layout.degree)
            both = {unit.layout.degree, 1}
        sharded |= both if unit.exchange in SHARDING else set()
        fully_sharded |= both if unit.exchange == "fully_sharded" else set()
        in_rows = unit.exchange in (*SHARDING, *GATHERED)
        gathered |= both if in_rows else set()
    parts = {unit.layout for unit in subset_units(plan)}
    by_host = {
        (unit.layout.degree, unit.peers_per_host) for unit in plan.units if unit.peers_per_host > 1
    }
    crossing = any(leaves_to_other_division(unit, rest) for unit, rest in divided(plan))
    tensors = (*model.parameters(), *model.buffers())
    world = make_world(
        placement, degrees, device, limit, sharded, fully_sharded, parts, by_host,
        gathered=gathered, crossing=crossing, host_count=local.hosts if local else 1,
        host_tensors=any(t.device.type == "cpu" for t in tensors),
    )  # fmt: skip
    watch = Watchdog(world.rank, len(placement), limit, run=next(_runs))
    return Run(whole, world, watch, lossy)


def _agree(run: Run, model: nn.Module, plan: Plan) -> None:
    # First what explains the rest: another version may well build another model.
    setups = run.everyone.agree_on_setup(device_of(model))
    different = other_devices(setups) if setups else None
    unlike = len({setup.device for setup in setups}) > 1
    low_rank = any(unit.exchange == "low_rank" for unit in plan.units)
    if unlike and low_rank:
        raise InputError(
            f"{different}; gradients of low rank are the same to the last bit on equal devices "
            f"only: plan with {forbidding('low_rank')}"
        )
    if low_rank and device_of(model).type == "cpu":
        threads = digest(str(torch.get_num_threads()))
        remedy = f"set OMP_NUM_THREADS alike, or plan with {forbidding('low_rank')}"
        run.everyone.agree("the number of threads, for low rank,", threads, remedy)
    # Where a plan shares the batch out by the devices' speed, it knows of them.
    if different is not None and run.world.rank == 0 and not plan.local_batch_sizes:
        warnings.warn(different, stacklevel=5)
    # Of another model or plan a rank would issue other collectives: a hang, or wrong sums.
    tensors = (*model.named_parameters(), *model.named_buffers())
    text = ";".join(f"{n}{tuple(t.shape)}{t.dtype}{t.requires_grad}" for n, t in tensors)
    run.everyone.agree(
        "the model (names, shapes and types of its parameters and buffers)",
        digest(text),
        "build the same model on every rank",
    )
    run.everyone.agree("the plan", digest(fingerprint(plan)), "give every rank the same file")


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
    planned = planned_parameter(model)
    if planned is not None:
        raise InputError(
            f"parameter {planned!r} is of another model to which a plan was applied, and its "
            "gradients would be exchanged twice: make one module of models that share parameters, "
            "and apply one plan to that"
        )
    if optimizer is not None and has_plan(optimizer):
        raise InputError(
            f"this {type(optimizer).__name__} was given with another model to which a plan was "
            "applied: make one module of both models and apply one plan to that, or an optimizer "
            "for each"
        )
    refusals = CAPABILITY.refusals(plan)
    if refusals:
        beyond = "hypothetical" if plan.local_steps is None else "allow_local_steps"
        raise InputError(
            f"this plan cannot be run: {refusals[0]}; plan without {option(beyond)} ({beyond})"
        )
    if plan.local_steps is not None:
        if optimizer is None:
            raise InputError(
                "the plan has local steps, which the optimizer's steps count, and no optimizer was "
                "given: pass it with the model, or plan without --allow-local-steps "
                "(allow_local_steps)"
            )
        plan = plan.inside_host
    _check_modules(model, plan)
    check_memory(model, plan, device_of(model))
    _check_tensors(model)
    check_subset_units(model, plan)
    check_ties(model, plan)
    _check_norms(model, plan)
    _check_release(optimizer, plan)
    check_compiled(model, plan)
    check_feedback(optimizer, plan)
    if optimizer is not None:
        optimizers.check_holds(optimizer, model)
    if optimizer is not None and any(unit.exchange == "topk" for unit in plan.units):
        check_momentum(optimizer)
    if optimizer is not None:
        sharded = any(unit.exchange in SHARDING for unit in plan.units)
        optimizers.check(optimizer, _in_parts(model, plan), sharded=sharded)


def _in_parts(model: nn.Module, plan: Plan) -> set[nn.Parameter]:
    """The parameters that not every rank has whole."""
    cuts = [c.name for u, _ in divided(plan) for c in split_of(model, u).cuts]
    tensors = [tensor_named(model, name) for name in (*cuts, *subset_layouts(model, plan))]
    return {t for t in tensors if isinstance(t, nn.Parameter)}


def _check_release(optimizer: Optimizer | None, plan: Plan) -> None:
    # Early release needs gradients that travel one by one, and an optimizer that takes them so.
    early = [unit for unit in plan.units if unit.early_release]
    if not early:
        return
    shared = next((unit for unit in early if unit.exchange in SHARDING), None)
    if shared is not None or plan.schedule != "priority":
        name = (shared or early[0]).name
        what = f"the exchange {shared.exchange!r}" if shared else f"the schedule {plan.schedule!r}"
        raise InputError(
            f"unit {name!r} is planned with early release and {what}, which do not go together: "
            f"plan with {forbidding(EARLY_RELEASE)}"
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
    for unit, _ in divided(plan):
        other = next((m for m in unit.modules if altered(model.get_submodule(m))), None)
        if other is not None:
            raise InputError(
                f"the plan divides module {other!r}, which has a hook, another forward or computed "
                "parameters of yours, that would see a part of it: add these after the plan is "
                "applied, or make a plan for the model as it is, which keeps it whole"
            )


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise InputError(
                f"parameter {name!r} has no shape yet: run one batch through the model first"
            )
        if tensor.is_meta:
            raise InputError(f"{name!r} is on the meta device: give it memory and values first")
    check_gradients(model)


def _check_norms(model: nn.Module, plan: Plan) -> None:
    # Local statistics are those of a rank's own samples, which a divided unit does not see.
    if plan.goal.batch_statistics == "global":
        return
    inside = {m for unit, _ in divided(plan) if unit.style == "column" for m in unit.modules}
    for name, _ in norms_of(model):
        if any(name == m or name.startswith(f"{m}.") for m in inside):
            raise InputError(
                f"batch normalisation {name!r} is in a divided unit, which sees the samples of a "
                "whole group: plan with batch_statistics 'global', or without dividing that unit"
            )


def _prepare_norms(model: nn.Module, run: Run, shards: ModelShards) -> None:
    for name, module in norms_of(model):
        place = shards.places.get(name, 1)
        if isinstance(place, Layout) and place.place(run.world.position) is None:
            continue  # it is not run here
        if run.plan.goal.batch_statistics == "global":
            group = _same_channels(run, shards, name)
            statistics = Statistics(group, run.watch, run.meter)
            normalise_globally(module, name, statistics)
        elif not isinstance(module, nn.SyncBatchNorm):
            tolerate_nothing(module)


def _same_channels(run: Run, shards: ModelShards, name: str) -> Group:
    """Those who hold other samples of the channels that this module normalises here."""
    place = shards.places.get(name, 1)
    # Of a unit on a subset of the ranks what is not cut is among them too, with a degree of one.
    own = [shard for n, shard in shards.by_name.items() if n.startswith(f"{name}.")]
    cut = any(shard.degree > 1 for shard in own)
    if cut or shards.styles.get(name) == "column":
        return run.world.statistics[place]
    return run.world.statistics[flat(place) if isinstance(place, Layout) else 1]


def _buffers(model: nn.Module, plan: Plan, shards: ModelShards) -> list[BufferPlace]:
    # Slices cannot follow; but for those of statistics, which then agree anyway, divided units have
    # none that training changes.
    local = plan.goal.batch_statistics == "local"
    cut = {id(tensor_named(model, name)) for name in shards.by_name}
    places = changing_buffers(model, statistics=local)
    return [place for place in places if id(place.buffers[place.name]) not in cut]


def _grad_params(model: nn.Module, run: Run, shards: ModelShards) -> list[GradParam]:
    """All parameters in the order in which backward finishes their gradients: units backwards, a
    tied one with its first user; those between units last."""
    first_users = _first_users(model, run.plan)
    norms = filter(is_norm, model.modules())
    of_norms = {p for norm in norms for p in norm.parameters(recurse=False)}
    params = []
    for name, parameter in model.named_parameters():
        shard = shards.parameters.get(parameter)
        degree = shard.degree if shard else 1
        size = shard.full_shape.numel() if shard else parameter.numel()
        layout = None
        if isinstance(shard, SubsetShard):
            layout = shard.layout if shard.degree > 1 else flat(shard.layout)
        groups = layout.groups if layout else run.world.size // degree
        # What is used between units counts to the model's beginning, as in its profile: needed as
        # early as anything, complete as late, and always whole.
        unit = first_users.get(parameter)
        param = GradParam(
            name,
            parameter,
            run.world.gradients[layout or degree],
            degree,
            size,
            members=_members(run, shard),
            unit=unit or 0,
            whole=sent_whole(parameter.ndim, size, of_norm=parameter in of_norms)
            or parameter.is_complex(),  # lossy exchanges choose among real numbers
            layout=layout,
            idle=layout is not None and layout.place(run.world.position) is None,
            parts=shard.parts if shard and degree > 1 else None,
            divisor=run.world.size / groups,
        )
        if unit is not None:
            policy = run.plan.units[unit]
            # What a divided unit has whole is exchanged among all ranks, as any.
            own = layout is None and degree == policy.layout.degree
            param = replace(
                param,
                hosts=run.world.hosts.get((degree, policy.peers_per_host)) if own else None,
                exchange=policy.exchange,
                ratio=policy.exchange_ratio,
                feedback=policy.feedback,
                wire=policy.wire,
                released=policy.early_release,
            )
        params.append(param)
    # Sorted and then reversed, so that those of one unit are in the reverse order too.
    return sorted(_with_ranks(params), key=lambda param: param.unit)[::-1]


def _with_ranks(params: Sequence[GradParam]) -> list[GradParam]:
    """The parameters with the rank of their thin matrices under low rank: one for all of a unit, as
    its profile was measured, whatever of it is frozen later."""
    sides: dict[int, list[tuple[int, int]]] = {}
    for param in params:
        trained = param.parameter.requires_grad
        if param.exchange == "low_rank" and not param.whole and trained:
            sides.setdefault(param.unit, []).append(matrix_sides(param.parameter.shape))
    return [
        replace(param, rank=thin_rank(sides[param.unit], param.ratio))
        if param.unit in sides and param.exchange == "low_rank"
        else param
        for param in params
    ]


def _members(run: Run, shard: Shard | None) -> Members | None:
    """Who combines figures of a parameter that not every rank has whole."""
    if shard is None:
        return None
    if not isinstance(shard, SubsetShard):
        return Members(shard.group, run.watch)
    # Of all ranks in the group one holder of each slice is counted: those of the first group.
    place = shard.layout.place(run.world.position)
    once = place is not None and place[0] == 0 and (shard.degree > 1 or place[1] == 0)
    return Members(shard.group, run.watch, counted=once)


def _first_users(model: nn.Module, plan: Plan) -> dict[nn.Parameter, int]:
    """The first unit in forward order that has each parameter; without those between units."""
    place: dict[nn.Parameter, int] = {}
    for index, unit in enumerate(plan.units):
        for path in unit.modules:
            for parameter in model.get_submodule(path).parameters():
                place.setdefault(parameter, index)
    return place
