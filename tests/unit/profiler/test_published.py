"""Estimates against published times and throughputs.

Constants were fitted on DeepPool's table of Inception-v3 and on throughputs of MPT; on the others
here they are tested. Run with ``-s`` to see the errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from meshwright.models import zoo
from meshwright.planner.schema.profile import ModelProfile, UnitProfile
from meshwright.profiler.catalogue import datasheet
from meshwright.profiler.estimate import estimate
from meshwright.profiler.memory import FusedAttention
from meshwright.profiler.operations import OperationLog
from meshwright.profiler.roofline import KERNEL_S, bandwidth, seconds
from torch import nn

from tests.sampling import sampled

from .llama import LLAMA2_7B, MPT, Llama, language_model

THROUGHPUT = json.loads(Path(__file__).with_name("throughput.json").read_text())

# DeepPool's profiles are of October 2021 (its commits 09c39de and 756587e): float32 in torch before
# 1.12, which used TF32 for matrix products too. Streaming at 1.37 TB/s (its ReLU rows), more than
# an A100 of 40 GB could do with numbers of two bytes, tells the memory.
DEVICE, PRECISION = "a100-sxm-40gb", "tf32"
SHEET = datasheet(DEVICE)


class Row(NamedTuple):
    """Seconds of a part of a network by batch size, forward and backward together."""

    table: dict[int, float]
    estimate: dict[int, float]


def table(name: str) -> list[dict[str, Any]]:
    folder = resources.files("meshwright.profiler").joinpath("data", "deeppool_a100")
    layers: list[dict[str, Any]] = json.loads(folder.joinpath(f"{name}.json").read_bytes())[
        "layers"
    ]
    return layers


def added_s(shapes: Sequence[Sequence[int]]) -> float:
    """What adding the gradients of float32 parameters to those that are there takes: DeepPool's
    replayed backward does, a step after ``zero_grad()`` does not."""
    return sum(KERNEL_S + 3 * 4 * prod(shape) / bandwidth(SHEET) for shape in shapes)


@cache
def estimated(name: str) -> ModelProfile:
    with torch.device("meta"):
        workload = zoo.build(name)
    # Under another name no table replaces the estimate.
    return estimate(replace(workload, name="unnamed", precision=PRECISION), DEVICE)


def compare(
    parts: Sequence[tuple[Sequence[dict[str, Any]], Sequence[UnitProfile]]], adding: bool
) -> list[Row]:
    """Rows of the table beside units of the estimate, with ``adding`` gradients to those that are
    there. The last layer's backward is in no row: it has the loss behind it."""
    rows = []
    for layers, units in parts:
        backward = layers is not parts[-1][0]
        published, ours = {}, {}
        for size in map(int, layers[0]["time_us_by_batch"]):
            times = [layer["time_us_by_batch"][str(size)] for layer in layers]
            published[size] = 1e-6 * sum(
                t["forward"] + (t["backward"] if backward else 0) for t in times
            )
            ours[size] = sum(
                u.whole.forward(size)
                + (u.whole.backward(size) if backward else 0)
                + (added_s([p.shape for p in u.parameters]) if backward and adding else 0)
                for u in units
            )
        rows.append(Row(published, ours))
    return rows


def errors(name: str, rows: Sequence[Row]) -> tuple[float, float]:
    """Mean absolute relative errors: of the parts that take at least a hundredth of the step, over
    all batch sizes; and of the whole step, over all batch sizes."""
    parts, steps = [], []
    for size in rows[0].table:
        step = sum(row.table[size] for row in rows)
        of_step = sum(row.estimate[size] for row in rows) / step - 1
        heavy = [row for row in rows if row.table[size] >= 0.01 * step]
        of_parts = [row.estimate[size] / row.table[size] - 1 for row in heavy]
        print(f"{name} batch {size}: step {of_step:+.1%}, parts {fmean(map(abs, of_parts)):.1%}")
        parts += map(abs, of_parts)
        steps.append(abs(of_step))
    print(f"{name}: parts {fmean(parts):.1%}, steps {fmean(steps):.1%}")
    return fmean(parts), fmean(steps)


