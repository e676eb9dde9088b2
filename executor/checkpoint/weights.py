"""A model's weights as other tools have them: a file of ``torch.save``, a safetensors file, or a
folder as ``save_pretrained`` of Hugging Face's transformers makes it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.compiled import unwrapped
from ...planner.schema.errors import InputError
from ..comm.agreement import rank_zero_decides, together
from ..parallel import full_state_dict, run_of
from ..redistribution.shards import aliases
from .folder import step_name
from .index import MODEL
from .latest import TRIES, latest_whole
from .safetensors import read_tensors, write_tensors
from .storage import StoredTensors

Weights = dict[str, Any]
_TORCH, _SAFE = (".pt", ".pth"), ".safetensors"
# The names that transformers gives.
_IN_FOLDER, _PARTS, _OLD = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def save_model(model: nn.Module, path: str | Path) -> None:
    """Writes the whole weights of ``model``, as one process would have them, whole or not at all.
    Collective: rank 0 writes, all ranks call it.

    ``path`` says how: ``.pt`` or ``.pth`` is what ``torch.save(model.state_dict())``
    makes, ``.safetensors`` a safetensors file, a name without suffix a folder with
    ``model.safetensors``, which for a model of transformers is what its ``save_pretrained`` makes
    (``from_pretrained`` reads it). Raises ``InputError`` for any other name, and where it cannot be
    written.
    """
    run_of(model)
    own = unwrapped(model)
    check_path(Path(path))
    state = full_state_dict(own, rank0_only=True)
    rank_zero_decides(
        lambda: write_weights(state, Path(path), getattr(own, "save_pretrained", None))
    )


def load_model(model: nn.Module, path: str | Path) -> None:
    """Loads what ``save_model``, ``torch.save(model.state_dict())`` or ``save_pretrained`` has
    written into a model that a plan was applied to, each rank its part. Collective.

    Nothing in a file can run. Raises ``InputError`` where a tensor is missing, is not known to the
    model or has another shape; nothing has changed then.
    """
    own = unwrapped(model)
    shapes = {name: shard.full_shape for name, shard in run_of(own).shards.items()}

    def read() -> Weights:
        state = read_weights(Path(path))
        _fill_ties(own, state)
        _check_names(own, state, shapes, path)
        return state

    own.load_state_dict(together(read))


def export(
    folder: str | Path, out: str | Path, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Writes the weights in the latest whole checkpoint in ``folder`` to ``out``, named as for
    ``save_model``, and returns that checkpoint's path. Needs neither the model nor ranks. ``say``
    is told of later ones that are damaged. Raises ``InputError`` where none is whole."""
    check_path(Path(out))
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # removed by a training that goes on there
            return _export(Path(folder), Path(out), say)
    raise InputError(
        f"checkpoints in {folder} are removed before they are read: keep more of them "
        "(mw.checkpoint(..., keep=10)), or copy one"
    )


def _export(folder: Path, out: Path, say: Callable[[str], None]) -> Path:
    found = latest_whole(folder).checked("copy one back, or name another folder")
    index = found.index
    if index is None:
        raise InputError(f"there is no checkpoint in {folder}: name a folder that has some")
    if found.damaged:
        say(f"takes the checkpoint of step {index.step} in {folder}{found.passed_over}")
    checkpoint = folder / step_name(index.step)
    stored, begin = StoredTensors(checkpoint, index), f"{MODEL}/"
    weights = {
        tensor.name.removeprefix(begin): stored.whole(tensor)
        for tensor in index.tensors
        if tensor.name.startswith(begin)
    }
    write_weights(weights, out)
    return checkpoint


def check_path(path: Path) -> None:
    """Raises ``InputError`` for a name that does not say how weights are to be written."""
    if path.suffix in (*_TORCH, _SAFE) or path.is_dir() or not path.suffix:
        return
    raise InputError(
        f"{path} does not say how weights are written: name a .pt, .pth or .safetensors file, or a "
        "folder (without a suffix)"
    )


