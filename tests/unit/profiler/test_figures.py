"""Lines through measurements, optimizers' rates, catalogued devices and described clusters."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.executor.comm.setups import device_name, software
from meshwright.executor.launch.start import memory_bytes
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import OPTIMIZERS
from meshwright.planner.schema.record import decode, encode
from meshwright.planner.schema.text import option
from meshwright.profiler import catalogue, timing
from meshwright.profiler.catalogue import describe_cluster
from meshwright.profiler.collectives import fit_line
from meshwright.profiler.estimate import load_table, tables
from meshwright.profiler.timing import update_rates

SIZES = [2**n for n in range(10, 25, 2)]


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e6, 1e11),
    st.integers(0, 10**6),
)
def test_a_known_line_is_found_under_noise(latency: float, rate: float, seed: int) -> None:
    """Whatever of it shows in the sizes measured: predictions are off by no more than the noise."""
    noise = random.Random(seed)
    exact = [latency + s / rate for s in SIZES]
    line = fit_line(SIZES, [t * noise.uniform(0.95, 1.05) for t in exact])
    for size, seconds in zip(SIZES, exact, strict=True):
        assert line.latency_s + size / line.bytes_per_s == pytest.approx(seconds, rel=0.1)


def test_an_exact_line_is_found_exactly() -> None:
    line = fit_line(SIZES, [5e-5 + s / 2e9 for s in SIZES])
    assert line.latency_s == pytest.approx(5e-5, rel=1e-6)
    assert line.bytes_per_s == pytest.approx(2e9, rel=1e-6)


def test_flat_and_falling_times_give_a_finite_bandwidth() -> None:
    for seconds in ([1e-4] * len(SIZES), [1e-3 / (i + 1) for i in range(len(SIZES))]):
        line = fit_line(SIZES, seconds)
        assert line.latency_s >= 0
        assert 0 < line.bytes_per_s < float("inf")


def test_optimizers_rates_are_measured_on_copies() -> None:
    parameter = torch.nn.Parameter(torch.randn(512, 512))
    before = parameter.detach().clone()
    rates = {r.optimizer: r.seconds_per_byte for r in update_rates([parameter], list(OPTIMIZERS))}
    assert set(rates) == set(OPTIMIZERS)
    assert all(0 < rate < 1e-5 for rate in rates.values())  # 0.1 MB/s would be no computer
    assert torch.equal(parameter, before)
    assert parameter.grad is None


def test_updates_are_of_new_gradients_and_free_them(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[torch.Tensor] = []
    states: list[bool] = []

    def made(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        updated.extend(parameters)
        return torch.optim.SGD(parameters, 0.0)

    def timed(
        update: Callable[[], object], device: torch.device, ahead_s: float = 0.0
    ) -> timing.Taken:
        states.append(all(p.grad is not None for p in updated))
        update()
        states.append(all(p.grad is None for p in updated))
        return timing.Taken(1e-3, 5e-4)

    monkeypatch.setattr(timing, "optimizer_for", made)
    monkeypatch.setattr(timing, "timed", timed)
    (rate,) = update_rates([torch.nn.Parameter(torch.ones(250))] * 2, ["sgd"], rounds=3)
    assert rate.seconds_per_byte == pytest.approx(1e-3 / 2000)
    assert states == [True] * 8


def test_updates_of_main_weights_are_measured_where_there_would_be_some() -> None:
    """They move more bytes for each byte of a parameter that has 16 bits."""
    whole = torch.nn.Parameter(torch.randn(1024, 1024))
    half = torch.nn.Parameter(torch.randn(1024, 1024, dtype=torch.bfloat16))
    before = half.detach().clone()
    assert not any(rate.sharded for rate in update_rates([whole], ["adamw"]))
    plain, sharded = update_rates([half], ["adamw"])
    assert (plain.sharded, sharded.sharded) == (False, True)
    assert 0 < sharded.seconds_per_byte < 1e-5
    assert torch.equal(half, before)


def test_optimizers_unknown_and_models_without_parameters() -> None:
    with pytest.raises(InputError, match=r"'muon' is not known: choose from sgd"):
        update_rates([torch.zeros(3)], ["muon"])
    assert update_rates([], ["sgd"])[0].seconds_per_byte == 0


def test_every_catalogued_device_is_plausible_and_cited() -> None:
    for name in catalogue.names():
        device = catalogue.catalogued_device(name)
        sheet = catalogue.datasheet(name)
        assert device.source
        assert device.memory_bytes == sheet.memory_gib * 2**30
        assert 1e12 < device.flops_per_s < 1e15
        assert sheet.float32 <= sheet.tf32 <= sheet.half
        assert 1e11 < device.memory_bytes_per_s < 1e13
    assert catalogue.catalogued_device("t4", 1000).memory_bytes == 1000


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("h100", "did you mean h100"),
        ("A100", "mean a100-sxm-40gb, a100-sxm-80gb"),
        ("H100-SXM", "h100-sxm"),
        ("abacus", "choose from a100"),
    ],
)
def test_unknown_devices_get_the_nearest_names(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        catalogue.catalogued_device(name)


def test_a_described_cluster_has_what_was_said() -> None:
    cluster = describe_cluster(
        device="a100-sxm-80gb",
        nodes=2,
        devices_per_node=4,
        inter_gbit_s=100,
        intra_gbyte_s=300,
        inter_latency_us=12,
    )
    assert cluster.world_size == 8
    inter, intra = cluster.level("inter"), cluster.level("intra")
    assert inter.bytes_per_s == pytest.approx(12.5e9)
    assert inter.latency_s == pytest.approx(12e-6)
    assert intra.bytes_per_s == pytest.approx(300e9)
    data = encode(cluster)
    assert encode(decode(Cluster, data)) == data


@pytest.mark.parametrize("links", [{"intra_gbyte_s": 300}, {"intra_latency_us": 300}])
def test_links_inside_hosts_of_one_device_are_told(links: dict[str, float]) -> None:
    (name,) = links
    shown = f"{option(name)} 300"
    with pytest.warns(UserWarning, match=f"{shown} .{name}. says nothing of hosts with one device"):
        found = describe_cluster(device="t4", nodes=2, inter_gbit_s=10, **links)
    assert found.level("intra") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate = {"intra_gbyte_s": 300}
        describe_cluster(
            device="t4", nodes=2, devices_per_node=2, inter_gbit_s=10, **(rate | links)
        )


def test_one_device_needs_no_link() -> None:
    assert describe_cluster(device="t4").world_size == 1


BAD = {
    r"nodes is 0": {"nodes": 0},
    r"devices_per_node is -1": {"devices_per_node": -1},
    r"no links: give inter_gbit_s \(such as --inter-gbit-s 10\) between": {"nodes": 2},
    r"of a host: give intra_gbyte_s \(such as --intra-gbyte-s 300, NVLink of an A100\)": {
        "nodes": 2,
        "devices_per_node": 2,
        "inter_gbit_s": 1,
    },
    r"no links between hosts: give inter_gbit_s": {"nodes": 2, "intra_gbyte_s": 1},
    r"inter_gbit_s is 0": {"nodes": 2, "inter_gbit_s": 0},
    r"inter_gbit_s is nan": {"nodes": 2, "inter_gbit_s": float("nan")},
    r"inter_gbit_s is inf": {"nodes": 2, "inter_gbit_s": float("inf")},
    r"inter_latency_us is -3": {"nodes": 2, "inter_gbit_s": 1, "inter_latency_us": -3},
    r"memory_bytes is -5: give a number above zero": {"memory_bytes": -5},
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_wrong_description_gets_a_sentence(sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        describe_cluster(**{"device": "t4", **BAD[sentence]})


def test_this_machine_is_named() -> None:
    cpu = torch.device("cpu")
    assert device_name(cpu).startswith("cpu (")
    assert memory_bytes(cpu) // 2 == memory_bytes(cpu, sharing=2)
    assert dict(software())["torch"] == torch.__version__


def test_published_tables_load_and_others_are_named() -> None:
    assert "vgg16" in tables()
    profile = load_table("vgg16")
    assert profile.origin == "table"
    assert profile.parameter_bytes == 138_357_544 * 4
    with pytest.raises(InputError, match="branches"):  # what a table does not tell
        load_table("inception_v3")
    with pytest.raises(InputError, match="choose from"):
        load_table("vgg61")


def test_published_times_rise_with_the_batch() -> None:
    profile = load_table("vgg16")
    steps = [
        sum(u.whole.forward(b) + u.whole.backward(b) for u in profile.units)
        for b in profile.batches
    ]
    assert all(a < b for a, b in itertools.pairwise(steps))
