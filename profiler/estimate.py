"""A ModelProfile for a catalogued device that is not here: a roofline over counted work.

One step runs on torch's meta device at two batch sizes, where nothing is computed and nothing
allocated (``dry``; on real tensors where the model needs values). Every operation of its forward
and backward is recorded with its type and sizes (``operations``) and its seconds on the device
follow from these (``roofline``). A member's share of a divided unit is counted likewise, alone, and
compared with the whole unit, alone. These are estimates, not measurements: profile on the device
when there is one.

Where DeepPool published layer times for just that network and device, they replace the roofline.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from math import ceil
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from ..executor.comm.setups import software
from ..executor.optimizer.chunks import steps_of
from ..executor.optimizer.kinds import optimizer_for
from ..models.compiled import uncompiled
from ..models.precision import measured_in
from ..models.replay import UnitCall, capture, copied, preserved, train_whole
from ..models.spec import SplitSpec, UnitSpec
from ..models.splits import apply_split
from ..models.splits.check import isolated, member_call
from ..models.target import check_batches
from ..models.trial_sizes import first_taken
from ..models.units.chance import every_layer
from ..models.units.discover import Discovery, discovered
from ..models.workload import Workload, device_of
from ..planner.schema.capability import degrees
from ..planner.schema.curve import Curve
from ..planner.schema.errors import InputError
from ..planner.schema.goal import OPTIMIZERS, OptimizerName
from ..planner.schema.layer_times import profile_of_table
from ..planner.schema.profile import (
    ModelProfile,
    ShareProfile,
    UnitProfile,
    UpdateRate,
)
from .catalogue import Datasheet, datasheet
from .compression import estimated_rates
from .memory import Footprints, FusedAttention, dry, is_dry, saved_inputs
from .model import inputs_of, unit_profile
from .operations import OperationLog
from .roofline import CountedWork, estimated_s
from .shares import Cost, OwnSamples, cost_of, saved_ratio, shard_bytes
from .timing import Timeline
from .usual_answers import UsualAnswers

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Memory is counted at the first two of these that the model takes as batch sizes, and is linear
# beyond.
FOOTPRINT_SIZES = ((2, 4), (4, 8))
DEGREES = (2, 4, 8)
# Shares are counted at these batch sizes: every member of the largest degree has samples.
SHARE_SIZES = (max(DEGREES), 2 * max(DEGREES))
# Optimizers are counted on one parameter of so many elements, enough to hide launches.
UPDATED = 1 << 26

# Workloads whose units are those of a published A100 table, one by one.
TABLES = {"vgg16": "vgg16"}


def estimate(
    workload: Workload, device: str, *, batches: Sequence[int] | None = None
) -> ModelProfile:
    """The profile of ``workload`` on the catalogued ``device``, without that device.

    Runs the model on a few samples without its memory (on the CPU where it needs values), to find
    its units and count their work. Raises ``InputError`` for a device that is not catalogued (with
    the nearest names) and where the model fails on its batch.
    """
    sheet = datasheet(device)
    sizes = tuple(sorted(set(batches or BATCHES)))
    with (
        torch.random.fork_rng(),
        uncompiled(workload.model) as model,
        measured_in(replace(workload, model=model), None) as chosen,
    ):
        check_batches(chosen)
        try:
            with UsualAnswers():
                found, units = _counted(dry(chosen), sheet, sizes)
        except Exception:
            # A model may need values (an index of what is not zero). With memory it has them.
            if is_dry(workload.model):
                raise
            found, units = _counted(chosen, sheet, sizes)
        types = [p.dtype for p in workload.model.parameters() if p.is_floating_point()]
    dtype = types[0] if types else torch.get_default_dtype()
    profile = ModelProfile(
        target=workload.name,
        model=found.fingerprint,
        device=device,
        device_type="cuda",
        dtype=str(dtype).removeprefix("torch."),
        software=software(),
        batches=sizes,
        units=units,
        edges=found.edges,
        pieces=found.pieces,
        updates=tuple(rate for name in OPTIMIZERS for rate in _update_rates(name, dtype, sheet)),
        compression=estimated_rates(dtype, sheet),
        origin="estimated",
        precision=workload.precision,
    )
    # Which is of float32 with convolutions in TF32.
    as_timed = workload.precision in (None, "tf32") and dtype == torch.float32
    if as_timed and workload.name in TABLES and device.startswith("a100"):
        table = load_table(TABLES[workload.name])
        if _parameters_of(table) == _parameters_of(profile):
            return with_table(profile, table)
    return profile


def _parameters_of(profile: ModelProfile) -> list[list[tuple[int, ...]]]:
    """The shapes of what each layer has, of layers that have any."""
    return [[p.shape for p in unit.parameters] for unit in profile.units if unit.parameters]


def _counted(
    workload: Workload, sheet: Datasheet, sizes: tuple[int, ...]
) -> tuple[Discovery, tuple[UnitProfile, ...]]:
    model = workload.model
    found, _ = discovered(model, workload.make_batch)
    with every_layer(model), preserved(model):
        train_whole(model)
        few, logs = _steps(workload, found.units)
        footprints = Footprints(workload, found.units, few)
        divided = [u for u in found.units if u.splits]
        calls = [capture(model, workload.make_batch(n), divided) for n in SHARE_SIZES]
        batch = workload.make_batch(few[0])
        with FusedAttention():
            inputs = saved_inputs(model, found.units, batch, workload.loss) if divided else {}
        counted = _Estimator(workload, found, few, logs, footprints, calls, sheet, sizes, {})
        return found, tuple(
            msgspec.structs.replace(counted.unit(u), **inputs_of(u, inputs, batch.size))
            for u in found.units
        )


def _steps(
    workload: Workload, units: Sequence[UnitSpec]
) -> tuple[tuple[int, int], list[OperationLog]]:
    """The first two of ``FOOTPRINT_SIZES`` that model and loss take, with what a step of each
    runs."""
    return first_taken(
        FOOTPRINT_SIZES, lambda sizes: (sizes, [_step(workload, units, size) for size in sizes])
    )


def _step(workload: Workload, units: Sequence[UnitSpec], size: int) -> OperationLog:
    """What one step runs, by unit."""
    model, batch = workload.model, workload.make_batch(size)
    model.zero_grad()  # backward would add to the gradients that are there
    timeline = Timeline(model, units, device_of(model))
    log = OperationLog(lambda: timeline.node)
    with FusedAttention(), timeline, log:
        timeline.step(batch, workload.loss)
    model.zero_grad()
    return log


def _update_rates(
    name: OptimizerName, dtype: torch.dtype, sheet: Datasheet
) -> Iterator[UpdateRate]:
    """An optimizer's seconds by what torch's does to a parameter, one list of tensors at a time as
    it does on a GPU, and those of a sharded exchange where they differ."""
    parameter = nn.Parameter(torch.empty(UPDATED, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = optimizer_for(name, [parameter])
    optimizer.param_groups[0]["foreach"] = True
    for sharded, step in steps_of(optimizer):
        step()  # the first makes the state
        rate = estimated_s(step, sheet) / parameter.nbytes
        yield UpdateRate(optimizer=name, seconds_per_byte=rate, sharded=sharded)


class _Counted(NamedTuple):
    """Forward and backward of something, what it saved, and for each sample the bytes of partial
    sums in it."""

    forward: Curve
    backward: Curve
    cost: Cost
    partial_sums: int


class _Estimator(NamedTuple):
    """What has been counted of a model, for a device and batch sizes."""

    workload: Workload
    found: Discovery
    few: tuple[int, int]
    logs: list[OperationLog]
    footprints: Footprints
    calls: list[dict[str, UnitCall]]
    sheet: Datasheet
    sizes: tuple[int, ...]
    known: dict[tuple[Any, ...], _Counted | None]

    @property
    def model(self) -> nn.Module:
        return self.workload.model

    def unit(self, unit: UnitSpec) -> UnitProfile:
        whole = self._whole(unit)
        unreached = self.footprints.smallest.unreached
        base = unit_profile(self.model, self.found, unit, whole, unreached)
        shares = [
            share
            for split in unit.splits
            for degree in DEGREES
            if degrees(base, split.style, degree)
            and (share := self._share(unit, base.whole, split, degree))
        ]
        kept = unit.name not in self.footprints.smallest.discarded
        return msgspec.structs.replace(base, shares=(base.whole, *shares), output_kept=kept)

    def _whole(self, unit: UnitSpec) -> ShareProfile:
        def work(phase: str) -> CountedWork:
            few, many = (getattr(log, phase).get(unit.name, ()) for log in self.logs)
            return CountedWork(self.few, few, many)

        kinds = ("saved", "gradient", "workspace", "new_grad", "never_together")
        return ShareProfile(
            style="none",
            degree=1,
            forward=self._curve(work("forward")),
            backward=self._curve(work("backward")),
            parameter_bytes=0,
            partial_sums=0,
            **{kind: self.footprints.curve(kind, unit.name) for kind in kinds},
        )

    def _curve(self, work: CountedWork) -> Curve:
        seconds = tuple(work.seconds(size, self.sheet) for size in self.sizes)
        return Curve(x=tuple(map(float, self.sizes)), y=seconds)

    def _share(
        self, unit: UnitSpec, whole: ShareProfile, split: SplitSpec, degree: int
    ) -> ShareProfile | None:
        """A member's share: what it takes alone, compared with the unit alone, of what the unit
        takes in the model."""
        isolated, member = self._isolated(unit), self._isolated(unit, split, degree)
        if isolated is None or member is None:
            return None
        size = shard_bytes(self.model, unit, split, degree)
        part = size / max(whole.parameter_bytes, 1)
        mine, alone = member.cost, isolated.cost
        sizes = (mine.gradient, alone.gradient), (mine.output, alone.output)
        gradient, output = (a / b if b else 1.0 for a, b in sizes)
        in_model = whole.saved(SHARE_SIZES[-1])
        saved = saved_ratio(in_model, isolated.cost.saved, member.cost.saved, degree)
        return ShareProfile(
            style=split.style,
            degree=degree,
            forward=_compared(whole.forward, member.forward, isolated.forward),
            backward=_compared(whole.backward, member.backward, isolated.backward),
            saved=whole.saved.scaled(saved),
            gradient=whole.gradient.scaled(gradient),
            workspace=whole.workspace.scaled(output),
            parameter_bytes=size,
            new_grad=whole.new_grad.scaled(part),
            never_together=whole.never_together.scaled(min(part, saved)),
            partial_sums=member.partial_sums,
        )

    def _isolated(
        self, unit: UnitSpec, split: SplitSpec | None = None, degree: int = 1
    ) -> _Counted | None:
        """A unit run by itself, or a member's share of it; equal ones are counted once."""
        calls = [found.get(unit.name) for found in self.calls]
        if None in calls:  # a forward leaves it out
            return None
        modules = [self.model.get_submodule(name) for name in unit.modules]
        shapes = [tuple(t.shape) for m in modules for t in m.parameters()]
        inputs = [(tuple(t.shape), t.dtype) for call in calls if call for t in call.tensors()]
        style = split.style if split else "none"
        key = (unit.kind, style, degree, *map(str, modules), *shapes, *inputs)
        if key not in self.known:
            try:
                self.known[key] = self._count_isolated(unit, split, degree)
            except Exception:
                # A member's few samples may be too few for what follows in the unit.
                self.known[key] = None
        return self.known[key]

    def _count_isolated(self, unit: UnitSpec, split: SplitSpec | None, degree: int) -> _Counted:
        holder, own_samples = isolated(self.model, unit.modules), OwnSamples(unit, degree)
        if split is not None:
            holder = copied(holder)
            apply_split(holder, unit.modules, split, degree, 0, own_samples)
        logs = []
        for calls in self.calls:
            call = calls[unit.name]
            if split is not None:
                call = member_call(unit, split, call, degree, 0)
            log, where = OperationLog(), device_of(self.model)
            with FusedAttention(), log:
                cost = cost_of(holder, unit, call, where, self.workload.precision)
            logs.append(log)
        few, many = logs
        forward, backward = (
            self._curve(
                CountedWork(
                    SHARE_SIZES, getattr(few, phase).get("", ()), getattr(many, phase).get("", ())
                )
            )
            for phase in ("forward", "backward")
        )
        added = ceil(own_samples.added_bytes / sum(SHARE_SIZES))
        return _Counted(forward, backward, cost, added)


