"""The link probe on two ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from meshwright.executor.comm import groups
from meshwright.executor.memory import offload
from meshwright.planner.schema.cluster import Cluster, HostedExchange, StepOverhead
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.record import decode, encode
from meshwright.profiler.collectives import COLLECTIVES, MeasuredGroup, curves, measure
from meshwright.profiler.host_rates import measure_host_rates
from meshwright.profiler.links import join, probe
from meshwright.profiler.overhead import _of_hosts, measure_overheads

SIZES = (1 << 10, 1 << 16, 1 << 20)


def probed(rank: int, rounds: int = 3) -> tuple[bytes, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []
    cluster = probe(
        sizes=SIZES,
        rounds=rounds,
        budget_s=5,
        progress=lambda done, total, doing: seen.append((done, total)),
    )
    dist.barrier()  # the caller's own group still works
    return encode(cluster), seen


def test_both_ranks_get_the_same_cluster(ranks: Callable[[int], Ranks]) -> None:
    (first, seen), (second, _) = ranks(2)(probed)
    assert first == second
    cluster = decode(Cluster, first)
    assert encode(cluster) == first
    assert cluster.world_size == 2
    assert cluster.origin == "measured"
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen  # a bar that never goes back


def test_all_collectives_are_measured_at_all_sizes(ranks: Callable[[int], Ranks]) -> None:
    cluster = decode(Cluster, ranks(2)(probed)[0][0])
    (level,) = cluster.levels
    assert level.name == "intra"
    assert {c.collective for c in level.curves} == set(COLLECTIVES)
    for curve in level.curves:
        assert curve.ranks == 2
        assert curve.seconds.x == tuple(map(float, SIZES))
        assert all(s > 0 for s in curve.seconds.y)
        assert curve.bytes_per_s > 0
        assert curve.seconds.y[-1] < 10  # a megabyte between two processes of one host
    assert cluster.interference.compute_slowdown >= 1
    assert cluster.interference.communication_slowdown >= 1


@pytest.mark.slow
def test_four_ranks_have_curves_for_pairs_and_for_all(ranks: Callable[[int], Ranks]) -> None:
    cluster = decode(Cluster, ranks(4)(probed, 1)[0][0])
    (level,) = cluster.levels
    assert {c.ranks for c in level.curves} == {2, 4}


def on_two_hosts(rank: int, hosts: str) -> bytes:
    with patch("socket.gethostname", return_value=hosts[rank]):
        return encode(probe(sizes=SIZES, rounds=1, budget_s=5))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aab", "abb"])
def test_a_rank_without_a_neighbour_waits_for_pairs(
    ranks: Callable[[int], Ranks], hosts: str
) -> None:
    first, *others = ranks(3)(on_two_hosts, hosts)
    assert others == [first] * 2
    levels = {level.name: level for level in decode(Cluster, first).levels}
    assert {name: {c.ranks for c in level.curves} for name, level in levels.items()} == {
        "intra": {2},
        "inter": {3},
    }
    assert all(curve.latency_s >= 0 for curve in levels["intra"].curves)


def on_two_machines_of_one_name(rank: int) -> str:
    with (
        patch("meshwright.profiler.places._machine", return_value=f"machine {rank // 2}"),
        pytest.raises(InputError) as refused,
    ):
        probe(sizes=SIZES, rounds=1, budget_s=5)
    return str(refused.value)


def test_two_machines_of_one_name_are_not_taken_for_one(ranks: Callable[[int], Ranks]) -> None:
    said = ranks(3)(on_two_machines_of_one_name)
    assert len(set(said)) == 1
    assert said[0].startswith("ranks 0 and 2 are on two machines that are both called '")


def as_hosts(rank: int) -> list[list[float]]:
    """Streams as if each rank had a host of its own."""
    return measure_host_rates(["a", "b"], torch.device("cpu"), budget_s=1.0).tolist()


def test_streams_between_hosts_are_measured_each_way(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2)(as_hosts)
    assert first == second
    (to_self, there), (back, _) = first
    assert to_self == 0
    assert there > 0
    assert back > 0


def joined_late(rank: int) -> float:
    value = torch.ones(1)
    for late_s in (0.0, 0.5):
        time.sleep(late_s * rank)
        group = join([(0, 1)], torch.device("cpu"))
        dist.all_reduce(value, group=group.handle)
        dist.destroy_process_group(group.handle)
    return float(value)


def test_a_second_group_of_the_same_ranks_waits_for_those_that_come_late(
    ranks: Callable[[int], Ranks],
) -> None:
    assert ranks(2)(joined_late) == [4.0, 4.0]


def slow_messages(rank: int) -> list[int]:
    group = MeasuredGroup(dist.group.WORLD, (0, 1), rank, torch.device("cpu"))
    measure(group, SIZES, 2, budget_s=1e-9)
    return [c.seconds.x[-1] for c in curves(group)]


def test_without_time_only_the_smallest_messages_are_sent(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(slow_messages) == [[float(SIZES[0])] * len(COLLECTIVES)] * 2


def overhead(rank: int) -> tuple[StepOverhead, StepOverhead]:
    found = measure_overheads(rounds=9)
    dist.barrier()
    return found


@pytest.mark.alone
def test_the_executors_own_work_is_measured_and_all_ranks_agree(
    ranks: Callable[[int], Ranks],
) -> None:
    first, second = ranks(2)(overhead)
    assert first == second
    for found in first:
        assert 0 < found.step_s + found.parameter_s < 1  # agreements, Python: milliseconds at most
        assert 0 <= found.byte_s < 1e-6
        assert 0 <= found.move_s < 0.1
        assert 0 < found.move_byte_s < 1e-7  # 10 MB/s would be no memory
        assert 0 < found.rerun_s < 0.01
    for same in ("move_s", "move_byte_s", "rerun_s"):
        assert getattr(first[0], same) == getattr(first[1], same)


def test_one_rank_has_hooks_and_second_forwards(ranks: Callable[[int], Ranks]) -> None:
    ((barrier, priority),) = ranks(1)(overhead)
    for found in (barrier, priority):
        assert 0 < found.step_s + found.parameter_s < 1
        assert 0 < found.rerun_s < 0.01
        assert found.byte_s == found.move_s == found.move_byte_s == 0


class Copy:
    """What has been sent to a host and comes back."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.kept = flat.clone()

    def leave(self) -> None: ...

    def prefetch(self) -> None: ...

    def wait(self) -> torch.Tensor:
        return self.kept


