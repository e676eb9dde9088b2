"""A goal that cannot be is refused where it is made, by Python as by the command line."""

import pytest
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"batch": 0}, "batch of 0"),
        ({"batch": -3}, "batch of -3"),
        ({"batch": "32"}, "batch of '32'"),
        ({"memory_limit_bytes": -1}, "memory limit of -1"),
        ({"micro_batches": ()}, "such as 1"),
        ({"micro_batches": (0,)}, "micro-batches of 0"),
        ({"slice_bytes": (0,)}, "slice size of 0"),
        ({"optimizer": "adm"}, "unknown optimizer 'adm': choose from sgd"),
        ({"batch_statistics": "all"}, "unknown batch statistics 'all': choose from local"),
        ({"objective": "money"}, "unknown objective 'money': choose from time"),
        ({"allow_lossy": True, "min_fidelity": 2.0}, "fidelity of 2 is no share"),
    ],
)
def test_what_cannot_be_is_told_with_a_remedy(given, says):
    with pytest.raises(InputError) as told:
        Goal(**{"batch": 8, **given})
    assert says in str(told.value)