def _compared(whole: Curve, part: Curve, isolated: Curve) -> Curve:
    """``whole`` by the ratio of the other two."""
    rows = zip(whole.y, part.y, isolated.y, strict=True)
    return Curve(x=whole.x, y=tuple(w * p / a if a else w for w, p, a in rows))


def with_table(profile: ModelProfile, table: ModelProfile) -> ModelProfile:
    """``profile`` with the times of ``table``, whose layers with parameters are the same, in the
    same order; layers without any (pooling) count with the one before them."""
    rows: list[list[UnitProfile]] = []
    for row in table.units:
        if row.parameters:
            rows.append([row])
        elif rows and not row.fixed:
            rows[-1].append(row)
    timed = iter(rows)
    units = [_with_times(u, next(timed)) if u.parameters else u for u in profile.units]
    return msgspec.structs.replace(
        profile, units=tuple(units), batches=table.batches, origin="table"
    )


def _with_times(unit: UnitProfile, rows: Sequence[UnitProfile]) -> UnitProfile:
    first = rows[0]

    def total(pick: str) -> Curve:
        curves = [getattr(row.whole, pick) for row in rows]
        sizes = curves[0].x
        return Curve(x=sizes, y=tuple(sum(c(x) for c in curves) for x in sizes))

    forward, backward = total("forward"), total("backward")
    shares = [msgspec.structs.replace(unit.whole, forward=forward, backward=backward)]
    for share in unit.shares[1:]:
        twin = next(s for s in first.shares if s.style == share.style and s.degree == share.degree)
        shares.append(msgspec.structs.replace(share, forward=twin.forward, backward=twin.backward))
    return msgspec.structs.replace(unit, shares=tuple(shares))


# Found by the package, which may lie in an archive.
_FOLDER = resources.files(__package__).joinpath("data", "deeppool_a100")


def tables() -> tuple[str, ...]:
    """The names of the tables."""
    return tuple(sorted(f.name[:-5] for f in _FOLDER.iterdir() if f.name.endswith(".json")))


def load_table(name: str) -> ModelProfile:
    """The profile of a network by its layer times on an A100 (see the folder's README)."""
    if name not in tables():
        raise InputError(f"there is no table {name!r}: choose from {', '.join(tables())}")
    return profile_of_table(_FOLDER.joinpath(f"{name}.json").read_bytes(), f"table {name}")
