"""Files of tensors in the safetensors format: a length, a header in JSON, and raw bytes
(https://huggingface.co/docs/safetensors). Nothing in one can run.

Written here and not by that package, which is no dependency, as checkpoints need what it does not
do: a hash while writing, and writing to disk for sure.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...planner.schema.errors import InputError
from .values import to_bytes

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}  # fmt: skip
_TYPES = {name: dtype for dtype, name in _NAMES.items()}
_LONGEST_HEADER = 100_000_000  # as that package has it


class FilePlace(NamedTuple):
    """Where a tensor's bytes lie in a file."""

    start: int
    stop: int


class WrittenFile(NamedTuple):
    """A file that is on disk: its size, its sha256, and where each tensor lies in it."""

    bytes: int
    sha256: str
    places: dict[str, FilePlace]


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Writes contiguous tensors of the host, and returns when they are on disk. Leaves no half of a
    file where that fails (``OSError``)."""
    # The widest types first, so that each tensor lies at a multiple of its element's size.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header, at = dict[str, Any](), 0
    for name in order:
        tensor = tensors[name]
        known = _NAMES.get(tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": known or "U8",
            "shape": list(tensor.shape) if known else [size],
            "data_offsets": [at, at + size],
        }
        at += size
    if metadata:
        header["__metadata__"] = dict(metadata)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    digest = hashlib.sha256()
    try:
        with path.open("wb", buffering=0) as file:
            for data in (struct.pack("<Q", len(text)), text, *map(_memory, _in(order, tensors))):
                digest.update(data)
                write_all(file, data)
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    places = {}
    for name in order:
        left, right = header[name]["data_offsets"]
        places[name] = FilePlace(begin + left, begin + right)
    return WrittenFile(begin + at, digest.hexdigest(), places)


def _in(order: list[str], tensors: Mapping[str, Tensor]) -> Iterator[Tensor]:
    return (tensors[name] for name in order)


def _memory(tensor: Tensor) -> Any:
    return to_bytes(tensor).numpy().data


def write_all(file: Any, data: Any) -> None:
    """Writes all of the data to a file that is not buffered."""
    # One system call may write a part only.
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(view):
        view = view[file.write(view) :]


class MappedFile:
    """A file's bytes as memory, read when they are looked at. Changes stay in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.bytes = os.fstat(file.fileno()).st_size
            # An empty file cannot be mapped.
            self._map = (
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                if self.bytes
                else bytearray(b"")
            )

    def tensor(self, place: FilePlace, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor that lies there, sharing the file's memory."""
        if not 0 <= place.start <= place.stop <= self.bytes:
            raise InputError(f"{self.path} has {self.bytes} bytes and none at {place.stop}")
        if prod(shape) * dtype.itemsize != place.stop - place.start:
            raise InputError(
                f"{self.path} has {place.stop - place.start} bytes for a tensor of shape "
                f"{list(shape)} and type {dtype}: it is damaged"
            )
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=dtype, count=prod(shape), offset=place.start)
        return flat.view(shape)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, sharing its memory. Raises ``InputError`` where it is none."""
    try:
        file = MappedFile(path)
        raw = bytes(file._map[:8])
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else _LONGEST_HEADER
        if length > min(_LONGEST_HEADER, file.bytes - 8):
            raise InputError(f"{path} is not a safetensors file, or is cut off: name another")
        header = json.loads(bytes(file._map[8 : 8 + length]))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            left, right = entry["data_offsets"]
            place = FilePlace(8 + length + left, 8 + length + right)
            found[name] = file.tensor(place, _TYPES[entry["dtype"]], tuple(entry["shape"]))
        return found
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; check the path") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path} is not a safetensors file ({type(error).__name__}: {error}): name another"
        ) from None
