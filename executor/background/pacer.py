"""The pacer: one process on each host that runs the background job and lets it have its share.

``python -m meshwright.executor.background.pacer PIPE`` reads ``Settings`` as the first line of its
stdin; further lines are orders (``state``, ``hold``, ``release``, ``stop``), each answered by the
job's ``State`` on stdout. PIPE is where the host's ranks write their ``PacerMessage``s. It sleeps
until one of these, the job's end or the end of a piece wakes it. When stdin closes, the launcher is
gone, and the job is told to end.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from .child import Child
from .gate import FOREVER, Gap, GapChoice, Hold, RunTimes, opening
from .law import ShareController, Summary
from .protocol import SIZE, Kind, PacerMessage, Settings, State, unpacked

_READ = 256 * SIZE
_STDIN = 0


class Foreground:
    """What the ranks of this host have told: their waits, and their steps, as their first tells
    them, since all make the same."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.attached = False
        self.laws: dict[int, ShareController] = {}
        self.current = ShareController(limit)
        self.began_s = 0.0
        self._gaps: dict[int, Gap] = {}
        self._held_since_s: float | None = None
        self._held_until_s = -FOREVER

    def heard(self, record: PacerMessage, now_s: float) -> None:
        self.attached = True
        began = record.kind == Kind.BEGAN and record.rank == 0
        if began or record.foreground not in self.laws:
            self.laws[record.foreground] = ShareController(self._limit)
        self.current = self.laws[record.foreground]
        if record.kind == Kind.WAITS:
            self._gaps[record.rank] = Gap(now_s, record.seconds)
        elif record.kind == Kind.WORKS:
            self._gaps.pop(record.rank, None)
        elif record.kind == Kind.STEPPED and record.rank == 0:
            self._stepped(record, now_s)
            self.began_s = now_s

    def _stepped(self, record: PacerMessage, now_s: float) -> None:
        since_s = self._held_since_s
        throughout = since_s is not None and since_s <= self.began_s
        # A step in which the launcher's hold began or ended was disturbed in part: it says nothing.
        if (since_s is not None or self._held_until_s > self.began_s) and not throughout:
            self.current.passed(record.number)
        else:
            self.current.stepped(record.number, record.seconds, held=throughout)

    def hold(self, held: bool, now_s: float) -> None:
        """From now on the launcher holds the background, or no longer does."""
        if held and not self.held:
            self._held_since_s = now_s
        elif not held and self.held:
            self._held_since_s, self._held_until_s = None, now_s

    @property
    def held(self) -> bool:
        return self._held_since_s is not None

    def left(self) -> None:
        self.attached = False
        self._gaps.clear()

    def opening(self, now_s: float) -> GapChoice:
        """Whether the background may run, and until when."""
        if not self.attached:
            return GapChoice(True, FOREVER)
        share, overdue_s = self.current.share, self.current.overdue_s()
        paused_s = self.current.paused_s()
        if overdue_s is None or paused_s is None:
            return GapChoice(False, FOREVER, Hold.LEARN)
        if now_s >= self.began_s + paused_s:
            return GapChoice(False, FOREVER, Hold.ELSE)
        if not share or now_s >= self.began_s + overdue_s:
            why = Hold.LEARN if self.current.learns else Hold.LIMIT
            return GapChoice(False, self.began_s + paused_s, why)
        # One rank that waits leaves a processor free, and the kernel moves the background there.
        gap = max(self._gaps.values(), key=lambda g: g.closes_s, default=None)
        found = opening(now_s, share, gap)
        return found._replace(until_s=min(found.until_s, self.began_s + overdue_s))

    def summary(self) -> Summary:
        """Of the foreground that has made most steps."""
        found = [law.summary() for law in (*self.laws.values(), self.current)]
        return max(found, key=lambda summary: summary.steps)


