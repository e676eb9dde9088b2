"""Where ranks are: the name of each one's host and of its device."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..executor.comm.setups import device_name
from ..planner.schema.errors import InputError

# Drawn when Linux starts: containers on one machine have the same, two machines never do.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def places_of_ranks(device: torch.device) -> list[tuple[str, str]]:
    """The host and the device of each rank, by name. Raises ``InputError`` on every rank where two
    machines have one name: they would be measured as one. Collective."""
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (socket.gethostname(), _machine(), device_name(device)))
    _check_hosts([(host, machine) for host, machine, _ in rows])
    return [(host, name) for host, _, name in rows]


def _machine() -> str:
    """What this machine alone has; nothing where the system does not tell."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _check_hosts(rows: Sequence[tuple[str, str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, (host, machine) in enumerate(rows):
        other, known = first.setdefault(host, (rank, machine))
        if machine != known:
            raise InputError(
                f"ranks {other} and {rank} are on two machines that are both called {host!r}: give "
                "each a name of its own (sudo hostnamectl set-hostname NAME), as hosts are told "
                "apart by their names"
            )
