"""Precision: the types in which a model's numbers are held and computed."""

from typing import Literal, NamedTuple, get_args

from .errors import InputError

Precision = Literal["float32", "tf32", "bf16", "bf16-mixed", "fp16-mixed"]
"""How a model computes. Where none is given: as it was built and as torch is set.

``float32``: in full float32. ``tf32``: the same with matrix products in TensorFloat-32, where the
device has it. ``bf16``: parameters, feature maps and gradients in bfloat16. ``bf16-mixed``:
float32 parameters under ``torch.autocast`` to bfloat16. ``fp16-mixed``: the same to float16, with a
scaled loss (``torch.amp.GradScaler``), as small gradients would vanish.
"""


class PrecisionTraits(NamedTuple):
    """``parameters`` is the type that floating parameters and inputs are made into, ``autocast``
    the type that operations are cast to (none: no autocast), both by their names in torch; ``tf32``
    whether matrix products may be TF32; ``scaled`` whether the loss is scaled."""

    parameters: str
    autocast: str | None = None
    tf32: bool | None = None
    scaled: bool = False


PRECISIONS: dict[Precision, PrecisionTraits] = {
    "float32": PrecisionTraits("float32", tf32=False),
    "tf32": PrecisionTraits("float32", tf32=True),
    "bf16": PrecisionTraits("bfloat16"),
    "bf16-mixed": PrecisionTraits("float32", autocast="bfloat16"),
    "fp16-mixed": PrecisionTraits("float32", autocast="float16", scaled=True),
}


def is_scaled(precision: Precision | None) -> bool:
    """Whether the loss is scaled: then no update is made before all gradients are known to be
    finite, and none is sent in part, as what waits would have been scaled by another factor."""
    return precision is not None and PRECISIONS[precision].scaled


def check_precision(name: str | None) -> Precision | None:
    """The precision of that name; ``InputError`` where there is none."""
    if name is None:
        return None
    if name not in PRECISIONS:
        raise InputError(f"precision {name!r} is not known: choose from {', '.join(PRECISIONS)}")
    return name


assert set(PRECISIONS) == set(get_args(Precision))
