"""Checkpoints on real ranks: going on from one is as if nothing had happened."""

from __future__ import annotations

import contextlib
import errno
import os
import time
import warnings
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoints import LOSSY, PLANS, Net, Trained, held_back, in_turn, unequal
from meshwright.executor.apply import apply
from meshwright.executor.checkpoint import safetensors, storage
from meshwright.executor.checkpoint.checkpoint import checkpoint
from meshwright.executor.checkpoint.folder import step_name, steps_in
from meshwright.executor.checkpoint.index import read_index
from meshwright.executor.parallel import run_of
from meshwright.planner.schema.errors import InputError, RunError
from torch import nn

from tests.sampling import sampled

LOSSLESS = [name for name in PLANS if name not in LOSSY]


def optimizer_for(name: str) -> str:
    return {"mirror": "plain", "topk": "sgd"}.get(name, "adamw")


def goes_on(rank: int, name: str, world: int, folder: str, **options: Any) -> list[str]:
    """What differs between six steps, and three, a new model and three more."""
    chosen = PLANS[name](world)
    straight = Trained(rank, chosen, f"{folder}/straight", seed=1, **options)
    straight.train(6)
    first = Trained(rank, chosen, f"{folder}/first", seed=1, every=3, **options)
    first.train(4)  # one more than is saved
    first.ckpt.close()
    second = Trained(rank, chosen, f"{folder}/first", seed=2, every=3, **options)
    assert second.ckpt.resume() == 3
    assert run_of(second.model).steps_done == 3  # what is shown of its progress counts from there
    second.train(3)
    assert second.losses == straight.losses[3:]
    return unequal(second.digest(), straight.digest())


@pytest.mark.parametrize("name", list(PLANS))
def test_goes_on_bit_for_bit(ranks, tmp_path: Path, name: str):
    for found in ranks(2)(goes_on, name, 2, str(tmp_path), optimizer=optimizer_for(name)):
        assert found == []


FOUR = ["divided", "divided and fully sharded", "burst, priority", "divided and topk", "dropped"]


@pytest.mark.parametrize("name", sampled(FOUR, 2))
def test_four_ranks_go_on_bit_for_bit(ranks, tmp_path: Path, name: str):
    for found in ranks(4)(goes_on, name, 4, str(tmp_path), optimizer=optimizer_for(name)):
        assert found == []


@pytest.mark.parametrize("name", sampled(["sharded", "fully sharded", "divided and sharded"], 1))
def test_main_weights_go_on(ranks, tmp_path: Path, name: str):
    options = {"dtype": torch.bfloat16}
    for found in ranks(2)(goes_on, name, 2, str(tmp_path), **options):
        assert found == []


def widens(rank: int, folder: str) -> None:
    """Main weights and float32 state go where no chunks are updated, and come again."""
    options = {"dtype": torch.bfloat16, "data": False}
    expected = saves(rank, "sharded", 2, folder, dtype=torch.bfloat16)
    second = Trained(rank, PLANS["priority"](2), folder, seed=2, every=1, keep=1, **options)
    second.ckpt.resume()
    found = second.digest()
    assert [n for n in unequal(found, expected) if n.startswith(("model", "groups", "sch"))] == []
    state = second.optimizer.state[second.model.up.weight]
    assert {key: value.dtype for key, value in state.items() if value.ndim} == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    second.train(1)
    second.ckpt.close()
    third = Trained(rank, PLANS["fully sharded"](2), folder, seed=3, **options)
    assert third.ckpt.resume() == 4
    third.train(1)


@pytest.mark.slow
def test_main_weights_go_and_come_with_the_plan(ranks, tmp_path: Path):
    ranks(2)(widens, str(tmp_path))


def saves(rank: int, name: str, world: int, folder: str, **options: Any) -> dict[str, str]:
    trained = Trained(rank, PLANS[name](world), folder, seed=1, every=3, data=False, **options)
    trained.train(3)
    trained.ckpt.close()
    return trained.digest()


