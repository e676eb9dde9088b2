"""The options of a unit: the lattice of layouts, times what may be done about memory and exchange.

Policies that cannot help a unit are left out: nothing is recomputed or offloaded where nothing is
saved, no exchange is chosen where there is none, and an exchange is sharded only where there is
optimizer state or an update to divide.
"""

from collections.abc import Iterator, Sequence

from ..cost.budget import energy_budget, lost_energy, within_unit_limit
from ..cost.compute import saved_bytes
from ..cost.cost import CostModel
from ..schema.capability import Capability
from ..schema.layout import Layout, Style, lattice
from ..schema.options import Option, allowed, feedbacks
from ..schema.plan import MemoryPolicy
from ..schema.profile import UnitProfile
from .host_memory import may_mirror, may_offload

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


def all_options(model: CostModel, capability: Capability) -> tuple[tuple[Option, ...], ...]:
    """The options of each unit by itself."""
    units = range(len(model.profile.units))
    return tuple(unit_options(model, k, capability) for k in units)


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
    unit, layout = model.profile.units[k], base.layout
    saved = saved_bytes(unit, base.style, layout.degree, 1.0)
    exchanges = tuple(exchange_options(model, k, base, capability))
    for memory in memory_policies(model, unit, saved, capability):
        if memory == "offload" and not may_offload(model, k, base):
            continue
        for option in exchanges:
            yield option._replace(memory=memory)


def memory_policies(
    model: CostModel, unit: UnitProfile, saved: float, capability: Capability
) -> tuple[MemoryPolicy, ...]:
    """What may be done with the ``saved`` bytes of a unit's feature maps."""
    found: list[MemoryPolicy] = ["keep"]
    if saved and not unit.fixed:
        if "recompute" in capability.memory:
            found.append("recompute")
        if "offload" in capability.memory and model.host_bytes_per_s is not None:
            found.append("offload")
    return tuple(found)


def exchange_options(
    model: CostModel, k: int, base: Option, capability: Capability
) -> Iterator[Option]:
    """``base`` under every policy of exchange that may help and can be run, early release with
    each."""
    # What is used between units travels dense: no hook tells when it is used.
    fixed = model.profile.units[k].fixed
    trained = not fixed and any(p.trainable for p in model.owned[k])
    # Gradients that add up over micro-batches cannot go before the last of these.
    releases = capability.early_release and model.sliced and model.micro_batches == 1 and trained
    exchanged = base.layout.groups > 1 and trained
    options = (base, *(_exchanges(model, k, base, capability) if exchanged else ()))
    rounded = tuple(_rounded(model, k, options, capability)) if exchanged else ()
    for option in (*options, *rounded):
        may_release = releases and not option.shards and option.peers_per_host == 1
        for early in (False, True) if may_release else (False,):
            if capability.suits(base.layout, model.world_size, option.exchange, early):
                yield option._replace(early_release=early)


def _exchanges(model: CostModel, k: int, base: Option, capability: Capability) -> Iterator[Option]:
    """The exchanges that may be had in place of a dense one."""
    goal = model.goal
    divides = goal.state_copies or model.profile.update_seconds_per_byte(goal.optimizer)
    if "sharded" in capability.exchange and model.sliced and divides:
        yield base._replace(exchange="sharded")
    if may_gather(model, capability):
        yield base._replace(exchange="fully_sharded")
    if capability.by_host and (each := model.peers_per_host(base.layout)) > 1:
        yield base._replace(peers_per_host=each)
    yield from _lossy_exchanges(model, k, base, capability)


def _lossy_exchanges(
    model: CostModel, k: int, base: Option, capability: Capability
) -> Iterator[Option]:
    """Those that send a part of each gradient."""
    goal, unit = model.goal, model.profile.units[k]
    host_bytes_per_s = model.host_bytes_per_s
    for curve in unit.fidelity if goal.allows_parts else ():
        known = curve.exchange in capability.exchanges(sliced=model.sliced)
        known = known and (curve.exchange != "low_rank" or _suits_low_rank(model, base))
        ways = feedbacks(curve.exchange, goal.optimizer, capability.feedback, host_bytes_per_s)
        for ratio in curve.ratios if known else ():
            lossy = base._replace(exchange=curve.exchange, ratio=ratio)
            if lost_energy(model, k, lossy) <= energy_budget(model):
                for way in ways:
                    if way != "host_mirror" or may_mirror(model, k, base):
                        yield lossy._replace(feedback=way)


def _suits_low_rank(model: CostModel, base: Option) -> bool:
    # Its products of matrices are the same to the last bit on equal devices only, and on CPUs with
    # equal threads, which are a host's cores over its ranks. And what they keep was measured of
    # whole matrices: of a member's slice the same share is of a lower rank.
    cluster = model.cluster
    names = {device.name for device in cluster.devices}
    each = {len(node.devices) for node in cluster.nodes}
    alike = len(model.kinds) == len(names) == 1 and (cluster.on_gpus or len(each) == 1)
    return alike and base.layout.degree == 1


def _rounded(
    model: CostModel, k: int, options: Sequence[Option], capability: Capability
) -> Iterator[Option]:
    """The options with gradients that are rounded to travel, where that saves bytes and may be."""
    for wire in capability.wire if model.goal.allow_lossy else ():
        for option in options if model.wire_share(wire) < 1 else ():
            rounded = option._replace(wire=wire)
            if not option.lossy and lost_energy(model, k, rounded) <= energy_budget(model):
                yield rounded


def may_gather(model: CostModel, capability: Capability) -> bool:
    """Whether parameters may be gathered for each use."""
    # Not where units may be offloaded: to the hooks that offload, parameters are like any other
    # tensor that is saved, and the two choices of a unit do not see each other.
    offloads = "offload" in capability.memory and model.host_bytes_per_s is not None
    return "fully_sharded" in capability.exchange and model.sliced and not offloads
