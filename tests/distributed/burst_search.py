"""Plans whose units take a part of the ranks, drawn at random."""

from __future__ import annotations

from collections.abc import Callable

from burst_strategies import trials
from burst_trials import Trial
from hypothesis import HealthCheck, Phase, given, seed, settings

DRAWN = 5
"""So many times as many trials are drawn as plans are tried: hypothesis likes to change what it has
drawn a little, and often in something else than the plan."""
EXAMPLE_S = 90.0
"""No trial may take longer, however busy the machine."""


def search(world: int, plans: int, start: int, attempt: Callable[[Trial], None]) -> None:
    """Tries so many different plans for that many ranks, drawn from that seed, or until one fails,
    which is then made small."""
    tried: set[str] = set()
    failing = False

    @seed(start)
    @settings(
        max_examples=DRAWN * plans,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=tuple(HealthCheck),
        database=None,
        deadline=None,
    )
    @given(trials(world))
    def holds(trial: Trial) -> None:
        nonlocal failing
        key = str(trial.plan)
        if not failing and (key in tried or len(tried) == plans):
            return
        tried.add(key)
        try:
            attempt(trial)
        except AssertionError:
            failing = True
            raise

    holds()
    assert len(tried) == plans, f"only {len(tried)} different plans were drawn"
