"""Ranks whose hosts differ: one sentence with the hosts' names, the same on every rank."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import msgspec
import pytest
import torch
from meshwright.executor import apply as applying
from meshwright.executor.comm import control, setups
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.errors import InputError
from plans import plan, unit
from torch import nn

HOSTS = ("a", "b", "b")


def applied(rank: int, model: nn.Module, target: str = "") -> str:
    """What ``apply`` says on this rank of host ``HOSTS[rank]``."""
    with (
        patch.object(control.socket, "gethostname", lambda: HOSTS[rank]),
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        made = msgspec.structs.replace(plan(len(HOSTS)), target=target)
        if target == "low rank":
            made = plan(len(HOSTS), [unit("", 1, "none", len(HOSTS))])
            made = with_exchange(made, "low_rank", 0.5)
        try:
            applying.apply(model, None, made, timeout_s=20)
        except InputError as error:
            return f"refused: {error}"
        return "; ".join(str(w.message) for w in warned)


def another(rank: int, what: str) -> str:
    torch.manual_seed(0)
    here = setups.setup_here(torch.device("cpu"))
    if what == "version" and rank:
        here = msgspec.structs.replace(here, software=(*here.software[:2], ("torch", "2.99")))
    if what in ("device", "low rank") and rank:
        here = msgspec.structs.replace(here, device="cpu (old)")
    here = msgspec.structs.replace(here, host=HOSTS[rank])
    model = nn.Linear(3, 4 if what == "model" and rank == 2 else 2)
    with patch.object(control, "setup_here", lambda device: here):
        if what == "low rank":
            return applied(rank, model, what)
        return applied(rank, model, "other" if what == "plan" and rank else "same")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("low rank", "refused: hosts have different devices: "),
        ("version", "refused: hosts have different versions of torch: {0} on a and 2.99 on b; "),
        ("model", "refused: the model (names, shapes and types of its parameters and buffers) of "
         "rank 2 (host b) differs from that of rank 0 (host a): build"),
        ("plan", "refused: the plan of rank 1, 2 (host b) differs from that of rank 0 (host a): "),
    ],
)  # fmt: skip
def test_a_difference_is_one_sentence_on_all_ranks(ranks, what, sentence):
    said = ranks(3)(another, what)
    assert len(set(said)) == 1
    assert said[0].startswith(sentence.format(torch.__version__))


def test_other_devices_are_said_once(ranks):
    said = ranks(3)(another, "device")
    assert said[0].startswith("hosts have different devices: cpu")
    assert "on a and cpu (old) on b;" in said[0]
    assert said[1:] == ["", ""]


def test_nothing_is_said_of_hosts_that_are_alike(ranks):
    assert ranks(3)(another, "nothing") == ["", "", ""]
