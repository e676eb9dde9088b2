"""What memory and processors this process's control groups (a container, a batch job) let it take.

Groups lie inside one another, and each has a limit of its own. A container may see its own group as
the root of all, or its path from outside without the files: what is not there has no limit.
"""

from collections.abc import Iterator
from contextlib import suppress
from math import inf
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROCESS, MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Which groups this process is in, and where their files are."""
# Version 1 has a number where no limit is set, the largest that is a whole number of pages.
UNLIMITED_BYTES = 2**60


class _Files(NamedTuple):
    """What a version of control groups calls its files, and the line of ``memory.stat`` with what
    the system would give back at once."""

    limit: str
    used: str
    reclaimable: str


_FIRST = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Files("memory.max", "memory.current", "inactive_file")


class GroupMemory(NamedTuple):
    """A group's limit, and what it has left of it."""

    limit_bytes: int
    free_bytes: int


def memory_groups() -> list[GroupMemory]:
    """Every group with a limit that this process is in, from the innermost one outwards."""
    found = []
    for folder, second in _folders("memory"):
        files = _SECOND if second else _FIRST
        with suppress(OSError, ValueError):  # not there, or "max": no limit is set
            limit = int((folder / files.limit).read_text())
            if limit < UNLIMITED_BYTES:
                used = int((folder / files.used).read_text()) - _reclaimable(folder, files)
                found.append(GroupMemory(limit, max(limit - max(used, 0), 0)))
    return found


def allowed_cores() -> float:
    """As many processors as the tightest group lets this process use, infinite without a limit."""
    found = [inf]
    for folder, second in _folders("cpu"):
        names = ("cpu.max",) if second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # not there, or "max": no limit is set
            numbers = " ".join((folder / name).read_text() for name in names).split()
            quota, period = map(int, numbers)
            if quota > 0 and period > 0:  # version 1 has -1 where no limit is set
                found.append(quota / period)
    return min(found)


def _folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folder of each group for a controller, and whether it is of version 2."""
    try:
        lines = PROCESS.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            place, second = MOUNTED, True
        elif controller in controllers.split(","):
            place, second = MOUNTED / controller, False
        else:
            continue
        inside = PurePosixPath(path.lstrip("/"))
        for part in (inside, *inside.parents):
            yield place / part, second


def _reclaimable(folder: Path, files: _Files) -> int:
    with suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == files.reclaimable:
                return int(value)
    return 0
