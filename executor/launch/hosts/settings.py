"""The hosts of a run, in the order of the plan's ranks, and how they are reached."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....planner.schema.errors import InputError

# What ssh is told as a destination. Nothing that a shell or ssh would read as more than a name.
_NAME = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_:][\w.:%-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Variables that hosts get where the launcher has them: settings of what ranks build on.
TAKEN_ALONG = ("GLOO_", "KMP_", "MESHWRIGHT_", "MKL_", "NCCL_", "OMP_", "TORCH_", "UCX_")
# What a launcher sets for its own ranks.
_OWN = {
    *("MESHWRIGHT_BACKGROUND", "MESHWRIGHT_CHECKPOINT", "MESHWRIGHT_CHECKPOINT_EVERY"),
    *("MESHWRIGHT_LAUNCHER", "MESHWRIGHT_PLAN", "MESHWRIGHT_PROGRESS", "MESHWRIGHT_REPORT"),
    *("MESHWRIGHT_STDOUT_TO_STDERR", "MESHWRIGHT_TENSORBOARD", "MESHWRIGHT_TRACE"),
}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run and how they are reached with OpenSSH.

    ``names`` are what ``ssh`` takes (``host``, ``user@host``), in the order of the plan's ranks;
    ``slots`` the ranks of each where they are given, else the plan's are divided evenly. Ranks run
    in ``folder`` (default: the launcher's) under ``python`` (a command, default: the launcher's own
    interpreter), with the variables of ``environment`` besides ``TAKEN_ALONG``. ``ssh_config`` is a
    file for ``ssh -F``, ``ssh_options`` are for ``ssh -o``. ``rendezvous`` is the HOST:PORT at
    which hosts meet on the first of them: without HOST its address is found, with port 0 or without
    all of it a free port is chosen. Raises ``InputError`` for what is no host.
    """

    names: Sequence[str]
    slots: Sequence[int | None] = ()
    python: str = ""
    folder: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh_config: str | None = None
    ssh_options: Sequence[str] = ()
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("no host is named: write --hosts a,b")
        for name in self.names:
            check_host(name)
        twice = next((n for n in self.names if list(self.names).count(n) > 1), None)
        if twice is not None:
            raise InputError(
                f"host {twice} is named twice: name it once, with its number of ranks "
                "(slots=2 in a hostfile, or --nproc)"
            )
        check_environment(self.environment)
        _ = self.command, self.meeting  # each refuses what cannot be read

    @property
    def labels(self) -> tuple[str, ...]:
        """What each host is called in what people read: without the user, where that is enough."""
        bare = [name.rpartition("@")[2] for name in self.names]
        return tuple(b if bare.count(b) == 1 else n for n, b in zip(self.names, bare, strict=True))

    def only(self, numbers: Sequence[int]) -> Hosts:
        """Those hosts alone, by their numbers. They meet at the same port, on the first of them."""
        rendezvous = self.rendezvous
        if rendezvous is not None and tuple(numbers)[:1] != (0,):
            rendezvous = f":{rendezvous.rpartition(':')[2]}"
        return replace(
            self,
            names=tuple(self.names[number] for number in numbers),
            slots=tuple(self.slots[number] for number in numbers) if self.slots else (),
            rendezvous=rendezvous,
        )

    @property
    def command(self) -> tuple[str, ...]:
        """The words that start Python on a host."""
        return python_command(self.python)

    @property
    def meeting(self) -> tuple[str, int]:
        """Where hosts meet: a host, "" where it is to be found, and a port, 0 for a free one."""
        if self.rendezvous is None:
            return "", 0
        host, colon, port = self.rendezvous.rpartition(":")
        # Not all that ssh takes: a user's name or an interface's is no part of an address to torch.
        named = _NAME.fullmatch(host.strip("[]")) and not set(host) & set("@%")
        bad_host = host != "" and not named
        if not colon or bad_host or not port.isdecimal() or int(port) > 65535:
            raise InputError(
                f"rendezvous {self.rendezvous!r} is no address: give HOST:PORT of the first host, "
                "or :PORT for a port on its own address"
            )
        return host, int(port)

    @property
    def where(self) -> str:
        """The working folder on the hosts."""
        return self.folder or str(Path.cwd())

    def telling(self, more: Mapping[str, str]) -> Hosts:
        """The same hosts, which get these variables besides."""
        return replace(self, environment={**self.environment, **more})

    @property
    def told(self) -> dict[str, str]:
        """All variables that hosts get."""
        return {**taken_along(), **self.environment}


def check_host(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no host: name it as ssh does, like node1 or user@node1")


def python_command(text: str) -> tuple[str, ...]:
    """The words of a command that starts Python on a host; "" is this interpreter's path."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(f"--remote-python {text!r} cannot be read: {error}") from None
    return words or (sys.executable,)


def python_path() -> dict[str, str]:
    """Where Python is to look for modules on hosts, as here: it needs that when it starts."""
    path = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": path} if path else {}


def taken_along() -> dict[str, str]:
    """The variables of this process that hosts get unasked."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(TAKEN_ALONG) and name not in _OWN
    }


def check_environment(environment: Mapping[str, str]) -> None:
    """Raises ``InputError`` for names of variables that no shell would take."""
    wrong = next((name for name in environment if not _VARIABLE.fullmatch(name)), None)
    if wrong is not None:
        raise InputError(
            f"{wrong!r} is no name of an environment variable: write NAME=VALUE, or NAME for the "
            "value that it has here"
        )


def variables(given: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` or ``NAME`` (its value here), each, as a mapping."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        check_environment({name: value})
        if not equals and name not in os.environ:
            raise InputError(f"--env {name}: there is no such variable here; write {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    return found


def listed_hosts(text: str) -> tuple[str, ...]:
    """The hosts of ``a,user@b``."""
    return tuple(part.strip() for part in text.split(","))


def read_hostfile(path: Path) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Hosts and their slots from a file: a host on each line, ``slots=N`` after it or not, and
    comments from ``#`` on."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise InputError(
            f"cannot read the hostfile {path}: {why}; name a file with a host on each line"
        ) from None
    names: list[str] = []
    slots: list[int | None] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *rest = words
        given = re.fullmatch(r"slots=([1-9][0-9]{0,5})", rest[0]) if rest else None
        if rest and (not given or len(rest) > 1):
            raise InputError(
                f"line {number} of {path} has {' '.join(rest)!r} after its host: write slots=N "
                "with the ranks of it, as in 'user@node1 slots=4', or nothing"
            )
        if not _NAME.fullmatch(name):
            raise InputError(
                f"line {number} of {path} is no host: {line.strip()!r}; write a host, as in "
                "'user@node1 slots=4'"
            )
        names.append(name)
        slots.append(int(given[1]) if given else None)
    if not names:
        raise InputError(f"the hostfile {path} names no host: write one on each line")
    return tuple(names), tuple(slots)


def counts_of(hosts: Hosts) -> tuple[int, ...] | None:
    """Ranks of each host as its slots say; None where none has any."""
    given = [slots for slots in hosts.slots if slots is not None]
    if not given:
        return None
    if len(given) < len(hosts.names):
        without = next(n for n, s in zip(hosts.names, hosts.slots, strict=True) if s is None)
        raise InputError(f"host {without} has no slots and others have: give all some, or none")
    return tuple(given)
