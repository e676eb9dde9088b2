"""What ssh starts on a host, without ssh: it ends with its launcher, and tells what it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from meshwright.executor.comm.setups import software
from meshwright.executor.launch.background import Background
from meshwright.executor.launch.hosts.over_ssh import order_for
from meshwright.executor.launch.hosts.protocol import (
    HostOrder,
    HostRecording,
    HostWork,
    RendezvousAddress,
)
from meshwright.executor.launch.hosts.settings import Hosts
from meshwright.executor.launch.timeline import STEPS
from meshwright.planner.schema.record import decode
from plans import plan as plan_by_hand

from tests.ssh import plan_for_hosts

pytestmark = pytest.mark.timeout(120)
VERSION = dict(software())["meshwright"]
# With little patience, so that a test of it is short.
PROGRAM = (
    "import sys\nfrom meshwright.executor.launch.hosts import remote\n"
    "remote.SILENCE_S = {0}\nsys.exit(remote.main())\n"
)


def order(folder: Path, **more) -> HostOrder:
    work = HostWork(plan=plan_for_hosts(2), script=(), steps=3, per_host=(1, 1), **more)
    return order_for(work, 0, Hosts(("a", "b"), folder=str(folder)))


def begin(silence_s: float = 60.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(silence_s)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def tell(host: subprocess.Popen[str], version: str, made: HostOrder) -> None:
    assert host.stdin is not None
    host.stdin.write(f"TOKEN\n{version}\norder {msgspec.json.encode(made).decode()}\n")
    host.stdin.flush()


def say(host: subprocess.Popen[str], word: str, place: RendezvousAddress) -> None:
    assert host.stdin is not None
    host.stdin.write(f"{word} {msgspec.json.encode(place).decode()}\n")
    host.stdin.flush()


def told(host: subprocess.Popen[str], word: str) -> bytes:
    """What the host says of that, whatever its ranks print before."""
    assert host.stdout is not None
    for line in host.stdout:
        if line.startswith(f"TOKEN {word} "):
            return line.split(" ", 2)[2].encode()
    raise AssertionError(f"nothing was said of {word}")


def test_an_order_arrives_as_it_was_given(tmp_path):
    given = order(tmp_path, background=Background("sleep 9", limit=1.5), timeout_s=2.0)
    assert decode(HostOrder, msgspec.json.encode(given)) == given


@pytest.mark.slow
def test_each_host_tells_what_its_ranks_have_recorded(tmp_path):
    plan = msgspec.structs.replace(plan_by_hand(2), target="mlp")
    work = HostWork(plan=plan, script=(), steps=3, per_host=(1, 1), progress=False, trace=True)
    hosts = [begin(), begin()]
    try:
        for number, host in enumerate(hosts):
            tell(host, VERSION, order_for(work, number, Hosts(("a", "b"), folder=str(tmp_path))))
            told(host, "ready")
        say(hosts[0], "meet", RendezvousAddress(address="127.0.0.1", port=0))
        place = decode(RendezvousAddress, told(hosts[0], "met"))
        for host in hosts:
            say(host, "go", RendezvousAddress(address="127.0.0.1", port=place.port))
        for rank, host in enumerate(hosts):
            (one,) = decode(HostRecording, told(host, "recorded")).ranks
            assert (one.rank, len(one.steps)) == (rank, STEPS)
            assert {group.ranks for group in one.groups} == {(0, 1)}
        assert [host.wait(60) for host in hosts] == [0, 0]
    finally:
        for host in hosts:
            host.kill()
            host.wait()


def test_hosts_end_where_nothing_is_heard_of_their_launcher(tmp_path):
    """One is hung up on, one hears nothing, of one the version is another, one lacks its folder."""
    hung_up, silent, other, lacking = hosts = [begin(), begin(2.0), begin(), begin()]
    try:
        tell(hung_up, VERSION, order(tmp_path))
        tell(silent, VERSION, order(tmp_path))
        tell(other, "0.0.9", order(tmp_path))
        tell(lacking, VERSION, order(tmp_path / "gone"))
        assert hung_up.stdout is not None
        token, word, told = hung_up.stdout.readline().split(" ", 2)
        assert (token, word) == ("TOKEN", "ready")
        assert json.loads(told)["setup"]["device"].startswith("cpu")
        assert hung_up.stdin is not None
        hung_up.stdin.close()
        hung_up.stdin = None
        assert [host.wait(60) for host in hosts] == [143, 143, 2, 2]
        said = [host.communicate() for host in hosts]
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert not any(err for _, err in said), said
    failures = [json.loads(out.split(" ", 2)[2])["message"] for out, _ in said[2:]]
    assert failures[0].startswith(f"Meshwright is {VERSION} here and 0.0.9 where it was launched")
    assert failures[1].startswith(f"the working folder {tmp_path}/gone cannot be entered (No such")
