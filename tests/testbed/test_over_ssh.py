"""A run over real ssh: a server in each of two hosts, and none of its processes left afterwards.

The servers' keys and configuration are in a folder of the test; a case takes 10 to 20 s.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator

import pytest
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import RunReport

from benchmarks.testbed import Bed
from tests.sampling import sampled
from tests.ssh import plan_for_hosts
from tests.testbed.ssh_hosts import PORT, SLEEP, SshHosts, lacking
from tests.traces import check_trace, tracks

pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.timeout(180),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[SshHosts]:
    folder = tmp_path_factory.mktemp("ssh")
    with Bed(2, 1000.0) as bed:
        made = SshHosts(bed, folder)
        (folder / "sleep.py").write_text(SLEEP)
        yield made


def test_a_plan_runs_on_two_hosts_to_its_end(hosts):
    code, out, err = hosts.ended(
        hosts.start(
            *("--steps", "5", "--report", "report.json", "--timeout", "100"),
            *("--trace", "trace.json"),
        )
    )
    assert code == 0, err
    report = load(RunReport, hosts.folder / "report.json")
    assert (report.target, report.world_size, report.steps) == ("mlp", 2, 5)
    assert report.measured.exposed_s is not None
    assert "step time" in out
    events = json.loads((hosts.folder / "trace.json").read_text())["traceEvents"]
    check_trace(events)
    # The ranks of both hosts, on whose links their gradients crossed.
    for rank in range(2):
        assert tracks(events)[f"rank {rank}", "computing, measured"]
        assert any(t.startswith("exchange") for p, t in tracks(events) if p == f"rank {rank}")


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
