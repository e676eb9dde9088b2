"""A ModelProfile for a catalogued device that is not here: a roofline over counted work.

    seconds = max( flops / (peak · FLOPS_REACHED), bytes / (bandwidth · BANDWIDTH_REACHED) )
              + kernels · KERNEL_S

Operations are counted by torch's FlopCounterMode on one small batch, bytes are those of the unit's
inputs, outputs, saved feature maps and parameters. Nothing is computed where the model runs without
values (``dry``), and nothing allocated. These are assumptions, not measurements: profile on the
device when there is one.

Where DeepPool published layer times for just that network and device, they replace the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..executor.launch.start import software
from ..models.compiled import uncompiled
from ..models.replay import UnitCall, capture, preserved, run_modules
from ..models.spec import UnitSpec
from ..models.target import own_batch
from ..models.units.discover import Discovery, discovered
from ..models.units.storages import tensors_in
from ..models.workload import Workload
from ..planner.schema.capability import degrees
from ..planner.schema.curve import Curve
from ..planner.schema.errors import InputError
from ..planner.schema.layer_times import profile_of_table
from ..planner.schema.profile import (
    ModelProfile,
    ShareProfile,
    UnitProfile,
    UpdateRate,
)
from .catalogue import GIGA, TERA, Datasheet, datasheet
from .memory import Footprints, dry, is_dry
from .model import unit_profile
from .shares import shard_bytes

# Share of a device's float32 peak that large matrix products are assumed to reach. Convolutions
# may use TF32, as torch lets them by default, and are faster then: DeepPool's A100 table has
# VGG-16 at three times the float32 peak, so an estimate errs on the slow side there.
FLOPS_REACHED = 0.6

# Share of the memory bandwidth that streaming kernels reach.
BANDWIDTH_REACHED = 0.8

# A kernel's launch on a GPU, which small units cannot beat.
KERNEL_S = 5e-6

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Memory is counted at these batch sizes, and is linear beyond.
FOOTPRINT_SIZES = (2, 4)
DEGREES = (2, 4, 8)
# How often an optimizer reads or writes a parameter's bytes: parameter, gradient, state.
STATE_TRAFFIC = {"sgd": 3, "momentum": 5, "adam": 7, "adamw": 7}

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
    with uncompiled(workload.model) as model, torch.random.fork_rng():
        workload = replace(workload, model=model)
        own_batch(workload, 2)
        try:
            found, units = _counted(dry(workload), sheet, sizes)
        except Exception:
            # A model may need values (an index of what is not zero). With memory it has them.
            if is_dry(workload.model):
                raise
            found, units = _counted(workload, sheet, sizes)
    profile = ModelProfile(
        target=workload.name,
        model=found.fingerprint,
        device=device,
        device_type="cuda",
        dtype="float32",
        software=software(),
        batches=sizes,
        units=units,
        edges=found.edges,
        pieces=found.pieces,
        updates=tuple(
            UpdateRate(optimizer=name, seconds_per_byte=moves / (sheet.gbyte_s * GIGA))
            for name, moves in STATE_TRAFFIC.items()
        ),
        origin="estimated",
    )
    if workload.name in TABLES and device.startswith("a100"):
        return with_table(profile, load_table(TABLES[workload.name]))
    return profile


def _counted(
    workload: Workload, sheet: Datasheet, sizes: tuple[int, ...]
) -> tuple[Discovery, tuple[UnitProfile, ...]]:
    found, batch = discovered(workload.model, workload.make_batch)
    with preserved(workload.model):
        calls = capture(workload.model, batch, found.units)
        footprints = Footprints(workload, found.units, FOOTPRINT_SIZES)
        counted = _Estimator(workload.model, found, batch.size, calls, footprints, sheet, sizes)
        return found, tuple(map(counted.unit, found.units))


class _Work(NamedTuple):
    """One unit's counted work for one sample: operations, bytes moved, and ``fixed`` bytes moved
    for all samples together; kernels started; how many times the forward the backward takes."""

    flops: float
    moved: float
    fixed: float
    kernels: int
    back: float

    def seconds(self, samples: float, part: float, sheet: Datasheet) -> float:
        """Forward seconds of ``part`` of the unit on ``samples`` samples."""
        compute = self.flops * samples * part / (sheet.float32 * TERA * FLOPS_REACHED)
        traffic = (self.moved * samples + self.fixed) * part
        memory = traffic / (sheet.gbyte_s * GIGA * BANDWIDTH_REACHED)
        return max(compute, memory) + self.kernels * KERNEL_S


class _Estimator(NamedTuple):
    """What has been counted of a model, for a device and batch sizes."""

    model: nn.Module
    found: Discovery
    batch: int
    calls: dict[str, UnitCall]
    footprints: Footprints
    sheet: Datasheet
    sizes: tuple[int, ...]

    def unit(self, unit: UnitSpec) -> UnitProfile:
        work = self._work(unit)
        whole = self._share(unit, work, "none", 1, 0)
        outside = self.found.outside if unit is self.found.units[0] else ()
        base = unit_profile(self.model, unit, whole, outside)
        shares = [
            self._share(
                unit, work, split.style, degree, shard_bytes(self.model, unit, split, degree)
            )
            for split in unit.splits
            for degree in DEGREES
            if degrees(base, split.style, degree)
        ]
        kept = unit.name not in self.footprints.smallest.discarded
        return msgspec.structs.replace(base, shares=(base.whole, *shares), output_kept=kept)

    def _work(self, unit: UnitSpec) -> _Work:
        if not unit.modules:
            # Glue is taken to read and write what flows: one kernel, and nothing that is computed.
            edges = [e for e in self.found.edges if unit.name in (e.source, e.target)]
            flows = sum(e.bytes_per_sample for e in edges) if unit.kind == "glue" else 0.0
            return _Work(0.0, flows, 0.0, 1 if flows else 0, 1.0)
        call, size = self.calls[unit.name], self.batch
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), counter:
            output = run_modules(self.model, unit.modules, call.fresh())
        saved = self.footprints.smallest.saved.get(unit.name, 0)
        moved = sum(t.nbytes for t in (*call.tensors(), *tensors_in(output))) + saved
        modules = [self.model.get_submodule(name) for name in unit.modules]
        parameters = sum(p.nbytes for m in modules for p in m.parameters())
        # The gradient of the input and that of the weight take as much as the forward each.
        back = 2.0 if any(t.requires_grad for t in call.tensors()) else 1.0
        # Every innermost module starts a kernel.
        kernels = sum(not list(x.children()) for m in modules for x in m.modules())
        return _Work(counter.get_total_flops() / size, moved / size, parameters, kernels, back)

    def _share(
        self, unit: UnitSpec, work: _Work, style: str, degree: int, parameter_bytes: int
    ) -> ShareProfile:
        part = 1 / degree
        forward = [work.seconds(b, part, self.sheet) for b in self.sizes]
        sizes = tuple(map(float, self.sizes))
        footprints, name = self.footprints, unit.name
        # A column share keeps its input whole and makes a part of its output; a row share the
        # reverse. What is saved is mostly inputs.
        kept = 1.0 if style == "column" else part
        return ShareProfile(
            style=style,  # type: ignore[arg-type]
            degree=degree,
            forward=Curve(x=sizes, y=tuple(forward)),
            backward=Curve(x=sizes, y=tuple(work.back * f for f in forward)),
            saved=footprints.curve("saved", name, kept),
            gradient=footprints.curve("gradient", name),
            workspace=footprints.curve("workspace", name, part),
            parameter_bytes=parameter_bytes,
            fresh=footprints.curve("fresh", name, part),
            spared=footprints.curve("spared", name, part),
        )


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
    if [p.shape for p in first.parameters] != [p.shape for p in unit.parameters]:
        raise AssertionError(f"the table's {first.name} is not unit {unit.name}")

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
