"""Models that were not written here train right, or are told in a sentence why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ZOO = Path(__file__).parents[2] / "benchmarks" / "zoo.py"
SEED = 18
# Where `make` puts the packages that only the zoo takes models from.
VISION = Path(sys.prefix) / "vision"


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "count", [pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)]
)
def test_a_sample_of_architectures_trains_right_or_says_why_not(tmp_path, count):
    done = subprocess.run(
        [sys.executable, ZOO, "--sample", str(count), "--seed", str(SEED)],
        capture_output=True, text=True, timeout=1400, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": str(tmp_path),
             "PYTHONPATH": str(VISION)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["models"] == count
    bad = {"wrong", "error", "hang"} & set(found["verdicts"])
    assert not bad, done.stdout
