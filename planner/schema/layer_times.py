"""Reads a table of layer times, as DeepPool published them, into a ModelProfile.

A table tells forward and backward of each layer by batch size on one device, not what a divided
layer takes or holds. What is assumed for the rest, and marked by the profile's origin ``table``:

- A convolution or linear layer and the ReLU behind it become one unit.
- A convolution or linear layer divided over m members takes 1/m of its time at the group's batch,
  but not less than ``KERNEL_S``. This says nothing of kernels that run less efficiently when
  smaller.
- Memory follows from shapes, in float32. A layer saves its input, and its workspace is taken as its
  output.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import msgspec

from .curve import ZERO, Curve, proportional
from .errors import InputError
from .profile import (
    EdgeProfile,
    ModelProfile,
    ParameterProfile,
    ShareProfile,
    SplitProfile,
    UnitKind,
    UnitProfile,
)

# The least that a layer takes: the tables' smallest row (flatten, which does no work). Work and the
# bytes of weights are divided evenly among members, the launch of a kernel is not.
KERNEL_S = 5e-6
DEGREES = (2, 4, 8, 16, 32, 64)
FLOAT_BYTES = 4
DOUBLE_BYTES = 8
INDEX_BYTES = 8  # of each output of a pooling, in int64
_KINDS: dict[str, UnitKind] = {"conv2d": "conv", "linear": "linear"}


class LayerTimes(msgspec.Struct, frozen=True):
    """Microseconds at one batch size."""

    forward: float
    backward: float


class Layer(msgspec.Struct, frozen=True):
    """One row of a table."""

    index: int
    kind: str
    config: dict[str, Any]
    input_shape: tuple[int, ...]
    param_count: int
    time_us_by_batch: dict[str, LayerTimes]


class Table(msgspec.Struct, frozen=True):
    """A table file."""

    model: str
    device: str
    dtype: str
    source: str
    layers: tuple[Layer, ...]


class _Row(NamedTuple):
    """A layer with the ReLU behind it, if there is one, and the shape of what comes out."""

    layer: Layer
    relu: Layer | None
    output_shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.layer.index:02d}.{self.layer.kind}"

    @property
    def input_bytes(self) -> int:
        return FLOAT_BYTES * prod(self.layer.input_shape)

    @property
    def output_bytes(self) -> int:
        return FLOAT_BYTES * prod(self.output_shape)


def profile_of_table(data: bytes, origin: str = "table") -> ModelProfile:
    """The profile in a table's JSON; ``origin`` names the source in the message of an error."""
    try:
        table = msgspec.json.decode(data, type=Table)
        return _profile(table, _rows(table, origin))
    except InputError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, ValueError, TypeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise InputError(f"{origin} is not a table of layer times: {detail}") from None


def _rows(table: Table, origin: str) -> list[_Row]:
    layers = table.layers
    if not layers:
        raise InputError(f"{origin} has no layers")
    rows: list[_Row] = []
    for i, layer in enumerate(layers):
        if i > 0 and layers[i - 1].kind in _KINDS and layer.kind.startswith("ReLU"):
            continue  # it is in the row of the layer before it
        follows = layers[i + 1] if i + 1 < len(layers) else None
        relu = follows if follows and _KINDS.get(layer.kind) and "ReLU" in follows.kind else None
        after = i + (2 if relu else 1)
        if after < len(layers):
            shape = layers[after].input_shape
        else:
            linear = layer.kind == "linear"
            shape = (layer.config["out_features"],) if linear else layer.input_shape
        rows.append(_Row(layer, relu, shape))
    # A chain's layers make what the next one takes; a file of branches cannot be told apart.
    for row, next_row in pairwise(rows):
        made = row.layer.config.get("out_channels", row.layer.config.get("out_features"))
        if made is not None and made != row.output_shape[0]:
            raise InputError(
                f"{origin}: layer {row.name} makes {made} features and {next_row.name} takes "
                f"{row.output_shape[0]}: the network has branches that the table does not tell"
            )
    return rows


def _profile(table: Table, rows: Sequence[_Row]) -> ModelProfile:
    units = [_end("input"), *(_unit(row) for row in rows), _end("output")]
    shapes = [*(row.layer.input_shape for row in rows), rows[-1].output_shape]
    edges = tuple(
        EdgeProfile(
            source=a.name,
            target=b.name,
            bytes_per_sample=FLOAT_BYTES * prod(shape),
            gradient_bytes_per_sample=0 if a.kind == "input" else FLOAT_BYTES * prod(shape),
            features=shape[0],
        )
        for (a, b), shape in zip(pairwise(units), shapes, strict=True)
    )
    structure = [(r.layer.kind, r.layer.config, r.layer.input_shape) for r in rows]
    return ModelProfile(
        target=table.model,
        model=hashlib.sha256(msgspec.json.encode(structure, order="sorted")).hexdigest()[:16],
        device=table.device,
        device_type="cuda",
        dtype=table.dtype,
        software=(("source", table.source),),
        batches=tuple(sorted(int(b) for b in rows[0].layer.time_us_by_batch)),
        units=tuple(units),
        edges=edges,
        origin="table",
    )


def _end(kind: UnitKind) -> UnitProfile:
    nothing = ShareProfile(
        style="none", degree=1, forward=ZERO, backward=ZERO, saved=ZERO, gradient=ZERO,
        workspace=ZERO, parameter_bytes=0,
    )  # fmt: skip
    return UnitProfile(name=kind, kind=kind, shares=(nothing,))


