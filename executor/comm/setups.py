"""What hosts have: versions, which must be alike before the first step, and devices.

Of other versions a rank would issue other collectives, which is a hang or wrong sums; on other
devices it computes the same, at another pace.
"""

import contextlib
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ...planner.schema.errors import InputError
from ...planner.schema.record import Index, Record


class HostSetup(Record, frozen=True, kw_only=True):
    """What a host has: names and versions of software, the name of the devices that its ranks
    compute on, and the number of its GPUs (0: they compute on the CPU)."""

    host: str
    software: tuple[tuple[str, str], ...]
    device: str
    gpus: Index


def setup_here(device: torch.device) -> HostSetup:
    """What this host has, for ranks that compute on that kind of device."""
    return HostSetup(
        host=socket.gethostname(),
        software=software(),
        device=device_name(device),
        gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
    )


def check_versions(setups: Sequence[HostSetup]) -> None:
    """Raises ``InputError`` where hosts have other versions of what all must have alike.

    ``setups`` are of hosts, or of the ranks in their order.
    """
    for name, _ in setups[0].software:
        found = [_compared(name, dict(setup.software).get(name, "none")) for setup in setups]
        if len(set(found)) > 1:
            raise InputError(
                f"hosts have different versions of {name}: {_by_value(found, setups)}; install the "
                "same on all of them"
            )


def other_devices(setups: Sequence[HostSetup]) -> str | None:
    """A sentence where hosts compute on different devices or have different numbers of them."""
    found = [f"{s.gpus} x {s.device}" if s.gpus else s.device for s in setups]
    if len(set(found)) == 1:
        return None
    return (
        f"hosts have different devices: {_by_value(found, setups)}; a step takes as long as on the "
        "slowest, which the plan knows of only where its cluster has these devices"
    )


def _compared(name: str, value: str) -> str:
    # Ranks under 3.11.4 and 3.11.9 work together.
    return ".".join(value.split(".")[:2]) if name == "python" else value


def _by_value(values: Sequence[str], setups: Sequence[HostSetup]) -> str:
    """``2.13.0 on a, b and 2.12.0 on c``: every value with those who have it."""
    names = [setup.host for setup in setups]
    several = Counter(host for host, _ in set(zip(names, values, strict=True)))
    labels: dict[str, dict[str, None]] = {}
    for rank, (host, value) in enumerate(zip(names, values, strict=True)):
        # A host that itself differs from rank to rank says nothing.
        label = host if several[host] == 1 else f"rank {rank} of {host}"
        labels.setdefault(value, {})[label] = None
    return " and ".join(f"{value} on {', '.join(who)}" for value, who in labels.items())


def digest_text(setup: HostSetup) -> str:
    """What is compared of a set-up, as text: all but the host's name."""
    versions = tuple((n, _compared(n, v)) for n, v in setup.software)
    return repr((versions, setup.device, setup.gpus))


def device_name(device: torch.device) -> str:
    """What a device is called in profiles and clusters."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines: list[str] = []
    with contextlib.suppress(OSError):  # no Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"cpu ({next(names, platform.machine())})"


def device_identity(device: torch.device) -> str:
    """What tells a GPU from the others of its host; "" for a CPU."""
    if device.type != "cuda":
        return ""
    # Numbers do not tell: where each rank is shown a GPU of its own, that is number 0 for all.
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def software() -> tuple[tuple[str, str], ...]:
    """Names and versions of what measures and trains."""
    try:
        ours = version("meshwright")
    except PackageNotFoundError:  # run from a checkout that was never installed
        ours = "unknown"
    return (
        ("meshwright", ours),
        ("python", platform.python_version()),
        ("torch", str(torch.__version__)),
    )
