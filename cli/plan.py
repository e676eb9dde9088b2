"""``plan``, ``explain`` and ``compare``: a decision, why it is so, and what another one differs in.

``plan`` may show a table instead: over cluster sizes, or the front of step time and device time.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..executor.capability import CAPABILITY
from ..executor.launch.progress import progress
from ..executor.notes import note
from ..planner.cost.device_kinds import with_profiles, with_relative_speeds
from ..planner.explain.what_if import ddp_step_s
from ..planner.explain.why import units_told
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InfeasibleError, InputError
from ..planner.schema.goal import make_goal
from ..planner.schema.pins import parse_wishes
from ..planner.schema.plan import Plan
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load, save
from ..planner.schema.text import samples, seconds
from ..planner.solve.heuristic.resize import resized, resized_with
from ..planner.solve.local_steps import cannot
from ..planner.solve.request import made_from, problem_of
from . import options
from .output import check_out, deliver, show
from .render.comparisons import comparison_tables, front_table, sizes_table
from .render.documents import (
    bound_sentence,
    ddp_sentences,
    decision_table,
    fewer_sentence,
    memory_sentences,
    origin_sentences,
    prediction_table,
    training_sentences,
    verdict,
)
from .render.explanations import explanation_tables
from .render.memory import kept_sentences, memory_tables, plot_memory
from .values import number, profiles_of, speeds, whole


def plan(
    target: options.Target,
    cluster: options.ClusterFile,
    batch: options.Batch,
    out_: Annotated[Path | None, options.out("plan (or the table)")] = None,
    memory_limit: options.MemoryLimit = None,
    optimizer: options.Optimizer = "sgd",
    micro_batches: options.MicroBatches = (1,),
    batch_statistics: options.BatchStatistics = "local",
    pin: options.Pins = None,
    forbid: options.Forbidden = None,
    objective: options.Objective = "step",
    step_limit: options.StepLimit = None,
    amplification_limit: options.AmplificationLimit = None,
    unit_amplification_limit: options.UnitAmplificationLimit = None,
    background_limit: options.BackgroundLimit = None,
    allow_lossy: options.AllowLossy = False,
    min_fidelity: options.MinFidelity = None,
    allow_local_steps: options.LocalSteps = False,
    inner_steps: options.InnerSteps = None,
    fragments: options.Fragments = None,
    outer_lr: options.OuterLr = None,
    outer_momentum: options.OuterMomentum = None,
    slices: options.Slices = None,
    schedule: options.Schedule = "auto",
    precision: options.PrecisionName = None,
    profile_of: options.ProfilesOf = None,
    relative_speed: options.RelativeSpeeds = None,
    bursts: options.Bursts = False,
    hypothetical: options.Hypothetical = False,
    all_layouts: options.AllLayouts = False,
    solver: options.Solver = "auto",
    time_limit: options.TimeLimit = None,
    ranks: options.ClusterSizes = None,
    front: options.AsFront = False,
    all_units: options.AllUnits = False,
    json: options.Json = False,
) -> None:
    """Decide how to train TARGET on a cluster, and predict what a step takes."""
    from .. import api

    check_out(out_)
    sizes = ranks if ranks is not None and len(ranks) > 1 else ()
    _check_together(
        sizes=bool(sizes), front=front, cut=slices is not None and schedule == "barrier",
        others=bool(profile_of), apart=allow_local_steps,
    )  # fmt: skip
    # What is wrong with the request is said before files are read and anything is measured.
    wishes = parse_wishes(pin or (), forbid or ())
    goal = make_goal(
        batch,
        memory_limit_bytes=memory_limit,
        optimizer=optimizer,
        micro_batches=micro_batches,
        batch_statistics=batch_statistics,
        objective=objective,
        step_limit_s=step_limit,
        amplification_limit=amplification_limit,
        unit_amplification_limit=unit_amplification_limit,
        background_limit=background_limit,
        min_fidelity=min_fidelity,
        allow_lossy=allow_lossy,
        allow_local_steps=allow_local_steps,
        inner_steps=inner_steps,
        fragments=fragments,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        slice_bytes=slices or (),
        pins=wishes.pins,
        all_layouts=all_layouts,
    )
    what = load(ModelProfile, target, "TARGET") if target.endswith(".json") else target
    there = with_relative_speeds(load(Cluster, cluster, "--cluster"), speeds(relative_speed))
    others = profiles_of(profile_of)
    note(_unused_speeds(there, ranks or ()))
    if ranks is not None and not sizes:
        what, there, others = _of_size(what, there, others, ranks[0])
    with progress(f"planning {target}") as step:
        how: dict[str, Any] = {
            "solver": solver,
            "time_limit_s": time_limit,
            "bursts": bursts,
            "hypothetical": hypothetical,
            "forbidden": wishes.without,
            "schedule": schedule,
            "precision": precision,
            "progress": step,
        }
        if sizes:
            table = api.sizes(what, there, goal, sizes, **how)
        elif front:
            points = api.front(what, there, goal, **how)
        else:
            made = api.plan(what, there, goal, profiles_of=others, **how)
    # Printed when the bar is gone: both write to the terminal.
    if (sizes or front) and (allow_lossy or (allow_local_steps and sizes)):
        allowed = "--allow-lossy" if allow_lossy else "--allow-local-steps"
        note(f"{allowed}: rows may be of plans that change the training; plan one to see how")
    if sizes:
        deliver(table, out_, json, *sizes_table(table))
        if not any(row.fits for row in table.rows):
            raise typer.Exit(InfeasibleError.exit_code)
    elif front:
        deliver(points, out_, json, *front_table(points))
        if not (bursts or hypothetical):
            note("no unit leaves devices idle: add --bursts to trade time for devices")
    else:
        # Before anything is shown of it, so that nothing which fails there loses it.
        if out_ is not None:
            save(made, out_)
        # With times of other nodes it is not the file's any more, and found by its fingerprint.
        profile = what if isinstance(what, ModelProfile) and not others else None
        words = _remarks(made, profile, there, forbidden=wishes.without, schedule=schedule)
        tables = decision_table(made, fold=not all_units), prediction_table(made)
        show(made, out_, json, *tables, *words)


def _check_together(*, sizes: bool, front: bool, cut: bool, others: bool, apart: bool) -> None:
    """Raises ``InputError`` for options that cannot be together: tables, and what is of one plan
    only."""
    if sizes and front:
        raise InputError("--ranks and --front are two tables: ask for one at a time")
    if cut:
        raise InputError(
            "--slices is how priority cuts, and --schedule is 'barrier': leave one of them out"
        )
    if others and (sizes or front):
        raise InputError(
            "--profile-of is of nodes of this cluster for one plan, and --front and --ranks with "
            "several sizes plan for others: leave one of them out"
        )
    if front and apart:
        note("--allow-local-steps does not count with --front: hosts train together in its plans")


def _of_size(
    what: str | ModelProfile, there: Cluster, others: dict[str, ModelProfile], ranks: int
) -> tuple[str | ModelProfile, Cluster, dict[str, ModelProfile]]:
    """The profile (or what is measured for that cluster), the cluster and the profiles of its
    nodes, for so many ranks."""
    if isinstance(what, ModelProfile):
        # Of which nodes there are some left, the names do not say any more.
        return (*resized_with(with_profiles(what, others, there), there, ranks), {})
    if others and ranks != there.world_size:
        raise InputError(
            f"--profile-of is of nodes of this cluster, and --ranks {ranks} plans for another with "
            "times that are measured for it: give TARGET as the profile's file, or leave it out"
        )
    return what, resized(there, ranks), others


def _unused_speeds(cluster: Cluster, sizes: Sequence[int]) -> str | None:
    """That speeds of nodes do not count with other numbers of ranks, and whose would."""
    # As ``resized`` has it: of another number of ranks all nodes are like the first.
    first, *rest = cluster.nodes
    own = first.devices[0].relative_speed
    speed_of = {node.name: node.devices[0].relative_speed for node in rest}
    unused = [f"{name}={speed:g}" for name, speed in speed_of.items() if speed not in (own, 1.0)]
    others = [str(size) for size in sizes if size != cluster.world_size]
    if not unused or not others:
        return None
    more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    return (
        f"relative speed {', '.join(unused[:3])}{more} does not count with "
        f"{' and '.join(others)} ranks, which are all on nodes like {first.name!r}: give that node "
        "the speed with --relative-speed, or plan for a cluster of the nodes that you mean"
    )


def _fewer_fragments(made: Plan) -> str | None:
    """That fewer fragments were made than were asked for, and why."""
    local, asked = made.local_steps, made.goal.fragments
    if local is None or asked is None or len(local.fragments) >= asked:
        return None
    found = len(local.fragments)
    return (
        f"the model is averaged in {found} fragments, not in {asked}: each is of whole units, is "
        "about as large as the others and leaves after an inner step of its own"
    )


def _over_limit(made: Plan) -> str | None:
    """That the step, as it is predicted, is longer than the limit, and what to ask for."""
    # The search keeps the limit by the formula. What is predicted is simulated.
    limit_s, step_s = made.goal.time_limit_s, made.slowed_s
    if limit_s is None or step_s <= limit_s:
        return None
    takes = f"takes {seconds(step_s)}"
    if made.goal.background:
        takes = f"takes up to {seconds(step_s)} with the background job"
    return (
        f"the limit of {seconds(limit_s)} is kept by the formula, and simulated the step {takes}: "
        "for a plan whose simulated step keeps it, ask for less, such as "
        f"--step-limit {limit_s * limit_s / step_s:.3g}s"
    )


def _why_together(made: Plan, profile: ModelProfile | None, cluster: Cluster) -> str:
    """Why local steps that are allowed were not taken."""
    impossible = None
    with suppress(InputError):  # what it was made from may not be there any more
        impossible = cannot(problem_of(made, *made_from(made, profile, cluster), CAPABILITY))
    return (
        impossible or "that is not predicted to be clearly quicker than this plan, or does not fit"
    )


def _remarks(made: Plan, profile: ModelProfile | None, cluster: Cluster, **how: Any) -> list[str]:
    """The sentences below a plan; what its user should know of the request goes to stderr."""
    from .. import api

    goal, ranks = made.goal, cluster.world_size
    least, more = divmod(goal.batch, ranks)
    if more and not made.local_batch_sizes:
        note(
            f"a batch of {goal.batch} does not divide over {ranks} ranks: {more} of them "
            f"{'takes' if more == 1 else 'take'} {samples(least + 1)} and the others "
            f"{samples(least)}, and every sample counts alike"
        )
    changed = any(unit.lossy or unit.rounded for unit in made.units)
    if goal.allow_lossy and not changed:
        what = "rounds its gradient"
        why = "by what is predicted, none would make the step shorter"
        if "bf16" in how["forbidden"]:
            why = "--forbid bf16 rules that out"
        if goal.allows_parts:
            what += " or sends it in part"
            why = f"none was measured to keep {goal.min_fidelity:g} of the energy, or {why}"
        note(f"no unit {what}: {why}, or gradients have 16 bits already")
    if goal.allow_local_steps and made.local_steps is None:
        note(f"hosts do not train apart: {_why_together(made, profile, cluster)}")
    note(_fewer_fragments(made))
    for reason in made.hypothetical[:1]:
        note(f"the executor cannot run this plan: {reason}")
    note(_over_limit(made))
    words = [verdict(made), *training_sentences(made, cluster)]
    # A profile measured for this plan is found on disk again, unless it could not be kept there.
    with suppress(InputError):
        profile, cluster = made_from(made, profile, cluster)
        if made.schedule == "priority" and made.local_steps is None:
            words += ddp_sentences(made, ddp_step_s(made, profile, cluster))
        words += origin_sentences(made, profile, cluster)
        words += memory_sentences(made, profile, cluster)
        words.append(bound_sentence(api.bottleneck(made, profile, cluster)))
        better = api.quicker_in_parts(made, profile, cluster, **how)
        note(better.sentence if better is not None else None)
        fewer = api.quicker_on_fewer(made, profile, cluster)
        if fewer is not None:
            words.append(fewer_sentence(made, fewer))
    return words


def explain(
    plan_file: options.PlanFile,
    profile: options.PlansProfile = None,
    cluster: options.PlansCluster = None,
    best: Annotated[int, whole("So many alternatives of each unit.")] = 2,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if/--no-what-if", help="Plan again with more bandwidth, memory, devices."
        ),
    ] = True,
    time_limit: Annotated[
        float, number("Seconds for each time that it is planned again.", above=0)
    ] = 10.0,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show what ranks hold at each point of a step instead.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="With --memory: draw it into this file, such as memory.png.")
    ] = None,
    trace: options.PlanTrace = None,
    all_units: options.AllUnits = False,
    json: options.Json = False,
) -> None:
    """Why a plan is as it is: each unit's alternatives, what binds, what more would buy."""
    from .. import api

    made = load(Plan, plan_file, "PLAN")
    given = (
        load(ModelProfile, profile, "--profile") if profile else None,
        load(Cluster, cluster, "--cluster") if cluster else None,
    )
    if plot is not None and not memory:
        raise InputError(f"--plot {plot} draws the memory timeline: add --memory")
    check_out(trace)
    if trace is not None:
        note(api.trace(made, trace, *given))
    if memory:
        check_out(plot)
        timeline = api.memory_timeline(made, *given)
        if plot is not None:
            plot_memory(timeline, plot)
            note(f"drawn into {plot}")
        tables = memory_tables(timeline, fold=not all_units)
        deliver(timeline, None, json, *tables, *kept_sentences(made, timeline))
        return
    with progress("explaining") as step:
        found = api.explain(
            made, *given, best=best, what_if=what_if, time_limit_s=time_limit, progress=step
        )
    told = units_told(len(found.units))
    if told < len(found.units):
        note(f"alternatives are told of the {told} units of {len(found.units)} that take most")
    tables = explanation_tables(found, made.goal.objective, fold=not all_units)
    _, links = made_from(made, *given)
    deliver(found, None, json, *tables, *training_sentences(made, links))


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A plan's file.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another plan's file.")],
    json: options.Json = False,
) -> None:
    """Two plans side by side: what they decide differently and what they predict."""
    from .. import api

    found = api.compare(load(Plan, first, "A"), load(Plan, second, "B"))
    deliver(found, None, json, *comparison_tables(found, first.name, second.name))
