"""A checkpoint's files: every damage is found and named, and nothing that is read can run."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from meshwright.executor.checkpoint import folder as folders
from meshwright.executor.checkpoint import safetensors, storage
from meshwright.executor.checkpoint.boxes import CutPiece, HeldPart, TensorBox, flat_boxes
from meshwright.executor.checkpoint.capture import kind_name
from meshwright.executor.checkpoint.holdings import StateTensor
from meshwright.executor.checkpoint.index import find_damage, read_index
from meshwright.executor.checkpoint.latest import index_or_damage, latest_whole
from meshwright.executor.checkpoint.restore import _check_kind
from meshwright.executor.checkpoint.values import decode_value, encode_value
from meshwright.executor.checkpoint.weights import export
from meshwright.executor.launch.train import steps_left
from meshwright.planner.schema.errors import InputError, RunError
from torch import Tensor

TENSORS = {
    "model/wide": torch.randn(7, 5),
    "model/half": torch.randn(3).to(torch.bfloat16),
    "model/scalar": torch.tensor(2.5, dtype=torch.float64),
    "optimizer/wide/complex": torch.randn(2, 2, dtype=torch.complex128),
    "model/flags": torch.tensor([True, False, True]),
}


def whole(tensor: Tensor) -> StateTensor:
    box = TensorBox((0,) * tensor.ndim, tuple(tensor.shape))
    return StateTensor(tuple(tensor.shape), tensor.dtype, ((box, tensor),))


def described(step: int) -> storage.Description:
    return storage.Description(step, 1, "model", "plan", "decisions", b"{}\n")


def write(folder: Path, step: int, tensors: dict[str, Tensor] = TENSORS) -> Path:
    """A checkpoint of one rank."""
    folders.prepare(folder)
    state = encode_value({"random": torch.get_rng_state()}, "state")
    stored = {name: whole(tensor) for name, tensor in tensors.items()}
    storage.save(folder, described(step), 0, stored, state, None)
    return folder / folders.step_name(step)


def damage_of(checkpoint: Path) -> str | None:
    """What a rank that is asked to go on from it would say."""
    try:
        index = read_index(checkpoint)
    except InputError as error:
        return str(error)
    found = (find_damage(checkpoint, file) for file in index.files)
    return next((damage for damage in found if damage is not None), None)


def test_what_is_written_is_read(tmp_path: Path):
    checkpoint = write(tmp_path, 3)
    index = read_index(checkpoint)
    into = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    storage.load(checkpoint, index, {name: whole(tensor) for name, tensor in into.items()}, None)
    for name, tensor in TENSORS.items():
        assert torch.equal(into[name], tensor)
    stored = storage.StoredTensors(checkpoint, index)
    for tensor in index.tensors:
        assert torch.equal(stored.whole(tensor), TENSORS[tensor.name])
    assert damage_of(checkpoint) is None
    assert folders.steps_in(tmp_path) == [3]


def test_every_flip_and_truncation_is_found_and_named(tmp_path: Path):
    checkpoint = write(tmp_path, 50)
    names = sorted(path.name for path in checkpoint.iterdir())
    assert names == ["index.json", "plan.json", "state-0.json", "tensors-0.safetensors"]
    before = {name: (checkpoint / name).read_bytes() for name in names}
    chance = random.Random(0)
    for trial in range(240):
        name = names[trial % len(names)]
        data = bytearray(before[name])
        at = chance.randrange(len(data))
        if trial % 3 == 2:
            data = data[:at]
        else:
            data[at] ^= 1 << chance.randrange(8)
        (checkpoint / name).write_bytes(data)
        told = damage_of(checkpoint)
        assert told is not None, (name, at)
        assert str(checkpoint / name) in told, (name, at, told)
        assert "\n" not in told
        (checkpoint / name).write_bytes(before[name])
    for name in names:
        (checkpoint / name).rename(tmp_path / "away")
        assert name in (damage_of(checkpoint) or "")
        (tmp_path / "away").rename(checkpoint / name)
    assert damage_of(checkpoint) is None


class Payload:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_planted_pickle_does_not_run(tmp_path: Path):
    checkpoint, mark = write(tmp_path, 1), tmp_path / "ran"
    planted = tmp_path / "planted.pt"
    torch.save(Payload(mark), planted)
    for payload in (pickle.dumps(Payload(mark)), planted.read_bytes()):
        for name in sorted(path.name for path in checkpoint.iterdir()):
            path = checkpoint / name
            before = path.read_bytes()
            path.write_bytes(payload)
            assert name in (damage_of(checkpoint) or "")
            # Also where somebody has made the hashes fit.
            with pytest.raises(InputError):
                decode_value(payload, "state-0.json")
            with pytest.raises(InputError):
                safetensors.read_tensors(path)
            path.write_bytes(before)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))  # it would have been seen
    assert mark.exists()


def test_an_index_names_no_file_elsewhere(tmp_path: Path):
    checkpoint = write(tmp_path, 1)
    text = (checkpoint / "index.json").read_text()
    inner = text[text.index('"index":') + 8 : -1].replace("state-0.json", "../../state.json")
    import hashlib

    digest = hashlib.sha256(inner.encode()).hexdigest()
    (checkpoint / "index.json").write_text(f'{{"sha256":"{digest}","index":{inner}}}')
    with pytest.raises(InputError, match="not the name of a checkpoint's file"):
        read_index(checkpoint)


def full_disk(monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> None:
    """From so many bytes on every write fails as on a full disk."""
    left = [after_bytes]

    def write_all(file: Any, data: Any) -> None:
        left[0] -= len(memoryview(data).cast("B")) if len(data) else 0
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        file.write(data)

    monkeypatch.setattr(safetensors, "write_all", write_all)
    monkeypatch.setattr(folders, "write_all", write_all)


@pytest.mark.parametrize("after_bytes", [0, 100, 900, 8000, 8600])
def test_a_full_disk_leaves_the_last_whole_one(tmp_path, monkeypatch, after_bytes):
    write(tmp_path, 1)
    with monkeypatch.context() as patched:
        full_disk(patched, after_bytes)
        with pytest.raises(RunError, match="rank 0: No space left on device"):
            write(tmp_path, 2)
    folders.discard(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert damage_of(tmp_path / "step-00000001") is None
    write(tmp_path, 2)
    assert folders.steps_in(tmp_path) == [2, 1]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def test_the_latest_whole_one_is_found_and_told(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept"
    assert latest_whole(kept).checked("").sentence == "begins anew in kept"
    for step in (1, 2, 3):
        write(kept, step)
    assert latest_whole(kept).sentence == "goes on from the checkpoint of step 3 in kept"
    flip(kept / "step-00000003" / "tensors-0.safetensors")
    why = "tensors-0.safetensors is not as it was written (it does not fit its hash)"
    on = "goes on from the checkpoint of step"
    assert latest_whole(kept).sentence == (
        f"{on} 2 in kept; that of step 3 is damaged ({why}) and was passed over"
    )
    assert latest_whole(kept, by_size=True).step == 3
    (kept / "step-00000003" / "tensors-0.safetensors").write_bytes(b"cut")
    assert latest_whole(kept, by_size=True).step == 2
    (kept / "step-00000002" / "index.json").unlink()
    assert latest_whole(kept).sentence.startswith(f"{on} 1 in kept; those of steps 3 and 2 are dam")
    (kept / "step-00000001" / "index.json").write_bytes(b'{"sha')
    with pytest.raises(InputError) as raised:
        latest_whole(kept).checked("copy one back")
    assert "passed over" not in str(raised.value)
    assert str(raised.value).startswith(f"no checkpoint in {kept} is whole (of that of step 3 ten")
    assert str(raised.value).endswith(": copy one back")


def test_weights_of_the_one_before_are_exported(tmp_path: Path):
    kept, out = tmp_path / "kept", tmp_path / "w.safetensors"
    said: list[str] = []
    for step in (1, 2):
        write(kept, step, {"model/w": torch.full((2,), float(step))})
    with pytest.raises(InputError, match=r"w\.bin does not say how weights are written: name a"):
        export(kept, tmp_path / "w.bin")
    assert export(kept, out, said.append) == kept / "step-00000002"
    assert said == []
    flip(kept / "step-00000002" / "index.json")
    assert export(kept, out, said.append) == kept / "step-00000001"
    assert "takes the checkpoint of step 1" in said[0]
    assert "that of step 2 is damaged (index.json" in said[0]
    assert torch.equal(safetensors.read_tensors(out)["w"], torch.ones(2))
    flip(kept / "step-00000001" / "index.json")
    with pytest.raises(InputError, match=r"no checkpoint in .*: copy one back, or name another fo"):
        export(kept, out)


def test_one_that_goes_while_it_is_read_gives_way_to_a_later_one(tmp_path: Path, monkeypatch):
    """As a training that goes on removes old ones: while files are compared, or after that."""
    kept, out = tmp_path / "kept", tmp_path / "w.safetensors"
    write(kept, 1, {"model/w": torch.full((2,), 1.0)})
    looked = index_or_damage

    def goes(where: Path) -> Any:
        if where.name == "step-00000001":
            write(kept, 2, {"model/w": torch.full((2,), 2.0)})
            shutil.rmtree(where)
        return looked(where)

    monkeypatch.setattr("meshwright.executor.checkpoint.latest.index_or_damage", goes)
    assert export(kept, out) == kept / "step-00000002"
    whole_of = storage.StoredTensors.whole

    def too_late(self: Any, tensor: Any) -> Tensor:
        if "step-00000002" in str(self._checkpoint):
            write(kept, 3, {"model/w": torch.full((2,), 3.0)})
            raise FileNotFoundError("gone")
        return whole_of(self, tensor)

    monkeypatch.setattr(storage.StoredTensors, "whole", too_late)
    assert export(kept, out) == kept / "step-00000003"
    assert torch.equal(safetensors.read_tensors(out)["w"], torch.full((2,), 3.0))


def test_old_ones_go(tmp_path: Path):
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
        folders.remove_older(tmp_path, step, 2)
    assert folders.steps_in(tmp_path) == [40, 30]
    # What lies ahead was damaged, or it would have been gone on from: it is replaced in its turn.
    write(tmp_path, 20)
    folders.remove_older(tmp_path, 20, 1)
    assert folders.steps_in(tmp_path) == [40, 30, 20]
    write(tmp_path, 30)
    assert damage_of(tmp_path / "step-00000030") is None


def test_half_written_ones_are_never_found(tmp_path: Path):
    write(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", folders.writing_folder(tmp_path, 2))
    assert folders.steps_in(tmp_path) == [1]
    folders.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_one_that_is_saved_again_is_never_lost(tmp_path: Path, monkeypatch):
    """Neither if the process ends between the two renames, nor if the second cannot be."""
    checkpoint = write(tmp_path, 1)
    shutil.copytree(checkpoint, folders.writing_folder(tmp_path, 1))
    checkpoint.rename(tmp_path / ".replaced-step-00000001")
    folders.prepare(tmp_path)
    assert damage_of(checkpoint) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.startswith(".writing"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(RunError):
        write(tmp_path, 1)
    assert damage_of(checkpoint) is None


class Wrapped(torch.optim.Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults


class Own(torch.optim.AdamW):
    pass


def optimizers(*names: str) -> list[torch.optim.Optimizer]:
    return [
        getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2))], lr=0.1) for name in names
    ]


def test_another_kind_of_optimizer_is_refused():
    made = optimizers("AdamW", "Adam", "SGD", "RMSprop")
    for saved in made:
        groups = [{**group, "params": ["w"]} for group in saved.param_groups]
        shared = {"groups": groups, "kind": kind_name(saved)}
        _check_kind(Path("kept"), shared, Wrapped(saved))
        for other in made:
            if other is not saved:
                with pytest.raises(InputError, match=f"saved with {kind_name(saved)}, and this is"):
                    _check_kind(Path("kept"), shared, other)
    _check_kind(Path("kept"), {"groups": [], "kind": "AdamW"}, Own([torch.ones(1)]))
    # Of checkpoints without the name.
    adam, sgd = optimizers("Adam", "SGD")
    shared = {"groups": [{**group, "params": ["w"]} for group in sgd.param_groups]}
    _check_kind(Path("kept"), shared, sgd)
    with pytest.raises(InputError, match="another kind of optimizer, and this is Adam"):
        _check_kind(Path("kept"), shared, adam)


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not a folder of checkpoints \(it has 'notes.txt'\)"):
        folders.prepare(tmp_path)
    with pytest.raises(InputError, match=r"cannot look into .*Not a directory"):
        folders.prepare(tmp_path / "notes.txt")
    checkpoint = write(tmp_path / "run", 1)
    with pytest.raises(InputError, match="is one checkpoint: name the folder that it lies in"):
        folders.prepare(checkpoint)


VALUES = {
    "numbers": [1, -2.5, float("inf"), 2**80, True, None, "text"],
    "tuple": (1, (2, [3])),
    "by number": {0: "a", 1.5: "b", (1, 2): "c"},
    "counter": Counter([1, 1, 2]),
    "ordered": OrderedDict(a=1),
    "tensor": torch.arange(6, dtype=torch.int16).view(2, 3),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.0),
    "array": np.arange(4, dtype=np.uint32),
    "number": np.float32(1.5),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_values_come_back(name: str):
    value = VALUES[name]
    found = decode_value(encode_value(value, "it"), "it")
    if isinstance(value, Tensor | np.ndarray):
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert bool((found == value).all())
    else:
        assert found == value
        assert type(found) is type(value) or isinstance(value, OrderedDict)
    assert str(decode_value(encode_value(float("nan"), "it"), "it")) == "nan"


def test_what_cannot_be_written_is_named():
    with pytest.raises(
        InputError, match=r"it\['a'\]\[1\] is a function, which no checkpoint holds"
    ):
        encode_value({"a": [1, json.dumps]}, "it")


@pytest.mark.parametrize(
    "text", [b"", b"[", b'{"what":1}', b'{"tensor":["os",[1],"AA=="]}', b'{"a":1,"b":2}', b"\xff"]
)
def test_what_is_no_state_is_refused(text: bytes):
    with pytest.raises(InputError, match="it is not a checkpoint's state"):
        decode_value(text, "it")


def filled(part: HeldPart, local: Tensor, whole: Tensor) -> None:
    """Every box that is held has the elements of the whole."""
    for box, view in part.views(local):
        place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(view, whole[place])
        view.fill_(-1)


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", [None, 0, 1])
@pytest.mark.parametrize("stride_order", [(0, 1, 2), (2, 0, 1)])
def test_boxes_are_what_is_held(peers: int, cut: int | None, stride_order: tuple[int, ...]):
    full = torch.arange(8 * 6 * 5.0).view(8, 6, 5)
    pieces: tuple[CutPiece, ...] = ()
    if cut is not None:  # two blocks, of each of which this rank has the second third or so
        length = full.shape[cut] // 2
        bounds = [(b * length + length // 3, b * length + 2 * length // 3) for b in (0, 1)]
        starts = (0, bounds[0][1] - bounds[0][0])
        pieces = tuple(CutPiece(s, a, b - a) for s, (a, b) in zip(starts, bounds, strict=True))
        own = torch.cat([full.narrow(cut, a, b - a) for a, b in bounds], cut)
    else:
        own = full.clone()
    back = sorted(range(3), key=stride_order.__getitem__)
    own = own.permute(stride_order).contiguous().permute(back)
    part = HeldPart((8, 6, 5), tuple(own.shape), cut or 0, pieces)
    seen = torch.zeros(full.shape)
    chunk = -(-own.numel() // peers)
    memory = own.as_strided((own.numel(),), (1,))
    for peer in range(peers):
        start, stop = min(peer * chunk, own.numel()), min((peer + 1) * chunk, own.numel())
        flat = HeldPart(
            part.full_shape, part.shape, part.dim, part.pieces, (start, stop), own.stride()
        )
        boxes = [box for box, _ in flat.views(memory[start:stop])]
        for box in boxes:
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            seen[place] += 1
        filled(flat, memory[start:stop].clone(), full)
        for box, view in part.share(own, peer, peers):
            place = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(view, full[place])
            seen[place] += 1
    filled(part, own.clone(), full)
    assert seen.sum() == 2 * own.numel()
    assert set(seen.unique().tolist()) <= {0.0, 2.0}


def test_a_training_that_is_over_is_told():
    said: list[str] = []
    found = SimpleNamespace(step=7, sentence="goes on")
    kept: Any = SimpleNamespace(go_on=lambda: found, folder=Path("kept"))
    assert steps_left(kept, 9, said.append) == range(7, 9)
    assert said == ["goes on"]
    with pytest.raises(InputError, match="in kept is at step 7 and --steps asks for 7, so it is"):
        steps_left(kept, 7, said.append)
    assert said == ["goes on"]


def test_flat_boxes_are_few():
    assert list(flat_boxes((4, 3, 2), 0, 24)) == [TensorBox((0, 0, 0), (4, 3, 2))]
    assert list(flat_boxes((), 0, 1)) == [TensorBox((), ())]
    assert list(flat_boxes((3, 2), 2, 2)) == []
    assert len(list(flat_boxes((4, 3, 2), 3, 21))) == 5


def test_a_checkpoint_under_another_name_is_passed_over(tmp_path: Path):
    write(tmp_path, 50)
    write(tmp_path, 60).rename(tmp_path / folders.step_name(70))
    found = latest_whole(tmp_path)
    assert found.step == 50
    assert "of step 70 is damaged (it is the checkpoint of step 60" in found.sentence
