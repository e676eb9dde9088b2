"""The ModelProfile of a workload: its units, what they take and hold, and what flows."""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec
import torch
from torch import nn

from ..executor.comm.setups import device_name, software
from ..executor.headroom import overflowed
from ..models.compiled import uncompiled
from ..models.precision import measured_in
from ..models.replay import capture, preserved
from ..models.spec import UnitSpec
from ..models.splits.leaves import BATCH_NORMS
from ..models.trial_sizes import SIZES, first_taken
from ..models.units.chance import every_layer
from ..models.units.discover import Discovery, discovered
from ..models.workload import Batch, Workload
from ..planner.schema.curve import Curve
from ..planner.schema.errors import InputError
from ..planner.schema.profile import (
    ModelProfile,
    ParameterProfile,
    ShareProfile,
    UnitProfile,
    UpdateRate,
)
from .compression import compression_rates
from .fidelity import STEPS, measure_fidelity
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
# Samples whose step tells what larger batches take, and the fewest that are measured for a goal: a
# batch of one has no statistics to normalise by, torch refuses it.
FEW = 2

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
    start: float = field(default_factory=time.perf_counter)

    def report(self, share: float, doing: str) -> None:
        if self.progress is not None:
            self.progress(round(1000 * share), 1000, doing)

    def left_s(self, share: float) -> float:
        """Seconds until ``share`` of the budget is used up."""
        return self.start + self.budget_s * share - time.perf_counter()

    def batch(self, size: int) -> Batch:
        return self.workload.make_batch(size).to(device=self.device)


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
    workload.model.to(where)
    with _as_measured(workload) as chosen:
        job = _Job(chosen, where, budget_s, progress)
        return _profile(job, batches, optimizers, degrees, repeats, room_bytes)


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
            if batches and room_bytes is not None:
                batches = _fitting(job, found, batches, room_bytes, few.size)
            measured = sorted(_measure(job, found, batches, repeats), key=lambda m: m.batch)
            units = _units(job, found, measured, degrees)
            units = _with_fidelity(job, units, measured[len(measured) // 2].batch)
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
    # Of a profile's own: the model's values are kept, and gradients are made.
    persistent = 3 * sum(p.numel() * p.element_size() for p in job.workload.model.parameters())

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
    refused: list[str] = []
    taken: list[int] = []
    short = False
    for i, size in enumerate(sizes):
        job.report(0.1 + 0.6 * i / len(sizes), f"measuring a batch of {size}")
        share = 0.1 + 0.6 * (i + 1) / len(sizes)
        try:
            measured = _measure_batch(job, found, size, repeats, share)
        except Exception as error:
            # A batch of one has no statistics where normalisation sees one pixel; a loss over pairs
            # wants an even one. Other sizes tell as much, smaller ones where memory was short.
            job.workload.model.zero_grad()
            short |= overflowed(error)
            refused.append(f"a batch of {size} with {type(error).__name__}: {error}")
            continue
        yield measured
        taken.append(size)
        if batches is None:
            done = measured.times.total
            # One size alone makes no curve.
            late = job.left_s(0.7) < 2 * measured.turn_s and i > 0
            if 2 * done > LONGEST_STEP_S or late:
                break
    if refused and len(taken) == 1:
        another = taken[0] // 2 if short and taken[0] > 1 else 2 * taken[0]
        yield _measure_batch(job, found, another, repeats, 0.7)
    if not taken:
        raise InputError(f"the model refuses {refused[0]}; measure others with --batches")
    if refused and batches:
        warnings.warn(f"measured without {'; '.join(refused)}", stacklevel=2)


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
    # The largest: what a divided unit works on is a whole group's batch.
    calls = capture(model, job.batch(sizes[-1]), [u for u in found.units if u.splits])
    # A step goes through feature maps, weights and their gradients.
    touched = measured[-1].footprint.total + 2 * sum(p.nbytes for p in model.parameters())
    deadline = job.start + job.budget_s
    meter = ShareMeter(model, job.device, deadline, job.workload.precision, touched)
    overtime = max(deadline, time.perf_counter()) + OVERTIME * job.budget_s
    # Parameters that no unit has count to the model's beginning, as in the executor.
    outside = {found.units[0].name: found.outside}
    unreached = set.intersection(*(m.footprint.unreached for m in measured))
    bases = {
        u.name: unit_profile(
            model, u, _whole(u, sizes, measured), outside.get(u.name, ()), unreached
        )
        for u in found.units
    }
    if job.device.type == "cuda":
        bases = {name: _with_host(base, measured) for name, base in bases.items()}
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
            "plans keep them whole; measure fewer batches (meshwright profile --batches 4,8), or "
            "give more time (budget_s of mw.profile)",
            stacklevel=2,
        )


def inputs_of(unit: UnitSpec, found: Mapping[str, SavedInputs], size: int) -> dict[str, float]:
    """A unit profile's fields of the inputs that it saves, by what ``size`` samples have shown."""
    if not unit.splits or unit.name not in found:
        return {}
    inputs = found[unit.name]
    return {"input_saved": inputs.saved / size, "input_kept": inputs.kept / size}


def _with_fidelity(job: _Job, units: Sequence[UnitProfile], size: int) -> tuple[UnitProfile, ...]:
    """The units with what lossy exchanges keep of their gradients, if there is time for it."""
    if job.left_s(1.0) < 0:
        return tuple(units)
    job.report(0.95, "measuring gradients")
    measured = measure_fidelity(job.workload, [job.batch(size) for _ in range(STEPS)])
    found = []
    for unit in units:
        names = list(dict.fromkeys(p.shared for p in unit.parameters))
        curves, energy = measured.profiles(names), measured.energy(names)
        found.append(msgspec.structs.replace(unit, fidelity=curves, gradient_energy=energy))
    return tuple(found)


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
    unit: UnitSpec,
    whole: ShareProfile,
    outside: Sequence[str] = (),
    unreached: Collection[str] = (),
) -> UnitProfile:
    """A unit with the measurements of its whole. ``outside`` are parameters that no unit has: they
    are held and exchanged all the same, and counted where the caller says. Of ``unreached`` ones no
    backward computes a gradient."""
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
    return UnitProfile(
        name=unit.name,
        kind=unit.kind,
        modules=unit.modules,
        batched_inputs=unit.batched_inputs,
        batch_dims=unit.batch_dims,
        parameters=parameters,
        state_bytes=sum(b.nbytes for m in modules for b in m.buffers()),
        batch_statistics=unit.batch_statistics,
        # A mean and a sum of squares for each channel, and the count, in double precision.
        statistics_bytes=sum(8 * (2 * int(norm.num_features) + 1) for norm in norms),
        splits=split_profiles(model, unit, shared),
        stays_whole=unit.stays_whole,
        shares=(msgspec.structs.replace(whole, parameter_bytes=total),),
    )


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of every parameter the first name of the same parameter."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[name] = first.setdefault(id(parameter), name)
    return found
