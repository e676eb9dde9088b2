"""Plans that must stay as they are: a change of the package that is meant to change nothing is held
against them.

Each case is asked for through the public functions and documents, so that it outlives a move of
modules. What is frozen has the names of the plan's document. Where a plan is meant to change,
``python -m tests.unit.planner.test_goldens [CASE...]`` writes what the cases give now; read the
difference before committing it.
"""

import json
import math
import sys
import tempfile
from functools import cache
from pathlib import Path

import meshwright as mw
import msgspec
import pytest
from meshwright.planner.solve.heuristic import infeasible, segmented
from meshwright.planner.solve.lagrangian import lagrange
from meshwright.planner.solve.lagrangian import solver as lagrangian
from meshwright.planner.solve.solver import solve
from meshwright.profiler.estimate import load_table
from threadpoolctl import threadpool_info

from tests.problems import problem
from tests.strategies import chain_profile, cluster, linear, norm

FOLDER = Path(__file__).parent / "goldens"
SOLVERS = ("heuristic", "integer", "lagrangian")
SECONDS = 600.0
"""For each search: no case takes a tenth of it, so that no search is cut short."""
CLOCKS = (
    (lagrange, "RESTRICTED_S"),
    (lagrangian, "TIGHTEN_S"),
    (lagrangian, "BEGIN_S"),
    (infeasible, "EXPLAIN_S"),
    (infeasible, "NODES_S"),
    (segmented, "EFFORT_S"),
    (segmented, "UNLIMITED_S"),
)
"""What searches give a part of themselves: on a busy machine that would cut some short."""
MIB = 2**20
CASES = {}
KERNELS = {each.get("architecture") for each in threadpool_info() if each["user_api"] == "blas"}
"""For which processors the products of matrices are made that numpy and scipy use here."""
SLOW = {
    *(f"drawn_{n}-{solver}" for n in range(6, 12) for solver in SOLVERS),
    *("least_device_time-integer", "many_units_on_many_ranks-heuristic"),
    *("pins-heuristic", "pins-lagrangian", "sent_in_part_for_adam-integer"),
    *("vgg16_on_two_levels-heuristic", "vgg16_on_two_levels-lagrangian"),
    "vgg16_with_little_memory-heuristic",
}
"""Those that take long where another solver has the same case, and half of the drawn problems."""
TIED = {"least_device_time-integer"}
"""Cases in which plans tie to rounding. Since Python 3.12 ``sum`` of floats rounds another way, and
another of them is found."""
TIED_PRICES = {"drawn_8-lagrangian"}
"""Cases in which prices of choices tie to rounding. Products of matrices round another way where
the processor has wider registers, and another plan is found."""


def golden(*solvers, **named):
    """Makes a function a case, one for each solver; without any it is asked once, with no solver.
    What is ``named`` is handed on."""

    def add(function):
        name = function.__name__
        if solvers:
            CASES.update({f"{name}-{s}": lambda s=s: function(solver=s, **named) for s in solvers})
        else:
            CASES[name] = lambda: function(**named)
        return function

    return add


# -- models and clusters -------------------------------------------------------------------------


def changed(record, **fields):
    """A document or a part of one with fields as they are written in files."""
    return msgspec.convert({**msgspec.to_builtins(record), **fields}, type(record))


def a100s(nodes=8, per_node=1, gbit_s=1.0, **more):
    intra = {"intra_gbyte_s": 300.0} if per_node > 1 else {}
    return mw.describe_cluster(
        device="a100-sxm-40gb", nodes=nodes, devices_per_node=per_node, inter_gbit_s=gbit_s,
        **intra, **more,
    )  # fmt: skip


@cache
def table(name):
    return load_table(name)


def with_fidelity(profile):
    """The profile with what a lossy exchange keeps of each unit that has parameters."""
    curves = [
        {"exchange": "topk", "ratios": [0.01, 0.1], "kept": [0.6, 0.95]},
        {"exchange": "dropped", "ratios": [0.5], "kept": [0.8]},
    ]
    units = [
        changed(u, fidelity=curves, gradient_energy=1.0 + i % 3) if u.parameters else u
        for i, u in enumerate(profile.units)
    ]
    rates = [{"exchange": "topk", "seconds_per_byte": 2e-11}]
    return changed(profile, units=[msgspec.to_builtins(u) for u in units], compression=rates)


