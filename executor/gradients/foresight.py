"""Which gradients a backward will compute, told while it begins.

Where peers wait in their backward for what this rank has to send, what it will not compute must
not be left for the end of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn


def left_out(parameters: Collection[nn.Parameter]) -> set[nn.Parameter]:
    """Those of the parameters that the backward which is going on will not add a gradient to. None
    where it adds to none at all, as ``torch.autograd.grad`` does."""
    try:
        found = {parameter for parameter in parameters if not _will_come(parameter)}
    except RuntimeError:  # one of them is what torch.autograd.grad was asked for
        return set()
    return set() if len(found) == len(parameters) else found


def _will_come(parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        made = parameter.view_as(parameter).grad_fn
        assert made is not None
        node: Any = made.next_functions[0][0]  # the same one for as long as any graph has it
    return bool(torch._C._will_engine_execute_node(node))
