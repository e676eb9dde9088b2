"""One host over OpenSSH: the command that reaches it, its streams, and why it cannot be reached."""

from __future__ import annotations

import contextlib
import queue
import shlex
import subprocess
import threading
from collections.abc import Sequence
from typing import IO, NamedTuple

import msgspec

from ....planner.schema.errors import InputError, MeshwrightError, RunError
from ....planner.schema.record import Record
from .settings import Hosts, python_path

MODULE = "meshwright.executor.launch.hosts.remote"
# In order: no question to a terminal; a host that does not answer, and one that no longer does, are
# given up; and whatever the user's configuration has for work at a terminal is left out. A
# connection that is there already (ControlPath) is used, but none is left behind.
OPTIONS = (
    *("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=15", "ServerAliveCountMax=4"),
    *("RequestTTY=no", "RemoteCommand=none", "ControlMaster=no", "ClearAllForwardings=yes"),
    *("ForwardX11=no", "LogLevel=ERROR"),
)
# What ssh itself exits with where it fails.
SSH_FAILED = 255
# What a shell exits with, and ``env``, where there is no such command.
NOT_FOUND = 127
# Lines of a host that are kept for a sentence of why it failed.
KEPT_LINES = 20


def ssh_command(name: str, hosts: Hosts, line: str | None = None) -> list[str]:
    """The command that starts a host's part of a run, or another ``line`` for its shell."""
    options = [part for option in (*hosts.ssh_options, *OPTIONS) for part in ("-o", option)]
    # Of each option ssh takes the first that it reads.
    config = ["-F", hosts.ssh_config] if hosts.ssh_config else []
    return ["ssh", *config, *options, "--", name, line or remote_line(hosts)]


def remote_line(hosts: Hosts) -> str:
    """What the host's shell is given: one simple command, which any shell reads alike."""
    # Python itself needs it before it can be told anything.
    paths = [f"{name}={value}" for name, value in python_path().items()]
    told = ["env", *paths] if paths else []
    return "exec " + shlex.join([*told, *hosts.command, "-m", MODULE])


class HostEvent(NamedTuple):
    """Something that came from host ``number``: a line of a stream (``stdout``, ``stderr``), what
    it tells (the word, and JSON), or its end (``ended``, with the exit code)."""

    number: int
    kind: str
    data: bytes
    code: int = 0


class HostConnection:
    """The ``ssh`` of one host. Its lines arrive as events in a queue that all hosts share."""

    def __init__(
        self, number: int, command: Sequence[str], token: str, events: queue.Queue[HostEvent]
    ) -> None:
        self.number, self._events = number, events
        self._token = token.encode()
        self._sent: queue.Queue[bytes | None] = queue.Queue()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # A terminal's Ctrl-C is for the launcher, which tells the hosts.
                start_new_session=True,
            )
        except FileNotFoundError:
            raise missing_ssh() from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(stream, kind), daemon=True)
            for stream, kind in (
                (self._process.stdout, "stdout"), (self._process.stderr, "stderr"),
            )
        ]  # fmt: skip
        for thread in readers:
            thread.start()
        threading.Thread(target=self._write, args=(self._process.stdin,), daemon=True).start()
        threading.Thread(target=self._wait, args=(readers,), daemon=True).start()

    def send(self, line: bytes) -> None:
        """Sends a line, or nothing where the connection has ended. Does not wait."""
        self._sent.put(line + b"\n")

    def tell(self, word: str, record: Record) -> None:
        self.send(word.encode() + b" " + msgspec.json.encode(record))

    def close(self) -> None:
        """Ends what is sent, by which the host knows that it is over."""
        self._sent.put(None)

    def kill(self) -> None:
        self._process.kill()

    def _write(self, stream: IO[bytes]) -> None:
        # In a thread: until the host is reached, a pipe takes no more than some kilobytes.
        try:
            while (data := self._sent.get()) is not None:
                stream.write(data)
                stream.flush()
            stream.close()
        except OSError:
            # The end comes as an event. What is not written yet would be tried once more when the
            # stream is freed, and Python 3.13 prints that it failed.
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self, stream: IO[bytes], kind: str) -> None:
        for line in stream:
            before, told, after = line.partition(self._token)
            # What a rank printed last may have lacked its line's end.
            if before.strip() or not told:
                self._events.put(HostEvent(self.number, kind, before))
            if told:
                word, _, data = after.strip().partition(b" ")
                self._events.put(HostEvent(self.number, word.decode(), data))

    def _wait(self, readers: Sequence[threading.Thread]) -> None:
        code = self._process.wait()
        for thread in readers:
            thread.join()
        self._events.put(HostEvent(self.number, "ended", b"", code))


def missing_ssh() -> InputError:
    """What to do where this machine has no ssh."""
    return InputError(
        "there is no ssh on this machine: install OpenSSH's client, or start "
        "'meshwright launch' on each host with --nnodes, --node-rank and --rendezvous"
    )


def why_not_there(host: str, code: int, lines: Sequence[str], hosts: Hosts) -> MeshwrightError:
    """Why a host that has not told of itself is not to be had, from what ssh and it have said."""
    said = "\n".join(lines)
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {code}")
    python = shlex.join(hosts.command)
    if code == NOT_FOUND:
        return InputError(f"host {host}: there is no {python}; {_INSTALL}")
    known = (
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED",
            "its key is not the one that ssh knows; if it was set up anew, remove the old key "
            f"(ssh-keygen -R {host}) and connect once by hand",
        ),
        (
            "Host key verification failed",
            f"ssh does not know its key: connect once by hand (ssh {host}) and accept it, or write "
            "it into known_hosts",
        ),
        (
            "Permission denied",
            f"it lets no key of yours in ({_line_with('Permission denied', lines)}): add one with "
            f"ssh-copy-id {host}, or name it with --ssh-option IdentityFile=FILE",
        ),
        ("Could not resolve hostname", "there is no host of that name: correct it"),
        ("No module named 'meshwright'", f"{python} has no meshwright; {_INSTALL}"),
        ("No module named", f"{last}; {_INSTALL}"),
    )
    for words, sentence in known:
        if words in said:
            return InputError(f"host {host}: {sentence}")
    if code == SSH_FAILED and any(words in last for words in _OWN_WORDS):
        return InputError(f"ssh was told what it does not take ({last}): correct its options here")
    ended: MeshwrightError = RunError(f"host {host} ended before it began: {last}")
    if code == SSH_FAILED:
        ended = InputError(f"host {host} cannot be reached: {last}; see whether ssh {host} works")
    ended.lost = code == SSH_FAILED or code < 0
    return ended


# Of its command line and its configuration ssh says so, before it looks for a host.
_OWN_WORDS = ("command-line", "config file", "configuration option")
# How ssh begins what it says of a connection that has ended.
_LOST_WORDS = ("Connection", "Timeout", "Read from remote host", "client_loop")
_INSTALL = (
    "install the same on all hosts, or say what starts the right Python there (--remote-python)"
)


def _line_with(words: str, lines: Sequence[str]) -> str:
    return next((line.strip().rstrip(".") for line in lines if words in line), words)


def why_ended(host: str, code: int, lines: Sequence[str]) -> RunError:
    """Why a host that had begun ended without a word."""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    ended = RunError(f"host {host} ended with exit code {code}; its own output says more")
    if code == SSH_FAILED or code < 0:
        # What a rank printed last says nothing of the connection.
        why = f": {last.rstrip('.')}" if last.startswith(_LOST_WORDS) else ""
        ended = RunError(f"the connection to host {host} was lost{why}")
    ended.lost = True  # what fails at its work says so
    return ended
