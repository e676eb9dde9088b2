"""Processes that a test has started, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def alive(mark: Path) -> list[int]:
    """Processes whose command line names that file or something in that folder, dead ones not among
    them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
        except OSError:
            continue
        if str(mark).encode() in line and state.rpartition(")")[2].split()[0] not in "ZX":
            found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
