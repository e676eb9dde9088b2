"""The ``meshwright`` command: verbs, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from .commands import explaining, measuring, multiplexing, planning, running
from .planner.errors import InputError, MeshwrightError

STOPPED = 130
"""The exit code of a command that Ctrl-C ended: 128 + SIGINT, as shells have it."""

app = typer.Typer(
    name="meshwright",
    help="Measures a PyTorch model and a cluster, plans training one on the other, and runs it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _room in (measuring, planning, explaining, multiplexing, running):
    _room.add_to(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code: 0, 1 for a failed run, 2 for wrong input, 3 where no plan
    fits, 130 when stopped. What a user can mend is said in one sentence on stderr."""
    try:
        given = running.separate_script(sys.argv[1:] if arguments is None else arguments)
        code = app(args=given, prog_name="meshwright", standalone_mode=False)
    except MeshwrightError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _say("stopped", STOPPED)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        # typer's errors of usage have changed modules between its versions, not their methods.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        # Without arguments typer has shown the help and says nothing more.
        return _say(_usage(words()), InputError.exit_code) if words() else InputError.exit_code
    return code if isinstance(code, int) else 0


def _usage(message: str) -> str:
    return f"{message.rstrip('.')}; 'meshwright --help' lists commands and options"


def _say(message: str, code: int) -> int:
    print(f"meshwright: {' '.join(message.split())}", file=sys.stderr)
    return code


def main() -> None:
    """The console script."""
    sys.exit(run())
