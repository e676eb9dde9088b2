"""What groups that run at once share, and the order of ranks that a Cluster can describe."""

import pytest
from meshwright.planner.schema.errors import InputError
from meshwright.profiler.links import _check_order, sharing

HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("sets", "load"),
    [
        ([(0, 1), (2, 3)], 1),  # inside hosts: no interface is used
        ([(0, 1, 2, 3)], 1),  # one ring crosses each interface once
        ([(0, 2), (1, 3)], 2),  # both rings cross both interfaces
    ],
)
def test_rings_over_one_interface_are_counted(sets, load):
    assert sharing(sets, HOSTS) == load


def test_ranks_that_alternate_between_hosts_are_refused():
    _check_order(HOSTS)
    with pytest.raises(InputError, match="alternate between hosts"):
        _check_order(["a", "b", "a", "b"])