def chain(count, seconds=1e-4, width=256, saved=2.0**14):
    """Layers whose work and widths differ a little, as rivals that tie would be told apart by
    rounding only."""
    units = [
        linear(f"fc{i}", width + 32 * (i % 5), width, seconds * (1 + 0.1 * (i % 7)), saved)
        for i in range(count)
    ]
    updates = [(name, 1e-10) for name in ("sgd", "momentum", "adam", "adamw")]
    return chain_profile(units, bytes_per_sample=4.0 * width, features=width, updates=updates)


def in_pieces(profile):
    """The profile with units that may be recomputed together, one after the other."""
    names = [u.name for u in profile.units if u.kind == "linear"]
    pieces = [
        {"modules": [n], "first": n, "last": n, "follows": names[max(i - 1, 0) : i]}
        for i, n in enumerate(names)
    ]
    return changed(profile, pieces=pieces)


def offloading(links, rate=2e10):
    """The cluster with a link to the host's memory in each device."""
    made = msgspec.to_builtins(links)
    for node in made["nodes"]:
        for device in node["devices"]:
            device["host_bytes_per_s"] = rate
    return msgspec.convert(made, type(links))


def planned(profile, links, goal, solver="auto", **how):
    return mw.plan(profile, links, goal, solver=solver, time_limit_s=SECONDS, **how)


# -- time alone ----------------------------------------------------------------------------------


@golden("auto", "heuristic", "lagrangian")
def vgg16_over_a_gigabit(solver):
    return planned(table("vgg16"), a100s(), mw.Goal(batch=256), solver)


@golden("integer")
def vgg16_over_a_terabyte(solver):
    return planned(table("vgg16"), a100s(gbit_s=8000.0), mw.Goal(batch=2048), solver)


@golden("integer", "lagrangian")
def vgg16_by_barrier(solver):
    goal = mw.Goal(batch=250, optimizer="adam")
    return planned(table("vgg16"), a100s(gbit_s=10.0), goal, solver, schedule="barrier")


