"""The glossary holds every word of JSON files and of the command line that is not plain."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer
from meshwright.cli.app import app
from meshwright.planner.solve.solver import solvers

DOCS = Path(__file__).parents[2] / "docs"
# What torch's documentation defines, or what means what it says. Nothing goes here that a reader of
# torch's documentation would have to ask about.
PLAIN_FIELDS = {
    # names and numbers of things
    "name", "document", "schema_version", "bytes", "seconds", "x", "y", "last",
    # torch's words
    "backward", "forward", "device", "device_type", "devices", "dtype", "gradients", "modules",
    "optimizer", "parameters", "shape", "trainable", "weights", "world_size", "ranks",
    # a quantity with its unit
    "backward_s", "forward_s", "compute_s", "step_s", "update_s", "latency_s", "bytes_per_s",
    "memory_bytes", "memory_limit_bytes", "parameter_bytes", "peak_bytes", "samples_per_s",
    "seconds_per_byte",
    # of training
    "batch", "batches", "nodes", "step", "steps", "updates", "prediction", "loss", "accuracy",
    # of a run's report
    "predicted", "data_parallel", "slowdown", "limit", "ended",
}  # fmt: skip
PLAIN_OPTIONS = {
    # files, and how much is shown
    "--out", "--json", "--plot", "--trace", "--report", "--all-units", "--name", "--profile",
    "--cluster", "--memory", "--background-log",
    # torchrun's words
    "--nnodes", "--nproc", "--node-rank", "--rendezvous", "--ranks",
    # of ssh, Slurm and Kubernetes
    "--hosts", "--ssh-config", "--ssh-option", "--slurm-option", "--submit", "--image", "--gpus",
    "--job-name", "--env", "--dry-run",
    # of training
    "--batch", "--batches", "--micro-batches", "--optimizer", "--steps", "--seeds", "--dtype",
    # hardware, with its unit
    "--device", "--devices", "--nodes", "--devices-per-node", "--inter-gbit-s", "--intra-gbyte-s",
    "--inter-latency-us", "--intra-latency-us", "--memory-limit", "--background-memory",
    "--background-gpu-memory",
    # seconds
    "--timeout", "--time-limit",
}  # fmt: skip
PLAIN_VALUES = {
    "Cluster", "ModelProfile", "Plan",  # the documents
    "adam", "adamw", "momentum", "sgd",
    "all_gather", "all_reduce", "all_to_all", "p2p", "reduce_scatter",
    "forward", "backward", "update",
}  # fmt: skip


def explained() -> set[str]:
    """What stands in backticks in the glossary."""
    return set(re.findall(r"`([^`]+)`", (DOCS / "glossary.md").read_text(encoding="utf-8")))


def inside(value: object):
    """A JSON value and all that lies in it."""
    yield value
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from inside(part)


def schemas():
    for path in (DOCS / "schemas").glob("*.json"):
        yield from inside(json.loads(path.read_text(encoding="utf-8")))


def fields() -> set[str]:
    found = [part.get("properties") for part in schemas() if isinstance(part, dict)]
    return {name for properties in found if isinstance(properties, dict) for name in properties}


def values() -> set[str]:
    found = [part.get("enum") for part in schemas() if isinstance(part, dict)]
    return {str(value) for enum in found if isinstance(enum, list) for value in enum}


def options() -> set[str]:
    command = typer.main.get_command(app)
    every = [p for verb in command.commands.values() for p in verb.params]
    names = {name for p in every for name in (*p.opts, *p.secondary_opts)}
    return {name for name in names if name.startswith("--")}


def test_every_field_of_the_documents_is_explained():
    assert fields() - PLAIN_FIELDS - explained() == set()


def test_every_value_of_the_documents_is_explained():
    assert values() - PLAIN_VALUES - explained() == set()


def test_every_option_is_explained():
    assert options() - PLAIN_OPTIONS - explained() == set()


def test_what_is_taken_for_plain_is_there_and_not_explained_twice():
    for plain, there in (
        (PLAIN_FIELDS, fields()), (PLAIN_OPTIONS, options()), (PLAIN_VALUES, values()),
    ):  # fmt: skip
        assert plain <= there
    twice = (PLAIN_OPTIONS | PLAIN_FIELDS) & explained()
    assert twice <= {"--time-limit"}  # of the search, told apart from the step's


def test_the_glossary_names_nothing_that_is_gone():
    words = {w for w in explained() if w.startswith("--") or w.islower()}
    known = fields() | values() | options() | {"file.py:factory", "package.module:factory"}
    assert words - known - set(solvers()) == set()