def with_parameters(layers: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Each row with parameters, and those without that follow it (ReLU, pooling)."""
    found: list[list[dict[str, Any]]] = []
    for layer in layers:
        if layer["param_count"]:
            found.append([])
        found[-1].append(layer)
    return found


@pytest.mark.slow
def test_vgg16_on_an_a100() -> None:
    units = [u for u in estimated("vgg16").units if u.parameters]
    parts = [(rows, [u]) for rows, u in zip(with_parameters(table("vgg16")), units, strict=True)]
    assert max(errors("VGG-16", compare(parts, adding=True))) <= 0.1
    # Also where the estimate is taken as it is.
    assert max(errors("VGG-16, gradients alone", compare(parts, adding=False))) <= 0.2


@pytest.mark.slow
def test_wide_resnet_on_an_a100() -> None:
    groups: dict[str, list[UnitProfile]] = {}
    at = ""
    for unit in estimated("wide_resnet101").units:
        if unit.modules:
            path = unit.modules[0].split(".")
            at = ".".join(path[:2]) if path[0].startswith("layer") else path[0]
        groups.setdefault(at, []).append(unit)
    del groups[""]
    rows = with_parameters(table("wide_resnet101_2"))
    parts = list(zip(rows, groups.values(), strict=True))
    assert max(errors("WRN-101-2", compare(parts, adding=True))) <= 0.1
    assert max(errors("WRN-101-2, gradients alone", compare(parts, adding=False))) <= 0.2


def inception_rows() -> list[Row]:
    """Each convolution of the table, run by itself on the meta device."""
    rows, seen = [], set()
    for layer in table("inception_v3"):
        key = json.dumps([layer["config"], layer["input_shape"]])
        if layer["kind"] != "conv2d" or key in seen:
            continue
        seen.add(key)
        conv = nn.Conv2d(**layer["config"], device="meta")
        ours, published = {}, {}
        for size in (1, 2, 4, 8, 16, 32, 64):
            conv.zero_grad()
            x = torch.empty(size, *layer["input_shape"], device="meta", requires_grad=True)
            with OperationLog() as log:
                y = conv(x)
                y.backward(torch.empty_like(y))
            done = [*log.forward[""], *log.backward[""]]
            added = added_s([conv.weight.shape, (conv.out_channels,)])
            ours[size] = added + sum(seconds(op, SHEET) for op in done)
            times = layer["time_us_by_batch"][str(size)]
            published[size] = 1e-6 * (times["forward"] + times["backward"])
        rows.append(Row(published, ours))
    return rows


def test_the_fit_on_inception() -> None:
    found = [r.estimate[b] / r.table[b] - 1 for r in inception_rows() for b in r.table]
    print(f"Inception-v3: {fmean(map(abs, found)):.1%}, mean {fmean(found):+.1%}")
    assert fmean(map(abs, found)) <= 0.1


def step_s(profile: ModelProfile, batch: float, gpus: int) -> float:
    """A fully sharded step's seconds on each of so many devices, all communication overlapped."""
    update = next(r for r in profile.updates if r.optimizer == "adamw").seconds_per_byte
    computing = sum(u.whole.forward(batch) + u.whole.backward(batch) for u in profile.units)
    # Main weights are float32: twice the bytes of the profile's parameters.
    return computing + update * 2 * profile.parameter_bytes / gpus


@pytest.mark.parametrize(
    "row", sampled(THROUGHPUT["llama"]["rows"], 1), ids=lambda row: row["device"]
)
def test_training_llama_2_in_bf16(row: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Llama(LLAMA2_7B)
    workload = language_model(model, LLAMA2_7B.vocabulary, row["length"])
    profile = estimate(workload, row["device"], batches=[1, row["batch"]])
    assert profile.parameter_bytes == 2 * 6_738_415_616
    tokens_s = row["batch"] * row["length"] / step_s(profile, row["batch"], row["gpus"])
    print(f"{row['model']} on {row['device']}: {tokens_s:.0f}, published {row['tokens_s']}")
    assert tokens_s == pytest.approx(row["tokens_s"], rel=0.2)


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm"])
def test_the_fit_on_mpt(device: str) -> None:
    errors = []
    for row in THROUGHPUT["mpt"]["rows"]:
        if row["device"] != device:
            continue
        seconds_of = []
        for layers in (1, 2):  # every further layer takes as long
            with torch.device("meta"):
                model = MPT(layers, row["width"], row["heads"]).bfloat16()
                workload = language_model(model, 50368, 2048)
                batch = workload.make_batch(row["batch"])
            with FusedAttention(), OperationLog() as log:
                workload.loss(model(*batch.args), batch.target).backward()
            done = [*log.forward[""], *log.backward[""]]
            seconds_of.append(sum(seconds(op, datasheet(device)) for op in done))
        one, two = seconds_of
        step = one + (row["layers"] - 1) * (two - one)
        tokens_s = row["batch"] * 2048 / step
        print(f"MPT {row['model']} on {device}: {tokens_s:.0f}, published {row['tokens_s']}")
        errors.append(tokens_s / row["tokens_s"] - 1)
    assert abs(fmean(errors)) < 0.02
    assert max(map(abs, errors)) < 0.06
