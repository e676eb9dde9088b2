"""A host's part of a run: it tells what the host has, meets the other hosts and runs the ranks.

Apart from ``remote``, which hears the launcher while this, and torch with it, is still loading.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import torch

from ....planner.schema.errors import InputError, MeshwrightError
from ....planner.schema.plan import Plan
from ....planner.schema.recorded import RecordedSteps
from ....planner.schema.report import RunReport
from ...checkpoint.latest import latest_whole
from ...comm.setups import setup_here, software
from ...headroom import free_bytes
from ...notes import note
from ..devices import on_gpus
from ..launch import check_script, differences, keeping_for, launch
from ..processes import Ranks, check_plan
from ..start import address_towards
from ..tasks import CheckpointSettings
from ..training_progress import PROGRESS_VARIABLE
from ..worker import STDOUT_TO_STDERR
from .protocol import HostOrder, HostReady, HostRecording, RendezvousAddress, SavedStep, failure_of
from .remote import LauncherLine

# So often the folder of checkpoints is looked at.
LOOK_S = 1.0


def serve(line: LauncherLine) -> int:
    """Runs what the launcher orders; the exit code. What went wrong has been told then."""
    try:
        mine = dict(software())["meshwright"]
        if line.version != mine:
            raise InputError(
                f"Meshwright is {mine} here and {line.version} where it was launched: install the "
                "same on all hosts"
            )
        _run_order(line)
    except MeshwrightError as error:
        line.tell("failed", failure_of(error))
        return error.exit_code
    return 0


def _run_order(line: LauncherLine) -> None:
    order = line.wait_for("order", HostOrder)
    os.environ.update(order.environment)
    try:
        os.chdir(order.folder)
    except OSError as error:
        raise InputError(
            f"the working folder {order.folder} cannot be entered ({error.strerror}): make it, or "
            "name another with --folder"
        ) from None
    plan = order.plan
    check_plan(plan, sum(order.per_host))
    check_script(order.script)
    line.tell("ready", _ready(plan, order))
    if order.node_rank == 0:
        line.tell("met", meeting_place(line.wait_for("meet", RendezvousAddress)))
    place = line.wait_for("go", RendezvousAddress)
    ranks = Ranks(
        nproc=order.per_host[order.node_rank],
        nodes=len(order.per_host),
        node_rank=order.node_rank,
        rendezvous=f"{place.address}:{place.port}",
        timeout_s=order.timeout_s,
        environment={
            PROGRESS_VARIABLE: "1" if order.progress else "",
            **({STDOUT_TO_STDERR: "1"} if order.quiet else {}),
        },
        per_host=order.per_host,
    )

    def at_end(report: RunReport | None) -> None:
        if report is not None:
            line.tell("report", report)

    def recorded(_: Plan, found: list[RecordedSteps]) -> None:
        line.tell("recorded", HostRecording(ranks=tuple(found)))

    keeping = keeping_for(
        order.checkpoint, order.checkpoint_every, resume=order.resume, restarted=order.restarted
    )
    if keeping is not None and order.node_rank == 0:
        threading.Thread(target=_tell_of_checkpoints, args=(line, keeping), daemon=True).start()
    launch(
        plan, order.script, order.steps, ranks, order.background, keeping, at_end, note,
        recorded=recorded if order.trace else None, replans=False,
    )  # fmt: skip


def _tell_of_checkpoints(line: LauncherLine, keeping: CheckpointSettings) -> None:
    """Tells of the latest checkpoint, and of each that comes after it."""
    # Looked for in the folder, as the launcher may be where that is not.
    last: int | None = None
    while True:
        with contextlib.suppress(InputError):
            # Not of one that is damaged: the run has gone on from the one before it.
            step = latest_whole(Path(keeping.folder), by_size=True).step
            if step != last:
                line.tell("saved", SavedStep(step=step))
            last = step
        time.sleep(LOOK_S)


def _ready(plan: Plan, order: HostOrder) -> HostReady:
    here = order.per_host[order.node_rank]
    with_gpus = on_gpus(here)
    # To ask a GPU for its free memory would take some of it: ranks do (``check_headroom``).
    free = None if with_gpus else free_bytes(torch.device("cpu"))
    # The client's address and port, then this host's own, as the client reached it.
    reached = os.environ.get("SSH_CONNECTION", "").split()
    return HostReady(
        setup=setup_here(torch.device("cuda" if with_gpus else "cpu")),
        address=reached[2] if len(reached) == 4 else "",
        free_bytes=free,
        notes=tuple(differences(plan, here, sum(order.per_host[: order.node_rank]))),
    )


def meeting_place(asked: RendezvousAddress) -> RendezvousAddress:
    """An address of this host on the way to the one that is named, and a port that is free now.

    Raises ``InputError`` where the port that was asked for is in use.
    """
    address = address_towards(asked.address) or asked.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the store does: ports of connections that have just ended are free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", asked.port))
        except OSError as error:
            raise InputError(
                f"port {asked.port}, at which hosts were to meet, cannot be had "
                f"({error.strerror}): name another with --rendezvous :PORT, or none for a free one"
            ) from None
        return RendezvousAddress(address=address, port=int(probe.getsockname()[1]))
