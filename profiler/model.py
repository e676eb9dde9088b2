"""The ModelProfile of a workload: its units, what they take and hold, and what flows."""

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median

import msgspec
import torch
from torch import Tensor, nn

from ..executor.comm.setups import device_name, software
from ..executor.headroom import overflowed
from ..executor.launch.start import local_ranks, memory_bytes
from ..models.compiled import uncompiled
from ..models.precision import measured_in
from ..models.replay import capture, preserved, train_whole
from ..models.spec import UnitSpec
from ..models.splits.leaves import BATCH_NORMS
from ..models.target import own_batch
from ..models.trial_sizes import SIZES, first_taken
from ..models.units.chance import every_layer
from ..models.units.discover import Discovery, discovered
from ..models.units.storages import storage_of
from ..models.workload import Batch, Workload, device_of
from ..planner.schema.curve import Curve
from ..planner.schema.errors import InputError
from ..planner.schema.goal import Pin
from ..planner.schema.pins import check_named
from ..planner.schema.profile import (
    ModelProfile,
    ParameterProfile,
    ShareProfile,
    UnitProfile,
    UpdateRate,
)
from .compression import compression_rates
from .fidelity import STEPS, measure_fidelity, thin_takes
from .memory import Footprint, SavedInputs, measure_footprint, saved_inputs
from .shares import ShareMeter, split_profiles
from .steps import StepMeter, StreamMeter
from .timing import StepTimes, plain_step, spread_of, update_rates

BATCHES = (1, 2, 4, 8, 16, 32)
# The planner reads Adam's rate off AdamW's.
TIMED_OPTIMIZERS = ("sgd", "momentum", "adamw")
DEGREES = (2, 4, 8)
# Without sizes given, no larger batch is measured once a step takes this long.
LONGEST_STEP_S = 4.0

# Of quick steps up to so many times the repetitions are made, until they took so long.
MORE, REPEATED_S = 6, 0.5
# Of the time for a profile, what a step may take where sizes are to fit.
LONGEST_SHARE = 0.2
# Of the time for a profile, what may be added so that units are measured divided at one degree:
# what is not cannot be planned.
OVERTIME = 0.5
# And so that it is measured what lossy exchanges keep.
FIDELITY_OVERTIME = 0.1
# Samples whose step tells what larger batches take, and the fewest that are measured for a goal: a
# batch of one has no statistics to normalise by, torch refuses it.
FEW = 2

FEWER = (
    "measure fewer batches (meshwright profile --batches 4,8, batches=[4, 8] of mw.profile), and "
    "plan from that profile"
)

Progress = Callable[[int, int, str], None]


@dataclass
class _Measured:
    batch: int
    times: StepTimes
    footprint: Footprint
    whole_s: Sequence[float]
    turn_s: float  # the last one's of those that it was measured in


@dataclass
class _Job:
    """One profiling: what is profiled, and how far it is."""

    workload: Workload
    device: torch.device
    budget_s: float
    progress: Progress | None
    room_bytes: float
    """What measuring may take of the device's memory."""
    start: float = field(default_factory=time.perf_counter)

    def report(self, share: float, doing: str) -> None:
        if self.progress is not None:
            self.progress(round(1000 * share), 1000, doing)

    def left_s(self, share: float) -> float:
        """Seconds until ``share`` of the budget is used up."""
        return self.start + self.budget_s * share - time.perf_counter()

    def batch(self, size: int) -> Batch:
        # Of that size: of fewer samples than asked for, times would be too short.
        return own_batch(self.workload, size).to(device=self.device)


