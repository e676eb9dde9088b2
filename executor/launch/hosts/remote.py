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
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn, TypeVar

import msgspec

from ....planner.schema.errors import InputError
from ....planner.schema.record import Record, decode

RecordT = TypeVar("RecordT", bound=Record)
# A launcher that is stopped (Ctrl-Z) or cut off for so long is taken for gone.
SILENCE_S = 120.0
# Ranks that are told to end are killed after 5 s by the engine; what goes on then ends after this.
GRACE_S = 15.0
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
        self._writes = threading.Lock()

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
        with self._writes:
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
                self._end(int(data))
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
        # Takes seconds, in which the launcher may already hang up.
        from .serve import serve

        return serve(line)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        # What is over is not to be ended: the launcher hangs up while this process clears up.
        for number in (*_SIGNALS, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
