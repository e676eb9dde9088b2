"""Settings of all tests.

Examples are the same in every run, so that a red run is the work of the change at hand;
``HYPOTHESIS_PROFILE=search`` draws others, as ``make test-long`` does.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from meshwright.planner.schema.cache import CACHE_VARIABLE

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


# Nearly all take less than a minute.
VERY_LONG_S = 1000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several work at once, what may take very long begins first: at the end it would be
    waited for alone."""

    def begins_first(item: pytest.Item) -> bool:
        limit = item.get_closest_marker("timeout")
        return limit is not None and limit.args[0] > VERY_LONG_S

    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: not begins_first(item))


def pytest_collection_finish() -> None:
    """What has been imported stays: looking through it for garbage, over and over, took 6% of the
    tests' time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where tests keep what they measure, not in the user's cache: ranks on this machine have the
    same links in every test, and those that want them measured anew name a folder of their own."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all that work at once
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "measurements"))
        yield folder / "measurements"
