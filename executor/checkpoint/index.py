"""A checkpoint's index: which files it has, and where in them each part of each tensor lies."""

from __future__ import annotations

import hashlib
import re
from math import prod
from pathlib import Path
from typing import Literal

import msgspec

from ...planner.schema.errors import InputError
from ...planner.schema.record import Bytes, Count, Index, Record
from .values import dtype_of

INDEX = "index.json"
"""The file's name. What has none is no whole checkpoint."""
PLAN = "plan.json"
_FILE_NAME = re.compile(r"(tensors-\d+\.safetensors|state-\d+\.json|plan\.json)")


def tensors_file(rank: int) -> str:
    return f"tensors-{rank}.safetensors"


def state_file(rank: int) -> str:
    return f"state-{rank}.json"


class StoredFile(Record, frozen=True, kw_only=True):
    """One file of a checkpoint and what it must be."""

    name: str
    bytes: Bytes
    sha256: str

    def __post_init__(self) -> None:
        super().__post_init__()
        # What is read is in the checkpoint's own folder, whatever an index says.
        if not _FILE_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a checkpoint's file")


class StoredChunk(Record, frozen=True, kw_only=True):
    """A box of a tensor: bytes ``start`` to ``stop`` of the file of that number."""

    offsets: tuple[Index, ...]
    sizes: tuple[Index, ...]
    file: Index
    start: Bytes
    stop: Bytes


MODEL, OPTIMIZER, EXCHANGE = "model", "optimizer", "exchange"
"""What the names of stored tensors begin with."""


def makes_up(name: str, written: int, wanted: int) -> bool:
    """Whether so many elements make up the stored tensor: all that it has, but of what one rank's
    exchange holds those of its slice."""
    if name.startswith(f"{EXCHANGE}/"):
        return written <= wanted
    return written == wanted


class StoredTensor(Record, frozen=True, kw_only=True):
    """A tensor in the shape that one process would give it, in ``chunks``."""

    name: str
    dtype: str
    shape: tuple[Index, ...]
    chunks: tuple[StoredChunk, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        each = dtype_of(self.dtype).itemsize
        for chunk in self.chunks:
            ends = [o + s for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
            if any(end > length for end, length in zip(ends, self.shape, strict=True)):
                raise ValueError(f"a chunk of {self.name!r} goes beyond its shape")
            if chunk.stop - chunk.start != prod(chunk.sizes) * each:
                raise ValueError(f"a chunk of {self.name!r} has not as many bytes as it needs")
        # No memory is made for a tensor that no file could fill.
        written = sum(prod(chunk.sizes) for chunk in self.chunks)
        if not makes_up(self.name, written, prod(self.shape)):
            raise ValueError(f"the chunks of {self.name!r} do not make it up")
        begins = [chunk.offsets for chunk in self.chunks if prod(chunk.sizes)]
        if len(set(begins)) != len(begins):
            raise ValueError(f"two chunks of {self.name!r} begin at the same element")


class CheckpointIndex(Record, frozen=True, kw_only=True):
    """What a checkpoint consists of. ``step`` counts the steps that were made; ``model``, ``plan``
    and ``decisions`` are fingerprints: of names, shapes and types of the model's tensors, of the
    plan, and of what in the plan decides how ranks train."""

    kind: Literal["meshwright checkpoint"] = "meshwright checkpoint"
    version: Literal[1] = 1
    step: Index
    world_size: Count
    model: str
    plan: str
    decisions: str
    files: tuple[StoredFile, ...]
    tensors: tuple[StoredTensor, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, names in (
            ("file", [file.name for file in self.files]),
            ("tensor", [tensor.name for tensor in self.tensors]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"a {what} is listed twice")
        for tensor in self.tensors:
            for chunk in tensor.chunks:
                if chunk.file >= len(self.files) or chunk.stop > self.files[chunk.file].bytes:
                    raise ValueError(f"a chunk of {tensor.name!r} lies in no file")


class _Sealed(Record, frozen=True, kw_only=True):
    """An index with the hash of its own bytes."""

    sha256: str
    index: msgspec.Raw


def encode_index(index: CheckpointIndex) -> bytes:
    """An index as the bytes of its file."""
    content = msgspec.json.encode(index)
    return msgspec.json.encode(_Sealed(sha256=_sha256(content), index=msgspec.Raw(content)))


def read_index(folder: Path) -> CheckpointIndex:
    """The index of a checkpoint. Raises ``InputError`` where a byte of it has changed."""
    path = folder / INDEX
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        # As written and no byte else: JSON has many ways to say one thing.
        if msgspec.json.encode(sealed) != data or _sha256(bytes(sealed.index)) != sealed.sha256:
            raise InputError(f"{path} is not as it was written (it does not fit its hash)")
        return msgspec.json.decode(sealed.index, type=CheckpointIndex)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not as it was written ({error})") from None


def find_damage(folder: Path, file: StoredFile) -> str | None:
    """What is wrong with a file of a checkpoint, in words; None where it is as it was written."""
    path = folder / file.name
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb", buffering=0) as opened:
            while piece := opened.read(2**22):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if size != file.bytes:
        return _of_another_size(path, size, file)
    if digest.hexdigest() != file.sha256:
        return f"{path} is not as it was written (it does not fit its hash)"
    return None


def find_wrong_size(folder: Path, file: StoredFile) -> str | None:
    """The same at a look, without reading the file."""
    path = folder / file.name
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if size == file.bytes else _of_another_size(path, size, file)


def _of_another_size(path: Path, size: int, file: StoredFile) -> str:
    return f"{path} is not as it was written (it has {size} bytes of {file.bytes})"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
