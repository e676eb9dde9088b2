"""The order of ranks that a Cluster can describe."""

import pytest
from meshwright.planner.schema.errors import InputError
from meshwright.profiler.links import _check_order


def test_ranks_that_alternate_between_hosts_are_refused():
    _check_order(["a", "a", "b", "b"])
    with pytest.raises(InputError, match="alternate between hosts"):
        _check_order(["a", "b", "a", "b"])
