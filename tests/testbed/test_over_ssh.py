"""A run over real ssh: a server in each of two hosts, and none of its processes left afterwards.

The servers' keys and configuration are in a folder of the test; a case takes 10 to 20 s.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import RunReport

from benchmarks.testbed import Bed, Host, missing
from tests.processes import wait_until
from tests.sampling import sampled
from tests.ssh import plan_for_hosts

SERVER = Path("/usr/sbin/sshd")
lacking = missing() or (None if SERVER.exists() else "there is no sshd: install openssh-server")
pytestmark = [
    pytest.mark.skipif(lacking is not None, reason=str(lacking)),
    pytest.mark.timeout(180),
]
PORT = 2222
SLEEP = "import os, time\nopen(f'begun{os.environ[\"RANK\"]}', 'w')\ntime.sleep(150)\n"


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
    """Two hosts with a server each, and a launcher on the first."""

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
        self.servers = [
            bed.start(host, [str(SERVER), "-D", "-e", "-f", str(folder / "server")],
                      stderr=(folder / f"server-{host.name}.log").open("w"))
            for host in bed.hosts
        ]  # fmt: skip
        for host in bed.hosts:
            log = folder / f"server-{host.name}.log"
            assert wait_until(lambda log=log: "listening" in log.read_text()), log.read_text()
        self.idle = [pids(host) for host in bed.hosts]
        save(small_plan(), folder / "plan.json")

    def start(
        self,
        *arguments: str,
        plan: str = "plan.json",
        hosts: Sequence[str] = ("--hosts", "host0,host1"),
    ) -> subprocess.Popen[str]:
        """A launcher on host 0, which is told nothing of the network."""
        command = [
            *(
                "env",
                "--default-signal=INT",
                "-u",
                "GLOO_SOCKET_IFNAME",
                sys.executable,
                "-m",
                "meshwright",
                "launch",
            ),
            *(plan, *hosts, "--ssh-config", str(self.folder / "client")),
            *arguments,
        ]
        return self.bed.start(
            self.bed.hosts[0], command, cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

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

    def begun(self) -> None:
        """Waits until both ranks of a script that says so have begun."""
        marks = [self.folder / f"begun{rank}" for rank in range(2)]
        assert wait_until(lambda: all(mark.exists() for mark in marks), 120)
        for mark in marks:
            mark.unlink()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[SshHosts]:
    folder = tmp_path_factory.mktemp("ssh")
    with Bed(2, 1000.0) as bed:
        made = SshHosts(bed, folder)
        (folder / "sleep.py").write_text(SLEEP)
        yield made


def test_a_plan_runs_on_two_hosts_to_its_end(hosts):
    code, out, err = hosts.ended(
        hosts.start("--steps", "5", "--report", "report.json", "--timeout", "100")
    )
    assert code == 0, err
    report = load(RunReport, hosts.folder / "report.json")
    assert (report.target, report.world_size, report.steps) == ("mlp", 2, 5)
    assert report.measured.exposed_s is not None
    assert "step time" in out


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *sampled([(signal.SIGINT, 130), (signal.SIGTERM, 143)], 1),
        (signal.SIGKILL, -9),
    ],
)
def test_hosts_end_with_their_launcher(hosts, number, code):
    launcher = hosts.start("sleep.py")
    hosts.begun()
    launcher.send_signal(number)
    assert launcher.wait(60) == code
    # One that is killed leaves ssh to notice, and the hosts to end their ranks.
    hosts.check_idle(40 if number == signal.SIGKILL else 5)
    _, err = launcher.communicate()
    assert "Traceback" not in err


REFUSED = [
    (("--ssh-option", "UserKnownHostsFile=/dev/null"), "host host0: ssh does not know its key"),
    (("--ssh-option", "Port=9"), "host host0 cannot be reached: .*Connection refused"),
    (("--remote-python", "{folder}/bare"), "host host1: .*bare has no meshwright"),
    (("--remote-python", "{folder}/other"), r"versions of python: \d\.\d+ on host0 and 3\.99 on "),
    (("--rendezvous", f":{PORT}"), f"on host0: port {PORT}, at which hosts were to meet, cannot"),
]


@pytest.mark.parametrize(("arguments", "sentence"), sampled(REFUSED, 2))
def test_what_is_not_as_it_should_be_is_one_sentence(hosts, arguments, sentence):
    on_host_1 = '#!/bin/sh\nif [ "$(hostname)" = host1 ]; then {0}; fi\nexec {1} "$@"\n'
    without = "unset PYTHONPATH; set -- -S -c 'import meshwright'"
    later = f"export PYTHONPATH={hosts.folder}/later:$PYTHONPATH"
    for name, change in (("bare", without), ("other", later)):
        path = hosts.folder / name
        path.write_text(on_host_1.format(change, sys.executable))
        path.chmod(0o755)
    (hosts.folder / "later").mkdir(exist_ok=True)
    (hosts.folder / "later" / "sitecustomize.py").write_text(
        "import platform\nplatform.python_version = lambda: '3.99.1'\n"
    )
    given = [argument.format(folder=hosts.folder) for argument in arguments]
    code, _, err = hosts.ended(hosts.start(*given))
    said = [line for line in err.splitlines() if line.startswith("meshwright: ")]
    assert code == 2, err
    assert len(said) == 1

    assert re.search(sentence, said[0]), said


@pytest.mark.long
def test_a_host_that_is_not_there(hosts):
    code, _, err = hosts.ended(hosts.start(hosts=("--hosts", "host0,absent")))
    assert code == 2
    assert "host absent cannot be reached" in err


@pytest.mark.slow
def test_a_wrong_key(hosts):
    config = hosts.folder / "client"
    before = config.read_text()
    config.write_text(before.replace("/key\n", "/other_key\n"))
    try:
        code, _, err = hosts.ended(hosts.start())
    finally:
        config.write_text(before)
    assert code == 2
    assert "it lets no key of yours in (root@10.77.0." in err
    assert "Permission denied (publickey" in err


@pytest.mark.slow
def test_two_launches_at_once(hosts):
    (hosts.folder / "hello.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    both = [hosts.start("hello.py") for _ in range(2)]
    said = [launcher.communicate(timeout=150) for launcher in both]
    assert [launcher.returncode for launcher in both] == [0, 0], said
    for out, _ in said:
        assert sorted(line for line in out.splitlines() if "rank" in line) == [
            "host0: rank 0", "host1: rank 1",
        ]  # fmt: skip
    hosts.check_idle()


@pytest.mark.long
def test_hosts_with_different_numbers_of_ranks(hosts):
    save(plan_for_hosts(3), hosts.folder / "three.json")
    (hosts.folder / "meet.py").write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "total = torch.tensor([10.0 ** dist.get_rank()])\ndist.all_reduce(total)\n"
        "print('rank', dist.get_rank(), int(total))\ndist.destroy_process_group()\n"
    )
    (hosts.folder / "hosts").write_text("host0 slots=2\nhost1 slots=1 # the last rank\n")
    launcher = hosts.start("meet.py", plan="three.json", hosts=("--hostfile", "hosts"))
    code, out, err = hosts.ended(launcher)
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "rank" in line) == [
        "host0: rank 0 111", "host0: rank 1 111", "host1: rank 2 111",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_fails_is_told_with_its_host(hosts):
    (hosts.folder / "fail.py").write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1': raise ValueError('the loss is nan')\ntime.sleep(150)\n"
    )
    code, _, err = hosts.ended(hosts.start("fail.py"))
    assert code == 1
    assert "meshwright: on host1: rank 1 failed with ValueError: the loss is nan\n" in err
    assert "host1: ValueError" in err  # its traceback