def write_weights(
    state: Mapping[str, Any], path: Path, save_pretrained: Callable[..., Any] | None = None
) -> None:
    """Writes whole weights, in this process. A model's own ``save_pretrained`` makes a folder."""
    if not path.absolute().parent.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {path.absolute().parent}")
    try:
        if path.suffix in _TORCH:
            replaced_by(path, lambda partial: torch.save(_apart(state), partial))
        elif path.suffix == _SAFE:
            replaced_by(path, lambda partial: _write_safe(state, partial))
        elif save_pretrained is not None:
            save_pretrained(path, state_dict=dict(state))
        else:
            path.mkdir(parents=True, exist_ok=True)
            replaced_by(path / _IN_FOLDER, lambda partial: _write_safe(state, partial))
    except (OSError, RuntimeError) as error:  # torch words a full disk as the latter
        what = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise InputError(f"cannot write {path}: {what}; name another place") from None


def replaced_by(path: Path, write: Callable[[Path], Any]) -> None:
    """Has ``write`` fill a new file, which takes the name ``path`` when it is whole and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _apart(state: Mapping[str, Any]) -> Weights:
    # A view would be saved with all of the memory that it is a part of.
    return {
        name: value.detach().clone()
        if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes
        else value
        for name, value in state.items()
    }


def _write_safe(state: Mapping[str, Any], path: Path) -> None:
    strange = next((name for name, value in state.items() if not isinstance(value, Tensor)), None)
    if strange is not None:
        raise InputError(f"{strange!r} is no tensor, as safetensors files hold: name a .pt file")
    tensors = {name: value.detach().to("cpu").contiguous() for name, value in state.items()}
    write_tensors(path, tensors, {"format": "pt"})


def read_weights(path: Path) -> Weights:
    """Whole weights, in this process. Raises ``InputError`` where there are none."""
    if not path.exists():
        raise InputError(f"there is no {path}: name a .pt or .safetensors file, or a folder of one")
    if not path.is_dir():
        return read_tensors(path) if path.suffix == _SAFE else _read_torch(path)
    if (path / _IN_FOLDER).exists():
        return read_tensors(path / _IN_FOLDER)
    if (path / _PARTS).exists():
        return _read_parts(path)
    if (path / _OLD).exists():
        return _read_torch(path / _OLD)
    raise InputError(f"{path} has no {_IN_FOLDER}: name a folder that save_pretrained has made")


def _read_parts(folder: Path) -> Weights:
    try:
        names = sorted(set(json.loads((folder / _PARTS).read_bytes())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("it names files elsewhere")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / _PARTS} is not an index of weights: {error}") from None
    state: Weights = {}
    for name in names:
        state |= read_tensors(folder / name)
    return state


def _read_torch(path: Path) -> Weights:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # the unpickler stumbles over what is no pickle in any way
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} is not a file of weights that can be read safely ({why[:200]}): save it with "
            "torch.save(model.state_dict())"
        ) from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise InputError(
            f"{path} holds no state_dict: save one with torch.save(model.state_dict())"
        )
    for inner in ("model", "state_dict"):  # beside an optimizer's, as scripts often have it
        if isinstance(state.get(inner), dict):
            return dict(state[inner])
    return state


def _fill_ties(model: nn.Module, state: Weights) -> None:
    """Adds the other names of tied tensors, of which safetensors files hold one."""
    for names in aliases(model).values():
        known = next((name for name in names if name in state), None)
        if known is not None:
            state.update({name: state[known] for name in names if name not in state})


def _check_names(
    model: nn.Module, state: Weights, shapes: Mapping[str, Any], path: str | Path
) -> None:
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    strange = [name for name in state if name not in own]
    if missing or strange:
        what = f"lacks {missing[0]!r}" if missing else f"has {strange[0]!r}, which this model lacks"
        raise InputError(f"{path} {what}: name the weights of this {type(model).__name__}")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in own.items():
        if not isinstance(value, Tensor) or not isinstance(state[name], Tensor):
            continue
        here = shapes.get(name, parameters[name].shape if name in parameters else value.shape)
        if tuple(state[name].shape) != tuple(here):
            raise InputError(
                f"{path} has {name!r} of shape {list(state[name].shape)}, this model "
                f"{list(here)}: name the weights of this {type(model).__name__}"
            )
