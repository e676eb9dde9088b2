"""Image classifiers of timm (the smallest of each family) and of torchvision, with random weights
and as small images as they take; nothing is downloaded."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from meshwright import Batch, Workload
from torch import nn
from zoo_models import CLASSES, loss, try_training

TIMM, TORCHVISION = "timm", "torchvision"
# Images from small to large; the last is what the models were made for.
SIDES = (64, 96, 128, 224, 299)
# What their sides are called where a model is made for one.
SIZED = ("img_size", "image_size", "input_size")


def vision_models() -> list[str]:
    """``timm/FAMILY`` and ``torchvision/MODEL``, of what is installed."""
    if not (find_spec(TIMM) and find_spec(TORCHVISION)):
        return []
    models = _torchvision_models()
    import timm

    found = [f"{TIMM}/{family}" for family in timm.list_modules()]
    return [*found, *(f"{TORCHVISION}/{name}" for name in models.list_models(module=models))]


def from_vision(name: str, most: int) -> Workload:
    """The model of that name, on the smallest images on which it trains. Raises what the last try
    raised where it trains on none, and where it has more than ``most`` parameters."""
    package, _, of = name.partition("/")
    if package == TIMM:
        build = partial(_timm_model, _smallest(of))
    else:
        build = partial(_torchvision_models().get_model, of)
    if name in _FOUND:
        return _workload(name, build, *_FOUND[name])
    if most < (count := _count(build)) < math.inf:
        raise ValueError(f"{count} parameters: {most} at most are run here")
    error: Exception | None = None
    for sized, side in _ways():
        try:
            try_training(_workload(name, build, sized, side))
        except Exception as raised:  # whatever a model raises on images of another size
            error = raised
        else:
            _FOUND[name] = sized, side
            return from_vision(name, most)
    assert error is not None
    raise error


_FOUND: dict[str, tuple[dict[str, Any], int]] = {}


def _ways() -> Iterator[tuple[dict[str, Any], int]]:
    """Arguments of a model's constructor, and the side of the images that it then gets."""
    for side in SIDES:
        for given in (side, (side, side)):
            yield from (({name: given}, side) for name in SIZED)
        yield {}, side


def _workload(name: str, build: Callable[..., nn.Module], sized: dict[str, Any], side: int) -> Any:
    torch.manual_seed(0)
    model = build(num_classes=CLASSES, **sized)
    return Workload(name.replace("/", "-"), model, partial(_images, side), loss)


def _images(side: int, n: int) -> Batch:
    return Batch((torch.randn(n, 3, side, side),), torch.randint(CLASSES, (n,)))


def _timm_model(name: str, **sizes: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name, **sizes)
    return model


@cache
def _smallest(family: str) -> str:
    """The model of a family that has the fewest parameters."""
    import timm

    names = sorted(timm.list_models(module=family))
    return min(names, key=lambda name: _count(partial(timm.create_model, name)))


def _count(build: Callable[..., nn.Module]) -> float:
    """The parameters of a model, made without memory for them."""
    with suppress(Exception), torch.device("meta"):
        return sum(p.numel() for p in build().parameters())
    return math.inf  # it computes with what it makes


@cache
def _torchvision_models() -> Any:
    """torchvision's classifiers. Beside a CPU build of torch, its packages for CUDA cannot load
    their own operators; no classifier has one, but the import wants two of them declared."""
    try:
        import torchvision
    except RuntimeError:
        for operator in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{operator}", schema)
        import torchvision
    return torchvision.models