def loads(
    rank: int, name: str, world: int, folder: str, **options: Any
) -> tuple[dict[str, str], list[float]]:
    """What it goes on from, and the losses of two more steps."""
    trained = Trained(rank, PLANS[name](world), folder, seed=2, data=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained.ckpt.resume() == 3
    found = trained.digest()
    trained.train(2)
    return found, trained.losses


def test_another_plan_has_the_same_parameters_and_state(ranks, tmp_path: Path):
    for saved, other in in_turn(LOSSLESS):
        folder = str(tmp_path / saved)
        expected = ranks(2)(saves, saved, 2, folder)
        for found, losses in ranks(2)(loads, other, 2, folder):
            assert unequal(found, expected[0]) == [], (saved, other)
            assert all(loss == loss for loss in losses)


OTHER_RANKS = [
    ("data parallel", 2, "data parallel", 1),
    ("divided and fully sharded", 2, "priority", 1),
    ("data parallel", 2, "divided and fully sharded", 4),
    ("burst, priority", 4, "fully sharded", 2),
    ("divided and sharded", 4, "divided", 2),
    ("fully sharded", 2, "burst", 4),
]


@pytest.mark.parametrize(("saved", "before", "other", "after"), sampled(OTHER_RANKS, 2))
def test_another_number_of_ranks(ranks, tmp_path: Path, saved, before, other, after):
    expected = ranks(before)(saves, saved, before, str(tmp_path))
    for found, _ in ranks(after)(loads, other, after, str(tmp_path)):
        assert unequal(found, expected[0]) == []


def passes_on_what_was_held(rank: int, saved: str, other: str, folder: str) -> None:
    options = {"optimizer": "plain", "dtype": torch.float64, "data": False}
    first = Trained(rank, PLANS[saved](2), folder, seed=1, every=3, **options)
    first.train(3)
    first.ckpt.close()
    expected = held_back(first.model)
    assert any(bool(total.any()) for total in expected.values())
    second = Trained(rank, PLANS[other](2), folder, seed=2, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        second.ckpt.resume()
    found = held_back(second.model)
    sentences = [str(one.message) for one in told if "is left out" in str(one.message)]
    if other in LOSSY:
        assert sentences == []
        for name, total in expected.items():
            torch.testing.assert_close(found[name], total, rtol=1e-12, atol=1e-15)
    elif rank == 0:
        assert len(sentences) == 1
        assert "this plan sends these whole" in sentences[0]
    second.train(2)


@pytest.mark.parametrize(
    ("saved", "other"),
    [("topk", "dropped"), ("dropped", "int8"), ("low rank", "topk"), ("topk", "sharded")],
)
def test_another_plan_goes_on_with_what_was_held_back(ranks, tmp_path: Path, saved, other):
    ranks(2)(passes_on_what_was_held, saved, other, str(tmp_path))


def momentum_goes_on(rank: int, folder: str) -> None:
    """Momentum before the choice is the optimizer's own where all is sent."""
    first = Trained(rank, PLANS["topk"](2), folder, seed=1, every=3, optimizer="sgd")
    first.train(3)
    first.ckpt.close()
    second = Trained(rank, PLANS["priority"](2), folder, seed=2, optimizer="sgd")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        second.ckpt.resume()
    assert second.optimizer.state[second.model.up.weight]["momentum_buffer"].any()
    second.train(1)


def test_momentum_goes_on_under_another_plan(ranks, tmp_path: Path):
    ranks(2)(momentum_goes_on, str(tmp_path))


def writes_once(rank: int, name: str, world: int, folder: str) -> None:
    trained = Trained(rank, PLANS[name](world), folder, seed=1, every=1)
    trained.train(1)
    trained.ckpt.close()


@pytest.mark.parametrize("name", ["data parallel", "divided and fully sharded"])
def test_every_element_is_written_once_and_ranks_write_as_much(ranks, tmp_path: Path, name):
    ranks(2)(writes_once, name, 2, str(tmp_path))
    index = read_index(tmp_path / step_name(1))
    net = Net()
    parameters = sum(p.numel() for p in net.parameters())
    buffers = sum(b.numel() * b.element_size() for b in net.buffers())
    stored = sum(c.stop - c.start for tensor in index.tensors for c in tensor.chunks)
    assert stored == 3 * 4 * parameters + buffers  # with AdamW's two moments
    sizes = [f.bytes for f in index.files if f.name.startswith("tensors-")]
    assert len(sizes) == 2
    assert max(sizes) < 1.25 * min(sizes)  # as even as small tensors come out


# -- what goes wrong -------------------------------------------------------------------------------


def falls_back(rank: int, folder: str) -> None:
    trained = Trained(rank, PLANS["fully sharded"](2), folder, seed=1, every=1)
    trained.train(1)
    expected = trained.digest()
    trained.train(2)
    trained.ckpt.close()
    torch.distributed.barrier()
    files = [f"{folder}/step-00000003/tensors-1.safetensors", f"{folder}/step-00000002/index.json"]
    if rank == 0:
        for name in files:
            path = Path(name)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 16
            path.write_bytes(data)
    torch.distributed.barrier()
    again = Trained(rank, PLANS["fully sharded"](2), folder, seed=2, every=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert again.ckpt.resume() == 1
    if rank == 0:
        (one,) = told
        assert str(one.message).startswith("goes on from the checkpoint of step 1 in ")
        assert "; those of steps 3 and 2 are damaged (tensors-1.safetensors is" in str(one.message)
        assert "; index.json is" in str(one.message)
        assert one.filename == __file__  # the line that called resume(), not one of ours
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stderr(StringIO()) as err:
        patched.setenv("MESHWRIGHT_CHECKPOINT", folder)
        launched = Trained(rank, PLANS["fully sharded"](2), None, seed=2)
        assert launched.ckpt.resume() == 1
    notes = [line for line in err.getvalue().splitlines() if line.startswith("note: ")]
    assert notes == ([f"note: {one.message}"] if rank == 0 else [])
    assert unequal(again.digest(), expected) == []
    again.train(2)  # and those that were damaged are replaced
    again.ckpt.close()
    assert Trained(rank, PLANS["fully sharded"](2), folder, seed=3).ckpt.resume() == 3


def test_a_damaged_one_is_named_and_the_one_before_is_used(ranks, tmp_path: Path):
    ranks(2)(falls_back, str(tmp_path))


def none_is_whole(rank: int, folder: str) -> None:
    trained = Trained(rank, PLANS["data parallel"](2), folder, seed=1, every=1)
    trained.train(1)
    trained.ckpt.close()
    if rank == 0:
        Path(f"{folder}/step-00000001/state-1.json").unlink()
    torch.distributed.barrier()
    again = Trained(rank, PLANS["data parallel"](2), folder, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.ckpt.resume()


def test_where_none_is_whole_nothing_begins_anew(ranks, tmp_path: Path):
    for outcome in ranks(2).outcomes(none_is_whole, str(tmp_path)):
        assert outcome.kind == "InputError"
        assert outcome.error.startswith(f"no checkpoint in {tmp_path} is whole (")
        assert "state-1.json cannot be read: No such file" in outcome.error


def lacks_a_disk(rank: int, folder: str) -> None:
    """Of two hosts the one of rank 0 has come back without what is mounted there."""
    there = f"{folder}/{'empty' if rank == 0 else 'kept'}"
    trained = Trained(rank, PLANS["data parallel"](2), f"{folder}/kept", seed=1, every=1)
    trained.train(1)
    trained.ckpt.close()
    Trained(rank, PLANS["data parallel"](2), there, seed=2).ckpt.resume()


def test_where_rank_0_alone_sees_no_checkpoint_nothing_begins_anew(ranks, tmp_path: Path):
    for outcome in ranks(2).outcomes(lacks_a_disk, str(tmp_path)):
        assert outcome.kind == "InputError"
        assert "rank 0 sees no checkpoint in " in outcome.error
        assert "and rank 1 has one of step 1 there" in outcome.error


def fills_the_disk(rank: int, folder: str) -> None:
    trained = Trained(rank, PLANS["data parallel"](2), folder, seed=1, every=1)
    trained.train(1)
    trained.ckpt.wait()
    before = safetensors.write_all

    def write_all(file: Any, data: Any) -> None:
        if rank == 1 and len(memoryview(data).cast("B")) > 1000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        before(file, data)

    safetensors.write_all = write_all
    try:
        trained.train(1)
        with pytest.raises(
            RunError, match=r"checkpoint of step 2 could not be written \(rank 1: No"
        ):
            trained.ckpt.wait()
    finally:
        safetensors.write_all = before
    torch.distributed.barrier()  # rank 0 clears up
    assert [p.name for p in Path(folder).iterdir()] == ["step-00000001"]
    expected = trained.digest()
    trained.ckpt.save()
    trained.ckpt.close()
    again = Trained(rank, PLANS["data parallel"](2), folder, seed=2)
    assert again.ckpt.resume() == 2
    assert unequal(again.digest(), expected) == []


def test_a_full_disk_is_told_on_all_ranks(ranks, tmp_path: Path):
    ranks(2)(fills_the_disk, str(tmp_path))


class Other(nn.Module):
    """As ``Net``, but for one layer."""

    def __new__(cls) -> Any:
        net = Net()
        net.last = nn.Linear(6, 4)
        return net


def is_refused(rank: int, folder: str) -> None:
    saves(rank, "data parallel", 2, folder)
    chosen = PLANS["data parallel"](2)
    model: nn.Module = Other()
    before = [p.detach().clone() for p in model.parameters()]
    apply(model, None, chosen, timeout_s=20)
    with pytest.raises(
        InputError, match=r"another model \(its 'last.weight' has shape \[3, 6\].*\[4, 6\]"
    ):
        checkpoint(folder, model).resume()
    assert all(p.shape == b.shape for p, b in zip(model.parameters(), before, strict=True))
    for options, sentence in (
        ({"optimizer": None}, "has the state of an optimizer, which was not given"),
        ({"scheduler": None}, "has the state of a scheduler, which was not given"),
        ({"data": {}}, "has no state of the data"),
    ):
        torch.manual_seed(5)
        net = Net()
        given: Any = torch.optim.AdamW(net.parameters())
        scheduler: Any = torch.optim.lr_scheduler.MultiStepLR(given, [1])
        apply(net, given, chosen, timeout_s=20)
        values = {"optimizer": given, "scheduler": scheduler, "data": None, **options}
        if values["data"] is not None:
            values["data"] = scheduler
        kept = checkpoint(
            folder, net, values["optimizer"], scheduler=values["scheduler"], data=values["data"]
        )
        state = {name: t.clone() for name, t in net.state_dict().items()}
        with pytest.raises(InputError, match=sentence):
            kept.resume()
        assert all(torch.equal(state[name], t) for name, t in net.state_dict().items())
    net = Net()
    given = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(given, [1])
    apply(net, given, chosen, timeout_s=20)
    kept = checkpoint(folder, net, given, scheduler=scheduler)
    with pytest.raises(InputError, match=r"was saved with an optimizer of 2 groups"):
        kept.resume()


def test_another_training_is_refused_and_nothing_changes(ranks, tmp_path: Path):
    ranks(2)(is_refused, str(tmp_path))


def uses_wrongly(rank: int, folder: str) -> None:
    saves(rank, "data parallel", 2, folder)
    chosen = PLANS["data parallel"](2)
    trained = Trained(rank, chosen, folder, seed=2, data=False)
    with pytest.raises(InputError, match="up to step 3 of a run before: call resume"):
        trained.ckpt.save()
    for given, sentence in (
        ({"every": 0}, "every 0 steps cannot be"),
        ({"keep": 0}, "keep=0 checkpoints would keep none"),
        ({"folder": None}, "no folder for checkpoints was named"),
        ({"folder": __file__}, "Not a directory"),
    ):
        options: dict[str, Any] = {"folder": folder, **given}
        with pytest.raises((InputError, RunError), match=sentence):
            checkpoint(options.pop("folder"), trained.model, trained.optimizer, **options)
    other = torch.optim.SGD([*trained.model.parameters(), nn.Parameter(torch.ones(3))], lr=1.0)
    with pytest.raises(InputError, match=r"group 0 of this SGD has a parameter of shape \[3\]"):
        checkpoint(folder, trained.model, other)
    with pytest.raises(InputError, match="no plan was applied"):
        checkpoint(folder, Net())
    trained.scheduler.strange = print  # type: ignore[attr-defined]
    trained.ckpt.resume()
    trained.ckpt.save(7)
    with pytest.raises(RunError, match="is a builtin_function_or_method, which no checkpoint"):
        trained.ckpt.wait()
    assert steps_in(Path(folder)) == [3]


def test_wrong_uses_are_told(ranks, tmp_path: Path):
    ranks(2)(uses_wrongly, str(tmp_path))


def data_of_other_ranks(rank: int, folder: str) -> None:
    trained = Trained(rank, PLANS["data parallel"](1), folder, seed=2)
    trained.ckpt.resume()


def test_positions_in_data_of_other_ranks_are_refused(ranks, tmp_path: Path):
    ranks(2)(writes_once, "data parallel", 2, str(tmp_path))
    (outcome,) = ranks(1).outcomes(data_of_other_ranks, str(tmp_path))
    assert outcome.kind == "InputError"
    assert "has the data's positions of 2 ranks, each its own, and this run has 1" in outcome.error


def made_again_while_it_writes(rank: int, folder: str) -> int | None:
    """In a notebook, say, whose cell is run a second time."""
    chosen, ordinary = PLANS["data parallel"](2), storage.write_tensors

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.5)  # its folder is there already
        return ordinary(*arguments, **options)

    first = Trained(rank, chosen, folder, seed=1)
    first.train(2)
    with patch.object(storage, "write_tensors", slowly):
        first.ckpt.save(2)
        time.sleep(0.2)
        second = Trained(rank, chosen, folder, seed=2)
    return second.ckpt.resume()


def test_what_is_still_being_written_is_waited_for(ranks, tmp_path: Path):
    assert ranks(2)(made_again_while_it_writes, str(tmp_path)) == [2, 2]


def best_beside_latest(rank: int, folder: str) -> None:
    """Two folders of one training, saved to at once, and one folder by two."""
    chosen = PLANS["sharded"](2)
    trained = Trained(rank, chosen, f"{folder}/latest", seed=1, every=1)
    options = {"optimizer": trained.optimizer}
    best = checkpoint(f"{folder}/best", trained.model, **options, keep=1)
    for _ in range(6):
        trained.train(1)
        best.save(trained.ckpt._steps)
    trained.ckpt.close()
    best.close()


def test_two_checkpoints_of_one_training_are_written_in_turn(ranks, tmp_path: Path):
    ranks(2)(best_beside_latest, str(tmp_path))
    # When all ranks are done: rank 0 takes older ones away, and another may be done before it.
    assert steps_in(tmp_path / "latest")[0] == 6
    assert steps_in(tmp_path / "best") == [6]
