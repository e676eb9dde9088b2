"""A run over ssh as its launcher sees it: a program in the place of ``ssh`` plays the hosts."""

from __future__ import annotations

import io
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from meshwright import Hosts, InputError, RunError
from meshwright.executor.launch.hosts.over_ssh import launch_over_ssh, meeting_peer, signals_raised
from meshwright.executor.launch.hosts.protocol import HostWork, RendezvousAddress
from meshwright.executor.launch.hosts.serve import meeting_place
from meshwright.executor.launch.hosts.ssh import HostConnection, ssh_command
from meshwright.planner.schema.errors import MemoryRunError
from meshwright.planner.schema.plan import Plan

from tests.processes import alive, wait_until
from tests.ssh import behave, behave_as_host, plan_for_hosts, put_ssh

PLAN = plan_for_hosts(2)
WAIT = "begin()\nhear()\n"
FIGURES = "{'step_s': 1.0}"
REPORT = (
    "tell('report', target='vgg16', world_size=2, steps=3, "
    f"predicted={FIGURES}, measured={FIGURES}, data_parallel={FIGURES})\n"
)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = put_ssh(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def launched(plan: Plan = PLAN, **more: object):
    """What is returned, and what is said."""
    said: list[str] = []
    hosts = Hosts(("a", "root@b"), **more)  # type: ignore[arg-type]
    work = HostWork(plan=plan, script=("train.py",), steps=3, per_host=(1, 1))
    return launch_over_ssh(work, hosts, say=said.append), [text for text in said if text]


def test_the_report_of_host_0_and_lines_with_the_hosts_names(ssh, capfd):
    behave_as_host(ssh, "a", f"begin()\nprint('x=1\\npart', end='')\n{REPORT}")
    behave_as_host(ssh, "b", "begin()\nprint('oh', file=sys.stderr)\n")
    report, said = launched()
    assert (report.target, report.steps) == ("vgg16", 3)
    out, err = capfd.readouterr()
    # What a rank printed without its line's end is there too, and not taken for the report.
    assert out.splitlines() == ["a: x=1", "a: part"]
    assert err.splitlines() == ["b: oh"]
    assert said == []
    assert not alive(ssh)


def test_each_host_gets_its_part_and_where_to_meet(ssh, tmp_path):
    for host in "ab":
        write = f"Path({str(tmp_path)!r}, name[-1]).write_text(json.dumps([order, begin()]))\n"
        behave_as_host(ssh, host, write)
    launched(folder="/work here", environment={"X": "$(y)"}, rendezvous=":4712")
    (first, place), (second, same) = (json.loads((tmp_path / h).read_text()) for h in "ab")
    assert place == same == {"address": "10.0.0.1", "port": 4712}
    assert (first["node_rank"], second["node_rank"]) == (0, 1)
    assert first["folder"] == "/work here"
    assert first["environment"]["X"] == "$(y)"
    assert {**first, "node_rank": 1} == second
    assert first["plan"]["target"] == PLAN.target


def test_ssh_is_asked_no_question_and_given_one_command(ssh, tmp_path, monkeypatch):
    odd = "a b;$(touch x)'\"\n"
    monkeypatch.setenv("PYTHONPATH", odd)
    hosts = Hosts(
        ("u@a",), python=f"{sys.executable} -X dev", ssh_config="f g", ssh_options=("Port=1",)
    )
    words = ssh_command("u@a", hosts)
    assert words[:5] == ["ssh", "-F", "f g", "-o", "Port=1"]
    assert {"BatchMode=yes", "ConnectTimeout=10"} <= set(words)
    assert words[-3:-1] == ["--", "u@a"]
    # The shell of the host makes the same words of it again, whatever is in them.
    printed = subprocess.run(
        ["sh", "-c", words[-1].replace("exec env", "exec printf '%s\\0'")],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    ).stdout.split("\0")  # fmt: skip
    module = "meshwright.executor.launch.hosts.remote"
    assert printed[:-1] == [f"PYTHONPATH={odd}", sys.executable, "-X", "dev", "-m", module]
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("ssh: connect to host b port 22: Connection refused", 255, "host b cannot be reached"),
        ("ssh: connect to host b port 22: Connection timed out", 255, "host b cannot be reached"),
        ("ssh: Could not resolve hostname b: Name or service", 255, "host b: there is no host of"),
        ("Can't open user config file x: No such file", 255, "ssh was told what it does not take"),
        ('command-line line 0: no argument after keyword "port"', 255, "correct its options here"),
        ("b: Permission denied (publickey).", 255, r"host b: .*no key of yours.*\(publickey\)\)"),
        ("Host key verification failed.", 255, "host b: ssh does not know its key: .*ssh b"),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.", 255, "keygen"),
        ("sh: 1: exec: python: not found", 127, "host b: there is no .*--remote-python"),
        (
            "ModuleNotFoundError: No module named 'meshwright'", 1,
            "host b: .*python.* has no meshwright; install the same",
        ),
        ("No module named 'torch'", 1, "host b: No module named 'torch'; install"),
        ("Segmentation fault", 139, "host b ended before it began: Segmentation fault"),
        ("This account is closed.", 0, "host b ended before it began: This account is closed."),
    ],
)  # fmt: skip
def test_a_host_that_is_not_to_be_had_is_named(ssh, words, code, sentence):
    behave_as_host(ssh, "a", WAIT)
    behave(ssh, "b", f"print({words!r}, file=sys.stderr)\nsys.exit({code})")
    with pytest.raises((InputError, RunError), match=sentence):
        launched()
    assert not alive(ssh)


