"""RunReport: what a run was predicted to take, beside what it took."""

from .goal import BACKGROUND_LIMIT
from .plan import Prediction
from .record import Bytes, Count, Index, Record, Seconds, Share, Slowdown


class Figures(Record, frozen=True, kw_only=True):
    """What a step takes on the busiest rank. None: not measured (``peak_bytes`` of a script on a
    CPU, where nothing counts what is alive; ``reserved_bytes``, what torch's allocator took of a
    device for it, but on GPUs). ``exposed_s`` is gradient exchange that nothing hid,
    ``blocking_s`` redistribution and the collectives inside units. ``drawing_s`` is no part of the
    step: what the host takes between two of them to draw the next batch, known of workloads that
    are launched, while a GPU may still be at work; a rank that draws for less time waits for the
    others in its step. A predicted step lies between
    ``low_s`` and ``high_s`` nine times in ten."""

    step_s: Seconds
    blocking_s: Seconds | None = None
    exposed_s: Seconds | None = None
    drawing_s: Seconds | None = None
    peak_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    low_s: Seconds | None = None
    high_s: Seconds | None = None


class BackgroundFigures(Record, frozen=True, kw_only=True):
    """What a background job on this host has had when the foreground ended, and cost it.

    It was let run for ``open_share`` of the time and used ``cpu_s`` of processors. While the
    foreground made its steps, for ``during_steps_s``, these were ``during_steps_open_share`` and
    ``during_steps_cpu_s``; it was stopped ``stops`` times then, for ``stopped_shares`` of that
    time: to ``learn`` the steps' undisturbed time, to keep the ``limit``, for want of a ``gap``,
    and while the foreground did something ``else`` than steps. Over ``steps`` of the foreground,
    those included in which it was held, a step took ``slowdown`` times ``undisturbed_s``; up to
    ``limit`` times was allowed. ``ended`` says how it ended, if it had.
    """

    open_share: Share
    cpu_s: Seconds
    during_steps_s: Seconds
    during_steps_open_share: Share
    during_steps_cpu_s: Seconds
    stops: Index
    stopped_shares: dict[str, Share]
    steps: Index
    slowdown: float
    undisturbed_s: Seconds
    limit: Slowdown = BACKGROUND_LIMIT
    ended: str = ""


LEAST_STEPS = 5
"""A median of fewer is decided by one disturbance: of such it is not said what was expected."""


class RunReport(Record, frozen=True, kw_only=True):
    """A run's end: predicted, measured, and what data parallelism was predicted to take.

    ``loss`` of the last step and ``accuracy`` on test data (0 to 1) where the plan's own workload
    was trained and has some.
    """

    target: str
    world_size: Count
    steps: Count
    predicted: Figures
    measured: Figures
    data_parallel: Figures
    loss: float | None = None
    accuracy: float | None = None
    background: BackgroundFigures | None = None

    @property
    def surprising(self) -> bool:
        """Whether the measured step is outside of the predicted interval."""
        low, high = self.predicted.low_s, self.predicted.high_s
        # Beside a background job, steps are longer on purpose; and one or two may be anything.
        if low is None or high is None or self.background is not None or self.steps < LEAST_STEPS:
            return False
        return not low <= self.measured.step_s <= high


def predicted_figures(prediction: Prediction) -> Figures:
    """A prediction's figures as far as they are measured too."""
    return Figures(
        step_s=prediction.step_s,
        blocking_s=prediction.blocking_s,
        exposed_s=prediction.exposed_s,
        peak_bytes=max(prediction.peak_bytes, default=0),
        reserved_bytes=max(prediction.reserved_bytes, default=None),
        low_s=prediction.low_s,
        high_s=prediction.high_s,
    )
