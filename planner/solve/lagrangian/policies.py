"""What each policy about memory and exchange adds to a unit, as ``cost.cost`` and
``memory.unit_memory`` state it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...cost.budget import energy_budget
from ...cost.compute import saved_bytes
from ...cost.cost import CostModel
from ...cost.step_time import LINKS
from ...memory.prefetch_overlap import neighbours_bytes
from ...memory.rows import AT, FIGURES
from ...schema.options import Option, feedbacks
from ...schema.plan import SHARDING, FeedbackPolicy
from ..choices import may_gather
from .figures import Figures
from .tables import Block, Policy, Reals, State


def memory_block(source: Figures, k: int, states: tuple[State, ...], plain: Reals) -> Block:
    """Keep, recompute and offload, as ``cost.cost`` and ``memory.unit_memory`` have them."""
    unit, names = source.model.profile.units[k], ["keep"]
    saves = not unit.fixed and saved_bytes(unit, "none", 1, 1.0) > 0
    if saves and "recompute" in source.space.capability.memory:
        names.append("recompute")
    host = source.model.cluster.host_bytes_per_s
    if saves and "offload" in source.space.capability.memory and host is not None:
        names.append("offload")
    parts = [plain]
    for name in names[1:]:
        parts.append(_recomputed(source, k, states, plain) if name == "recompute"
                     else _offloaded(source, k, states, plain, host or 1.0))  # fmt: skip
    open_ = np.ones((len(states), len(names)), dtype=bool)
    policies: tuple[Policy, ...] = tuple((("memory", name),) for name in names)
    return Block(policies, np.stack(parts, axis=1), open_, np.zeros(len(names)))


def _recomputed(source: Figures, k: int, states: Sequence[State], plain: Reals) -> Reals:
    found = plain.copy()
    found[:, AT["backward"]] += plain[:, AT["forward"]]
    for link in LINKS:
        found[:, AT[f"inner_backward.{link}"]] += plain[:, AT[f"inner_forward.{link}"]]
    whole = source.model.output_bytes_per_sample(k)[0]
    resident = np.array(
        [whole * (source.samples(y) or 0) / (y.degree if s == "column" else 1) for y, s in states]
    )
    gathered = source.gathered(k, states)
    resident = np.minimum(resident, plain[:, AT["saved"]] - gathered) + gathered
    found[:, AT["recomputed"]] = plain[:, AT["saved"]] - resident
    return _released(source, found, plain, resident, states)


def _offloaded(
    source: Figures, k: int, states: Sequence[State], plain: Reals, host_bytes_per_s: float
) -> Reals:
    found, unit = plain.copy(), source.model.profile.units[k]
    busiest, _ = source.readers(tuple(states))
    copy_s = busiest.values(unit, lambda s: s.saved, divides=False) / host_bytes_per_s
    found[:, AT["forward"]] += copy_s
    found[:, AT["backward"]] += copy_s
    found[:, AT["offloaded"]] = plain[:, AT["saved"]]
    return _released(source, found, plain, np.zeros(len(states)), states)


def _released(
    source: Figures, found: Reals, plain: Reals, resident: Reals, states: Sequence[State]
) -> Reals:
    """Feature maps of which only ``resident`` bytes stay, and the devices' time anew."""
    found[:, AT["workspace"]] += plain[:, AT["saved"]] - resident
    found[:, AT["saved"]] = resident
    both = [AT["forward"], AT["backward"]]
    more = source.model.micro_batches * (found[:, both] - plain[:, both]).sum(axis=1)
    free = [source.model.world_size - y.size for y, _ in states]
    found[:, AT["idle"]] += np.array(free) * more
    return found


def exchange_block(source: Figures, k: int) -> Block:
    """Every exchange policy, as what it adds to the plain one."""
    unit = source.model.profile.units[k]
    lossy = tuple(
        (c.exchange, r) for c in unit.fidelity for r in _affordable(source, k, c.exchange, c.ratios)
    )
    model = source.model
    around = neighbours_bytes(model, k), model.passing_bytes[k]
    spared = tuple(share.spared for share in unit.shares)  # zero for most units
    key = source.states_of(k), source.shape(k), around, lossy, spared
    if key not in source.exchanges:
        source.exchanges[key] = _exchange(source, k, lossy)
    shared = source.exchanges[key]
    return shared._replace(lost=source.lost(k, shared.policies))


def _affordable(
    source: Figures, k: int, exchange: str, ratios: Sequence[float]
) -> tuple[float, ...]:
    """The ratios at which a lossy exchange of unit ``k`` alone would not use up the budget."""
    goal, unit = source.model.goal, source.model.profile.units[k]
    known = source.space.capability.exchanges(sliced=source.model.sliced)
    if not goal.allow_lossy or exchange not in known:
        return ()
    budget = energy_budget(source.model)
    lost = {r: (1.0 - (unit.kept(exchange, r) or 0.0)) * source.energy[k] for r in ratios}
    return tuple(r for r in ratios if lost[r] <= budget)


def _exchange(source: Figures, k: int, lossy: Sequence[tuple[str, float]]) -> Block:
    states = source.states_of(k)
    trained = any(p.trainable for p in source.model.owned[k])
    names: list[tuple[str, float]] = [("dense", 1.0)]
    if trained and _shards(source.model, source.space.capability.exchange):
        names.append(("sharded", 1.0))
    if trained and may_gather(source.model, source.space.capability):
        names.append(("fully_sharded", 1.0))
    names += lossy if trained else ()
    early = (
        trained
        and source.space.capability.early_release
        and source.model.sliced
        and source.model.micro_batches == 1
    )
    fields = [(x, r, e, f) for x, r in names for e in (False, True)
              for f in _feedbacks(source, x)
              if not e or (early and x not in SHARDING)]  # fmt: skip
    figures = np.zeros((len(states), len(fields), len(FIGURES)))
    open_ = np.zeros(figures.shape[:2], dtype=bool)
    for i, state in enumerate(states):
        plain = np.array(source.figures(k, Option(*state)))
        for p, (x, r, e, f) in enumerate(fields):
            if x == "dense" or state[0].groups > 1:
                option = Option(*state, "keep", x, r, e, f)  # type: ignore[arg-type]
                figures[i, p] = np.array(source.figures(k, option)) - plain
                open_[i, p] = True
    policies: tuple[Policy, ...] = tuple(
        (("exchange", x), ("ratio", r), ("early_release", e), ("feedback", f))
        for x, r, e, f in fields
    )
    return Block(policies, figures, open_, np.zeros(len(policies)))


def _feedbacks(source: Figures, exchange: str) -> tuple[FeedbackPolicy, ...]:
    model, known = source.model, source.space.capability.feedback
    host_bytes_per_s = model.cluster.host_bytes_per_s
    return feedbacks(exchange, model.goal.optimizer, known, host_bytes_per_s)


def _shards(model: CostModel, exchanges: Sequence[str]) -> bool:
    """Whether an exchange may be sharded, and has something to divide."""
    rate = model.profile.update_seconds_per_byte(model.goal.optimizer)
    return "sharded" in exchanges and model.sliced and bool(model.goal.state_copies or rate)