def _unit(row: _Row) -> UnitProfile:
    parameters = _parameters(row)
    splits = _splits(row, parameters)
    forward, backward = _seconds(row)
    saved, statistics = _saved_bytes(row)
    whole = ShareProfile(
        style="none",
        degree=1,
        forward=forward,
        backward=backward,
        saved=proportional(saved),
        gradient=proportional(row.input_bytes + row.output_bytes),
        workspace=proportional(row.output_bytes),
        parameter_bytes=sum(p.bytes for p in parameters),
    )
    return UnitProfile(
        name=row.name,
        kind=_KINDS.get(row.layer.kind, "other"),
        modules=(row.name,),
        batched_inputs=(0,),
        parameters=parameters,
        batch_statistics=statistics > 0,
        statistics_bytes=statistics,
        splits=splits,
        shares=(whole, *(_share(whole, row, s, m) for s in splits for m in DEGREES)),
    )


def _parameters(row: _Row) -> tuple[ParameterProfile, ...]:
    layer, config = row.layer, row.layer.config
    if not layer.param_count:
        return ()
    if layer.kind == "linear":
        weight: tuple[int, ...] = (config["out_features"], config["in_features"])
    elif layer.kind == "conv2d":
        kernel = config["kernel_size"]
        sides = tuple(kernel) if isinstance(kernel, list) else (kernel, kernel)
        weight = (config["out_channels"], config["in_channels"], *sides)
    else:
        weight = (layer.param_count,)
    shapes = {f"{row.name}.weight": weight}
    if layer.param_count > prod(weight):
        shapes[f"{row.name}.bias"] = (layer.param_count - prod(weight),)
    return tuple(
        ParameterProfile(name=name, shared=name, shape=shape, bytes=FLOAT_BYTES * prod(shape))
        for name, shape in shapes.items()
    )


def _splits(row: _Row, parameters: Sequence[ParameterProfile]) -> tuple[SplitProfile, ...]:
    if row.layer.kind not in _KINDS or row.layer.config.get("groups", 1) != 1:
        return ()
    rows, columns = parameters[0].shape[:2]
    return (
        SplitProfile(
            style="column", parts=rows, uneven=True, features=rows,
            sharded=tuple((p.shared, 0) for p in parameters),
        ),
        SplitProfile(
            style="row", parts=columns, uneven=True, features=columns,
            sharded=((parameters[0].shared, 1),),
        ),
    )  # fmt: skip


def _seconds(row: _Row) -> tuple[Curve, Curve]:
    """Forward and backward by batch size, the ReLU's with them."""
    forward, backward, batches = [], [], sorted(row.layer.time_us_by_batch, key=int)
    for batch in batches:
        times = row.layer.time_us_by_batch[batch]
        behind = row.relu.time_us_by_batch[batch] if row.relu else LayerTimes(0, 0)
        ahead = times.forward + behind.forward
        back = times.backward + behind.backward
        # The file has the backward of a convolution or linear layer in the row of the ReLU behind
        # it (it says so). One without a ReLU has less than a microsecond, which is none: twice its
        # forward is taken.
        if row.layer.kind in _KINDS and row.relu is None and back < 1:
            back = 2 * ahead
        forward.append(ahead * 1e-6)
        backward.append(back * 1e-6)
    sizes = tuple(float(b) for b in batches)
    return Curve(x=sizes, y=tuple(forward)), Curve(x=sizes, y=tuple(backward))


def _saved_bytes(row: _Row) -> tuple[float, int]:
    """Bytes per sample that a layer saves, and those of its batch statistics."""
    layer, config = row.layer, row.layer.config
    if layer.kind == "flatten":
        return 0.0, 0
    if layer.kind == "maxPool2d":
        return row.input_bytes + INDEX_BYTES * prod(row.output_shape), 0
    if layer.kind != "ResnetBottleneck":
        # An in-place ReLU needs its output, which is the next layer's input and is counted there.
        return float(row.input_bytes), 0
    # A bottleneck block saves the inputs of its convolutions and of its batch normalisations, and
    # each of these sums twice by channel. Its width as in torchvision.models.resnet.Bottleneck.
    width = int(config["planes"] * config["base_width"] / 64 * config["groups"])
    inside, outside = prod(layer.input_shape[1:]), prod(row.output_shape[1:])
    blocks = 2 if "downsampleParams" in config else 1
    narrow = 2 * FLOAT_BYTES * width * (inside + outside)
    channels = 2 * width + 4 * config["planes"] * blocks
    return row.input_bytes + narrow + blocks * row.output_bytes, int(2 * DOUBLE_BYTES * channels)


def _share(whole: ShareProfile, row: _Row, split: SplitProfile, degree: int) -> ShareProfile:
    taken, made = (1, degree) if split.style == "column" else (degree, 1)
    forward, backward = (
        Curve(x=c.x, y=tuple(max(v / degree, min(v, KERNEL_S)) for v in c.y))
        for c in (whole.forward, whole.backward)
    )
    return ShareProfile(
        style=split.style,
        degree=degree,
        forward=forward,
        backward=backward,
        saved=whole.saved.scaled(1 / taken),
        gradient=proportional(row.input_bytes / taken + row.output_bytes / made),
        workspace=proportional(row.output_bytes / made),
        parameter_bytes=-(-whole.parameter_bytes // degree),
    )
