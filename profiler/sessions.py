"""Measuring on this machine: in this process, on its ranks, or from the catalogue.

What ranks measure together is kept on disk, and what is estimated for a plan. A profile is found
again by the model's structure (its modules, parameters and batch), the sizes measured, the device,
how many ranks share its host and the software; a cluster by its hosts, devices and software.
``refresh`` measures anew.
"""

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ..executor.comm.agreement import every_rank_tells, rank_zero_decides, together
from ..executor.comm.setups import device_name, software
from ..executor.launch.attribution import check_mean
from ..executor.launch.devices import local_device
from ..executor.launch.processes import Ranks
from ..executor.launch.progress import Step
from ..executor.launch.start import (
    local_ranks,
    memory_bytes,
    start_process_group,
    threads_of,
    under_torchrun,
)
from ..executor.launch.tasks import Task, rank_zero_bar, run_task
from ..models import target as targets
from ..models.compiled import described, uncompiled
from ..models.opened import leaves_in, tensors_in
from ..models.precision import surrounding_precision
from ..models.target import try_out, workload
from ..models.trial_sizes import SIZES, first_taken
from ..models.units.discover import settings
from ..models.workload import Batch, Workload
from ..models.zoo import is_known
from ..planner.cost.device_kinds import times_of, with_profiles
from ..planner.schema import cache
from ..planner.schema.cache import DocumentT
from ..planner.schema.cluster import Cluster, Node
from ..planner.schema.errors import InputError
from ..planner.schema.goal import Goal
from ..planner.schema.precision import Precision
from ..planner.schema.profile import ModelProfile
from ..planner.schema.text import size
from .catalogue import datasheet
from .catalogue import names as catalogued
from .estimate import estimate
from .kept_estimates import digest, keep_estimate, sources
from .links import probe as probe_ranks
from .links import single_device
from .memory import is_dry
from .model import FEW, check_pinned, measured_updates
from .model import profile as profile_model
from .places import places_of_ranks
from .progress import StageProgress

# [Note: What is measured together]
# Ranks that share a host share its memory bandwidth, caches and clock rate, in the run as well. So
# on CPUs all ranks of a host profile the model at the same time, and the slowest one's times are
# taken: they hold what the others cost, and everybody waits for it in the run as well. Updates are
# measured once all ranks have come to them: in training all update in the same moment. On GPUs each
# rank has a device to itself, and one rank for each kind of device measures. Hosts that are quicker
# than the slowest, beyond noise, keep the times of their own slowest rank (``node_times``).
# Links are measured by the groups that plans use at the same time: all blocks of neighbours at
# once, then all ranks with equal places at once, because these share a host's network interface.
# Collectives are not timed while the model computes; how much both slow each other is measured
# separately (``interference.measure_interference``) and applied by the simulation.

