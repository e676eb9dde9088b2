"""The options of a unit: the lattice of layouts, times what may be done about memory and exchange.

Policies that cannot help a unit are left out: nothing is recomputed or offloaded where nothing is
saved, no exchange is chosen where there is none, and an exchange is sharded only where there is
optimizer state or an update to divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..cost.budget import energy_budget, lost_energy, within_unit_limit
from ..cost.compute import saved_bytes
from ..cost.cost import CostModel
from ..schema.capability import Capability
from ..schema.layout import Layout, Style, lattice
from ..schema.options import Option, allowed, feedbacks
from ..schema.plan import ExchangePolicy, FeedbackPolicy

STYLES: tuple[Style, ...] = ("none", "column", "row", "pair")


def layouts_of(model: CostModel, capability: Capability) -> tuple[Layout, ...]:
    """The layouts that a search tries; all start at position 0."""
    every, bursts = model.goal.all_layouts, capability.idle_positions
    return tuple(lattice(model.world_size, complete=every, bursts=bursts))


def unit_options(model: CostModel, k: int, capability: Capability) -> tuple[Option, ...]:
    """All options of unit ``k`` by itself, those without a policy first in each layout."""
    plain = (
        Option(layout, style)
        for layout in layouts_of(model, capability)
        for style in STYLES
        if (style == "none") == (layout.degree == 1)
    )
    return tuple(
        option
        for base in plain
        if allowed(model.profile.units[k], base, model.goal, capability, model.world_size)
        for option in with_policies(model, k, base, capability)
        if within_unit_limit(model, k, option)
    )


def may_have(model: CostModel, k: int, option: Option, capability: Capability) -> bool:
    """Whether unit ``k`` may have the option's policies in the option's layout."""
    return option in with_policies(model, k, Option(option.layout, option.style), capability)


def all_may_have(model: CostModel, decisions: Sequence[Option], capability: Capability) -> bool:
    """Whether every decision is one of its unit's options."""
    return all(option in unit_options(model, k, capability) for k, option in enumerate(decisions))


def with_policies(
    model: CostModel, k: int, base: Option, capability: Capability
) -> Iterator[Option]:
    """``base`` under every combination of policies that may help and can be run."""
    for option in _combined(model, k, base, capability):
        policy = option.exchange, option.early_release
        if capability.suits(option.layout, model.world_size, *policy):
            yield option


def _combined(model: CostModel, k: int, base: Option, capability: Capability) -> Iterator[Option]:
    for memory in _memory(model, k, base, capability):
        for exchange in _exchange(model, k, memory, capability):
            yield exchange
            if not exchange.shards and _releases(model, k, capability):
                yield exchange._replace(early_release=True)


def _memory(model: CostModel, k: int, base: Option, capability: Capability) -> Iterator[Option]:
    yield base
    unit = model.profile.units[k]
    saved = saved_bytes(unit, base.style, base.layout.degree, 1.0)
    if unit.fixed or not saved:
        return
    if "recompute" in capability.memory:
        yield base._replace(memory="recompute")
    if "offload" in capability.memory and model.cluster.host_bytes_per_s is not None:
        yield base._replace(memory="offload")


def _exchange(model: CostModel, k: int, base: Option, capability: Capability) -> Iterator[Option]:
    yield base
    if base.layout.groups == 1 or not any(p.trainable for p in model.owned[k]):
        return
    goal, unit = model.goal, model.profile.units[k]
    divides = goal.state_copies or model.profile.update_seconds_per_byte(goal.optimizer)
    if "sharded" in capability.exchange and model.sliced and divides:
        yield base._replace(exchange="sharded")
    if may_gather(model, capability):
        yield base._replace(exchange="fully_sharded")
    for curve in unit.fidelity if goal.allow_lossy else ():
        known = curve.exchange in capability.exchanges(sliced=model.sliced)
        for ratio in curve.ratios if known else ():
            lossy = base._replace(exchange=curve.exchange, ratio=ratio)
            if lost_energy(model, k, lossy) <= energy_budget(model):
                for way in _feedbacks(model, curve.exchange, capability):
                    yield lossy._replace(feedback=way)


def _feedbacks(
    model: CostModel, exchange: ExchangePolicy, capability: Capability
) -> tuple[FeedbackPolicy, ...]:
    """Where a lossy exchange may keep what it has not sent."""
    host_bytes_per_s = model.cluster.host_bytes_per_s
    return feedbacks(exchange, model.goal.optimizer, capability.feedback, host_bytes_per_s)


def may_gather(model: CostModel, capability: Capability) -> bool:
    """Whether parameters may be gathered for each use. Not where units may be offloaded: to the
    hooks that offload, parameters are like any other tensor that is saved, and the two choices of a
    unit do not see each other."""
    offloads = "offload" in capability.memory and model.cluster.host_bytes_per_s is not None
    return "fully_sharded" in capability.exchange and model.sliced and not offloads


def _releases(model: CostModel, k: int, capability: Capability) -> bool:
    trained = any(p.trainable for p in model.owned[k])
    return capability.early_release and model.sliced and model.micro_batches == 1 and trained
