"""What ``auto_parallelize`` and its companions are given wrongly: a sentence with the remedy."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import meshwright as mw
import pytest
import torch
from meshwright.cli import demonstration
from meshwright.executor import micro
from meshwright.executor.arguments import check_arguments, tell_of_ready_plan
from meshwright.executor.optimizer.kinds import check_holds
from meshwright.executor.optimizer.state import scatter_optimizer_state
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import make_goal
from torch import nn
from torch.optim import SGD

RIGHT: dict[str, Any] = {
    "optimizer": None,
    "plan": None,
    "global_batch_size": 64,
    "memory_limit_bytes": 2**30,
    "micro_batches": (1, 2),
    "min_fidelity": 0.9,
    "inner_steps": 32,
    "time_limit_s": 30,
    "lossy": False,
}


def test_what_no_solver_is_called_is_told_before_anything_starts():
    with pytest.raises(InputError, match="no solver 'integr': choose from auto, "):
        mw.auto_parallelize(nn.Linear(2, 2), solver="integr")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("optimizer", 3, "torch.optim.Optimizer"),
        ("plan", 7, "path of its file"),
        ("global_batch_size", 6.5, "whole number"),
        ("global_batch_size", "64", "whole number"),
        ("global_batch_size", True, "whole number"),
        ("memory_limit_bytes", "1MiB", "2**30"),
        ("micro_batches", 2, "(1, 2)"),
        ("micro_batches", "12", "(1, 2)"),
        ("micro_batches", (1, 2.0), "(1, 2)"),
        ("min_fidelity", "most", "0.9"),
        ("inner_steps", 8.0, "32"),
        ("time_limit_s", "5", "seconds"),
        ("lossy", "yes", "mw.Lossy"),
    ],
)
def test_types_that_cannot_be(name: str, value: object, remedy: str):
    check_arguments(**RIGHT)
    with pytest.raises(InputError) as caught:
        check_arguments(**{**RIGHT, name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert remedy in str(caught.value)


def one_device() -> mw.Cluster:
    return mw.describe_cluster(device="a100-sxm-40gb")


FILE = "file.json"
GOAL = mw.Goal(batch=8)
WRONG_RECORDS = {
    "plan": (lambda: mw.plan("mlp", FILE, GOAL), "a Cluster is needed: load(Cluster, 'file.json')"),
    "goal": (lambda: mw.plan("mlp", one_device(), 8), "got int, expected a Goal"),
    "target": (lambda: mw.plan(nn.Linear(2, 2), one_device(), GOAL), "got Linear as target"),
    "no plan": (lambda: mw.explain(None), "got NoneType, expected a Plan"),
    "explain": (lambda: mw.explain(FILE), "load(Plan, 'file.json')"),
    "compare": (lambda: mw.compare(FILE, FILE), "load(Plan, 'file.json')"),
    "launch": (lambda: mw.launch(FILE), "load(Plan, 'file.json')"),
    "verify": (lambda: mw.verify(FILE), "load(Plan, 'file.json')"),
    "compare_losses": (lambda: mw.compare_losses(FILE), "load(Plan, 'file.json')"),
    "calibrate": (lambda: mw.calibrate(FILE, FILE), "load(Plan, 'file.json')"),
    "multiplex": (lambda: mw.multiplex([FILE]), "load(Plan, 'file.json')"),
    "report": (lambda: mw.report(FILE, "page.html"), "load(Plan, 'file.json')"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_the_name_of_a_file_is_no_record(name: str):
    wrong, sentence = WRONG_RECORDS[name]
    with pytest.raises(InputError, match=re.escape(sentence)):
        wrong()


ASKED: dict[str, Any] = {
    "global_batch_size": None,
    "memory_limit_bytes": None,
    "micro_batches": (1,),
    "min_fidelity": None,
    "inner_steps": None,
}


def test_what_is_asked_for_beside_a_ready_plan_is_told():
    plan = mw.plan(
        mw.profile("mlp", device="a100-sxm-40gb"),
        one_device(),
        mw.Goal(batch=64, micro_batches=(2,)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_ready_plan(plan, **ASKED)
        tell_of_ready_plan(plan, **{**ASKED, "global_batch_size": 64, "micro_batches": (1, 2)})
    asked = {**ASKED, "global_batch_size": 32, "memory_limit_bytes": 1024, "micro_batches": (1, 4)}
    with pytest.warns(UserWarning, match="taken as it is") as told:
        tell_of_ready_plan(plan, **asked)
    for part in (
        "global_batch_size=32 (the plan has 64)",
        "memory_limit_bytes=1024 (the plan has none)",
        "micro_batches=(1, 4) (the plan has 2)",
    ):
        assert part in str(told[0].message)


def test_a_search_without_time_is_refused():
    with pytest.raises(InputError, match="-1 s leaves no search: give more than 0"):
        check_arguments(**{**RIGHT, "time_limit_s": -1})


def test_a_batch_beyond_all_counts_is_refused():
    with pytest.raises(InputError, match="a batch of 99999999999999999999 cannot be: give at most"):
        make_goal(99999999999999999999)


def test_a_slice_of_nothing_is_refused():
    with pytest.raises(InputError, match="a slice size of 0 cannot be: give at least 1"):
        make_goal(8, slice_bytes=[2**20, 0])


def test_an_optimizer_of_another_model_is_refused():
    mine, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(InputError, match="SGD holds no parameter of this Linear: make it with"):
        check_holds(SGD(other.parameters(), lr=0.1), mine)
    check_holds(SGD([*other.parameters(), mine.weight], lr=0.1), mine)


@pytest.mark.parametrize(("state", "key"), [({}, "state"), ({"state": {}}, "param_groups")])
def test_an_optimizer_state_without_its_parts(state: dict[str, Any], key: str):
    with pytest.raises(InputError, match=f"no '{key}': give what full_optimizer_state_dict"):
        scatter_optimizer_state(SGD(nn.Linear(2, 2).parameters(), lr=0.1), {}, state)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model of one rank that exchanges nothing."""
    control = SimpleNamespace(gather=lambda *given, **how: None)
    run = SimpleNamespace(control=control, synchronise=True, weigh_next=None, input_dims={})
    monkeypatch.setattr(micro, "run_of", lambda model: run)
    return nn.Linear(3, 2)


def test_micro_batches_of_what_a_loader_gives(alone: nn.Module):
    x, y = torch.arange(15.0).view(5, 3), torch.arange(5)
    pairs = list(micro.micro_batches(alone, (x, y), 2))
    assert [type(pair) for pair in pairs] == [tuple, tuple]
    for at, whole in enumerate((x, y)):
        assert torch.cat([pair[at] for pair in pairs]).equal(whole)
    named = list(micro.micro_batches(alone, {"x": x, "y": y}, 5))
    assert torch.cat([piece["y"] for piece in named]).equal(y)


@pytest.mark.parametrize("batch", [torch.zeros(4, 3), 4, (1, 2)])
def test_micro_batches_of_what_is_no_batch(alone: nn.Module, batch: object):
    with pytest.raises(InputError, match=r"cannot cut this \w+: give .*\(x, y\)"):
        next(micro.micro_batches(alone, batch, 2))


def test_the_demo_asks_for_its_data_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"needs scikit-learn: .*meshwright\[data\]"):
        demonstration.demo(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_the_large_example_asks_for_transformers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    example = Path(__file__).parents[2] / "examples" / "llama_7b.py"
    with pytest.raises(InputError, match=r"meshwright\[hf\]"):
        runpy.run_path(str(example))["llama_7b"]()