# Seconds that measuring links, and the executor's own work, mostly takes.
LINKS_S, OVERHEAD_S, OF_HOSTS_S = 15.0, 8.0, 16.0
# Of a device's memory, what measuring may take: others may be on the machine.
ROOM = 0.6
# Hosts of which one takes at most so many times as long as another are taken to be equally fast: so
# much is noise on a busy machine.
ALIKE = 1.2
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def batches_for(goal: Goal, world_size: int) -> tuple[int, ...]:
    """Batch sizes worth measuring for a goal: around what one rank gets in a micro-batch, and what
    it gets of as many as are allowed."""
    share, least = (
        max(goal.batch // (world_size * count), FEW)
        for count in (min(goal.micro_batches), max(goal.micro_batches))
    )
    return tuple(sorted({least, max(share // 4, FEW), max(share // 2, FEW), share, 2 * share}))


def profile_on_ranks(
    workload: Workload,
    batches: Sequence[int] | None,
    device: torch.device,
    progress: Step | None = None,
    *,
    refresh: bool = False,
) -> ModelProfile:
    """One profile, the same on every rank. Unless ``refresh`` asks for these ``batches``, they are
    taken as far as they fit. Collective."""

    def measure(**but: Any) -> ModelProfile:
        step = progress if dist.get_rank() == 0 else None
        room = None if refresh else room_bytes(device)
        return profile_model(
            workload, batches=batches, device=device, progress=step, room_bytes=room, **but
        )

    places = places_of_ranks(device)

    def measure_together() -> ModelProfile:
        # See [Note: What is measured together].
        kinds = list(dict.fromkeys(name for _, name in places))
        if device.type == "cpu":
            measuring = list(range(len(places)))
        else:
            measuring = [next(r for r, (_, name) in enumerate(places) if name == k) for k in kinds]
        if len(measuring) == 1:
            return rank_zero_decides(measure)
        mine = dist.get_rank() in measuring
        own = together(lambda: measure(optimizers=()) if mine else None)
        rates = together(lambda: measured_updates(workload) if mine else ())
        every = every_rank_tells(own and msgspec.structs.replace(own, updates=rates))
        found = {p.device: p for p in every if p}
        by_rank = [profile or found[name] for profile, (_, name) in zip(every, places, strict=True)]
        return joined_profile([host for host, _ in places], by_rank)

    hosts = tuple(sorted(set(places))) if len({host for host, _ in places}) > 1 else ()
    key = _profile_key(workload, batches, device, hosts)
    return _once(ModelProfile, key, measure_together, refresh)


def joined_profile(hosts: Sequence[str], profiles: Sequence[ModelProfile]) -> ModelProfile:
    """One profile of what each rank on ``hosts`` has measured: that of the slowest, with the times
    of hosts that are quicker beyond noise."""
    # At a size that all have measured: one that is slow may have stopped earlier.
    size = min(profile.batches[-1] for profile in profiles)

    def step_s(profile: ModelProfile) -> float:
        return max(profile.step(size) if profile.step else 0.0, profile.issued_s)

    by_host: dict[str, ModelProfile] = {}
    for host, profile in zip(hosts, profiles, strict=True):
        # All ranks of a host wait for its slowest.
        by_host[host] = max(by_host.get(host, profile), profile, key=step_s)
    slowest_first = sorted(by_host, key=lambda host: -step_s(by_host[host]))
    kinds: list[list[str]] = []
    for host in slowest_first:
        alike = kinds and step_s(by_host[kinds[-1][0]]) <= ALIKE * step_s(by_host[host])
        if alike:
            kinds[-1].append(host)
        else:
            kinds.append([host])
    others = tuple(times_of(by_host[kind[0]], kind) for kind in kinds[1:])
    return msgspec.structs.replace(by_host[slowest_first[0]], node_times=others)


def cluster_of_ranks(
    device: torch.device, progress: Step | None = None, *, refresh: bool = False
) -> Cluster:
    """What the links among all ranks do; collective, and the same on every rank."""
    places = places_of_ranks(device)
    shown = progress if dist.get_rank() == 0 else None
    return _once(
        Cluster,
        _cluster_key(places, device),
        lambda: _probe(device, shown),
        refresh,
    )


def _cluster_key(places: Sequence[object], device: torch.device) -> str:
    """Of ranks at those places. Variables choose interfaces and algorithms."""
    chosen = sorted(
        (name, value) for name, value in os.environ.items() if name.startswith(("GLOO_", "NCCL_"))
    )
    return digest("cluster", places, software(), torch.get_num_threads(), chosen, *_how(device))


def _probe(device: torch.device, progress: Step | None) -> Cluster:
    """The links, and what the executor itself adds to a step. Collective."""
    alone = dist.get_world_size() == 1
    links_s = {} if alone else {"links": LINKS_S}
    # On several GPUs each exchange is tried.
    overhead_s = OF_HOSTS_S if device.type == "cuda" and not alone else OVERHEAD_S
    expected_s = links_s | {"overhead": overhead_s}
    stages = StageProgress(progress, expected_s)

    def told(done: int, total: int, what: str) -> None:
        stages.at("links", done / total, what)

    cluster = single_rank(device) if alone else probe_ranks(device=device, progress=told)
    # Here, as it brings the whole executor, which planning for other devices can do without.
    from .overhead import measure_overheads

    # All toys are trained over the slowest links that there are.
    line = cluster.level("inter") or next(iter(cluster.levels), None)
    overhead, priority = measure_overheads(
        bytes_per_s=line.bytes_per_s if line else inf,
        tick=lambda share: stages.at("overhead", share, "measuring the executor's own work"),
        device=device,
    )
    stages.end("measured")
    return msgspec.structs.replace(cluster, overhead=overhead, priority_overhead=priority)


def single_rank(device: torch.device) -> Cluster:
    """The cluster of one rank, which has no links."""
    described, host_memory = single_device(device)
    name = socket.gethostname()
    node = Node(name=name, devices=(described,), host_memory_bytes=host_memory)
    return Cluster(name=name, nodes=(node,), levels=())


def room_bytes(device: torch.device) -> float:
    """What measuring may take of the device's memory."""
    return ROOM * memory_bytes(device, local_ranks())


def _once(
    cls: type[DocumentT], key: str, make: Callable[[], DocumentT], refresh: bool
) -> DocumentT:
    """The document in rank 0's cache, else made by all ranks and put there. Collective."""
    known = None if refresh else rank_zero_decides(lambda: cache.get(cls, key))
    if known is not None:
        return known
    made = make()
    if dist.get_rank() == 0:
        cache.put(made, key)
    return made


def _profile_key(
    workload: Workload,
    batches: Sequence[int] | None,
    device: torch.device,
    hosts: tuple[tuple[str, str], ...] = (),
) -> str:
    # All that times and bytes depend on. The weights' values are not part of it. ``hosts`` that
    # measured together, with their devices, may be of unequal speed.
    model = workload.model
    switches = [settings(module) for module in model.modules()]
    with torch.random.fork_rng():
        batch = _smallest(workload)
    with uncompiled(model) as own:
        compiled = described(own)
    where = (device_name(device), local_ranks(), torch.get_num_threads(), software())
    how = (
        workload.precision or surrounding_precision(device), switches,
        torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, compiled,
        _code_of(model, workload.loss),
    )  # fmt: skip
    together = (*((hosts,) if hosts else ()), *_how(device), "whole matrices")
    return digest(
        "profile", workload.name, repr(model), _tensors_of(model), _inputs_of(batch), batches,
        where, how, *together,
    )  # fmt: skip


def _tensors_of(model: nn.Module) -> list[tuple[object, ...]]:
    """Parameters and buffers by all of their names, with the first name of the same one: tied ones
    are exchanged once, and how one lies in memory (channels last) chooses the kernel."""
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return [
        (
            name, first.setdefault(id(t), name), tuple(t.shape), str(t.dtype), t.requires_grad,
            t.stride() if t.layout == torch.strided else str(t.layout),
        )
        for name, t in every
    ]  # fmt: skip


def _inputs_of(batch: Batch) -> list[object]:
    """The shapes of a batch, and the plain arguments that the model gets with it (a flag)."""
    given = tensors_in((batch.args, dict(batch.kwargs), batch.target))
    # What lies in lists may be data (texts, lengths), which are others in each batch.
    plain = [
        (name, repr(leaf))
        for name, value in (*enumerate(batch.args), *batch.kwargs.items())
        if not isinstance(value, list | tuple)
        for leaf in leaves_in(value)
        if isinstance(leaf, str | int | float | None)
    ]
    return [batch.batch_dims, *((tuple(t.shape), str(t.dtype)) for t in given), *plain]


def _how(device: torch.device) -> tuple[str, ...]:
    """What is measured in another way than by earlier versions, whose results are not the same."""
    return ("hosts apart", "collectives by hosts") if device.type == "cuda" else ()


def _code_of(model: nn.Module, loss: Callable[..., Any]) -> list[object]:
    """What the modules' forwards and the loss do, so that a profile is made anew where one was
    edited: with all functions of their own classes, and those and the plain values that they name
    in their own files. What is installed changes with its version."""
    forwards = {type(module): module.forward for module in model.modules()}
    added = list(_added_to(model))
    functions: list[Any] = [*forwards.values(), loss, *(function for _, function in added)]
    for kind in forwards:
        for base in kind.__mro__:
            for value in vars(base).values():
                function = value.fget if isinstance(value, property) else value
                if not _is_installed(_plain_function(function)):
                    functions.append(function)
    seen: set[int] = set()
    code = [part for function in functions for part in _reached(function, seen)]
    return [*((where, type(function).__qualname__) for where, function in added), *code]


def _added_to(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """What modules run that their classes do not say, each with where: hooks of the user's, and
    forwards that were replaced."""
    own = __name__.partition(".")[0]
    for name, module in model.named_modules():
        for kind in _HOOKS:
            for hook in getattr(module, kind, {}).values():
                # Ours are there once a model has its precision, which counts by itself.
                if not str(getattr(hook, "__module__", "")).startswith(f"{own}."):
                    yield (name, kind), hook
        if "forward" in vars(module):
            yield (name, "forward"), vars(module)["forward"]


def _reached(function: Any, seen: set[int]) -> Iterator[object]:
    """The code of a function, and of what it names where it is written."""
    yield _compiled_code(function)
    plain = _plain_function(function)
    if _is_installed(plain) or id(plain) in seen:
        return
    assert plain is not None
    seen.add(id(plain))
    for name in _names_in(plain.__code__):
        value = plain.__globals__.get(name)
        if isinstance(value, FunctionType):
            if value.__module__ == plain.__module__ and id(value) not in seen:
                yield from _reached(value, seen)
        elif isinstance(value, int | float | str):
            yield name, value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _names_in(value)


def _is_installed(function: FunctionType | None) -> bool:
    """Whether it is somebody else's, or no function that Python has compiled."""
    return function is None or "site-packages" in Path(function.__code__.co_filename).parts


def _plain_function(function: Any) -> FunctionType | None:
    """The function inside a method, a wrapper or a partial, if there is one."""
    while function is not None and not isinstance(function, FunctionType):
        inner = getattr(function, "func", None)  # of a partial
        function = getattr(function, "__func__", getattr(function, "__wrapped__", inner))
    return function


def _compiled_code(function: Any) -> object:
    plain = None if isinstance(function, CodeType) else _plain_function(function)
    code = function if plain is None else plain.__code__
    if not isinstance(code, CodeType):
        return None
    return code.co_code.hex(), code.co_names, list(map(_constant, code.co_consts))


def _constant(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(map(repr, value))  # sets of texts have another order in each process
    return _compiled_code(value) if isinstance(value, CodeType) else repr(value)


def _smallest(workload: Workload) -> Batch:
    """A batch of one sample, or of the fewest that make_batch makes."""
    return first_taken((1, *SIZES), workload.make_batch)


def probe_task(task: Task, folder: Path, device: torch.device) -> Cluster:
    """The task ``probe`` on this rank."""
    with rank_zero_bar("probing") as step:
        return cluster_of_ranks(device, step, refresh=task.refresh)


def profile_task(task: Task, folder: Path, device: torch.device) -> ModelProfile:
    """The task ``profile`` on this rank."""
    with rank_zero_bar(f"profiling {task.target}") as step:
        return profile_on_ranks(
            targets.workload(task.target, precision=task.precision), task.batches or None, device,
            step, refresh=task.refresh,
        )  # fmt: skip


def profile(
    target: str | Workload,
    batches: Sequence[int] | None,
    device: str | None,
    ranks: int,
    precision: str | None,
    progress: Step | None,
    *,
    together: bool = False,
) -> ModelProfile:
    """See ``api.profile``."""
    if ranks > 1 and device not in (None, local_device().type):
        raise InputError(
            f"{ranks} ranks measure at once on this machine's own devices, not on {device}: leave "
            "--device (device) out, or --ranks (ranks)"
        )
    if device is not None and device.split(":")[0] not in ("cpu", "cuda"):
        # An unknown device is told before any work.
        datasheet(device)
        return _estimated(_dry_workload(target, precision), target, precision, device, batches)
    chosen = _tried(target, precision)
    if together:
        where = start_process_group()
        return profile_on_ranks(chosen, batches, where, progress, refresh=True)
    if ranks > 1:
        return _on_ranks(target, batches, ranks, chosen.precision, refresh=True)
    return profile_model(chosen, batches=batches, device=device_of(device), progress=progress)


def _tried(target: str | Workload, precision: str | None) -> Workload:
    """The workload, after a try. What training will refuse of its loss is a warning here: its times
    can be measured, and are no other for a mean."""
    chosen = workload(target, precision=precision)
    try_out(chosen)
    try:
        check_mean(chosen)
    except InputError as error:
        warnings.warn(f"{error}; until then 'meshwright launch' will refuse it", stacklevel=4)
    return chosen


def _estimated(
    chosen: Workload,
    target: str | Workload,
    precision: str | None,
    device: str,
    batches: Sequence[int] | None = None,
) -> ModelProfile:
    """The estimate of a model without memory (``chosen``), or with it (``target``) where the model
    needs values."""
    try:
        return estimate(chosen, device, batches=batches)
    except Exception as error:
        if not is_dry(chosen.model):
            raise
        # Weights, gradients, and about as much for feature maps.
        needed = 3 * sum(p.nbytes for p in chosen.model.parameters())
        if needed > room_bytes(torch.device("cpu")):
            raise InputError(
                f"estimates run a model without memory, where tensors have no values, and "
                f"{chosen.name!r} asks for some ({type(error).__name__}: {error}); with memory its "
                f"{size(needed)} do not fit here: profile it on a machine with more, or "
                "with fewer layers"
            ) from error
    return estimate(workload(target, precision=precision), device, batches=batches)


def _dry_workload(target: str | Workload, precision: str | None) -> Workload:
    """The workload without memory for its parameters, as it may not fit here; with it where it
    cannot be built otherwise (its factory loads weights, say)."""
    try:
        with torch.device("meta"):
            return workload(target, precision=precision)
    except InputError:
        return workload(target, precision=precision)


def device_of(name: str | None) -> torch.device:
    """A device by name, or this machine's best; ``InputError`` where there is none such."""
    if name is None:
        return local_device()
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(
            f"device {name!r} is not here: torch sees no GPU on this machine (with one, install a "
            "torch that is built for CUDA); measure on 'cpu', or name a catalogued device that is "
            "not here, such as 'h100-sxm', to estimate"
        )
    return torch.device(name)


def _on_ranks(
    target: str | Workload,
    batches: Sequence[int] | None,
    ranks: int,
    precision: Precision | None,
    refresh: bool,
) -> ModelProfile:
    if isinstance(target, Workload):
        raise InputError(
            f"workload {target.name!r} cannot be sent to {ranks} processes: name it as "
            "file.py:factory"
        )
    task = Task(
        name="profile", target=target, batches=tuple(batches or ()), precision=precision,
        refresh=refresh,
    )  # fmt: skip
    found = run_task(task, Ranks(nproc=ranks), ModelProfile)
    assert found is not None
    return found


def probe(ranks: int | None, progress: Step | None) -> Cluster:
    """See ``api.probe``."""
    if dist.is_initialized() or under_torchrun():
        return cluster_of_ranks(start_process_group(), progress, refresh=True)
    count = ranks if ranks is not None else max(torch.cuda.device_count(), 2)
    if count < 1:
        raise InputError(f"{count} ranks cannot be probed: name 1 (no links to measure) or more")
    found = run_task(Task(name="probe"), Ranks(nproc=count), Cluster)
    assert found is not None
    return found


def profile_for(
    target: str | Workload,
    cluster: Cluster,
    goal: Goal,
    precision: str | None,
    progress: Step | None,
) -> ModelProfile:
    """A profile of ``target`` on the cluster's devices: measured where they are this machine's,
    else estimated where they are catalogued."""
    names = {device.name for device in cluster.devices}
    name = min(names)
    here = device_name(local_device())
    if names == {here}:
        batches = batches_for(goal, cluster.world_size)
        ranks = max(len(node.devices) for node in cluster.nodes)
        chosen, where = _tried(target, precision), local_device()
        if goal.pins:
            check_pinned(chosen, goal.pins)
        if ranks > 1 and where.type == "cpu" and isinstance(target, str):
            return _on_ranks(target, batches, ranks, chosen.precision, refresh=False)

        def measured() -> ModelProfile:
            return profile_model(
                chosen, batches=batches, device=where, progress=progress,
                room_bytes=room_bytes(where),
            )  # fmt: skip

        with _as_one_of(ranks if where.type == "cpu" else 1):
            return _kept(_profile_key(chosen, batches, where), measured)
    if len(names) > 1 and names <= set(catalogued()):
        return _estimated_for_each(target, cluster, precision)
    if len(names) > 1:
        raise InputError(
            f"the cluster has devices of several kinds ({', '.join(sorted(names))}): profile the "
            "model on each and plan from one of the profiles, with the others by --profile-of "
            "NODE=FILE (profiles_of)"
        )
    if name not in catalogued():
        raise InputError(
            f"the cluster's device {name!r} is neither this machine's ({here!r}) nor catalogued: "
            "run 'meshwright profile' there and plan from that profile"
        )
    return _known_estimate(target, precision, name)


@contextmanager
def _as_one_of(ranks: int) -> Iterator[None]:
    """Inside, torch computes with as many threads as each of so many ranks on this host has; says
    what else they share that one process by itself does not measure."""
    if ranks == 1 or local_ranks() > 1:
        yield
        return
    warnings.warn(
        f"a Workload cannot be sent to the {ranks} processes of a host: its times are those of one "
        "by itself, which shares no memory bandwidth; name it as file.py:factory, and all measure "
        "at once",
        stacklevel=5,
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads_of(ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _known_estimate(target: str | Workload, precision: str | None, device: str) -> ModelProfile:
    """The estimate of a model, as it was made before where nothing has changed that it depends
    on."""
    chosen = _dry_workload(target, precision)
    try:
        key = digest("estimate", device, sources(), _profile_key(chosen, None, torch.device("cpu")))
    except Exception:  # a model or a batch that cannot be: estimating says what of it
        return _estimated(chosen, target, precision, device)
    made = _kept(key, lambda: _estimated(chosen, target, precision, device))
    if isinstance(target, str) and is_known(target) and _by_default():
        keep_estimate(made, target, device, chosen.precision)
    return made


def _by_default() -> bool:
    """Whether torch builds and computes as where nobody has set anything."""
    plain = surrounding_precision(torch.device("cpu")) is None
    return plain and torch.get_default_dtype() == torch.float32


def _kept(key: str, make: Callable[[], ModelProfile]) -> ModelProfile:
    """The profile in this process's cache, else made and put there."""
    known = cache.get(ModelProfile, key)
    if known is None:
        known = make()
        cache.put(known, key)
    return known


def _estimated_for_each(
    target: str | Workload, cluster: Cluster, precision: str | None
) -> ModelProfile:
    """The estimate for the devices of the first node, with those of nodes that have others. A node
    of several kinds counts as its slowest, by the datasheets' float32 rate."""

    def slowest(node: Node) -> str:
        return min((d.name for d in node.devices), key=lambda name: datasheet(name).float32)

    by_node = {node.name: slowest(node) for node in cluster.nodes}
    found = {
        name: _known_estimate(target, precision, name) for name in dict.fromkeys(by_node.values())
    }
    first = by_node[cluster.nodes[0].name]
    others = {node: found[name] for node, name in by_node.items() if name != first}
    return with_profiles(found[first], others, cluster)
