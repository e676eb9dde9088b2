"""What shares a cluster: foreground jobs under their plans, and background jobs of one device.

A foreground is told by one step, as each kind of device sees it (``solve/device_timelines``).

A background is another training that needs one device and no network. It has the largest batch that
serves it best among those measured, as far as it fits in the memory that foregrounds leave.
"""

from typing import Annotated, NamedTuple

import msgspec

from ..cost.cost import CostModel
from ..cost.device_kinds import slowed
from ..schema.cluster import Cluster, Device, Node
from ..schema.errors import InputError
from ..schema.goal import Goal
from ..schema.options import Decisions
from ..schema.plan import ScheduleName
from ..schema.profile import ModelProfile
from ..schema.record import Positive, Record, Seconds, Share
from ..simulate.spread import slowest_of
from ..solve.device_timelines import StepTimelines, timelines
from ..solve.evaluate import evaluate

# Of batches whose rates differ by less the smallest is taken: it leaves more memory.
NEAR = 0.01

# -- jobs ------------------------------------------------------------------------------------------

Slowdown = Annotated[float, msgspec.Meta(ge=1)]


class Assumptions(Record, frozen=True, kw_only=True):
    """What sharing a device is taken to cost; none of it was measured here.

    ``slowdown`` is how much longer everything that a foreground computes takes on devices that are
    shared, as if a kernel of the background were always in flight. A background runs in pieces of
    ``piece_s`` of its own time, none of which starts that would not end before the foreground needs
    the device (the plan tells when): of each gap ``switch_s`` is lost, and what is left after the
    last whole piece. In a gap it has the share ``idle_speed`` of the speed it has alone, all of it
    on devices on which no foreground ever computes, and ``communicating_speed`` while its device
    takes part in a foreground's communication, whose kernels take some of the multiprocessors.
    """

    slowdown: Slowdown = 1.05
    piece_s: Positive = 200e-6
    switch_s: Seconds = 20e-6
    idle_speed: Share = 0.95
    communicating_speed: Share = 0.75


class ForegroundJob(NamedTuple):
    """A job under a plan: its step by kinds of devices, on devices of its own (``unshared``) and
    with a background on them (``shared``: its computing slowed), its global ``batch``, and what
    data parallelism reaches by itself (samples/s, 0 where not known). Jobs of higher ``priority``
    get devices first, then those that came earlier; one without a number of ``steps`` runs to the
    end."""

    name: str
    batch: int
    unshared: StepTimelines
    shared: StepTimelines
    data_parallel_samples_s: float = 0.0
    priority: int = 0
    arrival_s: float = 0.0
    steps: int | None = None

    @property
    def devices(self) -> int:
        return self.unshared.devices


class BackgroundJob(NamedTuple):
    """A job of one device: ``batch`` samples in ``step_s`` alone, holding ``peak_bytes``. It runs
    on ``copies`` devices, or wherever there is room; of higher ``priority`` first."""

    name: str
    batch: int
    step_s: float
    peak_bytes: int = 0
    copies: int | None = None
    priority: int = 0

    @property
    def samples_per_s(self) -> float:
        """What one device reaches alone."""
        return self.batch / self.step_s


def shared_device_model(model: CostModel, slowdown: float) -> CostModel:
    """The cost model of the same job on devices that it shares."""
    return model.with_profile(slowed(model.profile, slowdown))


def foreground(
    name: str, model: CostModel, decisions: Decisions, schedule: ScheduleName, slowdown: float
) -> ForegroundJob:
    """The job of decisions under a cost model."""
    # As a prediction waits for the slowest rank, the baseline that this is divided by among them.
    slowest = slowest_of(model.world_size, model.profile.spread)
    unshared = shared = timelines(model, decisions, schedule, slowest=slowest)
    if slowdown != 1.0:
        slow = shared_device_model(model, slowdown)
        shared = timelines(slow, decisions, schedule, slowest=slowest)
    return ForegroundJob(name, model.goal.batch, unshared, shared)


def best_background(
    profile: ModelProfile, device: Device, optimizer: str = "sgd", foreground_bytes: int = 0
) -> BackgroundJob:
    """The background that trains ``profile``'s model on one ``device``, of whose memory
    ``foreground_bytes`` are the foreground's. Raises ``InputError`` where not even the smallest
    batch fits."""
    cluster = Cluster(name="one device", nodes=(Node(name="node", devices=(device,)),), levels=())
    left, made = device.usable_bytes - foreground_bytes, []
    # Its step is predicted, not measured: by the same cost model as that of the foreground, so that
    # the two are compared without the difference between a prediction and a measurement.
    for batch in profile.batches:
        found = evaluate(profile, cluster, Goal(batch=batch, optimizer=optimizer))  # type: ignore[arg-type]
        if found.step_s > 0:
            made.append(BackgroundJob(profile.target, batch, found.step_s, found.peak_bytes[0]))
    fitting = [each for each in made if each.peak_bytes <= left]
    if not fitting:
        least = min((each.peak_bytes for each in made), default=0)
        raise InputError(
            f"a background of {profile.target} needs {least:,} bytes beside the foreground and "
            f"{max(left, 0):,} are left on {device.name}: choose a smaller model or leave it out"
        )
    best = max(each.samples_per_s for each in fitting)
    return next(each for each in fitting if each.samples_per_s >= best * (1 - NEAR))
