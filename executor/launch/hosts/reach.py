"""Whether hosts answer over ssh: asked all at once, or now and then while others are at work."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection

from ....planner.schema.errors import MeshwrightError, RunError
from .settings import Hosts
from .ssh import missing_ssh, ssh_command, why_not_there

# ssh gives up connecting after 10 s (``ssh.OPTIONS``); a host that stops in between, after this.
ANSWER_S = 20.0
# So often hosts that are away are asked, while others train.
LOOK_S = 30.0
_QUESTION = "exec true"


class ReachCheck:
    """One ``ssh`` that does nothing but reach a host."""

    def __init__(self, number: int, hosts: Hosts) -> None:
        self._label, self._hosts = hosts.labels[number], hosts
        self._until = time.monotonic() + ANSWER_S
        try:
            self._process = subprocess.Popen(
                ssh_command(hosts.names[number], hosts, _QUESTION),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise missing_ssh() from None

    @property
    def done(self) -> bool:
        """Whether it is known. One that takes too long is ended."""
        if self._process.poll() is None and time.monotonic() > self._until:
            self._process.kill()
            self._process.wait()
        return self._process.poll() is not None

    def failure(self) -> MeshwrightError | None:
        """Once it is done: why the host does not answer, or None where it does."""
        code = self._process.wait()
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            lines = stream.read().decode(errors="replace").splitlines()
        if code == 0:
            return None
        if code < 0:
            return RunError(f"host {self._label} did not answer in {ANSWER_S:g} s")
        return why_not_there(self._label, code, lines, self._hosts)

    def end(self) -> None:
        """Leaves nothing of it."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def unreached(numbers: Collection[int], hosts: Hosts) -> dict[int, MeshwrightError]:
    """Asks those of ``hosts`` at once. The ones that do not answer, by number, and why."""
    checks: dict[int, ReachCheck] = {}
    try:
        for number in numbers:
            checks[number] = ReachCheck(number, hosts)
        while not all(check.done for check in checks.values()):
            time.sleep(0.05)
        failures = {number: check.failure() for number, check in checks.items()}
        return {number: why for number, why in failures.items() if why is not None}
    finally:
        for check in checks.values():
            check.end()


class AwayHosts:
    """Hosts that are not in a run, and are asked now and then whether they are back."""

    def __init__(self, numbers: Collection[int], hosts: Hosts) -> None:
        self._numbers, self._hosts = numbers, hosts
        self._checks: dict[int, ReachCheck] = {}
        self._next = time.monotonic() + LOOK_S
        self.back: set[int] = set()

    def look(self) -> None:
        """Hears who has answered, and asks again where it is time. Does not wait."""
        for number, check in list(self._checks.items()):
            if check.done:
                if check.failure() is None:
                    self.back.add(number)
                del self._checks[number]
        if not self._checks and time.monotonic() >= self._next:
            self._next = time.monotonic() + LOOK_S
            for number in self._numbers:
                if number not in self.back:
                    self._checks[number] = ReachCheck(number, self._hosts)

    def end(self) -> None:
        """Leaves nothing of it."""
        for check in self._checks.values():
            check.end()
