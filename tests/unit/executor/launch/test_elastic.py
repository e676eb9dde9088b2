"""A run over ssh that loses hosts and gets them back: a program in the place of ``ssh`` plays
them."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from meshwright import Hosts, InfeasibleError, InputError, Restarts, RunError, launch
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.launch.hosts import elastic, reach
from meshwright.executor.launch.hosts.elastic import launch_elastic
from meshwright.executor.launch.hosts.protocol import HostWork
from meshwright.executor.launch.replan import TRIES, Replanner, RoomForPlan, what_changed
from meshwright.planner.cost.device_kinds import slowed, with_profiles
from meshwright.planner.schema.errors import NoRoomError
from meshwright.planner.schema.goal import Goal, Pin
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.local_steps import LocalSteps
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import decode, load
from meshwright.planner.schema.text import size
from meshwright.planner.solve.heuristic.resize import cluster_of_nodes
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.solver import solve
from meshwright.profiler.estimate import load_table

from tests.processes import alive, wait_until
from tests.ssh import behave_as_host, cluster_of_hosts, plan_for_hosts, put_ssh
from tests.traces import durations, tracks

PLAN = plan_for_hosts(3)
PROFILE, CLUSTER = load_table("vgg16"), cluster_of_hosts(3)
# Asked whether they answer, hosts say so, unless a file tells that they are away. Attempts are
# counted, and each writes the plan that it was given.
ANSWERS = """
if (here / f"away-{name}").exists():
    print("ssh: connect to host x port 22: Connection refused", file=sys.stderr)
    sys.exit(255)
if command == "exec true":
    sys.exit(0)
