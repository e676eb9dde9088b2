"""What ssh starts on each host: it runs the host's ranks for a launcher elsewhere, and ends them
when that has gone.

``python -m meshwright.executor.launch.hosts.remote`` reads what to do from stdin and tells on
stdout how that goes (``protocol``).
"""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn, TypeVar

import msgspec
import torch

from ....planner.schema.errors import InputError, MeshwrightError
from ....planner.schema.plan import Plan
from ....planner.schema.record import Record, decode
from ....planner.schema.report import RunReport
from ...comm.setups import setup_here, software
from ...headroom import free_bytes
from ..launch import check_script, differences, launch
from ..processes import Ranks, check_plan
from ..start import address_towards
from ..worker import STDOUT_TO_STDERR
from .protocol import (
    GRACE_S,
    SILENCE_S,
    ForwardedSignal,
    HostOrder,
    HostReady,
    Meeting,
    failure_of,
)

RecordT = TypeVar("RecordT", bound=Record)
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class LauncherLine:
    """The connection to the launcher. Once it ends, or a signal comes over it, this process ends
    its ranks as if it had got that signal itself."""

    def __init__(self) -> None:
        # Ranks inherit stdin, and must not read what is told to this process.
        self._orders = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self._lines = self._read()
        self._token = next(self._lines, b"")
        self.version = next(self._lines, b"").decode()
        self._told: queue.Queue[tuple[str, bytes]] = queue.Queue()

    def listen(self) -> None:
        """From now on hears signals, and the end of the connection."""
        threading.Thread(target=self._listen, daemon=True).start()

    def wait_for(self, word: str, kind: type[RecordT]) -> RecordT:
        """What the launcher tells next, which is of that kind."""
        found, data = self._told.get()
        if found != word:
            raise InputError(f"the launcher said {found!r} and not {word!r}: use one version")
        return decode(kind, data, "what the launcher said")

    def tell(self, word: str, record: Record) -> None:
        line = b"%s %s %s\n" % (self._token, word.encode(), msgspec.json.encode(record))
        sys.stdout.flush()
        while line:
            line = line[os.write(1, line) :]

    def _read(self) -> Iterator[bytes]:
        held = b""
        while select.select([self._orders], [], [], SILENCE_S)[0]:
            part = os.read(self._orders, 1 << 16)
            if not part:
                return
            *whole, held = (held + part).split(b"\n")
            yield from whole

    def _listen(self) -> None:
        for line in self._lines:
            word, _, data = line.partition(b" ")
            if word == b"signal":
                self._end(decode(ForwardedSignal, data).number)
            elif word != b"alive":
                self._told.put((word.decode(), data))
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        # To the main thread, which may wait: a signal for the process may come to another, and then
        # interrupts nothing.
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, number)
        # The engine may wait where no signal is looked at (for other hosts, say). Ranks end with
        # this process, by the kernel.
        clock = threading.Timer(GRACE_S, os._exit, (1,))
        clock.daemon = True
        clock.start()


def _stop(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    """Runs what the launcher orders; the exit code."""
    for number in _SIGNALS:
        signal.signal(number, _stop)
    line = LauncherLine()
    line.listen()
    try:
        mine = dict(software())["meshwright"]
        if line.version != mine:
            raise InputError(
                f"Meshwright is {mine} here and {line.version} where it was launched: "
                "install the same on all hosts"
            )
        _serve(line)
    except MeshwrightError as error:
        line.tell("failed", failure_of(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        # What is over is not to be ended: the launcher hangs up while this process clears up.
        for number in (*_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return 0


def _serve(line: LauncherLine) -> None:
    order = line.wait_for("order", HostOrder)
    os.environ.update(order.environment)
    try:
        os.chdir(order.folder)
    except OSError as error:
        raise InputError(
            f"the working folder {order.folder} cannot be entered ({error.strerror}): make it, or "
            "name another with --folder"
        ) from None
    plan = decode(Plan, order.plan.encode(), "the plan")
    check_plan(plan, sum(order.per_host))
    check_script(order.script)
    line.tell("ready", _ready(plan, order))
    if order.node_rank == 0:
        line.tell("met", meeting_place(line.wait_for("meet", Meeting)))
    place = line.wait_for("go", Meeting)
    ranks = Ranks(
        nproc=order.per_host[order.node_rank],
        nodes=len(order.per_host),
        node_rank=order.node_rank,
        rendezvous=f"{place.address}:{place.port}",
        timeout_s=order.timeout_s,
        environment={STDOUT_TO_STDERR: "1"} if order.quiet else {},
        per_host=order.per_host,
    )

    def at_end(report: RunReport | None) -> None:
        if report is not None:
            line.tell("report", report)

    launch(plan, order.script, order.steps, ranks, order.background, at_end, _say)


def _say(text: str) -> None:
    if text:
        print(f"note: {text}", file=sys.stderr, flush=True)


def _ready(plan: Plan, order: HostOrder) -> HostReady:
    here = order.per_host[order.node_rank]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpus = gpus >= here
    # To ask a GPU for its free memory would take some of it: ranks do (``check_headroom``).
    free = None if on_gpus else free_bytes(torch.device("cpu"))
    # The client's address and port, then this host's own, as the client reached it.
    reached = os.environ.get("SSH_CONNECTION", "").split()
    return HostReady(
        setup=setup_here(torch.device("cuda" if on_gpus else "cpu")),
        address=reached[2] if len(reached) == 4 else "",
        free_bytes=free,
        notes=tuple(differences(plan, here)),
    )


def meeting_place(asked: Meeting) -> Meeting:
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
        return Meeting(address=address, port=int(probe.getsockname()[1]))


if __name__ == "__main__":
    sys.exit(main())
