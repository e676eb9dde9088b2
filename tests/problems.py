"""Random small planning problems from a seed: chains and trees with joins, all options."""

from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np
from meshwright.planner.cost.budget import single_device_s
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.schema.capability import EVERYTHING, Capability
from meshwright.planner.schema.cluster import ExchangeHostTime, HostedExchange, StepOverhead
from meshwright.planner.schema.curve import Curve, proportional
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import lattice
from meshwright.planner.schema.profile import (
    CompressionRate,
    EdgeProfile,
    FidelityProfile,
    ModelProfile,
    ShareProfile,
    SplitProfile,
    UpdateRate,
)
from meshwright.planner.solve.choice import choice
from meshwright.planner.solve.evaluate import rank_memory
from meshwright.planner.solve.option_table import OptionTable
from meshwright.planner.solve.problem import Problem

from tests.brute import best, combinations
from tests.strategies import chain_profile, cluster, linear

MOST = 1_000_000


def problem(seed, most=MOST, varied=False):
    """The problem of a seed, with at most so many combinations. Of a ``varied`` one layouts,
    memory, exchange, micro-batches and slice size each have two values at least."""
    rng = np.random.default_rng(seed)
    for _ in range(600 if varied else 60):
        made = _varied(_draw(rng)) if varied else _draw(rng)
        if 1 < combinations(made) <= most and (not varied or varies(made)):
            return _limited(made, rng)
    raise AssertionError("no problem that small was drawn")


def issued_by_hosts(made, seed):
    """The problem on GPUs whose hosts take about as long to issue a step as they take for it."""
    rng = np.random.default_rng(seed)
    units = []
    for unit in made.profile.units:
        whole, samples = unit.whole, made.goal.batch / made.cluster.world_size
        forward, backward = (
            float(curve(samples) * rng.uniform(0.3, 2.0))
            for curve in (whole.forward, whole.backward)
        )
        units.append(
            msgspec.structs.replace(
                unit, host_forward_s=forward, host_backward_s=backward,
                saved_storages=int(rng.integers(0, 4)),
            )
        )  # fmt: skip
    step_s = sum(u.host_forward_s + u.host_backward_s for u in units)
    overhead = StepOverhead(
        rerun_s=0.1 * step_s,
        copy_s=0.05 * step_s,
        parameter_s=0.02 * step_s,
        move_s=float(rng.uniform(0.0, 0.1)) * step_s,
        message_s=0.01 * step_s,
        exchanges=tuple(
            ExchangeHostTime(exchange=name, each_s=float(rng.uniform(0.0, 0.1)) * step_s)
            for name in get_args(HostedExchange)
        ),
    )
    return replace(
        made,
        profile=msgspec.structs.replace(
            made.profile, device_type="cuda", units=tuple(units),
            updates=tuple(
                msgspec.structs.replace(rate, host_s=0.01 * step_s)
                for rate in made.profile.updates
            ),
        ),
        cluster=msgspec.structs.replace(
            made.cluster, overhead=overhead, priority_overhead=overhead
        ),
    )  # fmt: skip


def with_overhead(made, seed):
    """The problem with an executor whose own work takes about as long as what units compute."""
    rng = np.random.default_rng(seed)
    each_s, byte_s = 10 ** rng.uniform(-6, -4, 4), 10 ** rng.uniform(-10, -8, 2)
    overhead = StepOverhead(
        step_s=float(10 * each_s[0]), parameter_s=float(each_s[1]), move_s=float(each_s[2]),
        rerun_s=float(each_s[3]), byte_s=float(byte_s[0]), move_byte_s=float(byte_s[1]),
    )  # fmt: skip
    links = msgspec.structs.replace(made.cluster, overhead=overhead, priority_overhead=overhead)
    return replace(made, cluster=links)


def _varied(made):
    """The problem with everything left open that its draw may have closed."""
    goal = msgspec.structs.replace(
        made.goal, micro_batches=(1, 2), slice_bytes=(4096, 65536), allow_lossy=True
    )
    capability = msgspec.structs.replace(
        made.capability, memory=("keep", "recompute"), exchange=("dense", "sharded", "topk")
    )
    return replace(made, goal=goal, capability=capability, schedule="priority")


def varies(made):
    """Whether layouts, memory, exchange, micro-batches and slice size each have two values."""
    every = list(made.placed().cost_models())
    options = [o for row in OptionTable(every[0], made.capability).options for o in row]
    chosen = [{o.layout for o in options}, {o.memory for o in options}]
    chosen.append({o.exchange for o in options})
    sizes = [{m.micro_batches for m in every}, {m.message_bytes for m in every}]
    return all(len(kind) > 1 for kind in (*chosen, *sizes))


