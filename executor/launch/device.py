"""What this machine's devices are called, what they hold, and which software measures them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def device_name(device: torch.device) -> str:
    """What a device is called in profiles and clusters."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({_processor()})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def memory_bytes(device: torch.device, sharing: int = 1) -> int:
    """A device's memory; on a CPU the host's, divided among the ``sharing`` ranks on it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // sharing


def software() -> tuple[tuple[str, str], ...]:
    """Names and versions of what measures."""
    try:
        ours = version("meshwright")
    except PackageNotFoundError:  # run from a checkout that was never installed
        ours = "unknown"
    return (
        ("meshwright", ours),
        ("python", platform.python_version()),
        ("torch", str(torch.__version__)),
    )
