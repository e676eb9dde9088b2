"""Small state as JSON: numbers, text, tensors and what is made of them, and nothing that runs when
it is read.

``torch.save`` and ``pickle`` can name any function to be called by whoever loads the file. Here a
value is what its JSON says, or it is refused.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...planner.schema.errors import InputError

# JSON has lists, text, numbers and objects whose keys are text. Everything else is an object with
# one key, which says what it is.
_TUPLE, _MAPPING, _COUNTER, _TENSOR, _ARRAY = "tuple", "mapping", "counter", "tensor", "array"
_ARRAYS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"} | {
    "float16", "float32", "float64",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The type of that name; ``ValueError`` where torch has none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of torch's")
    return found


def to_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in one dim."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def encode_value(value: Any, origin: str) -> bytes:
    """A value as JSON. Raises ``InputError`` that names ``origin`` and what in it cannot be
    written."""
    return json.dumps(_plain(value, origin), separators=(",", ":")).encode()


def decode_value(data: bytes, origin: str) -> Any:
    """What ``encode_value`` has written. Raises ``InputError`` for anything else."""
    try:
        return _value(json.loads(data))
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise InputError(f"{origin} is not a checkpoint's state: {error}") from None


def _plain(value: Any, where: str) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not _is_numpy(value)):
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided:
        raw = base64.b64encode(to_bytes(value.detach().to("cpu")).numpy().tobytes()).decode()
        return {_TENSOR: [dtype_name(value.dtype), list(value.shape), raw]}
    if _is_numpy(value) and value.dtype.name in _ARRAYS:
        raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: [value.dtype.name, list(value.shape), raw]}
    if isinstance(value, Mapping):
        items = [
            [_plain(key, where), _plain(one, f"{where}[{key!r}]")] for key, one in value.items()
        ]
        return {_COUNTER if isinstance(value, Counter) else _MAPPING: items}
    if isinstance(value, list | tuple):
        parts = [_plain(one, f"{where}[{i}]") for i, one in enumerate(value)]
        return parts if isinstance(value, list) else {_TUPLE: parts}
    raise InputError(
        f"{where} is a {type(value).__name__}, which no checkpoint holds: its state_dict() may "
        "have numbers, text, tensors, and lists and mappings of such"
    )


def _is_numpy(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == _TUPLE:
        return tuple(_value(one) for one in content)
    if kind in (_MAPPING, _COUNTER):
        made = {_value(key): _value(one) for key, one in content}
        return made if kind == _MAPPING else Counter(made)
    name, shape, raw = content
    data = bytearray(base64.b64decode(raw, validate=True))
    if kind == _TENSOR:
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        return flat.view(dtype_of(name)).view(shape)
    if kind == _ARRAY and name in _ARRAYS:
        array = np.frombuffer(data, dtype=name).reshape(shape)
        return array if shape else array[()]
    raise ValueError(f"{kind!r} is not known")