def profile(
    workload: Workload,
    *,
    batches: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    optimizers: Sequence[str] = TIMED_OPTIMIZERS,
    degrees: Sequence[int] = DEGREES,
    budget_s: float = 40.0,
    repeats: int = 5,
    progress: Progress | None = None,
    room_bytes: float | None = None,
) -> ModelProfile:
    """Measures a workload on this machine.

    ``batches`` are the batch sizes to measure; by default 1 to 32, stopping early where a step
    takes long. ``degrees`` are the model parallel degrees at which divided units are measured.
    ``budget_s`` bounds the time roughly: fewer repeats are made and larger degrees left out
    when it runs short, and half of it is added where units have not been divided by then; of quick
    steps more than ``repeats``. The workload's ``precision`` holds
    meanwhile. Weights, buffers, gradients, random state and train/eval flags are left as they
    were; the model is moved to ``device`` and stays there. With ``room_bytes`` a batch size
    that would take more memory than that, or too long for the budget, is halved until it does
    not: times and bytes of larger batches follow the line through those that were measured.
    Compiled modules are timed as compiled, with graphs that end at units where units are told
    apart; bytes, and how a divided unit's shares compare with the whole, are those of the eager
    model. Raises ``InputError`` where the model fails on its batch.
    """
    where = torch.device(device or "cpu")
    try:
        workload.model.to(where)
    except Exception as error:
        if not overflowed(error):
            raise
        raise InputError(
            f"the model has no room on {where}: measure it on a device with more memory, or let it "
            "be estimated for one of the catalogue (--device h100-sxm, device='h100-sxm')"
        ) from error
    with _as_measured(workload) as chosen:
        room = memory_bytes(where, local_ranks()) if room_bytes is None else room_bytes
        job = _Job(chosen, where, budget_s, progress, room)
        return _profile(job, batches, optimizers, degrees, repeats, room_bytes)


