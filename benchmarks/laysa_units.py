"""A profile in coarser units: runs of blocks that are recomputed together, for ``laysa.py``.

How many blocks a segment has is a decision: what is kept falls with it, what is there while one is
recomputed grows. A run of units becomes a unit of its own, so that the planner's figures of memory
and time hold for it as for any other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import msgspec
from meshwright.planner.curve import Curve
from meshwright.planner.profile import (
    EdgeProfile,
    FidelityProfile,
    ModelProfile,
    ShareProfile,
    UnitProfile,
)

BLOCK = re.compile(r"(layer\d+\.\d+|features\.\d+)(\.|$)")
"""A residual block, or a convolution with what follows it: what segments are made of."""
EVEN = -1
"""Instead of a length: as many blocks as together save no more than the block that saves most."""


def with_ratio(profile: ModelProfile, ratio: float) -> ModelProfile:
    """The profile with top-k at that ratio as the only lossy exchange."""

    def curves(unit: UnitProfile) -> tuple[FidelityProfile, ...]:
        kept = unit.kept("topk", ratio)
        if kept is None:
            return ()
        return (FidelityProfile(exchange="topk", ratios=(ratio,), kept=(kept,)),)

    units = tuple(msgspec.structs.replace(u, fidelity=curves(u)) for u in profile.units)
    return msgspec.structs.replace(profile, units=units)


def in_segments(profile: ModelProfile, length: int) -> ModelProfile:
    """The profile with every ``length`` blocks (or ``EVEN`` ones) that follow each other as one
    unit; other units stay as they are. The model's own code after a block belongs to it."""
    blocks = _blocks(profile.units)
    if length == EVEN:
        size = float(profile.batches[-1])
        saved = [sum(u.whole.saved(size) for u in units) for _, units in blocks]
        most = max((s for s, (name, _) in zip(saved, blocks, strict=True) if name), default=0.0)
        groups = _runs(blocks, saved, most)
    else:
        groups = _runs(blocks, [1.0] * len(blocks), float(length))
    units = tuple(_merged(profile, group) for group in groups)
    home = {u.name: unit.name for group, unit in zip(groups, units, strict=True) for u in group}
    return msgspec.structs.replace(profile, units=units, edges=_edges(profile, home))


def _blocks(units: Sequence[UnitProfile]) -> list[tuple[str, list[UnitProfile]]]:
    """(name of the block or "", its units), in order."""
    names: list[str] = []
    for unit in units:
        match = BLOCK.match(unit.name)
        follows = unit.kind == "glue" and names and names[-1]
        names.append(match[1] if match else names[-1] if follows else "")
    found = []
    pairs = zip(names, units, strict=True)
    for name, group in groupby(pairs, lambda pair: pair[0]):
        mine = [unit for _, unit in group]
        found += [(name, mine)] if name else [("", [unit]) for unit in mine]
    return found


def _runs(
    blocks: Sequence[tuple[str, list[UnitProfile]]], weights: Sequence[float], most: float
) -> list[tuple[UnitProfile, ...]]:
    """Blocks that follow each other and together weigh no more than ``most``."""
    runs: list[tuple[UnitProfile, ...]] = []
    open_, before = 0.0, ""
    for (name, units), weight in zip(blocks, weights, strict=True):
        if name and before and open_ + weight <= most:
            runs[-1], open_ = (*runs[-1], *units), open_ + weight
        else:
            runs.append(tuple(units))
            open_ = weight
        before = name
    return runs


def _merged(profile: ModelProfile, units: tuple[UnitProfile, ...]) -> UnitProfile:
    if len(units) == 1:
        return units[0]
    energy = sum(u.gradient_energy for u in units)
    return UnitProfile(
        name=units[0].name,
        kind="other",
        modules=_modules(units),
        batched_inputs=units[0].batched_inputs,
        parameters=tuple(p for u in units for p in u.parameters),
        state_bytes=sum(u.state_bytes for u in units),
        batch_statistics=any(u.batch_statistics for u in units),
        statistics_bytes=sum(u.statistics_bytes for u in units),
        shares=(_share(units, profile.batches),),
        fidelity=_fidelity(units, energy),
        gradient_energy=energy,
    )


def _modules(units: Sequence[UnitProfile]) -> tuple[str, ...]:
    """What is called one after another: whole blocks where units are parts of them."""
    found: dict[str, None] = {}
    for unit in units:
        match = BLOCK.match(unit.name)
        inside = match is not None and match[1] != unit.name
        for name in (match[1],) if match and inside else unit.modules:
            found[name] = None
    return tuple(found)


def _fidelity(units: Sequence[UnitProfile], energy: float) -> tuple[FidelityProfile, ...]:
    curves = [(u.gradient_energy, u.fidelity[0]) for u in units if u.fidelity]
    if not curves or not energy:
        return ()
    sent = sum(e * c.kept[0] for e, c in curves)
    whole = energy - sum(e for e, _ in curves)
    return (msgspec.structs.replace(curves[0][1], kept=(min((sent + whole) / energy, 1.0),)),)


def _share(units: Sequence[UnitProfile], batches: Sequence[int]) -> ShareProfile:
    rows = [_figures(units, float(size)) for size in batches]

    def curve(name: str) -> Curve:
        return Curve(x=tuple(map(float, batches)), y=tuple(row[name] for row in rows))

    names = ("forward", "backward", "saved", "gradient", "workspace", "fresh", "spared")
    return ShareProfile(
        style="none",
        degree=1,
        parameter_bytes=sum(u.parameter_bytes for u in units),
        **{name: curve(name) for name in names},
    )


def _figures(units: Sequence[UnitProfile], size: float) -> dict[str, float]:
    """A run's figures. While one of its units is at work, later ones have saved nothing (forward)
    or nothing any more (backward), and earlier ones have no gradients yet."""
    shares = [u.whole for u in units]
    saved = [s.saved(size) for s in shares]
    own = [sum(p.bytes for p in u.parameters if p.trainable) for u in units]
    forward, backward = [], []
    for i, share in enumerate(shares):
        work = share.workspace(size) - sum(saved[i + 1 :])
        forward.append(work)
        backward.append(work + share.gradient(size) - share.spared(size) - sum(own[:i]))
    up, down = max(*forward, 0.0), max(backward)
    return {
        "forward": sum(s.forward(size) for s in shares),
        "backward": sum(s.backward(size) for s in shares),
        "saved": sum(saved),
        "workspace": up,
        "gradient": max(down - up, 0.0),
        "spared": max(up - down, 0.0),
        "fresh": max(s.fresh(size) for s in shares),
    }


def _edges(profile: ModelProfile, home: dict[str, str]) -> tuple[EdgeProfile, ...]:
    """The edges between the new units; of several between the same two the largest, as they are of
    one tensor."""
    found: dict[tuple[str, str], EdgeProfile] = {}
    for edge in profile.edges:
        ends = home[edge.source], home[edge.target]
        known = found.get(ends)
        if ends[0] != ends[1] and (not known or known.bytes_per_sample < edge.bytes_per_sample):
            found[ends] = msgspec.structs.replace(edge, source=ends[0], target=ends[1], features=1)
    return tuple(found.values())
