"""The names of the reference workloads, and what each name builds."""

import importlib.util
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial

from torch import nn

from ..workload import Workload
from . import gpt, hugging_face, seq2seq, vision
from .data import Pictures, image_workload

PUBLISHED = Pictures(channels=3, pixels=224, classes=1000)
THUMBNAILS = Pictures(channels=3, pixels=32, classes=10)
DIGITS = Pictures(channels=1, pixels=8, classes=10)

_IMAGE_MODELS: dict[str, tuple[Callable[[], nn.Module], Pictures]] = {
    "vgg11": (partial(vision.vgg, 11), PUBLISHED),
    "vgg16": (partial(vision.vgg, 16), PUBLISHED),
    "vgg19": (partial(vision.vgg, 19), PUBLISHED),
    "vgg11-32": (partial(vision.vgg_thumbnail, 11), THUMBNAILS),
    "vgg16-32": (partial(vision.vgg_thumbnail, 16), THUMBNAILS),
    "vgg19-32": (partial(vision.vgg_thumbnail, 19), THUMBNAILS),
    "vgg16-32-narrow": (partial(vision.narrow_vgg_thumbnail, 16), THUMBNAILS),
    "resnet50": (vision.resnet50, PUBLISHED),
    "resnet50-32": (vision.resnet50_thumbnail, THUMBNAILS),
    "wide_resnet101": (vision.wide_resnet101, PUBLISHED),
    "alexnet": (vision.alexnet, PUBLISHED),
    "mlp": (vision.mlp, DIGITS),
    "cnn-digits": (vision.cnn_digits, DIGITS),
}


def _image(name: str) -> Workload:
    make_model, pictures = _IMAGE_MODELS[name]
    return image_workload(name, make_model(), pictures)


_BUILDERS: dict[str, Callable[[str], Workload]] = {
    **dict.fromkeys(_IMAGE_MODELS, _image),
    **dict.fromkeys(seq2seq.SHAPES, seq2seq.workload),
    **dict.fromkeys(gpt.SHAPES, gpt.workload),
}


def names() -> tuple[str, ...]:
    """Every name that ``build`` takes here; those from transformers only where it is installed."""
    return (*_BUILDERS, *(hugging_face.BUILDERS if _has_transformers() else ()))


def is_known(name: str) -> bool:
    """Whether it is the name of a workload, whatever packages are here."""
    return name in _BUILDERS or name in hugging_face.BUILDERS


def build(name: str) -> Workload:
    """The workload of that name, its parameters drawn from torch's default generator.

    Built on the current default device, so ``with torch.device("meta")`` costs no memory.
    Raises ValueError for a name that is not known, or that needs a package that is missing.
    """
    if name in _BUILDERS:
        return _BUILDERS[name](name)
    if name not in hugging_face.BUILDERS:
        near = get_close_matches(name.lower(), names(), n=3)
        remedy = f"did you mean {', '.join(near)}?" if near else f"choose from {', '.join(names())}"
        raise ValueError(f"unknown workload {name!r}: {remedy}")
    if not _has_transformers():
        raise ValueError(
            f"workload {name!r} needs the package transformers: pip install 'meshwright[hf]'"
        )
    return hugging_face.BUILDERS[name](name)


def _has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None