def check_pinned(workload: Workload, pins: Sequence[Pin]) -> None:
    """Refuses pins on units that the model does not have; raises ``InputError``. Measures
    nothing."""
    with (
        _as_measured(workload) as chosen,
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # who measures the model is warned then
        where = device_of(chosen.model)
        found, _ = discovered(chosen.model, lambda size: own_batch(chosen, size).to(where))
    check_named(pins, found.units)


def measured_updates(
    workload: Workload, optimizers: Sequence[str] = TIMED_OPTIMIZERS
) -> tuple[UpdateRate, ...]:
    """The rates of a profile, of the model where it is: what ranks that share a host's memory
    measure at the same time, as they update at the same time in training."""
    with _as_measured(workload) as chosen:
        return update_rates(chosen.model.parameters(), optimizers)


@contextmanager
def _as_measured(workload: Workload) -> Iterator[Workload]:
    """The workload in its precision, without compiled modules."""
    with (
        uncompiled(workload.model) as model,
        measured_in(replace(workload, model=model), workload.precision) as chosen,
    ):
        yield chosen


def _profile(
    job: _Job,
    batches: Sequence[int] | None,
    optimizers: Sequence[str],
    degrees: Sequence[int],
    repeats: int,
    room_bytes: float | None,
) -> ModelProfile:
    workload, where = job.workload, job.device
    job.report(0.0, "finding units")
    devices = [where.index or 0] if where.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        found, few = discovered(workload.model, job.batch)
        with every_layer(workload.model), preserved(workload.model):
            train_whole(workload.model)
            if batches and room_bytes is not None:
                batches = _fitting(job, found, batches, room_bytes, few.size)
            measured = sorted(_measure(job, found, batches, repeats), key=lambda m: m.batch)
            units = _units(job, found, measured, degrees)
    types = [p.dtype for p in workload.model.parameters() if p.is_floating_point()]
    job.report(0.95, "measuring optimizers")
    rates = update_rates(workload.model.parameters(), optimizers)
    dtype = types[0] if types else torch.get_default_dtype()
    sizes = tuple(m.batch for m in measured)
    job.report(1.0, "measured")
    return ModelProfile(
        target=workload.name,
        model=found.fingerprint,
        device=device_name(where),
        device_type=where.type,
        dtype=str(dtype).removeprefix("torch."),
        precision=workload.precision,
        software=software(),
        batches=sizes,
        units=units,
        edges=found.edges,
        pieces=found.pieces,
        step=_curve(sizes, [m.times.total for m in measured]),
        spread=spread_of(m.whole_s for m in measured),
        updates=rates,
        compression=compression_rates(where, dtype),
    )


def _fitting(
    job: _Job, found: Discovery, batches: Sequence[int], room_bytes: float, smallest: int
) -> list[int]:
    """The sizes, halved where they do not fit, judged by a batch of a few samples: the first of
    ``SIZES``, from ``smallest`` on, that model and loss take."""
    few, takes_bytes, step_s = _small_step(job, found, smallest)
    persistent = _persistent_bytes(job.workload.model)

    def fits(size: int) -> bool:
        takes = persistent + takes_bytes * size / few <= room_bytes
        return takes and step_s * size / few <= job.budget_s * LONGEST_SHARE

    sizes = set[int]()
    for size in batches:
        while size > few and not fits(size):
            size //= 2
        sizes.add(size)
    # One size alone makes no curve.
    if len(sizes) == 1:
        sizes.add(max(sizes) // 2 or few)
    return sorted(sizes)


def _persistent_bytes(model: nn.Module) -> int:
    # Of a profile's own: the model's values are kept, and gradients are made.
    return 3 * sum(p.numel() * p.element_size() for p in model.parameters())


def _small_step(job: _Job, found: Discovery, smallest: int) -> tuple[int, float, float]:
    """The size, bytes and seconds of a step on a few samples."""
    model, loss = job.workload.model, job.workload.loss

    def of(size: int) -> tuple[int, float, float]:
        try:
            batch = job.batch(size)
            footprint = measure_footprint(model, found.units, batch, loss, job.device)
            model.zero_grad()
            return size, footprint.total, plain_step(model, batch, loss, job.device)
        finally:
            model.zero_grad()

    return first_taken((s for s in SIZES if s >= smallest), of)


def _measure(
    job: _Job, found: Discovery, batches: Sequence[int] | None, repeats: int
) -> Iterator[_Measured]:
    sizes = sorted(set(batches)) if batches else BATCHES
    if sizes[0] < 1:
        raise InputError(f"batch size {sizes[0]} cannot be measured: give at least 1")
    refused: dict[int, str] = {}
    taken: list[int] = []
    short = False

    def tried(size: int, share: float) -> _Measured | None:
        nonlocal short
        try:
            measured = _measure_batch(job, found, size, repeats, share)
        except Exception as error:
            # A batch of one has no statistics where normalisation sees one pixel; a loss over pairs
            # wants an even one. Other sizes tell as much, smaller ones where memory was short.
            job.workload.model.zero_grad()
            short |= overflowed(error)
            refused[size] = f"a batch of {size} with {type(error).__name__}: {error}"
            return None
        taken.append(size)
        return measured

    for i, size in enumerate(sizes):
        job.report(0.1 + 0.6 * i / len(sizes), f"measuring a batch of {size}")
        measured = tried(size, 0.1 + 0.6 * (i + 1) / len(sizes))
        if measured is None:
            continue
        yield measured
        if batches is None:
            done = measured.times.total
            # One size alone makes no curve.
            late = job.left_s(0.7) < 2 * measured.turn_s and i > 0
            if 2 * done > LONGEST_STEP_S or late:
                break
    for size in _other_sizes(taken, refused, short):
        if (another := tried(size, 0.7)) is not None:
            yield another
            break
    if not taken:
        raise InputError(
            f"the model refuses {next(iter(refused.values()))}; measure others with --batches "
            "(batches of mw.profile)"
        )
    if refused and batches:
        warnings.warn(f"measured without {'; '.join(refused.values())}", stacklevel=2)


def _other_sizes(taken: Sequence[int], refused: Collection[int], short: bool) -> list[int]:
    """What to try for a curve where one size alone was taken of several; the smaller one first
    where memory was ``short``."""
    if not refused or len(taken) != 1:
        return []
    others = {taken[0] // 2, 2 * taken[0]} - {0, *refused}
    return sorted(others, reverse=not short)


def _measure_batch(job: _Job, found: Discovery, size: int, repeats: int, share: float) -> _Measured:
    model, loss, batch = job.workload.model, job.workload.loss, job.batch(size)
    footprint = measure_footprint(model, found.units, batch, loss, job.device)
    meter = StreamMeter if job.device.type == "cuda" else StepMeter
    steps = meter(model, found.units, batch, loss, job.device)
    spent_s = taken_s = 0.0
    # One more than counted: the first warms up.
    for i in range(MORE * repeats + 1):
        if i > repeats and spent_s > REPEATED_S:
            break
        taken_s = steps.turn()
        if i == 0 and steps.compiles:
            job.start += taken_s  # compiling is not counted either
        spent_s += taken_s * (i > 0)
        if i >= 2 and job.left_s(share) < 0:
            break
    model.zero_grad()
    return _Measured(size, steps.times(), footprint, steps.repeated_s, taken_s)


def _curve(sizes: Sequence[int], values: Sequence[float]) -> Curve:
    return Curve(x=tuple(map(float, sizes)), y=tuple(max(float(v), 0.0) for v in values))


def _units(
    job: _Job, found: Discovery, measured: Sequence[_Measured], degrees: Sequence[int]
) -> tuple[UnitProfile, ...]:
    model = job.workload.model
    sizes = [m.batch for m in measured]
    unreached = set.intersection(*(m.footprint.unreached for m in measured))
    bases = {
        u.name: unit_profile(model, found, u, _whole(u, sizes, measured), unreached)
        for u in found.units
    }
    if job.device.type == "cuda":
        bases = {name: _with_host(base, measured) for name, base in bases.items()}
    # Before units are divided, which may take all the time that is left.
    bases = _with_fidelity(job, bases, measured[len(measured) // 2])
    # The largest: what a divided unit works on is a whole group's batch.
    calls = capture(model, job.batch(sizes[-1]), [u for u in found.units if u.splits])
    # A step goes through feature maps, weights and their gradients.
    touched = measured[-1].footprint.total + 2 * sum(p.nbytes for p in model.parameters())
    deadline = job.start + job.budget_s
    meter = ShareMeter(model, job.device, deadline, job.workload.precision, touched)
    overtime = max(deadline, time.perf_counter()) + OVERTIME * job.budget_s
    # Should time run short, it was spent where most can be gained: on the most parameters.
    divided = [u for u in found.units if u.splits]
    divided.sort(key=lambda u: bases[u.name].parameter_bytes, reverse=True)
    # And on the smallest degree of all of them, before larger ones.
    passes = {tuple(degrees): deadline, tuple(degrees[:1]): overtime}
    turns = [(u, wanted, end) for wanted, end in reversed(passes.items()) for u in divided]
    for i, (unit, wanted, end) in enumerate(turns):
        meter.end = end
        job.report(0.7 + 0.25 * i / len(turns), f"dividing {unit.name}")
        call = calls.get(unit.name)  # none where a forward leaves the unit out
        if call is None:
            continue
        base = bases[unit.name]
        shares = meter.shares(unit, base, call, sizes[-1], wanted)
        bases[unit.name] = msgspec.structs.replace(base, shares=(base.whole, *shares))
    _tell_of_late(
        [u.name for u in divided if len(bases[u.name].shares) == 1 and u.name in meter.late]
    )
    discarded = measured[0].footprint.discarded
    batch = job.batch(sizes[0])
    kept = saved_inputs(model, found.units, batch, job.workload.loss) if divided else {}
    return tuple(
        msgspec.structs.replace(
            bases[u.name],
            output_kept=u.name not in discarded,
            **inputs_of(u, kept, batch.size),
        )
        for u in found.units
    )


def _with_host(unit: UnitProfile, measured: Sequence[_Measured]) -> UnitProfile:
    """The unit with what a host takes to issue its operators, which are as many at any batch; and
    with how many storages it saves."""
    forward, backward = (
        median(times.get(unit.name, 0.0) for times in rows)
        for rows in (
            [m.times.issued_forward for m in measured], [m.times.issued_backward for m in measured]
        )
    )  # fmt: skip
    return msgspec.structs.replace(
        unit,
        host_forward_s=forward,
        host_backward_s=backward,
        saved_storages=measured[-1].footprint.storages[unit.name],
    )


def _tell_of_late(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"time ran out before {len(names)} units were measured divided ({names[0]!r} first): "
            f"plans keep them whole; {FEWER}",
            stacklevel=2,
        )


def inputs_of(unit: UnitSpec, found: Mapping[str, SavedInputs], size: int) -> dict[str, float]:
    """A unit profile's fields of the inputs that it saves, by what ``size`` samples have shown."""
    if not unit.splits or unit.name not in found:
        return {}
    inputs = found[unit.name]
    return {"input_saved": inputs.saved / size, "input_kept": inputs.kept / size}


def _with_fidelity(
    job: _Job, units: Mapping[str, UnitProfile], like: _Measured
) -> dict[str, UnitProfile]:
    """The units with what lossy exchanges keep of their gradients, if there is time for steps
    ``like`` that one."""
    left_s = max(job.left_s(1.0), FIDELITY_OVERTIME * job.budget_s)
    if STEPS * like.times.total > left_s:
        warnings.warn(
            "time ran out before it was measured what lossy exchanges keep of gradients: plans "
            f"send none in part (min_fidelity); {FEWER}",
            stacklevel=2,
        )
        return dict(units)
    job.report(0.7, "measuring gradients")
    model, batches = job.workload.model, [job.batch(like.batch) for _ in range(STEPS)]
    takes_bytes, takes_s = thin_takes(model)
    thin = _persistent_bytes(model) + takes_bytes <= job.room_bytes and (
        job.device.type != "cpu" or STEPS * like.times.total + takes_s <= left_s
    )
    measured = measure_fidelity(job.workload, batches, thin=thin)
    found, wrong = {}, []
    for name, unit in units.items():
        names = list(dict.fromkeys(p.shared for p in unit.parameters))
        energy = measured.energy(names)
        if not isfinite(energy):
            wrong.append(name)
            found[name] = unit
            continue
        curves = measured.profiles(names)
        found[name] = msgspec.structs.replace(unit, fidelity=curves, gradient_energy=energy)
    if wrong:
        warnings.warn(
            f"gradients of {len(wrong)} units ({wrong[0]!r} first) are not finite on the "
            "workload's own batch: plans send none of these in part, and training would not go "
            "far; mend the model, its loss or its batch",
            stacklevel=2,
        )
    return found


def _whole(unit: UnitSpec, sizes: Sequence[int], measured: Sequence[_Measured]) -> ShareProfile:
    """The whole unit's share: its times and its footprint by batch size."""

    def curve(quantity: str) -> Curve:
        source = "times" if quantity in ("forward", "backward") else "footprint"
        rows = [getattr(getattr(m, source), quantity) for m in measured]
        return _curve(sizes, [row.get(unit.name, 0.0) for row in rows])

    quantities = (
        "forward",
        "backward",
        "saved",
        "gradient",
        "workspace",
        "new_grad",
        "never_together",
    )
    curves = {quantity: curve(quantity) for quantity in quantities}
    return ShareProfile(style="none", degree=1, parameter_bytes=0, partial_sums=0, **curves)


def unit_profile(
    model: nn.Module,
    found: Discovery,
    unit: UnitSpec,
    whole: ShareProfile,
    unreached: Collection[str] = (),
) -> UnitProfile:
    """A unit that was ``found``, with the measurements of its whole. Parameters and buffers that no
    unit has are held all the same, and the former exchanged: they count to the model's beginning,
    as in the executor. Of ``unreached`` parameters no backward computes a gradient."""
    is_first = unit is found.units[0]
    outside = found.outside if is_first else ()
    shared = canonical_names(model)
    names = [n for n in shared if any(n.startswith(f"{m}.") or m == "" for m in unit.modules)]
    parameters = tuple(
        ParameterProfile(
            name=name, shared=shared[name], shape=tuple(p.shape), bytes=p.nbytes,
            trainable=p.requires_grad, reached=shared[name] not in unreached,
        )
        for name, p in ((name, model.get_parameter(name)) for name in (*names, *outside))
    )  # fmt: skip
    modules = [model.get_submodule(name) for name in unit.modules]
    norms = [x for m in modules for x in m.modules() if isinstance(x, BATCH_NORMS)]
    total = sum(p.bytes for p in {p.shared: p for p in parameters}.values())
    buffers = sum(b.nbytes for m in modules for b in m.buffers())
    return UnitProfile(
        name=unit.name,
        kind=unit.kind,
        modules=unit.modules,
        batched_inputs=unit.batched_inputs,
        batch_dims=unit.batch_dims,
        parameters=parameters,
        state_bytes=buffers + (_buffers_outside(model, found.units) if is_first else 0),
        batch_statistics=unit.batch_statistics,
        # A mean and a sum of squares for each channel, and the count, in double precision.
        statistics_bytes=sum(8 * (2 * int(norm.num_features) + 1) for norm in norms),
        splits=split_profiles(model, unit, shared),
        stays_whole=unit.stays_whole,
        shares=(msgspec.structs.replace(whole, parameter_bytes=total),),
    )


def _buffers_outside(model: nn.Module, units: Sequence[UnitSpec]) -> int:
    """Bytes of the buffers that no unit has, the model's own or those of modules without
    parameters: each storage once, as several names may have it."""

    def by_storage(tensors: Iterable[Tensor]) -> dict[int, int]:
        found = {}
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None:  # a sparse one
                found[id(tensor)] = tensor.nbytes
            else:
                found[storage._cdata] = storage.nbytes()
        return found

    modules = [model.get_submodule(name) for unit in units for name in unit.modules]
    inside = by_storage((*model.parameters(), *(b for m in modules for b in m.buffers())))
    every = by_storage(model.buffers())
    return sum(size for key, size in every.items() if key not in inside)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of every parameter the first name of the same parameter."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    return found
