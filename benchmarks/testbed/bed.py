"""Hosts as network namespaces on a switch, each with a shaped link, gone again afterwards.

Every host has a namespace of its own with one interface, whose other end is on a bridge. A token
bucket (``tc tbf``) on both ends of a link gives it its rate, each way. Needs root, and iproute2.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.planner.schema.errors import InputError, RunError

from .quota import CpuQuota

# The token bucket's depth, just above what the kernel hands over at once (64 KB): less loses a part
# of the rate, more lets a layer's tensors through at once after each pause, as no network does.
BURST_BYTES = 70_000
# What a link holds back before it drops, in seconds at its rate.
QUEUE_S = 0.1
NETWORK = "10.77.0"
MOST_HOSTS = 8
_PREFIX = "mwbed"
_TOOLS = ("ip", "tc", "unshare", "taskset")
_KILL_S = 5.0


def missing() -> str | None:
    """Why no bed can be built here, in a sentence; None where one can."""
    if os.geteuid() != 0:
        return "a test bed makes network namespaces, which needs root: run it as root"
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"a test bed needs {', '.join(lacking)}: install iproute2 and util-linux"
    return None


@dataclass(frozen=True)
class Host:
    """One host of a bed: its number, address, network namespace, and the core it is pinned to."""

    number: int
    name: str
    address: str
    namespace: str
    core: int

    def command(self, arguments: Sequence[str]) -> list[str]:
        """``arguments`` as run on this host: in its network, under its name, on its core."""
        name = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        return [
            *("ip", "netns", "exec", self.namespace),
            *("unshare", "--uts", "sh", "-c", name, self.name),
            *("taskset", "-c", str(self.core)),
            *arguments,
        ]


@dataclass
class Bed:
    """A context manager: inside it the hosts exist.

    ``mbit_s`` is the rate of every link, or one rate for each host. Hosts take turns on the cores
    that this process may use. Raises ``InputError`` where a bed cannot be built.
    """

    count: int = 2
    mbit_s: float | Sequence[float] = 1000.0
    burst_bytes: int = BURST_BYTES
    hosts: list[Host] = field(default_factory=list, init=False)
    _running: list[subprocess.Popen[Any]] = field(default_factory=list, init=False)
    _quotas: dict[int, CpuQuota] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 2 <= self.count <= MOST_HOSTS:
            raise InputError(f"a bed of {self.count} hosts cannot be: ask for 2 to {MOST_HOSTS}")
        single = isinstance(self.mbit_s, int | float)
        rates = [float(self.mbit_s)] * self.count if single else list(self.mbit_s)  # type: ignore[arg-type]
        if len(rates) != self.count or min(rates) <= 0:
            raise InputError(
                f"rates of {rates} Mbit/s do not fit {self.count} hosts: give one above zero for "
                "all, or one for each"
            )
        self.rates = rates
        self._name = f"{_PREFIX}{os.getpid()}"

    def __enter__(self) -> Bed:
        reason = missing()
        if reason is not None:
            raise InputError(reason)
        # What a killed process has left has the same addresses.
        sweep()
        if any(name.startswith(f"{self._name}-") for name in _namespaces()):
            raise InputError("this process has a test bed already: leave that one first")
        # For a process that ends without leaving the context.
        atexit.register(self.remove)
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self._name}-switch"

    def _build(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        # The bridge has a namespace too, so that nothing outside the bed's namespaces is touched:
        # removing these removes all of it.
        _run("ip", "netns", "add", self.switch)
        _inside(self.switch, "ip", "link", "add", "br0", "type", "bridge")
        _inside(self.switch, "ip", "link", "set", "br0", "up")
        for number in range(self.count):
            own, port = f"{self._name}-host{number}", f"port{number}"
            address, core = f"{NETWORK}.{number + 1}", cores[number % len(cores)]
            self.hosts.append(host := Host(number, f"host{number}", address, own, core))
            _run("ip", "netns", "add", own)
            pair = ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0")
            _inside(self.switch, *pair, "netns", own)
            _inside(self.switch, "ip", "link", "set", port, "master", "br0", "up")
            _inside(own, "ip", "link", "set", "lo", "up")
            _inside(own, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
            _inside(own, "ip", "link", "set", "eth0", "up")
            self.set_rate(host, self.rates[number])

    def remove(self) -> None:
        """Ends every process on the hosts and takes the bed away. Harmless where it is gone."""
        atexit.unregister(self.remove)
        _remove(f"{self._name}-")
        self._reap()
        for quota in self._quotas.values():
            quota.remove()
        self._quotas.clear()
        self.hosts.clear()

    def _reap(self) -> None:
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
        self._running.clear()

    def set_rate(self, host: Host, mbit_s: float, receives: float | None = None) -> None:
        """Gives a host's link another rate, each way, or ``receives`` for what comes in; while
        something runs, too."""
        # Each way has a bucket of its own, at the end that sends.
        into = mbit_s if receives is None else receives
        for namespace, device, mbit in (
            (host.namespace, "eth0", mbit_s),
            (self.switch, f"port{host.number}", into),
        ):
            limit = int(max(mbit * 1e6 / 8 * QUEUE_S, 2 * self.burst_bytes))
            _inside(
                namespace,
                *("tc", "qdisc", "replace", "dev", device, "root", "tbf"),
                *("rate", f"{mbit:.6f}mbit", "burst", str(self.burst_bytes), "limit", str(limit)),
            )

    def slow(self, host: Host, share: float) -> None:
        """Gives what will be started on a host ``share`` of a core's time, by a CPU quota. Raises
        ``InputError`` where none can be set."""
        before = self._quotas.pop(host.number, None)
        if before is not None:
            before.remove()
        self._quotas[host.number] = CpuQuota(host.name, share)

    def cut(self, host: Host) -> None:
        """Cuts a host's link: packets are lost without a word, as when a cable is pulled."""
        _inside(self.switch, "ip", "link", "set", f"port{host.number}", "down")

    def restore(self, host: Host) -> None:
        """Joins a link that was cut."""
        _inside(self.switch, "ip", "link", "set", f"port{host.number}", "up")

    def start(
        self,
        host: Host,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host, with one thread for each process and gloo on its interface;
        ``options`` are ``subprocess.Popen``'s. What still runs ends when the bed is removed."""
        known = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        told = {**os.environ, **known, **(environment or {})}
        command, quota = host.command(arguments), self._quotas.get(host.number)
        if quota is not None:
            command = quota.command(command)
        process = subprocess.Popen(command, env=told, **options)
        self._running.append(process)
        return process

    def begin(
        self,
        program: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        nproc: int = 1,
    ) -> list[subprocess.Popen[str]]:
        """Starts ``SCRIPT ARGS…`` on all hosts with torchrun, which meet at host 0, and returns at
        once; the torchrun of each host, its outputs in pipes."""
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(self.count), "--nproc-per-node", str(nproc)),
            *("--master-addr", self.hosts[0].address, "--master-port", "29500"),
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return [
            self.start(
                host, [*torchrun, "--node-rank", str(host.number), *program], environment, **pipes
            )
            for host in self.hosts
        ]

    def launch(
        self,
        program: Sequence[str],
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        nproc: int = 1,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs ``SCRIPT ARGS…`` on all hosts with torchrun, which meet at host 0; what each host's
        torchrun said. Raises ``RunError`` where they are not done in ``timeout_s``."""
        started = self.begin(program, environment, nproc=nproc)
        deadline = time.monotonic() + timeout_s
        done = []
        for host, process in zip(self.hosts, started, strict=True):
            try:
                out, err = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.stop()
                raise RunError(
                    f"the program on {host.name} was not done in {timeout_s:g} s: allow more"
                ) from None
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return done

    def stop(self) -> None:
        """Kills whatever runs on the hosts."""
        for host in self.hosts:
            _kill(host.namespace)
        self._reap()


def sweep() -> None:
    """Removes what is left of beds whose process is gone."""
    for name in _namespaces():
        if not name.startswith(_PREFIX):
            continue
        owner = name.removeprefix(_PREFIX).split("-")[0]
        if not (owner.isdigit() and Path(f"/proc/{owner}").exists()):
            _remove(name)


def _remove(prefix: str) -> None:
    """Removes the namespaces with that beginning, and every process in them."""
    found = [name for name in _namespaces() if name.startswith(prefix)]
    # First the processes: a namespace lives on as long as one is in it.
    for name in found:
        _kill(name)
    for name in found:
        # Another process may have swept it meanwhile.
        with contextlib.suppress(RunError):
            _run("ip", "netns", "delete", name)


def _kill(namespace: str) -> None:
    # Again until none is left: one may have started another meanwhile.
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False
        )
        pids = [int(p) for p in listed.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def _inside(namespace: str, *arguments: str) -> None:
    _run("ip", "netns", "exec", namespace, *arguments)


def _run(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(arguments)} failed: {done.stderr.strip() or done.returncode}")
