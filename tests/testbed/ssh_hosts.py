"""Hosts of a test bed with a server for ssh in each, and a launcher on the first of them.

The servers' keys and configuration are in a folder of the test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import save

from benchmarks.testbed import Bed, Host, missing
from tests.processes import wait_until
from tests.ssh import plan_for_hosts

SERVER = Path("/usr/sbin/sshd")
PORT = 2222
# A script whose ranks say that they have begun, and wait.
SLEEP = "import os, time\nopen(f'begun{os.environ[\"RANK\"]}', 'w')\ntime.sleep(150)\n"


def lacking() -> str | None:
    """Why there can be no such hosts here, in a sentence."""
    return missing() or (None if SERVER.exists() else "there is no sshd: install openssh-server")


def key(path: Path) -> str:
    """A new pair of keys; the public one."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path.with_suffix(".pub").read_text().strip()


def pids(host: Host) -> set[int]:
    """What runs on a host."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    )
    return set(map(int, listed.stdout.split()))


def small_plan() -> Plan:
    """Data parallelism for a small model, as one unit of which nothing is decided."""
    made = plan_for_hosts(2)
    nothing = msgspec.structs.replace(made.prediction, peak_bytes=(0, 0))
    return msgspec.structs.replace(made, target="mlp", units=(), prediction=nothing)


class SshHosts:
    """The hosts of a bed with a server each, and a launcher on the first."""

    def __init__(self, bed: Bed, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        own = key(folder / "host_key")
        (folder / "authorized").write_text(key(folder / "key") + "\n")
        key(folder / "other_key")
        (folder / "known").write_text("".join(f"[{h.address}]:{PORT} {own}\n" for h in bed.hosts))
        (folder / "server").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized\nUsePAM no\n"
            f"PidFile none\nStrictModes no\nPermitRootLogin prohibit-password\nPort {PORT}\n"
            "PasswordAuthentication no\n"
        )
        names = "".join(f"Host {h.name}\n  HostName {h.address}\n" for h in bed.hosts)
        (folder / "client").write_text(
            f"{names}Host absent\n  HostName 10.77.0.99\nHost *\n  Port {PORT}\n  User root\n"
            f"  IdentityFile {folder}/key\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known\n  GlobalKnownHostsFile /dev/null\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # which the server wants, and packages make at boot
        for host in bed.hosts:
            self.serve(host)
        self.idle = [pids(host) for host in bed.hosts]
        save(small_plan(), folder / "plan.json")

    def serve(self, host: Host) -> None:
        """Starts a host's server, and waits until it listens."""
        log = self.folder / f"server-{host.name}.log"
        log.unlink(missing_ok=True)
        command = [str(SERVER), "-D", "-e", "-f", str(self.folder / "server")]
        with log.open("w") as errors:
            self.bed.start(host, command, stderr=errors)
        assert wait_until(lambda: "listening" in log.read_text()), log.read_text()

    def lose(self, host: Host) -> None:
        """Kills all that runs on a host, its server too."""
        while found := pids(host):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def restore(self, host: Host) -> None:
        """Starts the server of a host that was lost."""
        self.serve(host)
        self.idle[host.number] = pids(host)

    def start(
        self,
        *arguments: str,
        plan: str = "plan.json",
        hosts: Sequence[str] = ("--hosts", "host0,host1"),
        program: Sequence[str] = ("-m", "meshwright"),
        **options: Any,
    ) -> subprocess.Popen[str]:
        """A launcher on host 0, which is told nothing of the network; ``program`` is what Python
        runs as it, ``options`` are ``Bed.start``'s."""
        command = [
            *(
                "env",
                "--default-signal=INT",
                "-u",
                "GLOO_SOCKET_IFNAME",
                sys.executable,
                *program,
                "launch",
            ),
            *(plan, *hosts, "--ssh-config", str(self.folder / "client")),
            *arguments,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.bed.start(
            self.bed.hosts[0], command, cwd=self.folder, text=True, **(pipes | options)
        )

    def ended(self, launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Its exit code and what it said; nothing is left of it on any host then."""
        out, err = launcher.communicate(timeout=150)
        self.check_idle()
        return launcher.returncode, out, err

    def check_idle(self, seconds: float = 5.0) -> None:
        """Fails unless the servers are alone on their hosts, at once or soon."""

        def left() -> list[set[int]]:
            return [pids(h) - idle for h, idle in zip(self.bed.hosts, self.idle, strict=True)]

        assert wait_until(lambda: not any(left()), seconds), left()

    def begun(self, count: int = 2) -> None:
        """Waits until all ranks of a script that says so have begun."""
        marks = [self.folder / f"begun{rank}" for rank in range(count)]
        assert wait_until(lambda: all(mark.exists() for mark in marks), 120)
        for mark in marks:
            mark.unlink()
