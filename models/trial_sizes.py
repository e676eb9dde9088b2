"""Sizes of batches at which a model is tried out: it may refuse some."""

from collections.abc import Callable, Iterable
from typing import TypeVar

# None of one sample: where normalisation sees one pixel it has no statistics.
SIZES = (2, 4, 8)
# To compare batches of several sizes, the third where two leave a doubt. Even ones for losses over
# pairs.
SEVERAL = ((2, 3, 5), (2, 4, 6), (4, 8, 12))

Size = TypeVar("Size")
Result = TypeVar("Result")


def first_taken(
    sizes: Iterable[Size], run: Callable[[Size], Result], refusal: type[Exception] = Exception
) -> Result:
    """What ``run`` returns for the first of ``sizes`` that it takes. Where it raises ``refusal``
    for all of them, that of the first is raised."""
    errors: list[Exception] = []
    for size in sizes:
        try:
            return run(size)
        except refusal as error:
            errors.append(error)
    raise errors[0]
