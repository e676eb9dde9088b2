"""What a model is told that asks its tensors for a truth on the meta device, where they have no
values."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary  # by identity: tensors compare element by element

_ALL, _ANY = (torch.all, Tensor.all), (torch.any, Tensor.any)
_EQUAL = (torch.eq, Tensor.eq, Tensor.__eq__)
_SUM = (torch.sum, Tensor.sum)
_ASKED = (Tensor.__bool__, Tensor.item)


class UsualAnswers(TorchFunctionMode):
    """Whether *all* is so and whether *any* is: yes and no, as such questions are asked about what
    mostly is (no padding in a mask, one sequence in a row, a number that is finite).

    Other questions are refused by torch. An answer that is wrong for a model's own batches costs
    an estimate some accuracy, not more.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: Any = WeakIdKeyDictionary()
        self._summed: Any = WeakIdKeyDictionary()
        """How many elements a sum has added up."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        if first is not None and func in _ASKED and first in self._answers:
            return self._answers[first]
        made = func(*args, **(kwargs or {}))
        if first is None or not isinstance(made, Tensor) or made.ndim:
            return made
        if func in _ALL or func in _ANY:
            self._answers[made] = func in _ALL
        elif func in _SUM:
            self._summed[made] = first.numel()
        elif func in _EQUAL and first in self._summed and args[1] == self._summed[first]:
            self._answers[made] = True  # all, in the words of transformers
        return made