def _draw(rng):
    world = int(rng.choice([4, 4, 6, 8]))
    units = [_unit(rng, f"u{i}") for i in range(int(rng.integers(1, 8)))]
    if len(units) > 2 and rng.random() < 0.25:
        units[-1] = _tied(units[0], units[-1])
    profile = _graph(rng, units)
    per_node = int(rng.choice([d for d in (1, 2, 4) if world % d == 0]))
    links = cluster(
        world // per_node,
        per_node,
        inter=float(10 ** rng.uniform(6, 9)),
        intra=float(10 ** rng.uniform(8, 10)),
        latency_s=float(10 ** rng.uniform(-6, -4)),
        memory_bytes=10**12,
    )
    if rng.random() < 0.7:
        links = _with_host(links, float(10 ** rng.uniform(7, 9)))
    capability = Capability(
        styles=("none", "column", "row", "pair") if rng.random() < 0.7 else ("none",),
        memory=_some(rng, ("keep", "recompute", "offload")),
        exchange=_some(rng, ("dense", "sharded", "topk", "dropped")),
        idle_positions=bool(rng.random() < 0.5),
        early_release=bool(rng.random() < 0.3),
        micro_batches=True,
        feedback=EVERYTHING.feedback if len(units) % 2 else ("residual",),
        wire=EVERYTHING.wire if len(units) % 3 == 0 else ("exact",),
    )
    goal = Goal(
        batch=world * int(rng.choice([2, 4, 8])) + int(rng.choice([0, 0, 0, 1])),
        optimizer=str(rng.choice(["sgd", "momentum", "adam"])),
        micro_batches=(1, 2) if rng.random() < 0.5 else (1,),
        slice_bytes=(4096, 65536) if rng.random() < 0.6 else (65536,),
        allow_lossy=bool(rng.random() < 0.7),
        min_fidelity=float(rng.choice([0.7, 0.9])),
        pins=_pins(rng, units, world),
        objective="time" if rng.random() < 0.85 else "gpu_seconds",
        batch_statistics="global",
    )
    schedule = "priority" if rng.random() < 0.8 else "barrier"
    message_bytes = int(rng.choice([4096, 65536]))
    return Problem(
        profile,
        links,
        goal,
        capability,
        schedule=schedule,
        message_bytes=message_bytes,
        tie_tolerance=0.0,
    )


def _some(rng, names):
    """The first of the names and perhaps others."""
    return (names[0], *(n for n in names[1:] if rng.random() < 0.6))


def _unit(rng, name):
    rows, columns = (int(rng.choice([32, 64, 96])) for _ in range(2))
    seconds = float(10 ** rng.uniform(-6, -3))
    unit = linear(name, rows, columns, seconds, saved=float(rng.choice([0, 512, 4096])))
    whole = unit.whole
    shares = [_rough(rng, whole)]
    for split in unit.splits if rng.random() < 0.4 else ():
        degree = int(rng.choice([2, 4]))
        factor = float(rng.uniform(1 / degree, 1.0))
        shares.append(
            ShareProfile(
                style=split.style,
                degree=degree,
                forward=shares[0].forward.scaled(factor),
                backward=shares[0].backward.scaled(factor),
                saved=whole.saved.scaled(factor),
                gradient=whole.gradient,
                workspace=proportional(64.0),
                parameter_bytes=whole.parameter_bytes // degree,
            )
        )
    fidelity = tuple(
        FidelityProfile(
            exchange=x, ratios=(0.05, 0.3), kept=tuple(sorted(map(float, rng.uniform(0.3, 1, 2))))
        )
        for x in ("topk", "dropped")
        if rng.random() < 0.5
    )
    splits = unit.splits if rng.random() < 0.7 else _pair(unit)
    return msgspec.structs.replace(
        unit,
        shares=tuple(shares) if splits == unit.splits else tuple(shares[:1]),
        splits=splits,
        fidelity=fidelity,
        gradient_energy=float(rng.uniform(0.1, 3)),
        state_bytes=int(rng.choice([0, 128])),
    )


def _pair(unit):
    name = unit.parameters[0].shared
    return (SplitProfile(style="pair", parts=8, uneven=False, features=8, sharded=((name, 0),)),)


