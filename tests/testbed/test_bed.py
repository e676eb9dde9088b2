"""The test bed: links as fast as asked for, hosts that find each other, nothing left behind."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from meshwright.planner.schema.errors import InputError, RunError

from benchmarks.testbed import Bed, Host, missing
from tests.processes import wait_until

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(120),
    pytest.mark.alone,
]

# Where ``benchmarks`` can be imported from, as `make testbed` does.
ROOT = Path(__file__).parents[2]
SERVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 16): pass
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
data = bytes(1 << 16)
def push(count):
    start, sent = time.perf_counter(), 0
    while sent < count:
        peer.sendall(data)
        sent += len(data)
    return sent, time.perf_counter() - start
push(int(sys.argv[2]))
sent, taken = push(2 * int(sys.argv[2]))
print(8 * sent / taken / 1e6)
"""
MEET = """
import socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1000) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(socket.gethostname(), dist.get_rank(), total[0].item(), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def bed() -> Iterator[Bed]:
    with Bed(2, 200.0) as made:
        yield made


def sent_mbit_s(bed: Bed, source: Host, target: Host, mbit: float) -> float:
    """What the link carries, measured over a second or so after a quarter of that."""
    server = bed.start(target, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    size = int(mbit * 1e6 / 8 * 0.5)
    client = bed.start(
        source,
        [sys.executable, "-c", SEND, target.address, str(size)],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = client.communicate(timeout=30)
    server.communicate(timeout=30)
    return float(out)


def fastest_mbit_s(bed: Bed, source: Host, target: Host, mbit: float) -> float:
    """The best of four attempts: other work on this machine makes a link slower, never faster."""
    best = 0.0
    for _ in range(4):
        best = max(best, sent_mbit_s(bed, source, target, mbit))
        if best > 0.95 * mbit:
            break
    return best


def test_links_carry_what_was_asked_for(bed: Bed) -> None:
    first, second = bed.hosts
    for mbit in (50.0, 200.0):
        for host in bed.hosts:
            bed.set_rate(host, mbit)
        assert fastest_mbit_s(bed, first, second, mbit) == pytest.approx(mbit, rel=0.12)


def test_each_link_has_a_rate_of_its_own() -> None:
    with Bed(3, [400.0, 50.0, 400.0]) as bed:
        fast, slow, other = bed.hosts
        assert fastest_mbit_s(bed, fast, slow, 50.0) == pytest.approx(50, rel=0.12)
        assert fastest_mbit_s(bed, slow, other, 50.0) == pytest.approx(50, rel=0.12)
        assert fastest_mbit_s(bed, fast, other, 400.0) > 300


def test_torchrun_meets_across_hosts(bed: Bed, tmp_path: Path) -> None:
    path = tmp_path / "meet.py"
    path.write_text(MEET)
    done = bed.launch([str(path)], timeout_s=90)
    assert [d.returncode for d in done] == [0, 0], [d.stderr[-500:] for d in done]
    assert [d.stdout.strip() for d in done] == ["host0 0 3.0", "host1 1 3.0"]


def ping(bed: Bed) -> bool:
    """Whether host 0 reaches host 1 within a second."""
    first, second = bed.hosts[:2]
    code = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\n"
        "s.sendto(b'x', (sys.argv[1], 7000)); s.recv(10)"
    )
    asked = bed.start(
        first, [sys.executable, "-c", code, second.address], stderr=subprocess.DEVNULL
    )
    return asked.wait(20) == 0


def test_a_link_can_be_cut_and_joined_again(bed: Bed) -> None:
    code = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('0.0.0.0', 7000))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    data, peer = s.recvfrom(10); s.sendto(data, peer)"
    )
    echo = bed.start(bed.hosts[1], [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert echo.stdout is not None
    assert echo.stdout.readline() == "ready\n"
    assert ping(bed)
    bed.cut(bed.hosts[1])
    assert not ping(bed)
    bed.restore(bed.hosts[1])
    assert wait_until(lambda: ping(bed))
    assert echo.poll() is None


def namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines() if line]


def test_nothing_is_left() -> None:
    with Bed(2, 100.0) as bed:
        names = [bed.switch, *(h.namespace for h in bed.hosts)]
        assert set(names) <= set(namespaces())
        sleeper = bed.start(bed.hosts[0], ["sleep", "600"])
        assert sleeper.poll() is None
    assert not set(names) & set(namespaces())
    assert sleeper.poll() is not None


def test_the_next_bed_removes_what_a_killed_process_left() -> None:
    code = (
        "import os, signal, subprocess\nfrom benchmarks.testbed import Bed\n"
        "bed = Bed(2, 100.0).__enter__()\n"
        "bed.start(bed.hosts[0], ['sleep', '600'], stdout=subprocess.DEVNULL)\n"
        "print(bed.switch, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == -signal.SIGKILL
    left = done.stdout.strip()
    assert left in namespaces()
    with Bed(2, 100.0):
        assert left not in namespaces()


def test_the_command_says_how_to_enter_and_cleans_up() -> None:
    asked = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.testbed", "--hosts", "2", "--mbit", "50", "100"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert asked.stdout is not None
    said = ""
    while "removes everything" not in said:
        line = asked.stdout.readline()
        assert line, said
        said += line
    assert "ip netns exec mwbed" in said
    line = next(line for line in said.splitlines() if "enter:" in line)
    enter = shlex.split(line.split("enter:")[1])
    inside = [*enter[:-1], "hostname"]
    assert subprocess.run(inside, capture_output=True, text=True, check=True).stdout == "host0\n"
    inside = [*enter[:-1], "ip", "-br", "addr", "show", "eth0"]
    assert "10.77.0.1" in subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    asked.terminate()
    assert asked.wait(30) == 0
    assert not [name for name in namespaces() if name.startswith(f"mwbed{asked.pid}-")]


@pytest.mark.slow
def test_a_program_that_hangs_is_ended(bed: Bed, tmp_path: Path) -> None:
    path = tmp_path / "hang.py"
    path.write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(RunError, match="was not done in 8 s"):
        bed.launch([str(path)], timeout_s=8)
    for host in bed.hosts:
        done = subprocess.run(
            ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
        )
        assert not done.stdout.split()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, 100.0), "1 hosts cannot be: ask for 2 to 8"),
        ((9, 100.0), "9 hosts cannot be"),
        ((2, [100.0]), "do not fit 2 hosts"),
        ((2, -1.0), "do not fit 2 hosts"),
    ],
)
def test_what_cannot_be_asked_for(arguments: tuple[int, float], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Bed(*arguments)


def test_one_bed_at_a_time(bed: Bed) -> None:
    with pytest.raises(InputError, match="has a test bed already"):
        Bed(2, 100.0).__enter__()
    assert bed.hosts
