"""Layers that a forward leaves out by chance: layer drop (Fan et al., Reducing Transformer Depth on
Demand with Structured Dropout, ICLR 2020).

A rate is found by its name, at a module or in the configuration that the module keeps:
``layerdrop``, as most who do it call it. While a model is looked at and measured every layer runs.
Layers in a list below such a rate are not divided: each rank draws for itself, and a member of a
group would wait for one that has left the layer out.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

RATE = "layerdrop"


def layer_drop_rates(model: nn.Module) -> Iterator[tuple[nn.Module, object, str]]:
    """Modules with such a rate above zero, what holds it (the module or its ``config``), and its
    name there."""
    for module in model.modules():
        for holder in (module, vars(module).get("config")):
            for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                rate = isinstance(value, int | float) and not isinstance(value, bool)
                if rate and value > 0 and RATE in name.lower().replace("_", ""):
                    yield module, holder, name


@contextmanager
def every_layer(model: nn.Module) -> Iterator[None]:
    """A context in which no layer is left out."""
    rates = {
        (id(holder), name): (holder, name, getattr(holder, name))
        for _, holder, name in list(layer_drop_rates(model))
    }
    try:
        for holder, name, _ in rates.values():
            setattr(holder, name, 0.0)
        yield
    finally:
        for holder, name, rate in rates.values():
            setattr(holder, name, rate)


def may_be_left_out(model: nn.Module) -> set[str]:
    """The names of modules that a forward may leave out: those in lists below such a rate."""
    dropping = {module for module, _, _ in layer_drop_rates(model)}
    below = {id(inner) for module in dropping for inner in module.modules()}
    return {
        f"{name}.{child}" if name else child
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and id(module) in below
        for child, _ in module.named_children()
    }