"""
COUNTED = """
begin()
attempt = len(list(here.glob(f"plan-{name}-*")))
(here / f"plan-{name}-{attempt}").write_text(json.dumps(order["plan"]))
(here / f"order-{name}-{attempt}").write_text(json.dumps(order))
"""
# Checkpoints, by one of which a host that is back has been seen to be.
SAVED = "for step in range(10, 14):\n    tell('saved', step=step)\n    time.sleep(0.3)\n"
UNTIL_SIGNAL = "hear('signal')\nsys.exit(143)\n"
REPORT = (
    "tell('report', target='vgg16', world_size=2, steps=3, predicted={'step_s': 1.0}, "
    "measured={'step_s': 1.0}, data_parallel={'step_s': 1.0})\n"
)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = put_ssh(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh._TO_TELL_S", 0.2)
    monkeypatch.setattr(elastic, "RETURN_S", 1.0)
    monkeypatch.setattr(elastic, "_ASK_AGAIN_S", 0.1)
    monkeypatch.setattr(reach, "LOOK_S", 0.1)
    return folder


def play(ssh: Path, **hosts: str) -> None:
    """What each host does in an attempt, once it has begun."""
    for name, code in hosts.items():
        behave_as_host(ssh, name, f"{COUNTED}{code}")
        path = ssh / name
        path.write_text(ANSWERS + path.read_text())


def away(ssh: Path, host: str) -> str:
    """What a host does that goes away for good, in the middle of an attempt."""
    return f"Path({str(ssh)!r}, 'away-{host}').touch()\nsys.exit(255)\n"


def launched(ssh: Path, most: int = 3, min_nodes: int | None = 1, **more):
    """What is returned, and what is said."""
    said: list[str] = []
    work = HostWork(
        plan=PLAN, script=more.pop("script", ("train.py",)), steps=30, per_host=(1, 1, 1),
        checkpoint="kept", resume=False,
    )  # fmt: skip
    restarts = Restarts(most, min_nodes, more.pop("profile", PROFILE), CLUSTER)
    hosts = Hosts(("a", "b", "c"), folder=str(ssh.parent), **more)
    try:
        report = launch_elastic(work, hosts, restarts, say=said.append)
    finally:
        assert not alive(ssh)
    return report, [text for text in said if text]


def plans(ssh: Path, host: str) -> list[Plan]:
    paths = sorted(ssh.glob(f"plan-{host}-*"), key=lambda path: int(path.name.split("-")[2]))
    return [decode(Plan, path.read_bytes()) for path in paths]


def test_hosts_that_are_left_go_on_under_another_plan(ssh):
    first = "if attempt == 0: " + UNTIL_SIGNAL.replace("\n", "; ", 1)
    play(ssh, a=f"{first}{REPORT}", b=first, c=away(ssh, "c"))
    report, said = launched(ssh)
    assert report is not None
    assert [plan.world_size for plan in plans(ssh, "a")] == [3, 2]
    assert plans(ssh, "a")[0] == PLAN
    made = plans(ssh, "b")[1]
    assert made.goal == PLAN.goal
    assert said[0] == "the connection to host c was lost; started again (restart 1 of 3)"
    where = ssh.parent / "kept-plan-of-2-hosts.json"
    assert said[1].startswith("planned again for 2 of 3 hosts: for 2 ranks, predicted ")
    assert said[1].endswith(f"; written to {where}")
    assert "\n" not in said[1]
    assert load(Plan, where) == made
    orders = [json.loads((ssh / f"order-b-{i}").read_text()) for i in range(2)]
    assert [(o["resume"], o["restarted"], o["per_host"]) for o in orders] == [
        (False, False, [1, 1, 1]), (True, True, [1, 1]),
    ]  # fmt: skip


def test_the_host_of_rank_0_may_be_the_one_that_is_lost(ssh):
    first = "if attempt == 0: " + UNTIL_SIGNAL.replace("\n", "; ", 1)
    play(ssh, a=away(ssh, "a"), b=f"{first}{REPORT}", c=first)
    report, _ = launched(ssh, rendezvous="10.9.9.9:4711")
    assert report is not None
    order = json.loads((ssh / "order-b-1").read_text())
    assert (order["node_rank"], order["per_host"]) == (0, [1, 1])


def test_a_host_that_is_back_takes_part_from_the_next_checkpoint_on(ssh):
    """It is away at first. A checkpoint that was there before does not stop the run."""
    (ssh / "away-c").touch()
    back = f"Path({str(ssh)!r}, 'away-c').unlink(missing_ok=True)\n"
    stopped = f"tell('saved', step=5)\n{back}{SAVED}{UNTIL_SIGNAL}"
    first = "if attempt == 0:\n" + "".join(f"    {line}\n" for line in stopped.splitlines())
    play(ssh, a=f"{first}{REPORT}", b="if attempt == 0: hear()\n", c="")
    report, said = launched(ssh, most=0)
    assert report is not None
    assert [plan.world_size for plan in plans(ssh, "a")] == [2, 3]
    assert plans(ssh, "a")[1] == PLAN
    assert said[0].startswith("host c cannot be reached: ssh: connect to host x port 22: Connectio")
    assert said[0].endswith("; the run begins without it")
    assert re.fullmatch(
        "host c answers again: stopped at the checkpoint of step 1[0-3], to go on with more hosts",
        said[2],
    )
    assert said[3].startswith("planned again for 3 of 3 hosts: for 3 ranks")
    assert len(said) == 4


def test_at_its_last_checkpoint_a_run_is_not_stopped_for_more_hosts(ssh):
    (ssh / "away-c").touch()
    back = f"Path({str(ssh)!r}, 'away-c').unlink()\ntime.sleep(0.6)\n"
    saved = f"tell('saved', step=5)\n{back}tell('saved', step=30)\ntime.sleep(0.4)\n"
    play(ssh, a=f"{saved}{REPORT}", b="", c="")
    report, said = launched(ssh, script=())
    assert report is not None
    assert not any("answers again" in text for text in said)


def come_back_instead(ssh: Path, refuses: str) -> list[str]:
    """What is said of a run to which c comes back, and ``refuses`` where it would begin."""
    (ssh / "away-c").touch()
    back = f"Path({str(ssh)!r}, 'away-c').unlink(missing_ok=True)\n"
    stopped = f"tell('saved', step=5)\n{back}{SAVED}{UNTIL_SIGNAL}"
    first = "if attempt == 0:\n" + "".join(f"    {line}\n" for line in stopped.splitlines())
    play(ssh, a=f"{first}{REPORT}", b="if attempt == 0: hear()\n", c="")
    path = ssh / "c"
    path.write_text(path.read_text().replace("\nbegin()\n", f"\n{refuses}"))
    report, said = launched(ssh)
    assert report is not None
    return said


@pytest.mark.parametrize(
    ("more", "remedy"),
    # Of memory there is so little that no plan for all hosts fits.
    [("", ""), (", remedy='free some', limit_bytes=1 << 20", ": free some")],
)
def test_a_host_that_came_back_without_what_it_needs_ends_nothing(ssh, more, remedy):
    why = "the working folder cannot be entered"
    refuses = f"tell('failed', message={why!r}, exit_code=2{more})\n"
    said = come_back_instead(ssh, f"{refuses}sys.exit(2)\n")
    assert f"on c: {why}{remedy}; goes on without host c" in said


def test_a_host_that_came_back_broken_ends_nothing(ssh):
    said = come_back_instead(ssh, "print('libcudart.so: no', file=sys.stderr)\nsys.exit(1)\n")
    assert any("libcudart" in text and "goes on without host c" in text for text in said)


def test_a_host_that_came_back_and_fails_at_its_first_step_ends_nothing(ssh):
    why = "[Errno 2] No such file or directory: '/data/train'"
    fails = f"begin()\ntell('failed', message={why!r}, exit_code=1)\nsys.exit(1)\n"
    said = come_back_instead(ssh, fails)
    assert f"on c: {why}; goes on without host c" in said
    assert [plan.world_size for plan in plans(ssh, "a")][-1] == 2


def test_what_failed_before_it_began_is_not_resumed(ssh):
    """Whether the folder has another training in it is still to be looked at."""
    refused = "print('ssh: connect to host c port 22: Connection reset', file=sys.stderr)"
    play(ssh, a=REPORT, b="", c="")
    path, tried = ssh / "c", f"Path({str(ssh / 'tried')!r})"
    once = f"if not {tried}.exists():\n    {tried}.touch()\n    {refused}\n    sys.exit(255)\n"
    path.write_text(path.read_text().replace("\nbegin()\n", f"\n{once}begin()\n"))
    report, said = launched(ssh, min_nodes=None)
    assert report is not None
    assert "started again" in said[0]
    order = json.loads((ssh / "order-a-0").read_text())
    assert (order["resume"], order["restarted"]) == (False, False)


def test_a_host_that_was_lost_and_is_broken_at_once_ends_nothing(ssh):
    """It answers before anybody has asked whether it is away."""
    play(ssh, a="if attempt == 0: hear()\n" + REPORT, b="if attempt == 0: hear()\n", c="")
    path = ssh / "c"
    lost = "begin()\nPath({!r}).touch()\nsys.exit(255)\n".format(str(ssh / "was-lost"))
    broken = "print('libcudart.so: no', file=sys.stderr)\nsys.exit(1)\n"
    both = "if not (here / 'was-lost').exists():\n" + "".join(
        f"    {line}\n" for line in lost.splitlines()
    )
    path.write_text(path.read_text().replace("\nbegin()\n", f"\n{both}{broken}"))
    report, said = launched(ssh)
    assert report is not None
    assert any("libcudart" in text and "goes on without host c" in text for text in said)


def test_a_host_that_came_back_and_hangs_ends_nothing(ssh, monkeypatch):
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh.READY_S", 4.0)
    monkeypatch.setattr("meshwright.executor.launch.hosts.over_ssh._TO_END_S", 1.0)
    said = come_back_instead(ssh, "time.sleep(100)\n")
    assert any(
        "c answered over ssh and had not begun" in text and "goes on without host c" in text
        for text in said
    )
    assert [plan.world_size for plan in plans(ssh, "a")][-1] == 2


def test_a_rank_that_was_lost_alone_leaves_the_plan_as_it_is(ssh):
    failed = "tell('failed', message='rank 1 ended with SIGKILL', exit_code=1, lost=True)\n"
    first = "if attempt == 0: " + UNTIL_SIGNAL.replace("\n", "; ", 1)
    play(ssh, a=f"{first}{REPORT}", b=f"if attempt == 0: {failed.strip()}; sys.exit(1)\n", c=first)
    _, said = launched(ssh, min_nodes=None)
    assert said == ["on b: rank 1 ended with SIGKILL; started again (restart 1 of 3)"]
    assert plans(ssh, "c") == [PLAN, PLAN]


def test_too_few_hosts_are_a_sentence(ssh):
    for host in "bc":
        (ssh / f"away-{host}").touch()
    play(ssh, a="", b="", c="")
    with pytest.raises(InputError, match="1 of 3 hosts answer, and --min-nodes asks for 2") as told:
        launched(ssh, min_nodes=2)
    assert "(host b cannot be reached: " in str(told.value)
    assert not plans(ssh, "a")


@pytest.mark.parametrize(
    ("min_nodes", "words"),
    [
        (3, "2 of 3 hosts answer, and the plan needs all of them .*: with --min-nodes N it would"),
        (None, "2 of 3 hosts answer, and the plan needs all of them"),
    ],
)
def test_hosts_that_do_not_come_back_are_a_sentence(ssh, min_nodes, words):
    play(ssh, a=UNTIL_SIGNAL, b=UNTIL_SIGNAL, c=away(ssh, "c"))
    with pytest.raises(RunError, match=words) as told:
        launched(ssh, min_nodes=min_nodes)
    assert "goes on from the latest whole checkpoint in kept" in str(told.value)


def test_no_plan_that_fits_on_what_is_left_is_a_sentence(ssh, monkeypatch):
    monkeypatch.setattr("tests.unit.executor.launch.test_elastic.CLUSTER", cluster_of_hosts(3, 1))
    play(ssh, a=UNTIL_SIGNAL, b=UNTIL_SIGNAL, c=away(ssh, "c"))
    with pytest.raises(InfeasibleError) as told:
        launched(ssh)
    said = str(told.value)
    assert said.startswith("2 of 3 hosts are left (host a, host b) and no plan fits there: ")
    assert said.endswith("the same command goes on from the latest whole checkpoint in kept")


def test_a_run_without_what_its_plan_was_made_from_is_refused_before_it_begins(ssh):
    play(ssh, a="", b="", c="")
    with pytest.raises(InputError, match=r"name its file with --profile \(profile\)"):
        launched(ssh, profile=None)
    with pytest.raises(InputError, match="nodes of 1, 1, 1 devices and the hosts have 2, 1 ranks"):
        Replanner.for_run(PLAN, (2, 1), Restarts(1, 1, PROFILE, CLUSTER))
    assert not (ssh / "asked").exists()


def test_it_can_be_stopped_between_two_attempts(ssh, monkeypatch):
    monkeypatch.setattr(elastic, "RETURN_S", 60.0)
    play(ssh, a=UNTIL_SIGNAL, b=UNTIL_SIGNAL, c=away(ssh, "c"))
    asks = lambda: (ssh / "asked").exists() and (ssh / "asked").read_text().count("true") > 4  # noqa: E731

    def when_it_waits() -> None:
        wait_until(asks)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=when_it_waits)
    thread.start()
    with pytest.raises(SystemExit) as ended:
        launched(ssh, min_nodes=None)
    thread.join()
    assert ended.value.code == 128 + signal.SIGTERM


# -- plans for those that are left -----------------------------------------------------------------


def test_a_cluster_of_some_nodes_keeps_their_links():
    rates = ((0.0, 1.0, 2.0), (3.0, 0.0, 4.0), (5.0, 6.0, 0.0))
    whole = msgspec.structs.replace(CLUSTER, pair_bytes_per_s=rates)
    left = cluster_of_nodes(whole, (0, 2))
    assert [node.name for node in left.nodes] == ["host0", "host2"]
    assert left.pair_bytes_per_s == ((0.0, 2.0), (5.0, 0.0))
    assert left.levels == whole.levels
    assert cluster_of_nodes(whole, (0, 1, 2)) is whole


def test_the_goal_and_the_schedule_stay():
    replanner = Replanner(PLAN, PROFILE, CLUSTER)
    made = replanner.plan_for((0, 2))
    assert (made.world_size, made.goal, made.schedule) == (2, PLAN.goal, PLAN.schedule)
    assert replanner.plan_for((0, 1, 2)) is PLAN
    assert replanner.plan_for((0, 2)) is made
    assert replanner.plan_for((1,)).world_size == 1
    assert not any(unit.early_release for unit in made.units)


@pytest.mark.parametrize("apart", [None, LocalSteps(hosts=3, inner_steps=4)])
def test_hosts_train_apart_only_where_they_did_before(apart):
    """On a link so slow that a plan with local steps is much the quickest."""
    (link,) = CLUSTER.levels
    slow = msgspec.structs.replace(link, bytes_per_s=1e7)
    cluster = msgspec.structs.replace(CLUSTER, levels=(slow,))
    goal = msgspec.structs.replace(PLAN.goal, allow_local_steps=True, fragments=2)
    plan = msgspec.structs.replace(PLAN, goal=goal, local_steps=apart)
    made = Replanner(plan, PROFILE, cluster).plan_for((0, 2))
    assert (made.local_steps is None) == (apart is None)


def test_hosts_of_unequal_speed_have_their_own_shares_wherever_they_are():
    profile = with_profiles(PROFILE, {"host1": slowed(PROFILE, 3.0)}, CLUSTER)
    fast = msgspec.structs.replace(
        CLUSTER, levels=(msgspec.structs.replace(CLUSTER.levels[0], bytes_per_s=1e13),)
    )
    whole = solve(Problem(profile, fast, PLAN.goal, CAPABILITY), "heuristic").checked()
    replanner = Replanner(whole, profile, fast)
    first, last = replanner.plan_for((0, 1)), replanner.plan_for((1, 2))
    assert first.local_batch_size(0) > 2 * first.local_batch_size(1)
    # Host 1 is rank 0 now.
    sizes = last.local_batch_sizes
    assert 2 * last.local_batch_size(0) < last.local_batch_size(1)
    assert what_changed(whole, last).endswith(
        f"; ranks get {sizes[0]}, {sizes[1]} of the 32 samples"
    )
    even = replanner.plan_for((0, 2))
    assert even.local_batch_sizes == ()
    assert what_changed(last, even).endswith("; ranks get even shares of the batch")


def test_pins_keep_their_styles_and_not_their_layouts():
    """These are of as many ranks as there were."""
    name = "32.linear"
    pins = (
        Pin(unit="00.conv2d", only=(Layout(groups=3, degree=1),)),
        Pin(unit=name, never=(Layout(groups=1, degree=3),), never_styles=("row",)),
    )
    plan = msgspec.structs.replace(PLAN, goal=msgspec.structs.replace(PLAN.goal, pins=pins))
    replanner = Replanner(plan, PROFILE, CLUSTER)
    made = replanner.plan_for((0, 1))
    assert made.world_size == 2
    assert made.goal.pins == (Pin(unit=name, never_styles=("row",)),)
    assert made.unit(name).style != "row"
    divided = Goal(batch=32, pins=(Pin(unit=name, styles=("column",)),))
    replanner = Replanner(msgspec.structs.replace(PLAN, goal=divided), PROFILE, CLUSTER)
    assert replanner.plan_for((0, 1)).unit(name).style == "column"
    assert replanner.plan_for((1,)).unit(name).style == "none"  # by itself nothing is divided


def test_a_trace_is_of_the_plan_that_ran(ssh, tmp_path):
    """With host a away rank 0 is on host b: what is predicted and recorded is of two ranks."""
    step = {"start_s": 0.0, "end_s": 1.0}
    sent = {"name": "message", "start_s": 0.1, "end_s": 0.2, "message_bytes": 8}
    group = {"label": "exchange", "ranks": [0, 1], "messages": [sent]}
    one = {"rank": 0, "steps": [step], "computing": [], "waiting": [], "updating": []}
    tells = f"tell('recorded', ranks=[{ {**one, 'groups': [group]} }])\n{REPORT}"
    first = "if attempt == 0: " + UNTIL_SIGNAL.replace("\n", "; ", 1)
    play(ssh, a=away(ssh, "a"), b=f"{first}{tells}", c=f"{first}tell('recorded', ranks=[])\n")
    said: list[str] = []
    path = tmp_path / "trace.json"
    report = launch(
        PLAN, ["train.py"], hosts=Hosts(("a", "b", "c"), folder=str(ssh.parent)), say=said.append,
        checkpoint="kept", restarts=Restarts(3, 1, PROFILE, CLUSTER), trace=path,
    )  # fmt: skip
    assert report is not None
    assert said[-1] == f"trace written to {path}; https://ui.perfetto.dev opens it"
    assert not any("no trace" in text for text in said)
    (made,) = plans(ssh, "b")[1:]
    events = json.loads(path.read_text())["traceEvents"]
    assert {process for process, _ in tracks(events)} == {"rank 0"}
    names = {track for _, track in tracks(events)}
    assert {"step, predicted", "step, measured", "exchange between nodes, measured"} <= names
    took = durations(events)["rank 0", "step, predicted"]
    assert took == pytest.approx(1e6 * made.prediction.step_s, rel=1e-6)
    assert made.prediction.step_s != pytest.approx(PLAN.prediction.step_s, rel=1e-3)


def test_an_attempt_without_a_trace_leaves_the_one_before(ssh, tmp_path):
    one = {"rank": 0, "steps": [{"start_s": 0.0, "end_s": 1.0}], "computing": [], "waiting": []}
    one |= {"updating": [], "groups": []}
    tells = f"tell('recorded', ranks=[{one}])\n"
    play(ssh, a=f"if attempt == 0:\n    {tells}    sys.exit(255)\n{REPORT}", b="", c="")
    said: list[str] = []
    path = tmp_path / "trace.json"
    launch(
        PLAN, ["train.py"], hosts=Hosts(("a", "b", "c"), folder=str(ssh.parent)), say=said.append,
        checkpoint="kept", restarts=1, trace=path,
    )  # fmt: skip
    assert path.exists()
    assert sum("trace written" in text for text in said) == 1
    assert not any("no trace" in text for text in said)
    play(ssh, a=REPORT, b="", c="")
    launch(
        PLAN,
        ["t.py"],
        hosts=Hosts(("a", "b", "c"), folder=str(ssh.parent)),
        say=said.append,
        trace=path,
    )
    assert said[-1] == "no trace: fewer than 3 steps were made under the plan"


def test_what_another_plan_decides_is_one_line():
    unit = PLAN.units[0]
    other = msgspec.structs.replace(
        unit, layout=Layout(groups=1, degree=2), style="column", memory="recompute"
    )
    after = msgspec.structs.replace(PLAN, units=(other, *PLAN.units[1:]))
    told = what_changed(PLAN, after)
    assert told.endswith(f"; {unit.name} column over 2 recompute instead of undivided")
    same = what_changed(PLAN, PLAN)
    assert same.startswith("for 3 ranks, predicted ")
    assert same.endswith("; all units decided as before")
    assert PLAN.goal == Goal(batch=32)
    pieces = msgspec.structs.replace(PLAN, micro_batches=2)
    assert "; 2 micro-batches instead of 1; all units decided as before" in what_changed(
        PLAN, pieces
    )


def short_of(limit: int) -> str:
    """What host a does whose rank has less memory free than its plan needs."""
    failure = {
        "message": "rank 0 has 1 byte of memory free and needs 2 bytes for the plan",
        "exit_code": 2, "remedy": "free some", "limit_bytes": limit,
    }  # fmt: skip
    return f"if attempt == 0: tell('failed', **{failure}); sys.exit(2)\n"


@pytest.mark.parametrize("min_nodes", [None, 1])
def test_a_plan_that_needs_more_than_is_free_is_made_again(ssh, min_nodes):
    peak = max(PLAN.prediction.peak_bytes)
    others = "if attempt == 0: " + UNTIL_SIGNAL.replace("\n", "; ", 1)
    play(ssh, a=f"{short_of(int(0.9 * peak))}{REPORT}", b=others, c=others)
    report, said = launched(ssh, 0 if min_nodes is None else 3, min_nodes)
    assert report is not None
    first, second = plans(ssh, "a")
    assert first == PLAN
    assert second.world_size == 3
    assert max(second.prediction.peak_bytes) <= 0.9 * peak
    assert plans(ssh, "c")[1] == second
    (again,) = (text for text in said if "planned again" in text)
    assert again.startswith(
        "on a: rank 0 has 1 byte of memory free and needs 2 bytes for the plan: planned again "
        f"within {size(int(0.9 * peak))} on a rank, what it holds already among "
        "them, for 3 ranks, predicted "
    )
    # Nothing had run, so nothing is gone on from that was not asked for.
    order = json.loads((ssh / "order-a-1").read_text())
    assert (order["resume"], order["restarted"]) == (False, False)


def test_a_plan_that_cannot_be_made_again_is_refused_with_both_reasons(ssh):
    waits = UNTIL_SIGNAL
    play(ssh, a=short_of(2**20), b=waits, c=waits)
    with pytest.raises(NoRoomError) as raised:
        launched(ssh, 0, None)
    text = str(raised.value)
    assert text.startswith("on a: rank 0 has 1 byte")
    assert ", and none was made that needs less (" in text
    assert text.endswith("): free some")
    assert "\n" not in text


def test_another_plan_is_made_so_often_and_no_more(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    room = RoomForPlan(PLAN, lambda: Replanner(PLAN, PROFILE, CLUSTER), lambda text: None)
    limit = int(0.95 * max(PLAN.prediction.peak_bytes))
    error = NoRoomError("there is no room", "free some", limit)
    # What it was made from is not here.
    nowhere = RoomForPlan(PLAN, lambda: Replanner.for_plan(PLAN, Restarts()), lambda text: None)
    with pytest.raises(NoRoomError, match="--profile"):
        nowhere.plan_after(error)
    made = []
    for _ in range(TRIES):
        room.plan_after(error)
        made.append(room.plan)
    assert all(max(plan.prediction.peak_bytes) <= limit for plan in made)
    with pytest.raises(NoRoomError, match=r"^there is no room: free some$"):
        room.plan_after(error)