@golden("integer")
def vgg16_by_priority(solver):
    goal = mw.Goal(batch=256, optimizer="momentum", slice_bytes=(MIB // 4, 4 * MIB))
    return planned(table("vgg16"), a100s(gbit_s=10.0), goal, solver, schedule="priority")


@golden(*SOLVERS)
def vgg16_on_two_levels(solver):
    return planned(
        table("vgg16"), a100s(2, 4, 10.0), mw.Goal(batch=256), solver, schedule="barrier"
    )


@golden("heuristic", "lagrangian")
def wide_resnet_on_two_levels(solver):
    goal = mw.Goal(batch=128, batch_statistics="global")
    links = a100s(2, 4, 5.0)
    return planned(table("wide_resnet101_2"), links, goal, solver, schedule="barrier")


@golden("heuristic", "integer")
def every_layout_of_six_ranks(solver):
    return planned(chain(4), cluster(6), mw.Goal(batch=63, all_layouts=True), solver)


@golden(*SOLVERS)
def pins(solver):
    home, pair = {"groups": 8}, {"groups": 4, "degree": 2}
    wishes = (
        {"unit": "*.conv2d", "only": [home]},
        {"unit": "34.linear", "only": [pair], "styles": ["column"]},
        {"unit": "36.linear", "never": [{"groups": 1, "degree": 8}], "never_styles": ["row"]},
    )
    goal = changed(mw.Goal(batch=256), pins=wishes)
    return planned(table("vgg16"), a100s(), goal, solver, schedule="barrier")


@golden(*SOLVERS)
def ties(solver):
    first = linear("embed", 4096, 256, 1e-6, shared="wte")
    last = linear("head", 4096, 256, 1e-6, shared="wte")
    profile = chain_profile([first, norm("norm"), linear("fc", 64, 64, 1e-6), last])
    goal = mw.Goal(batch=32, batch_statistics="global")
    return planned(profile, cluster(8, inter=1e7), goal, solver)


@golden("heuristic", "lagrangian")
def many_units_on_many_ranks(solver):
    goal = mw.Goal(batch=1024, optimizer="adam")
    links = cluster(16, 4, inter=1.25e9, intra=1e11)
    return planned(chain(60, width=512), links, goal, solver, schedule="barrier")


# -- memory --------------------------------------------------------------------------------------


@cache
def plain_bytes(profile, links, goal):
    """What plain data parallelism takes: the same for every solver, and whatever else there is."""
    pinned = changed(goal, pins=[{"unit": "*", "only": [{"groups": 4}]}])
    free = planned(profile, links, pinned, "lagrangian", schedule="barrier")
    return max(free.baseline.peak_bytes)


def short_of_memory(solver, share, profile=None, host=False, undivided=False, forbidden=(), **goal):
    """Layers on four ranks with so much of the memory that plain data parallelism takes."""
    profile = profile or chain(4, width=512, saved=2.0**17)
    links = cluster(4, inter=1e9)
    links = offloading(links) if host else links
    goal = {"batch": 64, "optimizer": "adam", "slice_bytes": (MIB,), **goal}
    goal["memory_limit_bytes"] = int(plain_bytes(profile, links, mw.Goal(**goal)) * share)
    goal["pins"] = [{"unit": "*", "only": [{"groups": 4}]}] if undivided else []
    limited = changed(mw.Goal(batch=1), **goal)
    how = {"schedule": "priority", "forbidden": forbidden}
    return planned(profile, links, limited, solver, **how)


@golden(*SOLVERS)
def vgg16_with_little_memory(solver):
    goal = mw.Goal(batch=256, optimizer="adam", memory_limit_bytes=2200 * MIB)
    return planned(table("vgg16"), a100s(gbit_s=100.0), goal, solver, schedule="barrier")


@golden(*SOLVERS)
def recomputed(solver):
    return short_of_memory(solver, 0.7, forbidden=("sharded", "fully_sharded"))


@golden("integer")
def offloaded(solver):
    return short_of_memory(solver, 0.7, host=True, forbidden=("recompute", "fully_sharded"))


@golden("heuristic", "integer")
def sharded(solver):
    return short_of_memory(solver, 0.75, forbidden=("recompute", "fully_sharded"))


@golden(*SOLVERS)
def fully_sharded(solver):
    return short_of_memory(
        solver, 0.55, chain(4, width=512, saved=1024.0), undivided=True, forbidden=("recompute",)
    )


@golden(*SOLVERS)
def released_early(solver):
    return short_of_memory(
        solver, 0.9, chain(4, width=512, saved=1024.0), undivided=True,
        forbidden=("recompute", "sharded", "fully_sharded"),
    )  # fmt: skip


@golden("heuristic", "integer")
def in_micro_batches(solver):
    profile = chain(4, width=128, saved=2.0**18)
    goal = {"forbidden": ("recompute", "sharded", "fully_sharded"), "micro_batches": (1, 4)}
    return short_of_memory(solver, 0.45, profile, undivided=True, **goal)


@golden(*SOLVERS)
def in_segments(solver):
    units = [linear(f"u{i}", 1, 1, 1e-3, 1000.0) for i in range(10)]
    profile = in_pieces(chain_profile(units, bytes_per_sample=500.0))
    return short_of_memory(solver, 0.5, profile, batch=8, optimizer="sgd")


# -- lossy exchange ------------------------------------------------------------------------------


def lossy(solver, profile, forbidden=(), **goal):
    goal = mw.Goal(batch=64, allow_lossy=True, min_fidelity=0.85, slice_bytes=(MIB // 2,), **goal)
    links = offloading(cluster(4, inter=1e8))
    how = {"schedule": "priority", "forbidden": forbidden}
    return planned(with_fidelity(profile), links, goal, solver, **how)


@golden("heuristic", "integer")  # lagrangian: now and then another of two near plans
def sent_in_part(solver):
    return lossy(solver, chain(4, width=512), optimizer="momentum")


@golden("heuristic", "integer")  # lagrangian: as above
def sent_in_part_for_adam(solver):
    return lossy(solver, chain(4, width=512), optimizer="adam")


@golden(*SOLVERS)
def left_for_later(solver):
    return lossy(solver, chain(4, width=512), ("topk",))


# -- idle devices --------------------------------------------------------------------------------


@golden(*SOLVERS)
def least_device_time(solver):
    goal = mw.Goal(batch=32, objective="gpu_seconds", time_limit_s=0.03)
    how = {"bursts": True, "schedule": "barrier"}
    return planned(table("vgg16"), a100s(gbit_s=100.0), goal, solver, **how)


@golden(*SOLVERS)
def limited_device_time(solver):
    goal = mw.Goal(batch=64, amplification_limit=1.3)
    how = {"bursts": True, "schedule": "barrier"}
    return planned(chain(6), cluster(4, inter=1e9), goal, solver, **how)


@golden(*SOLVERS)
def limited_device_time_of_each_unit(solver):
    goal = mw.Goal(batch=32, unit_amplification_limit=1.5)
    links = a100s(gbit_s=100.0)
    return planned(table("vgg16"), links, goal, solver, bursts=True, schedule="barrier")


@golden("heuristic", "lagrangian")
def beside_a_background_job(solver):
    goal = mw.Goal(
        batch=32, objective="gpu_seconds", time_limit_s=0.03, background=True,
        background_limit=1.3,
    )  # fmt: skip
    how = {"bursts": True, "schedule": "barrier"}
    return planned(table("vgg16"), a100s(gbit_s=100.0), goal, solver, **how)


def branched():
    """A block with three branches and a join, of kernels that take as long for one sample as for
    many."""
    units = [linear(name, 4 + i, 4) for i, name in enumerate("abcdefg")]
    made = msgspec.to_builtins(chain_profile(units, bytes_per_sample=16.0, features=4))
    for i, unit in enumerate(made["units"][1:-1]):
        curve = {"x": [1.0, 64.0], "y": [1e-3 * (2 + i), 1e-3 * (2 + i)]}
        unit["shares"][0].update(forward=curve, backward=curve)
        unit["splits"] = []
    ends = [e for e in made["edges"] if "put" in e["source"] + e["target"]]
    sizes = {"bytes_per_sample": 16.0, "gradient_bytes_per_sample": 16.0}
    made["edges"] = ends + [{"source": a, "target": b, **sizes} for a, b in BRANCHES]
    return msgspec.convert(made, mw.ModelProfile)


BRANCHES = (
    ("a", "b"),
    ("a", "c"),
    ("c", "d"),
    ("a", "e"),
    ("b", "f"),
    ("d", "f"),
    ("e", "f"),
    ("f", "g"),
)


@golden(*SOLVERS)
def branches_side_by_side(solver):
    links = cluster(4, inter=1e12, intra=1e12, latency_s=1e-6)
    how = {"bursts": True, "schedule": "barrier"}
    return planned(branched(), links, mw.Goal(batch=8), solver, **how)


@golden("heuristic", "integer")
def all_that_can_be_decided(solver):
    goal = mw.Goal(batch=64, optimizer="adam", micro_batches=(1, 2), slice_bytes=(MIB,))
    return planned(chain(4), cluster(2, 2, inter=1e8), goal, solver, hypothetical=True)


# -- refusals ------------------------------------------------------------------------------------


@golden("heuristic", "integer")
def no_room(solver):
    goal = mw.Goal(batch=64, optimizer="adam", memory_limit_bytes=2 * MIB)
    links = cluster(4, inter=1e9)
    return planned(chain(3, width=512), links, goal, solver, schedule="barrier")


@golden("lagrangian")
def no_such_step(solver):
    goal = mw.Goal(batch=64, time_limit_s=1e-3)
    return planned(chain(3), cluster(4), goal, solver, schedule="barrier")


@golden("integer")
def no_such_device_time(solver):
    goal = mw.Goal(batch=64, amplification_limit=0.5)
    return planned(chain(3), cluster(4), goal, solver, bursts=True, schedule="barrier")


@golden("heuristic")
def pins_that_leave_nothing(solver):
    pin = {"unit": "fc1", "only": [{"groups": 4}], "styles": ["row"]}
    goal = changed(mw.Goal(batch=64), pins=[pin])
    return planned(chain(3), cluster(4), goal, solver, schedule="barrier")


# -- drawn problems ------------------------------------------------------------------------------


@cache
def random_problem(seed):
    return problem(seed, most=20_000)


def drawn(solver, seed):
    """A small random problem; what the solver itself says of its answer is frozen, too."""
    result = solve(random_problem(seed), solver, SECONDS)
    said = {name: getattr(result, name) for name in ("status", "objective_s", "bound_s", "gap")}
    why = result.infeasible and result.infeasible.sentence
    return {**said, "error": why, **(figures(result.plan) if result.plan else {})}


CASES.update({f"drawn_{n}-{s}": lambda n=n, s=s: drawn(s, n) for n in range(12) for s in SOLVERS})


# -- what is frozen ------------------------------------------------------------------------------

PASSING = ("solve_s", "software", "profile", "cluster")
"""Of a plan's provenance: what differs between runs, versions and files."""
DECIDED = (
    "world_size", "micro_batches", "message_bytes", "schedule", "placement", "units", "prediction",
    "baseline_fits", "hypothetical",
)  # fmt: skip


SURE = ("low_s", "high_s", "waiting_s")


def figures(plan):
    """What is frozen of a plan."""
    made = msgspec.to_builtins(plan)
    found = {name: made[name] for name in DECIDED}
    # How sure a prediction is changes with what predictions have been seen to miss.
    prediction = made["prediction"]
    # Of GPUs, and of their hosts, only.
    rare = ("reserved_bytes", "pinned_bytes", "copies_s")
    nothing = {n for n in rare if not prediction[n]}
    left_out = {*SURE, *nothing}
    found["prediction"] = {n: v for n, v in prediction.items() if n not in left_out}
    found["baseline"] = {"step_s": made["baseline"]["step_s"]}
    proved = made["provenance"].items()
    found["provenance"] = {name: value for name, value in proved if name not in PASSING}
    return found


def answer(name):
    """What a case gives now, as it is written: its figures, or the sentence of its refusal."""
    with pytest.MonkeyPatch.context() as patch:
        for module, limit in CLOCKS:
            patch.setattr(module, limit, SECONDS)
        try:
            found = CASES[name]()
        except mw.MeshwrightError as error:
            found = {"error": f"{type(error).__name__}: {error}"}
    return json.loads(written(found if isinstance(found, dict) else figures(found)))


def written(found):
    """One line for each field and each unit, so that a difference is short to read."""
    lines = []
    for key, value in found.items():
        text = json.dumps(value)
        if key == "units":
            text = "[\n  " + ",\n  ".join(json.dumps(unit) for unit in value) + "\n ]"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def path_of(name):
    return FOLDER / f"{name}.json"


def differences(expected, found, where=""):
    """Where two documents differ: in the twelfth digit of a float, or at all."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted({*expected, *found}):
            yield from differences(expected.get(key), found.get(key), f"{where}.{key}")
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        for i, pair in enumerate(zip(expected, found, strict=True)):
            yield from differences(*pair, f"{where}[{i}]")
    elif not alike(expected, found):
        yield f"{where[1:]}: {expected!r} became {found!r}"


def alike(expected, found):
    if isinstance(expected, float) and isinstance(found, float):
        return math.isclose(expected, found, rel_tol=1e-12, abs_tol=1e-15)
    return type(expected) is type(found) and expected == found


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_the_plan_is_what_it_was(name):
    if name in TIED and sys.version_info >= (3, 12):
        pytest.skip("plans tie here, and sums round another way since Python 3.12")
    if name in TIED_PRICES and not {"Haswell", "Zen"} >= KERNELS:
        pytest.skip("prices tie here, and products of matrices round another way on this processor")
    expected = json.loads(path_of(name).read_text())
    found = list(differences(expected, answer(name)))
    assert not found, "\n".join(found)


def test_every_golden_has_a_case():
    assert {p.stem for p in FOLDER.iterdir()} == set(CASES)


def rewrite(names):
    """Writes what the cases give now."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", folder)
        for name in names or CASES:
            path_of(name).write_text(written(answer(name)))


if __name__ == "__main__":
    rewrite(sys.argv[1:])
