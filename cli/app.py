"""The ``meshwright`` command: verbs, exit codes, and one sentence for every mistake."""

import atexit
import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from .. import __version__
from ..executor.notes import show_warnings_as_notes
from ..planner.schema.errors import InputError, MemoryRunError, MeshwrightError
from .advise import advise
from .calibrate import calibrate
from .launch import demo, export, launch, separate_script, verify
from .measure import cluster, probe, profile
from .multiplex import multiplex
from .plan import compare, explain, plan
from .report import report

# The exit code of a command that Ctrl-C ended: 128 + SIGINT, as shells have it.
STOPPED = 130
# Characters of a path that are shown of one that is too long.
LONGEST_NAME = 80
# What the system says where there is no room for more: on the disk, for this user, in one file.
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
# Verbs that are asked for a plan, and that some look for among the options of another verb.
OF_A_PLAN = "explain", "verify", "launch", "report"
# Objects made after which Python looks for circles of garbage (itself: 700 to 2,000, by version).
GARBAGE = 50_000

app = typer.Typer(
    name="meshwright",
    help="Measures a PyTorch model and a cluster, plans training one on the other, and runs it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order in which they are used: the help lists them so.
for _verb in (
    profile, probe, cluster, advise, plan, explain, compare, multiplex, verify, launch, export,
    calibrate, report, demo,
):  # fmt: skip
    app.command(_verb.__name__)(_verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"meshwright {__version__}")
        raise typer.Exit


@app.callback()
def _before_any_verb(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and end."
        ),
    ] = False,
) -> None:
    """Options that stand before the verb."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code: 0, 1 for a failed run, 2 for wrong input, 3 where no plan
    fits, 130 when stopped. What a user can mend is said in one sentence on stderr."""
    try:
        # standalone_mode off: typer would print its own errors and end the process.
        given = separate_script(sys.argv[1:] if arguments is None else arguments)
        code = app(args=given, prog_name="meshwright", standalone_mode=False)
    except MemoryRunError as error:
        return _say(error.sentence, error.exit_code, error.details)
    except MeshwrightError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _say("stopped", STOPPED)
    except BrokenPipeError:
        # The reader of our output has gone (head, less). Python would flush stdout once more when
        # it ends and complain, so that goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # A path that no file can have (too long, links in a circle): said of the path, wherever it
        # was looked at first. What has no path is no mistake of the user's, but for a full disk.
        if error.filename is None and error.errno in FULL:
            return _say(f"cannot write: {error.strerror}; make room for it", InputError.exit_code)
        if error.filename is None:
            raise
        name = str(error.filename)
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"
        return _say(
            f"cannot use {shown!r}: {error.strerror}; name another path", InputError.exit_code
        )
    except Exception as error:
        # typer's errors of usage have changed modules between its versions, not their methods.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        if wrong := _wrong_value(error):
            return _say(wrong, InputError.exit_code)
        # Without arguments typer has shown the help and says nothing more.
        usage = _usage(
            _unknown_option(error) or words(),
            getattr(getattr(error, "ctx", None), "command_path", ""),
        )
        return _say(usage, InputError.exit_code) if words() else InputError.exit_code
    # What some of typer's versions return in place of KeyboardInterrupt.
    if code == STOPPED:
        return _say("stopped", STOPPED)
    return code if isinstance(code, int) else 0


def _wrong_value(error: Exception) -> str:
    """The sentence of an option that refuses its value (``cli.values``), after the option's
    name; "" for any other error."""
    names = getattr(getattr(error, "param", None), "opts", ())
    message = getattr(error, "message", "") or ""
    # An option that is missing has no message.
    if not names or not message:
        return ""
    # By its long name, as the help has it.
    return f"{max(names, key=len)} {message.removeprefix('Value error, ')}"


def _unknown_option(error: Exception) -> str:
    """The sentence of an unknown option that is the name of a verb; "" for any other error."""
    option = getattr(error, "option_name", "")
    verb = option.removeprefix("--")
    if verb not in OF_A_PLAN:
        return ""
    return f"No such option: {option} (it is a verb of its own: meshwright {verb} PLAN)"


def _usage(message: str, command: str) -> str:
    """What is wrong, and the help that tells how to write it: the verb's own, once there is one."""
    lists = "lists its options" if " " in command else "lists commands and options"
    return f"{message.rstrip('.')}; '{command or 'meshwright'} --help' {lists}"


def _say(message: str, code: int, details: Sequence[str] = ()) -> int:
    lines = [f"meshwright: {message}", *details]
    print("\n  ".join(" ".join(line.split()) for line in lines), file=sys.stderr)
    return code


def main() -> None:
    """The console script."""
    # A Python that ends looks through all objects for circles, several times: with torch's objects
    # nearly a second, for memory that the process gives back anyway. Looking seldom while torch is
    # imported and plans are made saves about as much again.
    atexit.register(gc.freeze)
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    show_warnings_as_notes()
    sys.exit(run())
