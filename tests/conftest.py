"""Settings of all tests.

Examples are the same in every run, so that a red run is the work of the change at hand;
``HYPOTHESIS_PROFILE=search`` draws others, as ``make test-long`` does.
"""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
