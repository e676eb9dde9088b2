"""One profile of what the ranks of several hosts have measured."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from meshwright.planner.cost.device_kinds import slowed
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.profiler import sessions
from meshwright.profiler.catalogue import catalogued_device, describe_cluster
from meshwright.profiler.sessions import joined_profile, profile_for

from tests.strategies import chain_profile, linear

NET = """
import torch
import meshwright as mw
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, {width})

    def forward(self, x):
        return torch.{activation}(self.fc(x))

def net():
    def batch(size):
        return mw.Batch((torch.ones(size, 4),), None)
    return mw.Workload("net", Net(), batch, lambda output, target: output.mean())
"""


def measured(times: float) -> msgspec.Struct:
    """A profile of a host that takes so many times as long."""
    made = chain_profile([linear("fc", 8, 8, 1e-3)])
    step = Curve(x=(1.0, 2.0), y=(3e-3, 6e-3))
    return slowed(msgspec.structs.replace(made, step=step), times)


def test_the_slowest_rank_of_each_kind_of_host_tells() -> None:
    hosts = ("a", "a", "b", "b", "c")
    profiles = [measured(t) for t in (1.0, 1.05, 2.0, 2.1, 1.1)]
    found = joined_profile(hosts, profiles)
    assert msgspec.structs.replace(found, node_times=()) == profiles[3]
    # Hosts a and c differ by less than noise: the slower of them stands for both.
    (quick,) = found.node_times
    assert quick.nodes == ("c", "a")
    assert quick.units[1].shares == profiles[4].units[1].shares
    assert quick.step == profiles[4].step


def test_equal_hosts_have_one_profile() -> None:
    profiles = [measured(t) for t in (1.0, 1.15, 1.1)]
    assert joined_profile(("a", "b", "a"), profiles) == profiles[1]
    # On one host nobody is quicker, however far its ranks lie apart.
    assert joined_profile(("a", "a"), [measured(1.0), measured(3.0)]) == measured(3.0)


def mixed(*names: str) -> Cluster:
    made = describe_cluster(device="t4", nodes=len(names), inter_gbit_s=100)
    nodes = tuple(
        msgspec.structs.replace(node, devices=(catalogued_device(name),))
        for node, name in zip(made.nodes, names, strict=True)
    )
    return msgspec.structs.replace(made, nodes=nodes)


def test_a_cluster_of_several_catalogued_devices_is_estimated_for_each() -> None:
    found = profile_for("mlp", mixed("a100-sxm-40gb", "t4"), Goal(batch=64), None, None)
    assert found.device == "a100-sxm-40gb"
    (slow,) = found.node_times
    assert (slow.nodes, slow.device) == (("node1",), "t4")
    own = [unit.shares for unit in found.units]
    assert [unit.shares for unit in slow.units] != own


def test_what_was_measured_for_a_batch_is_found_again(monkeypatch, tmp_path) -> None:
    """On one rank of a host, too: the next command must not predict from other times."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    times = iter((1.0, 2.0))
    monkeypatch.setattr(sessions, "profile_model", lambda *_, **__: measured(next(times)))
    there = sessions.single_rank(torch.device("cpu"))
    first = profile_for("mlp", there, Goal(batch=8), None, None)
    assert profile_for("mlp", there, Goal(batch=8), None, None) == first
    assert profile_for("mlp", there, Goal(batch=64), None, None) != first


def test_an_estimate_is_found_again_until_the_model_is_edited(monkeypatch, tmp_path) -> None:
    """It takes longer than most searches, and a plan is asked for with other limits and links."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    made, estimate = [], sessions.estimate

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args[1])
        return estimate(*args, **kwargs)

    monkeypatch.setattr(sessions, "estimate", counted)
    file = tmp_path / "net.py"

    def found(width: int, activation: str, device: str = "t4") -> Any:
        file.write_text(NET.format(width=width, activation=activation))
        there = mixed(device, device)
        return profile_for(f"{file}:net", there, Goal(batch=8), None, None)

    first = found(8, "relu")
    assert found(8, "relu") == first
    assert made == ["t4"]
    assert found(8, "relu", "a100-sxm-40gb") != first
    found(8, "sigmoid")  # of another length, as Python tells edits within a second by that alone
    assert found(16, "relu").unit("fc").parameter_bytes > first.unit("fc").parameter_bytes
    assert len(made) == 4


def test_of_devices_that_are_not_known_profiles_are_asked_for() -> None:
    device = msgspec.structs.replace(catalogued_device("t4"), name="home-made")
    there = mixed("t4", "t4")
    nodes = (there.nodes[0], msgspec.structs.replace(there.nodes[1], devices=(device,)))
    with pytest.raises(InputError, match="--profile-of NODE=FILE"):
        profile_for("mlp", msgspec.structs.replace(there, nodes=nodes), Goal(batch=64), None, None)
