"""Hypothesis strategies and small builders for the planner's records, shared by tests."""

from itertools import pairwise

import msgspec
import numpy as np
from hypothesis import strategies as st
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.step_time import Chain
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.cluster import (
    Cluster,
    CollectiveCurve,
    Device,
    Interference,
    Level,
    Node,
    StepOverhead,
)
from meshwright.planner.schema.curve import ZERO, Curve, proportional
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import lattice
from meshwright.planner.schema.options import Option, allowed, ties_agree
from meshwright.planner.schema.profile import (
    EdgeProfile,
    ModelProfile,
    ParameterProfile,
    ShareProfile,
    SplitProfile,
    UnitProfile,
    UpdateRate,
)
from meshwright.planner.solve.evaluate import make_plan

WORLDS = (1, 2, 3, 4, 6, 8)


# -- builders ---------------------------------------------------------------------------------


def constant(value):
    """The same value at every size above zero."""
    return Curve(x=(1.0, 2.0), y=(value, value))


def share(style="none", degree=1, forward=ZERO, backward=ZERO, saved=0.0, parameter_bytes=0):
    """Measurements of a share; memory in bytes per sample."""
    return ShareProfile(
        style=style,
        degree=degree,
        forward=forward,
        backward=backward,
        saved=proportional(saved) if saved else ZERO,
        gradient=proportional(saved) if saved else ZERO,
        workspace=ZERO,
        parameter_bytes=parameter_bytes,
        new_grad=constant(float(parameter_bytes)),
    )


def end(kind):
    """The model's input or output."""
    return UnitProfile(name=kind, kind=kind, shares=(share(),))


def linear(name, rows=64, columns=64, seconds_per_sample=1e-4, saved=256.0, shared=None):
    """A linear unit that divides by columns and rows, its time proportional to its work."""
    parameter = ParameterProfile(
        name=f"{name}.weight",
        shared=shared or f"{name}.weight",
        shape=(rows, columns),
        bytes=4 * rows * columns,
    )
    forward, backward = proportional(seconds_per_sample), proportional(2 * seconds_per_sample)
    splits = tuple(
        SplitProfile(
            style=style,
            parts=parts,
            uneven=True,
            features=parts,
            sharded=((parameter.shared, dim),),
        )
        for style, parts, dim in (("column", rows, 0), ("row", columns, 1))
    )
    return UnitProfile(
        name=name,
        kind="linear",
        modules=(name,),
        batched_inputs=(0,),
        parameters=(parameter,),
        splits=splits,
        shares=(share("none", 1, forward, backward, saved, parameter.bytes),),
    )


def norm(name, seconds_per_sample=1e-5, statistics_bytes=512):
    """A unit with batch statistics."""
    time = proportional(seconds_per_sample)
    return UnitProfile(
        name=name,
        kind="norm",
        modules=(name,),
        batched_inputs=(0,),
        batch_statistics=True,
        statistics_bytes=statistics_bytes,
        shares=(share("none", 1, time, time, 64.0),),
    )


def chain_profile(units, bytes_per_sample=256.0, features=64, updates=()):
    """A model whose units follow one another."""
    units = (end("input"), *units, end("output"))
    edges = tuple(
        EdgeProfile(
            source=a.name,
            target=b.name,
            bytes_per_sample=bytes_per_sample,
            gradient_bytes_per_sample=0.0 if a.kind == "input" else bytes_per_sample,
            features=features,
        )
        for a, b in pairwise(units)
    )
    return ModelProfile(
        target="test",
        model="0" * 16,
        device="test",
        device_type="cpu",
        dtype="float32",
        batches=(1, 2),
        units=units,
        edges=edges,
        updates=tuple(UpdateRate(optimizer=o, seconds_per_byte=r) for o, r in updates),
    )


def cluster(
    nodes=8,
    devices=1,
    inter=125e6,
    intra=10e9,
    latency_s=20e-6,
    memory_bytes=80 * 2**30,
    interference=None,
    pairs=(),
    curves=(),
    overhead=None,
):
    """Equal nodes of equal devices; bandwidths in bytes per second."""
    device = Device(name="test", memory_bytes=memory_bytes)
    counts = devices if isinstance(devices, tuple) else (devices,) * nodes
    return Cluster(
        name="test",
        nodes=tuple(Node(name=f"n{i}", devices=(device,) * n) for i, n in enumerate(counts)),
        levels=(
            Level(name="intra", latency_s=latency_s / 4, bytes_per_s=intra),
            Level(name="inter", latency_s=latency_s, bytes_per_s=inter, curves=curves),
        ),
        interference=interference or Interference(),
        overhead=overhead or StepOverhead(),
        pair_bytes_per_s=pairs,
    )