def _rough(rng, whole):
    """The share with times that are not quite proportional to the samples."""
    xs = (1.0, 4.0, 16.0, 64.0)

    def curve(base):
        values = [float(base(x) * rng.uniform(0.8, 1.2) + 2e-6) for x in xs]
        return Curve(x=xs, y=tuple(sorted(values)))

    return msgspec.structs.replace(
        whole, forward=curve(whole.forward), backward=curve(whole.backward)
    )


def _tied(first, last):
    parameter = first.parameters[0]
    renamed = msgspec.structs.replace(parameter, name=f"{last.name}.weight")
    return msgspec.structs.replace(
        first, name=last.name, modules=(last.name,), parameters=(renamed,)
    )


def _graph(rng, units):
    updates = [(o, float(10 ** rng.uniform(-11, -9))) for o in ("sgd", "momentum", "adam")]
    base = chain_profile(units, float(rng.choice([64, 512, 4096])), 96)
    edges = list(base.edges) if rng.random() < 0.5 else _tree(rng, base)
    return msgspec.structs.replace(
        base,
        edges=tuple(edges),
        updates=tuple(UpdateRate(optimizer=o, seconds_per_byte=r) for o, r in updates),
        compression=(
            CompressionRate(exchange="topk", seconds_per_byte=float(10 ** rng.uniform(-11, -9))),
        ),
    )


def _tree(rng, base: ModelProfile):
    """Branches and joins: each unit after an earlier one, leaves joined at the end."""
    names, edges = [u.name for u in base.units], []
    for i in range(1, len(names) - 1):
        sources = {int(rng.integers(max(i - 3, 0), i))}
        if rng.random() < 0.3:
            sources.add(int(rng.integers(0, i)))
        edges += [(s, i) for s in sorted(sources)]
    used = {s for s, _ in edges}
    edges += [(i, len(names) - 1) for i in range(len(names) - 1) if i not in used]
    return [
        EdgeProfile(
            source=names[s],
            target=names[t],
            bytes_per_sample=float(rng.choice([64, 512, 4096])),
            gradient_bytes_per_sample=0.0 if s == 0 else float(rng.choice([64, 512])),
            features=96,
        )
        for s, t in edges
    ]


def _with_host(links, rate):
    nodes = tuple(
        msgspec.structs.replace(
            n,
            devices=tuple(msgspec.structs.replace(d, host_bytes_per_s=rate) for d in n.devices),
        )
        for n in links.nodes
    )
    return msgspec.structs.replace(links, nodes=nodes)


def _pins(rng, units, world):
    """Takes some layouts away from some units, so that few enough combinations remain."""
    every = list(lattice(world))
    pins = []
    for unit in units:
        keep = int(rng.integers(1, 5))
        if rng.random() < 0.7:
            chosen = rng.choice(len(every), size=min(keep, len(every)), replace=False)
            layouts = {every[0 if i < 0 else int(i)] for i in chosen}
            layouts.add(every[-1] if rng.random() < 0.1 else _home(world))
            pins.append(Pin(unit=unit.name, only=tuple(sorted(layouts))))
    return tuple(pins)


def _home(world):
    return next(y for y in lattice(world) if y.groups == world)


def value_of(made, found):
    """The figures of what brute force found, by the cost model."""
    model = made.cost_model(found.micro_batches, found.message_bytes)
    return choice(model, found.decisions, made.schedule)


def _limited(made, rng):
    """The problem with limits that its free optimum breaks, as often as not."""
    found = best(made)
    if not found.decisions or rng.random() < 0.35:
        return made
    goal, kind = made.goal, rng.random()
    changes = {}
    if kind < 0.6:
        model = made.cost_model(found.micro_batches, found.message_bytes)
        peak = max(m.peak_bytes for m in rank_memory(model, found.decisions))
        least = found.least_bytes
        part = rng.uniform(0, 0.9) if rng.random() < 0.95 else -0.05
        changes["memory_limit_bytes"] = int(least + part * (peak - least))
    if kind > 0.5:
        model = CostModel(made.profile, made.cluster, goal)
        single = sum(single_device_s(model, k) for k in range(len(model.profile.units)))
        used = value_of(made, found).gpu_seconds / single
        least = found.least_gpu_seconds / single
        changes["amplification_limit"] = float(least + rng.uniform(0.05, 0.9) * (used - least))
    if rng.random() < 0.1:
        changes["unit_amplification_limit"] = float(rng.uniform(1.0, 3.0))
    return replace(made, goal=msgspec.structs.replace(goal, **changes))
