"""``advise``: what each way to train a model on a cluster is predicted to reach."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ..executor.launch.progress import console, progress
from ..planner.cost.device_kinds import with_relative_speeds
from ..planner.explain.advice import Way
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InfeasibleError
from ..planner.schema.goal import make_goal
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load
from ..planner.schema.text import option
from . import options
from .output import check_out, deliver
from .render.advice import (
    advice_sentence,
    gain_sentences,
    slow_sentences,
    spoken,
    told_ways,
    ways_table,
    why_sentences,
)
from .render.documents import device_sentences
from .values import amount_text, given_options, profiles_of, speeds

# The options that ``plan`` has too, and that a way's plan is made with.
_SHARED = (
    "batch", "memory_limit", "optimizer", "micro_batches", "batch_statistics", "precision",
    "profile_of", "relative_speed", "solver", "time_limit",
)  # fmt: skip


def advise(
    context: typer.Context,
    target: options.Target,
    cluster: options.ClusterFile,
    batch: options.Batch,
    out_: Annotated[Path | None, options.out("table")] = None,
    memory_limit: options.MemoryLimit = None,
    optimizer: options.Optimizer = "sgd",
    micro_batches: options.MicroBatches = (1,),
    batch_statistics: options.BatchStatistics = "local",
    precision: options.PrecisionName = None,
    profile_of: options.ProfilesOf = None,
    relative_speed: options.RelativeSpeeds = None,
    solver: options.Solver = "auto",
    time_limit: options.TimeLimit = None,
    json: options.Json = False,
) -> None:
    """Say which way to train TARGET on a cluster is quickest, and what each changes."""
    from .. import api

    check_out(out_)
    goal = make_goal(
        batch,
        memory_limit_bytes=memory_limit,
        optimizer=optimizer,
        micro_batches=micro_batches,
        batch_statistics=batch_statistics,
    )
    what = load(ModelProfile, target, "TARGET") if target.endswith(".json") else target
    there = with_relative_speeds(load(Cluster, cluster, "--cluster"), speeds(relative_speed))
    others = profiles_of(profile_of)
    with progress(f"planning {target}") as step:
        found = api.advise(
            what, there, goal,
            precision=precision, solver=solver, time_limit_s=time_limit, profiles_of=others,
            progress=step,
        )  # fmt: skip
    words = [advice_sentence(found), *gain_sentences(found), *slow_sentences(found)]
    if isinstance(what, ModelProfile):
        words += device_sentences(what, there)
    deliver(found, out_, json, ways_table(found), *why_sentences(found), *words)
    if not json:
        for way in told_ways(found):
            if way.options is not None:
                # Whole lines, to be copied: the terminal breaks them.
                command = f"{spoken(way)}: {_command(context, way)}"
                console().print(f"{command[0].upper()}{command[1:]}", soft_wrap=True)
    if not any(way.gain for way in found.ways):
        raise typer.Exit(InfeasibleError.exit_code)


def _command(context: typer.Context, way: Way) -> str:
    """The whole command that makes a way's plan: what this one was given, and the way's options."""
    own, given = way.options or (), given_options(context)
    words = ["meshwright", "plan", context.params["target"], "-c", str(context.params["cluster"])]
    for name in _SHARED:
        if name in given and option(name) not in own:
            value = context.params[name]
            several = value if isinstance(value, list) else [value]
            words += [word for one in several for word in (option(name), _text(name, one))]
    return shlex.join([*words, *own, "-o", _file_of(way)])


def _file_of(way: Way) -> str:
    """A file of its own, so that the commands of several ways may be run one after the other."""
    # plan-exact.json and not plan-exact-plan.json.
    words = [word for word in way.name.split() if word not in ("plan", "with", "for")]
    return f"plan-{'-'.join(words)}.json"


def _text(name: str, value: object) -> str:
    """An option's value as it is written."""
    if name == "memory_limit" and isinstance(value, int):
        return amount_text(value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