# -- strategies -------------------------------------------------------------------------------

seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1.0))
rates = st.floats(1e5, 1e12)


def up_to(most):
    """Zero, or a number that a record may hold."""
    return st.one_of(st.just(0.0), st.floats(min(1e-30, most), most))


@st.composite
def curves(draw, most=4, top=1.0):
    """A curve of up to ``most`` points."""
    xs = draw(st.lists(st.integers(1, 512), min_size=1, max_size=most, unique=True))
    ys = draw(st.lists(up_to(top), min_size=len(xs), max_size=len(xs)))
    return Curve(x=tuple(float(x) for x in sorted(xs)), y=tuple(ys))


@st.composite
def step_chains(draw, links="one"):
    """Costs of a few units; ``links`` is whether gradients use ``one`` link or ``both``."""
    n = draw(st.integers(1, 7))
    figures = st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.floats(0, 10))
    row = st.lists(figures, min_size=n, max_size=n)
    vectors = [np.array(draw(row)) for _ in range(3)]
    blocking = [np.array([draw(row), draw(row)]) for _ in range(4)]
    exchange = np.array([draw(row), draw(row)])
    if links == "one":
        exchange[draw(st.integers(0, 1))] = 0.0
    return Chain(*vectors, *blocking, exchange)


@st.composite
def clusters(draw, worlds=WORLDS, measured=False, equal=False):
    """Two-level clusters, with measured curves on request."""
    world = draw(st.sampled_from(worlds))
    per_node = draw(st.sampled_from([d for d in range(1, world + 1) if world % d == 0]))
    counts = [per_node] * (world // per_node)
    if not equal and len(counts) > 1 and draw(st.booleans()):
        counts[0] += counts.pop()
    return cluster(
        devices=tuple(counts),
        inter=draw(rates),
        intra=draw(rates),
        latency_s=draw(up_to(1e-3)),
        memory_bytes=draw(st.integers(2**10, 2**40)),
        interference=Interference(
            compute_slowdown=draw(st.floats(1, 2)), communication_slowdown=draw(st.floats(1, 2))
        ),
        curves=draw(collective_curves()) if measured else (),
        overhead=draw(st.one_of(st.none(), overheads())),
    )


def overheads():
    """Of an executor's own work, the same whatever the schedule."""
    each, byte = up_to(1e-3), up_to(1e-8)
    return st.builds(
        StepOverhead, step_s=each, parameter_s=each, byte_s=byte, move_s=each, move_byte_s=byte,
        rerun_s=each,
    )  # fmt: skip


@st.composite
def collective_curves(draw):
    """Measured curves of a few collectives."""
    names = ("p2p", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    keys = st.lists(
        st.tuples(st.sampled_from(names), st.sampled_from((2, 4))), max_size=4, unique=True
    )
    return tuple(
        CollectiveCurve(
            collective=name,
            ranks=ranks,
            seconds=draw(curves()),
            latency_s=draw(up_to(1e-3)),
            bytes_per_s=draw(rates),
        )
        for name, ranks in draw(keys)
    )


@st.composite
def unit_profiles(draw, name, shared=None):
    """A unit that divides by columns and rows, as a pair, or not at all."""
    kind = draw(st.sampled_from(("linear", "attention", "norm", "glue", "other")))
    time = draw(seconds)
    if kind == "linear":
        size = st.just(16) if shared else st.integers(1, 64)  # tied weights have one shape
        rows, columns = draw(size), draw(size)
        saved = float(draw(st.integers(0, 512)))
        unit = linear(name, rows, columns, time, saved, shared)
        never_together = proportional(draw(up_to(saved))) if saved else ZERO
        whole = msgspec.structs.replace(unit.whole, never_together=never_together)
        return msgspec.structs.replace(unit, shares=(whole,))
    if kind == "norm":
        return norm(name, time, draw(st.integers(0, 4096)))
    unit = linear(name, draw(st.integers(1, 64)), 8, time, 32.0)
    whole = unit.whole
    if kind == "glue":
        return UnitProfile(name=name, kind="glue", shares=(share("none", 1, whole.forward),))
    if kind == "other":
        return UnitProfile(
            name=name, kind="other", batched_inputs=(0,), parameters=unit.parameters,
            shares=(whole,), state_bytes=8,
        )  # fmt: skip
    heads = draw(st.integers(1, 8))
    split = SplitProfile(
        style="pair",
        parts=heads,
        uneven=False,
        features=8,
        sharded=((unit.parameters[0].shared, 0),),
    )
    half = share("pair", 2, draw(curves()), draw(curves()), 16.0, whole.parameter_bytes // 2)
    return UnitProfile(
        name=name,
        kind="attention",
        modules=(name,),
        batched_inputs=(0,),
        parameters=unit.parameters,
        splits=(split,),
        shares=(whole, half),
    )


@st.composite
def profiles(draw, most=5):
    """Graphs of up to ``most`` units: a chain with some skips, perhaps a tied parameter."""
    count = draw(st.integers(1, most))
    tied = draw(st.booleans())
    units = [
        draw(unit_profiles(f"u{i}", "tied" if tied and i in (0, count - 1) else None))
        for i in range(count)
    ]
    base = chain_profile(units, float(draw(st.integers(1, 4096))), draw(st.integers(1, 64)))
    names = [u.name for u in base.units]
    pairs = st.tuples(st.integers(0, count + 1), st.integers(0, count + 1))
    skips = draw(st.lists(pairs, max_size=2))
    extra = [
        EdgeProfile(
            source=names[a],
            target=names[b],
            bytes_per_sample=draw(up_to(1e4)),
            gradient_bytes_per_sample=draw(up_to(1e4)),
            features=draw(st.integers(1, 64)),
        )
        for a, b in skips
        if a < b
    ]
    rate = draw(st.sampled_from(((), (("sgd", 1e-9),))))
    return chain_profile(units, 256.0, 64, rate) if not extra else _with_edges(base, extra)


def _with_edges(base, extra):
    return ModelProfile(
        target=base.target,
        model=base.model,
        device=base.device,
        device_type=base.device_type,
        dtype=base.dtype,
        software=(("torch", "2"),),
        batches=base.batches,
        units=base.units,
        edges=(*base.edges, *extra),
        step=proportional(1e-3),
        updates=(UpdateRate(optimizer="adam", seconds_per_byte=1e-9),),
    )


@st.composite
def goals(draw, world, batch=None):
    """A goal without a memory limit."""
    return Goal(
        batch=batch or draw(st.integers(world, 8 * world)),
        optimizer=draw(st.sampled_from(("sgd", "momentum", "adam", "adamw"))),
        batch_statistics=draw(st.sampled_from(("local", "global"))),
    )


def choices(model, bursts=True):
    """The options of each unit of a cost model, bursts among them."""
    layouts = list(lattice(model.world_size, bursts=bursts))
    options = [
        Option(layout, style)
        for layout in layouts
        for style in ("none", "column", "row", "pair")
        if (style == "none") == (layout.degree == 1)
    ]
    rules = model.goal, EVERYTHING, model.world_size
    return [[o for o in options if allowed(u, o, *rules)] for u in model.profile.units]


@st.composite
def decisions(draw, model, bursts=True):
    """One allowed option for each unit; tied units agree or are data parallel."""
    found = [draw(st.sampled_from(options)) for options in choices(model, bursts)]
    for k, units in enumerate(model.ties):
        if units[0] == k and not ties_agree(
            [model.profile.units[u] for u in units], [found[u] for u in units]
        ):
            for u in units:
                found[u] = model.baseline[u]
    return tuple(found)


@st.composite
def decided(draw, bursts=True, measured=False):
    """(cost model, decisions)."""
    links = draw(clusters(measured=measured))
    goal = draw(goals(links.world_size))
    most = goal.batch // links.world_size
    made, times = draw(profiles()), draw(st.integers(1, min(most, 3)))
    model = CostModel(made, links, goal, micro_batches=times)
    return model, draw(decisions(model, bursts))


@st.composite
def plans(draw):
    """Plans of random decisions."""
    model, chosen = draw(decided())
    return make_plan(model.profile, model.cluster, model.goal, chosen, model.micro_batches)
