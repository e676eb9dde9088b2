"""Profiles of catalogued devices that are not here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from meshwright.models import zoo as models
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import decode, encode
from meshwright.profiler.catalogue import datasheet, names
from meshwright.profiler.estimate import FLOPS_REACHED, estimate


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


def test_no_estimate_is_faster_than_the_datasheet() -> None:
    """A linear layer of known work: 2 x in x out operations forward for each sample."""
    profile = estimated("cnn-digits", "t4")
    unit = next(u for u in profile.units if u.kind == "linear")
    weight = next(p for p in unit.parameters if len(p.shape) == 2)
    least = 2 * weight.shape[0] * weight.shape[1] * 256 / (datasheet("t4").float32 * 1e12)
    assert unit.whole.forward(256) >= least / FLOPS_REACHED


def test_nothing_is_changed() -> None:
    workload = models.build("gpt-tiny")
    before = {n: t.detach().clone() for n, t in workload.model.state_dict().items()}
    state = torch.get_rng_state()
    estimate(workload, "t4")
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in workload.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in workload.model.parameters())


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
def test_vgg16_is_estimated_on_an_h100() -> None:
    profile = estimated("vgg16", "h100-sxm")
    assert profile.origin == "estimated"
    flops = 3 * 2 * 15.5e9 * 64
    assert 1 < total(profile, 64) / (flops / 67e12) < 5
