"""Hosts that compute for a part of the time only: a CPU bandwidth quota of a control group.

The kernel stops a group's processes for the rest of each period once they have used their quota
(cgroup v1: ``cpu.cfs_quota_us``, v2: ``cpu.max``). Needs root and a writable cpu controller.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from meshwright.planner.schema.errors import InputError

# Short beside a step, so that each is slowed alike, and long beside a switch of processes.
PERIOD_US = 5000
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_PREFIX = "meshwright-bed-"


def missing_quota() -> str | None:
    """Why no CPU quota can be set here, in a sentence; None where one can."""
    if os.geteuid() != 0:
        return "a CPU quota is set by root: run it as root"
    if _root() is None:
        return (
            "a CPU quota needs the cpu controller of cgroups, v1 (/sys/fs/cgroup/cpu) or v2, "
            "mounted and writable, which it is not here: run it on a host with one"
        )
    return None


def _root() -> Path | None:
    """The group in which groups with a quota can be made."""
    if (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "cgroup.procs").exists():
        return _V1 if os.access(_V1, os.W_OK) else None
    control = _V2 / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if "cpu" not in control.read_text().split():
            control.write_text("+cpu")
        return _V2 if os.access(_V2, os.W_OK) else None
    return None


class CpuQuota:
    """A control group whose processes have ``share`` of one core. Raises ``InputError`` where none
    can be made."""

    def __init__(self, name: str, share: float) -> None:
        reason, root = missing_quota(), _root()
        if reason is not None or root is None:
            raise InputError(str(reason))
        if not 0.2 <= share <= 1:
            # The kernel takes no quota below a millisecond.
            raise InputError(f"a share of {share:g} of a core cannot be: give 0.2 to 1")
        remove_stale_quotas(root)
        self.path = root / f"{_PREFIX}{os.getpid()}-{name}"
        self.path.mkdir()
        quota = round(PERIOD_US * share)
        if root == _V1:
            (self.path / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.path / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self.path / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """``arguments`` as run in the group."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", enter, str(self.path / "cgroup.procs"), *arguments]

    def remove(self) -> None:
        """Takes the group away. It must be empty."""
        with contextlib.suppress(FileNotFoundError):
            self.path.rmdir()


def remove_stale_quotas(root: Path) -> None:
    """Removes groups whose bed's process is gone."""
    for path in root.glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):  # one of its processes may still be ending
                path.rmdir()
