"""Estimates of reference models that were made before, found without loading torch.

To load torch takes longer than most plans. A reference model is known by its name: its code is this
package's own, and part of what an estimate is found again by.
"""

import functools
import hashlib
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..planner.schema import cache
from ..planner.schema.cluster import Cluster
from ..planner.schema.precision import Precision
from ..planner.schema.profile import ModelProfile


def kept_estimate(
    target: object, cluster: Cluster, precision: Precision | None
) -> ModelProfile | None:
    """The estimate of a reference model for the cluster's one kind of device, made before in
    another process; None where there is none."""
    names = {device.name for device in cluster.devices}
    # Where torch is loaded its settings may change what is built (types, autocast).
    if "torch" in sys.modules or not isinstance(target, str) or len(names) > 1:
        return None
    return cache.get(ModelProfile, _key(target, names.pop(), precision))


def keep_estimate(
    profile: ModelProfile, target: str, device: str, precision: Precision | None
) -> None:
    """Keeps the estimate of a reference model for ``kept_estimate``, made under torch's own
    settings."""
    key = _key(target, device, precision)
    if cache.get(ModelProfile, key) is None:
        cache.put(profile, key)


def _key(target: str, device: str, precision: Precision | None) -> str:
    # A device that is catalogued and here as well is measured, not estimated: so the host and what
    # it shows of its devices are part of it.
    here = socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return digest("named estimate", target, device, precision, sources(), _software(), here)


def _software() -> tuple[str, ...]:
    try:
        ours = version("meshwright")
    except PackageNotFoundError:  # run from a checkout that was never installed
        ours = "unknown"
    return platform.python_version(), ours, version("torch")


@functools.cache
def sources() -> str:
    """A digest of what estimates are made by: code and tables of the profiler, and reference models
    and what finds their units."""
    package = Path(__file__).parent.parent
    files = sorted(
        file
        for room in ("profiler", "models")
        for kind in ("py", "json")
        for file in (package / room).rglob(f"*.{kind}")
    )
    return digest(*(file.read_bytes() for file in files))


def digest(*parts: object) -> str:
    """What documents are found again by: one mark of all the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
