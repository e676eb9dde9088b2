"""A background job as the launcher holds it: its pacer's process, and the words between them."""

import contextlib
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...planner.schema.errors import InputError, RunError
from .law import LIMIT
from .protocol import VARIABLE, Settings, State

ANSWER_S = 20.0
"""A pacer that does not answer within so long has gone wrong."""


def command_of(text: str) -> tuple[str, ...]:
    """The words of a command, as a shell would divide them; nothing else of a shell's is done."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(
            f"--background {text!r} cannot be read: {error}; quote it as one"
        ) from None
    if not words:
        raise InputError("--background is empty: give a command, or the file of a plan")
    return words


class Job:
    """A background job on this host, which has begun. See ``background_job``. ``last`` is the
    latest state that its pacer has told."""

    last: State

    def __init__(self, settings: Settings, pipe: Path) -> None:
        self.settings = settings
        self.environment = {VARIABLE: str(pipe)}
        """What the foreground's ranks on this host are told."""
        self._answers = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.pacer", str(pipe)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the launcher, which tells it
            bufsize=0,
        )
        self._say(settings.text())
        if not self._read(ANSWER_S):
            raise RunError(
                f"the background job {shlex.join(settings.command)!r} could not be started: its "
                "error is above"
            )

    def state(self) -> State:
        """The job now, or as it ended."""
        return self._order("state")

    def hold(self) -> State:
        """Stops it until ``release``, whatever the foreground does."""
        return self._order("hold")

    def release(self) -> State:
        """Leaves it to the law again."""
        return self._order("release")

    def wait(self) -> State:
        """Returns when it has ended by itself."""
        while not self.last.ended and self._read(None):
            pass
        self._process.wait()
        return self.last

    def stop(self) -> State:
        """Lets it write a checkpoint and ends it; none of its processes is left then."""
        self._order("stop")
        return self.wait()

    def _order(self, word: str) -> State:
        if not self.last.ended:
            self._say(word)
            self._read(ANSWER_S)
        return self.last

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        # Where the job has ended meanwhile its last state is in the pipe.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line.encode() + b"\n")

    def _read(self, limit_s: float | None) -> bool:
        """Takes the next state; False where the pacer has gone without one."""
        out = self._process.stdout
        assert out is not None
        while b"\n" not in self._answers:
            if not select.select([out], [], [], limit_s)[0]:
                raise RunError("the background job's pacer does not answer: launch without it")
            data = os.read(out.fileno(), 4096)
            if not data:
                return False
            self._answers += data
        line, _, self._answers = self._answers.partition(b"\n")
        self.last = State.read(line.decode())
        return True

    def close(self) -> None:
        """Ends it if it has not ended, and its pacer."""
        try:
            if not self.last.ended:
                self.stop()
        finally:
            for end in (self._process.stdin, self._process.stdout):
                assert end is not None
                end.close()
            self._process.wait()


@contextlib.contextmanager
def background_job(settings: Settings) -> Iterator[Job]:
    """A background job that runs inside the block, and has ended after it.

    The foreground's ranks, told the job's ``environment``, pace it; as long as there are none it
    runs freely. Raises ``InputError`` for a command, limit or log that cannot be.
    """
    if not sys.platform.startswith("linux"):
        raise InputError(
            f"background jobs are stopped and ended through the Linux kernel, and this is "
            f"{sys.platform}: launch without --background (background)"
        )
    check_limit(settings.limit)
    _check_files(settings)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as name:
        pipe = Path(name) / "signals"
        os.mkfifo(pipe)
        job = Job(settings, pipe)
        try:
            yield job
        finally:
            job.close()


def check_limit(limit: float) -> None:
    """Raises ``InputError`` for a limit that nothing could be held to."""
    if not 1 < limit < float("inf"):
        raise InputError(
            f"a background limit of {limit:g} cannot be held: give more than 1, such as {LIMIT} "
            "for a foreground that takes up to a tenth longer"
        )


def _check_files(settings: Settings) -> None:
    program = settings.command[0]
    if shutil.which(program) is None:
        raise InputError(
            f"--background starts with {program!r}, which is no program here: give a command such "
            "as 'python train.py', or the file of a plan"
        )
    try:
        with Path(settings.log).open("ab"):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write the background's output to {settings.log}: {error.strerror}; name "
            "another file with --background-log (Background.log)"
        ) from None
