"""Profiling without the model's memory."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from meshwright.models.units.discover import discover
from meshwright.models.zoo import build
from meshwright.profiler.estimate import estimate
from meshwright.profiler.memory import FusedAttention, dry, is_dry, measure_footprint
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", ["gpt-tiny", "cnn-digits"])
def test_the_footprint_is_the_same_as_with_memory(name):
    """Also that of attention, which torch would not fuse there."""
    real = build(name)
    twin = dry(real)
    assert is_dry(twin.model)
    assert not is_dry(real.model)
    found = discover(real.model, real.make_batch(3), real.make_batch(2))
    other = discover(twin.model, twin.make_batch(3), twin.make_batch(2))
    assert (found.units, found.edges) == (other.units, other.edges)
    with FusedAttention():
        held = [
            measure_footprint(w.model, found.units, w.make_batch(4), w.loss, device)
            for w, device in ((real, torch.device("cpu")), (twin, torch.device("meta")))
        ]
    for field in ("saved", "workspace", "gradient", "new_grad", "never_together"):
        here, there = (getattr(h, field) for h in held)
        assert there == pytest.approx(here, rel=0.01, abs=64), field


def test_fused_attention_leaves_real_tensors_alone():
    x = torch.randn(2, 4, 8, 16)
    with FusedAttention():
        ours = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(x, x, x, is_causal=True))


def test_an_estimate_needs_no_memory():
    with torch.device("meta"):
        workload = build("gpt-tiny")
    found = estimate(workload, "a100-sxm-80gb")
    assert found.units == estimate(build("gpt-tiny"), "a100-sxm-80gb").units


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_seven_billion_parameters_on_64_devices(tmp_path):
    """In minutes, with its timeline, on a machine that could not hold the model."""
    pytest.importorskip("transformers")
    start = time.monotonic()

    def run(*arguments: object) -> str:
        program = [sys.executable, "-m", "meshwright", *map(str, arguments)]
        done = subprocess.run(
            program, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    target = f"{ROOT / 'examples' / 'llama_7b.py'}:llama_7b"
    run("profile", target, "--device", "a100-sxm-80gb", "-o", "llama.json")
    links = ("--inter-gbit-s", 200, "--intra-gbyte-s", 250, "-o", "cluster.json")
    run("cluster", "--device", "a100-sxm-80gb", "--nodes", 8, "--devices-per-node", 8, *links)
    made = ("llama.json", "--cluster", "cluster.json", "--batch", 128, "--optimizer", "adamw")
    run("plan", *made, "--micro-batches", "1,2", "--time-limit", 10, "-o", "plan.json")
    given = ("--profile", "llama.json", "--cluster", "cluster.json")
    found = json.loads(run("explain", "plan.json", "--memory", *given, "--json"))
    # One and a half on an idle machine of two cores; tests beside it take their part.
    assert time.monotonic() - start < 240
    parameters = sum(
        p["bytes"] // 4
        for u in json.loads((tmp_path / "llama.json").read_text())["units"]
        for p in u["parameters"]
    )
    assert 6.5e9 < parameters < 7e9
    ranks = [r for one in found["timelines"] for r in one["ranks"]]
    assert sorted(ranks) == list(range(64))
    for one in found["timelines"]:
        assert one["limit_bytes"] == 75 * 2**30  # less what tensors cannot have
        for moment in one["moments"]:
            held = sum(v for k, v in moment.items() if k not in ("unit", "phase"))
            assert 0 < held <= one["limit_bytes"]
    most = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert most < 8 * 2**30  # weights alone would take 27 GB