class Pacer:
    def __init__(self, settings: Settings, pipe: Path) -> None:
        self.settings = settings
        self.foreground = Foreground(settings.limit)
        self._path = pipe
        self._pipe = self._listen()
        self._signals = _woken_by_signals()
        with Path(settings.log).open("ab") as log:
            self.child = Child(
                settings.command, log, dict(settings.environment), settings.memory_bytes
            )
        self._launcher: list[int] = [_STDIN]
        self._started_s = time.monotonic()
        self._tally = RunTimes(self._started_s)
        self._kill_s = FOREVER
        self._orders = b""
        self._ended = ""
        self._cpu_s = 0.0

    def _listen(self) -> int:
        return os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)

    def run(self) -> None:
        while True:
            now_s = time.monotonic()
            until_s = self._turn(now_s)
            if self._ended:
                return
            wait_s = None if until_s == FOREVER else max(0.0, until_s - now_s)
            watched = [self._pipe, self._signals, self.child.descriptor, *self._launcher]
            ready, _, _ = select.select(watched, [], [], wait_s)
            if self._pipe in ready:
                self._hear()
            if self._signals in ready:
                os.read(self._signals, 64)
            if _STDIN in ready:
                self._obey()
            if self.child.descriptor in ready:
                self._finish()
                return

    def _turn(self, now_s: float) -> float:
        """Lets the job run or not; when to look again."""
        if now_s >= self._kill_s:
            self._finish()
            return now_s
        if self._kill_s < FOREVER:  # it writes its checkpoint
            return self._kill_s
        held = self.foreground.held
        found = GapChoice(False, FOREVER) if held else self.foreground.opening(now_s)
        self._tally.turned(now_s, found, self.foreground.attached, self.child.cpu_s)
        self.child.let_run(found.runs)
        return found.until_s

    def _hear(self) -> None:
        try:
            data = os.read(self._pipe, _READ)
        except BlockingIOError:
            return
        now_s = time.monotonic()
        if not data:
            # Its writers have gone, which a pipe that stays open would report for ever.
            self.foreground.left()
            os.close(self._pipe)
            self._pipe = self._listen()
        for record in unpacked(data):
            self.foreground.heard(record, now_s)

    def _obey(self) -> None:
        data = os.read(_STDIN, 4096)
        if not data:
            self._launcher.clear()
            self.stop()
        *orders, self._orders = (self._orders + data).split(b"\n")
        for order in orders:
            if order == b"stop":
                self.stop()
            elif order in (b"hold", b"release"):
                now_s = time.monotonic()
                self.foreground.hold(order == b"hold", now_s)
                self._turn(now_s)
            if not self._ended:
                self.tell()

    def stop(self) -> None:
        """Tells the job to end; kills it when its time is over."""
        if self._kill_s == FOREVER:
            self._kill_s = time.monotonic() + self.settings.grace_s
            self.child.ask_to_end()

    def _finish(self) -> None:
        if not self._ended:
            self._ended, self._cpu_s = self.child.end()

    def tell(self) -> None:
        now_s, found = time.monotonic(), self.foreground.summary()
        cpu_s = self._cpu_s if self._ended else self.child.cpu_s()
        state = State(
            pid=self.child.pid,
            ended=self._ended,
            seconds=now_s - self._started_s,
            open_s=self._tally.open_s,
            cpu_s=cpu_s,
            during_steps=self._tally.during_steps(cpu_s),
            steps=found.steps,
            disturbed=found.disturbed,
            undisturbed_s=found.undisturbed_s,
            slowdown=found.slowdown,
            priority=self.child.priority,
        )
        with contextlib.suppress(BrokenPipeError):  # the launcher is gone
            os.write(1, f"{state.text()}\n".encode())


def _woken_by_signals() -> int:
    """A descriptor that becomes readable with a signal."""
    # Python goes on with a select that a signal has interrupted, which so would sleep on.
    read, write = os.pipe()
    for descriptor in (read, write):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(write)
    return read


def main() -> None:
    with os.fdopen(_STDIN, "rb", buffering=0, closefd=False) as orders:
        settings = Settings.read(orders.readline().decode())
    pacer = Pacer(settings, Path(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: pacer.stop())
    pacer.tell()
    pacer.run()
    pacer.tell()


if __name__ == "__main__":
    main()
