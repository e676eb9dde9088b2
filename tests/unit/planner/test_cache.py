"""The documents kept on disk, where the disk lets one."""

from pathlib import Path

import pytest
from meshwright.planner.schema import cache
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.errors import InputError

from tests.strategies import cluster


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), RuntimeError("no home")]
)
def test_a_cache_that_cannot_be_read_has_nothing(monkeypatch, tmp_path, error):
    """As a folder of another user's has, or none where nobody has a home."""
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path))
    kept = cluster(2)
    cache.put(kept, "mine")
    assert cache.get(Cluster, "mine") == kept

    def fails(*_):
        raise error

    monkeypatch.setattr(Path, "exists", fails)
    assert cache.get(Cluster, "mine") is None
    with pytest.raises(InputError, match="is not on this machine: name its file with --cluster"):
        cache.get_named(Cluster, "mine", "--cluster")
    monkeypatch.delenv(cache.CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fails)
    assert cache.get(Cluster, "mine") is None
    cache.put(kept, "mine")