class Host:
    """One beside a device that is a CPU."""

    device = torch.device("cpu")
    send = Copy


def hosts_work(rank: int) -> tuple[StepOverhead, StepOverhead]:
    known = groups._handles.setdefault(dist.group.WORLD, {})
    before = set(known)
    with patch.object(offload, "host_of", lambda device: Host()), groups.given_back():
        found = _of_hosts(torch.device("cpu"), 9, lambda share: None)
    # On GPUs each would keep a communicator's buffers.
    assert all(groups.CONTROL_BACKEND in key for key in set(known) - before)
    return found


@pytest.mark.alone
def test_hosts_of_gpus_take_time_for_what_is_rerun_and_copied(
    ranks: Callable[[int], Ranks],
) -> None:
    ((barrier, priority),) = ranks(1)(hosts_work)
    for found in (barrier, priority):
        assert 0 < found.step_s + found.parameter_s < 1
        assert 0 < found.rerun_s < 0.01
        assert 0 < found.copy_s < 0.01
        assert found.byte_s == 0


@pytest.mark.alone
def test_hosts_of_gpus_take_time_for_collectives(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2)(hosts_work)
    assert first == second
    barrier, priority = first
    assert barrier.exchanges == priority.exchanges
    assert [e.exchange for e in priority.exchanges] == list(get_args(HostedExchange))
    for found in (barrier, priority):
        assert 0 < found.message_s < 0.1
        assert 0 < found.move_s < 0.1
        assert 0 < found.exchange_s("low_rank") < 0.1
        assert found.exchange_s("dense") == found.move_byte_s == 0


def test_a_probe_needs_a_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(InputError, match="at least two ranks: start it with torchrun"):
        probe()
