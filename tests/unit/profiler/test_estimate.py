"""Profiles of catalogued devices that are not here."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from meshwright import Batch, Workload
from meshwright.models import zoo as models
from meshwright.models.target import workload
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.precision import PRECISIONS
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import decode, encode
from meshwright.profiler.catalogue import datasheet, names
from meshwright.profiler.estimate import estimate
from meshwright.profiler.model import profile
from torch import nn


@cache
def estimated(name: str, device: str) -> ModelProfile:
    return estimate(models.build(name), device)


def total(profile: ModelProfile, batch: int) -> float:
    return sum(u.whole.forward(batch) + u.whole.backward(batch) for u in profile.units)


def test_a_small_model_on_a_catalogued_device() -> None:
    profile = estimated("cnn-digits", "h100-sxm")
    assert profile.origin == "estimated"
    assert profile.device == "h100-sxm"
    assert total(profile, 256) > total(profile, 1) > 0
    assert total(estimated("cnn-digits", "t4"), 256) > total(profile, 256)
    data = encode(profile)
    assert encode(decode(ModelProfile, data)) == data


def test_shares_of_divided_units_take_less() -> None:
    profile = estimated("cnn-digits", "t4")
    linear = max((u for u in profile.units if u.kind == "linear"), key=lambda u: u.parameter_bytes)
    assert len(linear.shares) > 1
    for share in linear.shares[1:]:
        assert share.forward(256) < linear.whole.forward(256)
        assert 0 < share.parameter_bytes < linear.whole.parameter_bytes


def test_partial_sums_are_those_before_pooling_estimated_or_measured() -> None:
    """Of 8 x 8 pixels in 8 channels, of which pooling leaves a quarter; and of ten classes."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )
    workload = Workload(
        "pooled", model, lambda n: Batch((torch.randn(n, 4, 8, 8),), torch.zeros(n).long()),
        nn.functional.cross_entropy,
    )  # fmt: skip
    for found in (
        estimate(workload, "t4"),
        profile(workload, batches=(8,), degrees=(2,), repeats=1, budget_s=20),
    ):
        added = {
            (unit.kind, share.style): share.partial_sums
            for unit in found.units
            for share in unit.shares
            if unit.parameters and share.degree == 2
        }
        assert added == {
            ("conv", "row"): 8 * 8 * 8 * 4, ("conv", "column"): 0,
            ("linear", "row"): 10 * 4, ("linear", "column"): 0,
        }  # fmt: skip


def test_no_estimate_is_faster_than_the_datasheet() -> None:
    """A linear layer of known work: 2 x in x out operations forward for each sample."""
    profile = estimated("cnn-digits", "t4")
    unit = next(u for u in profile.units if u.kind == "linear")
    weight = next(p for p in unit.parameters if len(p.shape) == 2)
    least = 2 * weight.shape[0] * weight.shape[1] * 256 / (datasheet("t4").float32 * 1e12)
    assert unit.whole.forward(256) >= least


def test_nothing_is_changed() -> None:
    workload = models.build("gpt-tiny")
    before = {n: t.detach().clone() for n, t in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    estimate(workload, "t4")
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in workload.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in workload.model.parameters())


def test_the_precision_is_that_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096))

    def make_batch(size: int) -> Batch:
        return Batch((torch.randn(size, 4096),), torch.randn(size, 4096))

    workload = Workload("two", model, make_batch, nn.functional.mse_loss)
    taken = {
        precision: estimate(replace(workload, precision=precision), "h100-sxm", batches=[4096])
        for precision in PRECISIONS
    }
    flops = (2 + 3) * 2 * 4096**3  # the input needs no gradient
    rates = {name: flops / total(profile, 4096) for name, profile in taken.items()}
    assert rates["float32"] < 67e12 < 2 * rates["float32"] < rates["tf32"] < rates["bf16-mixed"]
    # Parameters are cast for every forward.
    assert 250e12 < rates["bf16-mixed"] == rates["fp16-mixed"] < rates["bf16"] < 989e12
    linear = {name: next(u for u in p.units if u.parameters) for name, p in taken.items()}
    assert linear["bf16-mixed"].parameter_bytes == 2 * linear["bf16"].parameter_bytes
    assert taken["bf16-mixed"].dtype == "float32"
    assert taken["bf16"].dtype == "bfloat16"
    assert taken["bf16"].precision == "bf16"
    # An update moves as many bytes for each byte of parameters.
    a, b = (taken[name].update_seconds_per_byte("adamw") for name in ("float32", "bf16"))
    assert a == pytest.approx(b, rel=0.1)
    # With main weights, float32 is moved for parameters of half its size, and both are compared.
    assert taken["float32"].update_seconds_per_byte("adamw", sharded=True) == a
    assert 2 * b < taken["bf16"].update_seconds_per_byte("adamw", sharded=True) < 5 * b


def test_a_divided_units_shares_save_their_part() -> None:
    """What a member makes: a part of the features, or of the samples. Inputs are others'."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid(), nn.Linear(512, 4))

    def make_batch(size: int) -> Batch:
        return Batch((torch.randn(size, 512),), torch.zeros(size, dtype=torch.long))

    workload = Workload("one", model, make_batch, nn.functional.cross_entropy)
    unit = next(u for u in estimate(workload, "t4").units if u.kind == "linear")
    parts = {(s.style, s.degree): s.saved(64) / unit.whole.saved(64) for s in unit.shares}
    for m in (2, 8):
        assert parts["column", m] == parts["row", m] == pytest.approx(1 / m)


def test_an_unknown_device_gets_the_nearest_names() -> None:
    with pytest.raises(InputError, match="did you mean"):
        estimate(models.build("mlp"), "a100")


def test_the_documentation_lists_every_device() -> None:
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    listed = re.findall(r"`([^`]*)`", text.partition("Catalogued, with")[2].partition("\n\n")[0])
    assert tuple(listed) == names()


@pytest.mark.slow
def test_vgg16_takes_its_times_from_the_published_table() -> None:
    profile = estimated("vgg16", "a100-sxm-40gb")
    assert profile.origin == "table"
    assert profile.parameter_bytes == 138_357_544 * 4
    # Published times are three times shorter than float32's peak allows: convolutions are TF32
    flops = 3 * 2 * 15.5e9 * 64
    assert 1 < total(profile, 64) / (flops / (datasheet("a100-sxm-40gb").tf32 * 1e12)) < 10


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16", "tf32"])
def test_the_table_stands_for_the_precision_that_it_was_timed_in(precision: str) -> None:
    profile = estimate(workload("vgg16", precision=precision), "a100-sxm-40gb")
    assert profile.origin == ("table" if precision == "tf32" else "estimated")


def test_another_model_of_that_name_is_estimated() -> None:
    other = replace(models.build("mlp"), name="vgg16")
    assert estimate(other, "a100-sxm-40gb").origin == "estimated"


@pytest.mark.slow
def test_vgg16_is_estimated_on_an_h100() -> None:
    profile = estimated("vgg16", "h100-sxm")
    assert profile.origin == "estimated"
    flops = 3 * 2 * 15.5e9 * 64
    assert 1 < total(profile, 64) / (flops / (datasheet("h100-sxm").tf32 * 1e12)) < 8