def test_all_hosts_that_are_not_to_be_had_are_named(ssh, tmp_path):
    for host in "ab":
        unknown = f"ssh: Could not resolve hostname {host}: Name or service not known"
        behave(ssh, host, f"print({unknown!r}, file=sys.stderr)\nsys.exit(255)")
    said: list[str] = []
    work = HostWork(plan=PLAN, script=("train.py",), steps=3, per_host=(1, 1))
    with pytest.raises(InputError) as raised:
        launch_over_ssh(work, Hosts(("a", "b")), say=said.append)
    told = sorted([str(raised.value), *filter(None, said)])
    assert told == [f"host {name}: there is no host of that name: correct it" for name in "ab"]
    assert not alive(ssh)


def test_without_ssh(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="there is no ssh on this machine"):
        launched()


def test_other_versions_are_refused_before_anything_runs(ssh, capfd):
    other = "SETUP['software'] = [['torch', '2.1']]\n"
    behave_as_host(ssh, "a", f"{WAIT}print('ran')\n")
    behave_as_host(ssh, "b", f"{other}{WAIT}print('ran')\n")
    with pytest.raises(InputError, match=r"versions of torch: 2\.0 on a and 2\.1 on root@b"):
        launched()
    assert "ran" not in capfd.readouterr().out


def test_devices_whose_speed_the_plan_knows_are_not_remarked_upon(ssh):
    shares = (PLAN.goal.batch - 1, 1)
    behave_as_host(ssh, "a", "begin()\n")
    behave_as_host(ssh, "b", "SETUP['device'] = 'gpu'\nbegin()\n")
    _, said = launched(msgspec.structs.replace(PLAN, local_batch_sizes=shares))
    assert not any(said)


def test_what_differs_and_does_no_harm_is_said(ssh):
    few = "notes=['it has 1 core'], free_bytes=5 << 20"
    behave_as_host(ssh, "a", f"begin({few})\n")
    behave_as_host(ssh, "b", "SETUP['device'] = 'gpu'\nbegin(notes=['it has 1 core'])\n")
    _, said = launched()
    assert said[0].startswith("hosts have different devices: cpu on a and gpu on root@b;")
    assert said[1] == "on a, b: it has 1 core"
    assert said[2].startswith("host a has 5.0 MiB of memory free and its ranks are predicted")
    assert len(said) == 3


def failing(at: float, words: str, *, of_peer: bool = False) -> str:
    told = f"tell('failed', message={words!r}, exit_code=1, failed_at={at}, of_peer={of_peer})"
    return f"{told}\nsys.exit(1)\n"


@pytest.mark.parametrize(
    ("seen_at", "of_peer", "to_tell_s", "late_s"), [(20.0, False, 3.0, 0.5), (1.0, True, 0.1, 1.5)]
)
def test_the_first_of_several_failures_is_raised(
    ssh, monkeypatch, seen_at, of_peer, to_tell_s, late_s
):
    """Host a sees that its peer has gone, and is heard first. Where it says that this is what it
    saw, the other may tell later, and by a clock that is ahead."""
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh._TO_TELL_S", to_tell_s)
    seen = failing(seen_at, "the peer closed", of_peer=of_peer)
    behave_as_host(ssh, "a", f"begin()\n{seen}")
    behave_as_host(ssh, "b", f"begin()\ntime.sleep({late_s})\n{failing(19.5, 'the loss is nan')}")
    with pytest.raises(RunError, match=r"^on b: the loss is nan$"):
        launched()


