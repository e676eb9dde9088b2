"""A workload that cannot be sent to other processes is measured by this one, as one of several."""

from __future__ import annotations

import msgspec
import pytest
import torch
from meshwright import Goal, models
from meshwright.executor.comm.setups import device_name
from meshwright.executor.launch import start
from meshwright.executor.launch.devices import local_device
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.profile import ModelProfile
from meshwright.profiler import sessions

from tests.strategies import chain_profile, cluster, linear


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that torch has while a model is measured, on a machine of eight cores."""
    found: list[int] = []

    def measured(*_: object, **__: object) -> ModelProfile:
        found.append(torch.get_num_threads())
        return chain_profile([linear("fc", 8, 8, 1e-3)])

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(start, "cores", lambda: 8)
    monkeypatch.setattr(sessions, "profile_model", measured)
    return found


def hosts_of(ranks: int) -> Cluster:
    """Two hosts like this one, with so many ranks each."""
    made = cluster(2, devices=ranks)
    own = msgspec.structs.replace(made.devices[0], name=device_name(local_device()))
    nodes = tuple(msgspec.structs.replace(node, devices=(own,) * ranks) for node in made.nodes)
    return msgspec.structs.replace(made, nodes=nodes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
@pytest.mark.parametrize("ranks", [1, 4])
def test_it_has_the_threads_of_a_rank(
    threads: list[int], ranks: int, recwarn: pytest.WarningsRecorder
) -> None:
    before = torch.get_num_threads()
    found = sessions.profile_for(models.build("mlp"), hosts_of(ranks), Goal(batch=64), None, None)
    assert found.target == "test"
    assert threads == [before if ranks == 1 else 8 // ranks]
    assert torch.get_num_threads() == before
    told = [str(one.message) for one in recwarn if "cannot be sent" in str(one.message)]
    assert len(told) == (ranks > 1)
