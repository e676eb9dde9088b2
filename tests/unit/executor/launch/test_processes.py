"""How launchers of several hosts meet, before any rank is started."""

from __future__ import annotations

import json
import os
import signal
import socket
from types import SimpleNamespace

import pytest
from meshwright import InputError, RunError
from meshwright.executor.launch import processes, start
from meshwright.executor.launch.launch import ranks_for, ranks_of_hosts
from meshwright.executor.launch.processes import Ranks, run_ranks

from tests.ssh import plan_for_hosts


def test_a_rendezvous_whose_port_is_in_use_is_a_sentence(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        ranks = Ranks(nproc=1, nodes=2, rendezvous=f"127.0.0.1:{port}")
        with pytest.raises(RunError, match=f"port {port} is in use on this host"):
            run_ranks(["-m", "this"], ranks, tmp_path)


def test_hosts_that_do_not_meet_are_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.processes.RENDEZVOUS_TIMEOUT_S", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(RunError, match=f"the 2 hosts did not meet at {address} "):
        run_ranks(["-m", "this"], Ranks(nproc=1, nodes=2, rendezvous=address), tmp_path)


@pytest.mark.parametrize("ignored", [True, False])
def test_a_run_outlives_a_hang_up_under_nohup_only(tmp_path, ignored):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getppid(), signal.SIGHUP)\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        if ignored:
            run_ranks([str(script)], Ranks(nproc=1), tmp_path / "run")
        else:
            script.write_text(script.read_text() + "import time\ntime.sleep(60)\n")
            with pytest.raises(SystemExit, match=str(128 + signal.SIGHUP)):
                run_ranks([str(script)], Ranks(nproc=1), tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_limit_is_named_as_it_was_given(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(60)\n")
    ranks = Ranks(nproc=1, timeout_s=0.1, limit_s=20.0)
    with pytest.raises(RunError, match="after its limit of 20 s: allow more time"):
        run_ranks([str(script)], ranks, tmp_path / "run")


@pytest.mark.parametrize(
    ("asked", "nodes", "counts"),
    [(None, 2, (4, 4)), (4, 2, (4, 4)), ((4,), 2, (4, 4)), ((5, 3), 2, (5, 3)), (None, 1, (8,))],
)
def test_ranks_of_each_host(asked, nodes, counts):
    assert ranks_of_hosts(plan_for_hosts(8), asked, nodes) == counts


def test_ranks_that_do_not_divide(monkeypatch):
    with pytest.raises(InputError, match=r"3 hosts: .* \(--nproc 3,3,2, ranks_here=\[3, 3, 2\]\)"):
        ranks_of_hosts(plan_for_hosts(8), None, 3)
    ranks = ranks_for(plan_for_hosts(8), (3, 3, 2), 3, 2, "a:1", None, quiet=False)
    assert (ranks.nproc, ranks.world_size, list(ranks.here)) == (2, 8, [6, 7])


@pytest.mark.skipif("lo" not in dict(map(reversed, socket.if_nameindex())), reason="asks Linux")
def test_gloo_takes_the_interface_on_the_way_to_host_0():
    assert start.interface_for_gloo("127.0.0.1") == "lo"
    # Any address of the loopback's network is reached over it, and has no name of its own there.
    assert start.address_towards("127.0.0.9") == "127.0.0.1"
    assert start.interface_for_gloo("127.0.0.9") == "lo"
    assert start.address_towards("no.such.host.invalid") is None
    assert start.interface_for_gloo("no.such.host.invalid") is None


@pytest.mark.skipif("lo" not in dict(map(reversed, socket.if_nameindex())), reason="asks Linux")
@pytest.mark.parametrize(
    ("nodes", "own", "told"), [(2, None, "lo"), (2, "eth7", "eth7"), (1, None, None)]
)
def test_ranks_of_several_hosts_are_told_the_interface(monkeypatch, nodes, own, told):
    """Also those of scripts that start their process group themselves."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if own is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", own)
    with processes._environment(Ranks(nproc=1, nodes=nodes, rendezvous="127.0.0.9:1")):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == told
    assert os.environ.get("GLOO_SOCKET_IFNAME") == own


@pytest.mark.skipif("lo" not in dict(map(reversed, socket.if_nameindex())), reason="asks Linux")
@pytest.mark.parametrize(("way_out", "chosen"), [("10.0.0.5", "eth7"), (None, None)])
def test_hosts_do_not_meet_at_the_loopback_that_a_name_stands_for(monkeypatch, way_out, chosen):
    ways = {"node0": "127.0.0.1", "127.0.1.1": "127.0.0.1"}
    addresses = {"lo": "127.0.0.1", "eth7": "10.0.0.5"}
    monkeypatch.setattr(start, "address_towards", lambda host: ways.get(host, way_out))
    monkeypatch.setattr(start, "_address_of", addresses.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses)))
    assert start.interface_for_gloo("node0", several=True) == chosen
    assert start.interface_for_gloo("node0") == "lo"
    assert start.interface_for_gloo("127.0.1.1", several=True) == "lo"


def test_more_hosts_than_ranks_are_refused():
    with pytest.raises(InputError, match="has 2 ranks and 3 hosts were named: use 2 of them"):
        ranks_of_hosts(plan_for_hosts(2), None, 3)


@pytest.mark.parametrize(
    ("killed_at", "words", "lost"),
    [(99, "rank 1 ended with SIGKILL", True), (105, "rank 1 is not heard of", False)],
)
def test_a_rank_that_was_killed_after_a_peer_had_failed_is_not_the_cause(
    tmp_path, killed_at, words, lost
):
    """It stood still, and the engine killed it in the end."""
    written = {
        "rank": 0, "time": 100.4, "kind": "RunError", "message": "rank 1 is not heard of",
        "exit_code": 1, "expected": True, "of_peer": True, "memory": None, "room": None,
    }  # fmt: skip
    (tmp_path / "failure-0.json").write_text(json.dumps(written))
    ended = SimpleNamespace(exitcode=-signal.SIGKILL, timestamp=killed_at)
    found = processes._failure(tmp_path, SimpleNamespace(failures={1: ended}))  # type: ignore[arg-type]
    assert str(found).startswith(words)
    assert found.lost is lost


def test_what_a_rank_saw_of_anothers_end_is_not_the_cause(tmp_path):
    """Even where it was quicker to write it, or clocks differ."""
    for rank, message in enumerate(("lost the connection to another rank", "no such file")):
        written = {
            "rank": rank, "time": 100.0 + rank, "kind": "RunError", "message": message,
            "exit_code": 1, "expected": True, "of_peer": not rank, "memory": None, "room": None,
        }  # fmt: skip
        (tmp_path / f"failure-{rank}.json").write_text(json.dumps(written))
    found = processes._failure(tmp_path, SimpleNamespace(failures={}))  # type: ignore[arg-type]
    assert str(found) == "no such file"
    assert not found.of_peer
