"""Hosts as users name them, and the ranks of each."""

from __future__ import annotations

import os
import sys

import pytest
from meshwright import Hosts, InputError
from meshwright.executor.launch.hosts.settings import (
    counts_of,
    listed_hosts,
    python_command,
    read_hostfile,
    variables,
)
from meshwright.executor.launch.processes import Ranks


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-oProxyCommand=x",
        "a b",
        "a;x",
        "$(x)",
        "a\n",
        "'a'",
        "user@",
        "@a",
        "a@b@c",
        "-u@a",
        "é",
    ],
)
def test_what_is_no_host(name):
    with pytest.raises(InputError, match="is no host: name it as ssh does"):
        Hosts(("node1", name))


def test_hosts_as_ssh_names_them():
    names = listed_hosts("node1, user.x@node2,10.0.0.3,fe80::1%eth0")
    hosts = Hosts(names)
    assert hosts.names == ("node1", "user.x@node2", "10.0.0.3", "fe80::1%eth0")
    assert hosts.labels[:2] == ("node1", "node2")
    assert Hosts(("a@n", "b@n")).labels == ("a@n", "b@n")
    for wrong, sentence in (((), "no host is named"), (("a", "b", "a"), "host a is named twice")):
        with pytest.raises(InputError, match=sentence):
            Hosts(wrong)


def test_a_hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\nnode1 slots=2\n\n  user@node2   slots=1 # slow\n")
    names, slots = read_hostfile(path)
    assert (names, slots) == (("node1", "user@node2"), (2, 1))
    assert counts_of(Hosts(names, slots)) == (2, 1)
    assert counts_of(Hosts(("a", "b"))) is None
    with pytest.raises(InputError, match="host b has no slots and others have"):
        counts_of(Hosts(("a", "b"), (2, None)))


@pytest.mark.parametrize("line", ["a;b", "slots=2", "-a"])
def test_a_line_that_is_no_host_is_told_by_its_number(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_text(f"node1\n{line}\n")
    with pytest.raises(InputError, match=f"line 2 of .*hosts is no host: {line!r}"):
        read_hostfile(path)


@pytest.mark.parametrize(
    "rest", ["slots=0", "slots=x", "slots=1 more", "b", "slots=-1", "max_slots=4"]
)
def test_what_follows_a_host_and_is_no_number_of_slots_is_told(tmp_path, rest):
    path = tmp_path / "hosts"
    path.write_text(f"node1\nnode2 {rest}\n")
    with pytest.raises(InputError, match=f"line 2 of .*hosts has {rest!r} after its host"):
        read_hostfile(path)


def test_hostfiles_without_hosts(tmp_path):
    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, sentence in (
        ("empty", "names no host"), ("gone", "No such file"), ("bytes", "it is no text"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=sentence):
            read_hostfile(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, ("", 0)), (":29500", ("", 29500)), ("node1:0", ("node1", 0)),
        ("10.0.0.1:5", ("10.0.0.1", 5)), ("[fe80::1]:5", ("[fe80::1]", 5)),
    ],
)  # fmt: skip
def test_where_hosts_meet(given, meant):
    assert Hosts(("a",), rendezvous=given).meeting == meant


@pytest.mark.parametrize(
    "given",
    [
        "", "29500", "a:", "a:b", "a:70000", "a b:1", "$(x):1", "-a:1", "root@a:1",
        "[fe80::1%eth0]:1",
    ],
)  # fmt: skip
def test_where_hosts_cannot_meet(given):
    with pytest.raises(InputError, match="is no address: give HOST:PORT"):
        Hosts(("a",), rendezvous=given)


@pytest.mark.parametrize("given", ["root@10.0.0.1:29500", "[fe80::1%eth0]:29500"])
def test_what_ssh_takes_and_torch_does_not_is_no_rendezvous(given):
    with pytest.raises(InputError, match="is no address for 2 hosts: give HOST:PORT"):
        Ranks(nproc=1, nodes=2, rendezvous=given)


def test_what_hosts_are_told_of_the_environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("NCCL_", "MESHWRIGHT_"))]:
        monkeypatch.delenv(name)
    for name in ("NCCL_DEBUG", "MESHWRIGHT_TIMEOUT_S", "MESHWRIGHT_LAUNCHER", "SECRET", "MINE"):
        monkeypatch.setenv(name, "1")
    told = Hosts(("a",), environment=variables(["MINE", "X=a=b", "NCCL_DEBUG="])).told
    # A launcher's own variables are for its own ranks.
    assert {n: told.get(n) for n in ("MINE", "X", "NCCL_DEBUG", "MESHWRIGHT_TIMEOUT_S")} == {
        "MINE": "1", "X": "a=b", "NCCL_DEBUG": "", "MESHWRIGHT_TIMEOUT_S": "1",
    }  # fmt: skip
    assert not {"SECRET", "MESHWRIGHT_LAUNCHER"} & set(told)
    for wrong, sentence in (("1X=2", "is no name"), ("A B=c", "is no name"), ("GONE_", "no such")):
        with pytest.raises(InputError, match=sentence):
            variables([wrong])


def test_what_starts_python():
    assert python_command("") == (sys.executable,)
    assert python_command("run 'my image' python") == ("run", "my image", "python")
    with pytest.raises(InputError, match='--remote-python "\'" cannot be read'):
        python_command("'")


def test_ranks_are_numbered_through_hosts_of_different_sizes():
    hosts = [
        Ranks(nproc=n, nodes=3, node_rank=i, rendezvous="a:1", per_host=(2, 1, 3))
        for i, n in enumerate((2, 1, 3))
    ]
    assert [list(h.here) for h in hosts] == [[0, 1], [2], [3, 4, 5]]
    assert {h.world_size for h in hosts} == {6}
    assert list(Ranks(nproc=2, nodes=2, node_rank=1, rendezvous="a:1").here) == [2, 3]