def test_where_no_host_tells_the_cause_they_are_ended_all_the_same(ssh, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh._CAUSE_S", 0.5)
    seen = failing(1.0, "lost the connection", of_peer=True)
    behave_as_host(ssh, "a", f"begin()\n{seen}")
    behave_as_host(ssh, "b", "begin()\nassert hear('signal') == 15\nsys.exit(143)\n")
    with pytest.raises(RunError, match=r"^on a: lost the connection$"):
        launched()
    assert not alive(ssh)


def test_hosts_of_a_failed_one_are_ended(ssh, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh._TO_TELL_S", 0.2)
    behave_as_host(ssh, "a", "begin()\nassert hear('signal') == 15\nsys.exit(143)\n")
    lacking = failing(1.0, "no memory").replace(
        "exit_code", "memory=True, details=['more'], limit_bytes=7, exit_code"
    )
    behave_as_host(ssh, "b", f"begin()\n{lacking}")
    with pytest.raises(MemoryRunError) as raised:
        launched()
    assert (raised.value.sentence, raised.value.limit_bytes) == ("on b: no memory", 7)
    assert not alive(ssh)


def test_a_connection_that_is_lost_is_told(ssh, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh._TO_TELL_S", 0.2)
    behave_as_host(ssh, "a", WAIT)
    behave_as_host(ssh, "b", "begin()\nprint('Connection reset', file=sys.stderr)\nsys.exit(255)\n")
    with pytest.raises(RunError, match="the connection to host b was lost: Connection reset"):
        launched()


def test_hosts_hear_that_the_launcher_is_there(ssh, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh.HEARTBEAT_S", 0.1)
    wait = "begin()\nassert [next(sys.stdin) for _ in range(3)] == ['alive\\n'] * 3\n"
    for host in "ab":
        behave_as_host(ssh, host, wait)
    launched()


def test_hosts_hear_so_while_a_terminal_does_not_read(ssh, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh.HEARTBEAT_S", 0.1)
    heard = tmp_path / "heard"

    class Stopped(io.StringIO):
        def write(self, text: str) -> int:
            assert wait_until(heard.exists, 10)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Stopped())
    wait = "assert [next(sys.stdin) for _ in range(3)] == ['alive\\n'] * 3\n"
    behave_as_host(ssh, "a", f"begin()\nprint('x', flush=True)\n{wait}Path({str(heard)!r}).touch()")
    behave_as_host(ssh, "b", "begin()\n")
    launched()


def test_what_a_host_that_has_ended_was_not_told_is_dropped():
    events = queue.Queue()
    connection = HostConnection(0, [sys.executable, "-c", "pass"], "token", events)
    assert events.get(timeout=60).kind == "ended"
    connection.send(b"alive")
    assert wait_until(lambda: connection._process.stdin.closed, 10.0)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signals_are_passed_on(ssh, tmp_path, number, error):
    # A shell that starts the tests in the background has it ignored, and Python leaves it so.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    for host in "ab":
        begun, got = (str(tmp_path / f"{what}-{host}") for what in ("begun", "got"))
        behave_as_host(
            ssh,
            host,
            f"begin()\nPath({begun!r}).touch()\n"
            f"number = hear('signal')\nPath({got!r}).write_text(str(number))\n",
        )

    def when_begun() -> None:
        wait_until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=when_begun)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        launched()
    thread.join()
    signal.signal(signal.SIGINT, interrupts)
    assert signal.getsignal(signal.SIGTERM) == before
    assert {p.read_text() for p in tmp_path.glob("got-*")} == {str(int(number))}
    assert not alive(ssh)


def test_a_hang_up_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raised():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_where_host_0_looks_for_its_address():
    assert meeting_peer(["10.0.0.1", "127.0.0.1", "10.0.0.3"]) == "10.0.0.3"
    assert meeting_peer(["10.0.0.1", "127.0.0.1"]) == "10.0.0.1"
    assert meeting_peer(["127.0.0.1", ""]) == "127.0.0.1"


def test_a_port_in_use_is_refused():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}, .*--rendezvous :PORT"):
            meeting_place(RendezvousAddress(address="127.0.0.1", port=port))
    found = meeting_place(RendezvousAddress(address="127.0.0.1", port=0))
    assert found.address == "127.0.0.1"
    assert found.port > 1023
