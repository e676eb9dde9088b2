"""What ``launch`` starts on every rank: it runs a program and writes down how it failed.

``python -m meshwright.executor.launch.worker FOLDER SCRIPT ARGS…`` (or ``-m MODULE ARGS…``) does as
``python SCRIPT ARGS…`` would, and besides: it ends when its parent dies, however that dies; and
where the program fails, FOLDER gets one sentence that says why, which the launcher shows.
"""

import ctypes
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

# Nothing of the package is imported before it is needed: until the program runs, Ctrl-C is to end
# this process without a word, and the less there is until then the better. Not so where a launcher
# imports this module, whose own Ctrl-C ends what runs beside its ranks.
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Set where stdout is kept for machines: what the program prints goes to stderr.
STDOUT_TO_STDERR = "MESHWRIGHT_STDOUT_TO_STDERR"
# The launcher's process. A rank's parent is known by the rank itself only once it has started.
LAUNCHER = "MESHWRIGHT_LAUNCHER"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> None:
    """Runs the program; exits as it does, with 1 where it raised."""
    folder, program = Path(arguments[0]), arguments[1:]
    rank = int(os.environ.get("RANK", "0"))
    _end_with_parent()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if os.environ.get(STDOUT_TO_STDERR):
        os.dup2(2, 1)
    # Lines of several ranks on one terminal or pipe do not run into each other, nor come late.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_program(program)
    except KeyboardInterrupt:  # the launcher has it too, and says so
        _exit(128 + signal.SIGINT)  # as a shell reports it
    except Exception as error:
        if not _write_failure(folder, rank, error):
            # As if the program had been started by itself: what called it is of no use.
            ours, frames = (__file__, runpy.run_path.__code__.co_filename), error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in ours:
                frames = frames.tb_next
            traceback.print_exception(error.with_traceback(frames))
        _exit(1)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: threads of a process group that lost a peer may never finish.
    os._exit(code)


def run_program(program: list[str]) -> None:
    """Runs ``SCRIPT ARGS…`` or ``-m MODULE ARGS…`` as the main module."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        # As Python does for a script; under ``-m`` it is the current folder.
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def _write_failure(folder: Path, rank: int, error: Exception) -> bool:
    """Writes why the program failed; returns whether the sentence says it all, as those of our own
    errors do."""
    from ...planner.schema.errors import MeshwrightError, NoRoomError
    from ...planner.schema.record import write_whole

    expected = isinstance(error, MeshwrightError)
    message = str(error) or type(error).__name__
    memory: dict[str, object] | None = None
    if not expected and "torch" in sys.modules:
        from ..headroom import account, overflowed

        told = account(error) if overflowed(error) else None
        if told is not None:
            expected, message = True, told.sentence
            memory = {"details": told.details, "limit_bytes": told.limit_bytes}
    failure = {
        "rank": rank,
        "time": time.time(),
        "kind": type(error).__name__,
        "message": message,
        "exit_code": getattr(error, "exit_code", 1),
        "expected": expected,
        "of_peer": getattr(error, "of_peer", False),
        "memory": memory,
        "room": [error.sentence, error.remedy, error.limit_bytes]
        if isinstance(error, NoRoomError)
        else None,
    }
    # Whole or not at all: the launcher may read it while peers are still failing.
    write_whole(folder / f"failure-{rank}.json", json.dumps(failure).encode())
    return expected


def _end_with_parent() -> None:
    """Asks the kernel (Linux) to kill this process when the launcher is gone."""
    # So a launcher that was itself killed, and could clear up nothing, leaves nothing behind.
    if not sys.platform.startswith("linux"):
        return
    parent = int(os.environ.get(LAUNCHER, os.getppid()))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked, while this process started
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
