"""What the device-seconds of a step are made of, beside what one device would take by itself.

Their ratio is DeepPool's amplification (Park et al., arXiv 2112.10065). One device is taken to
compute the whole batch and update once: no executor, nothing to wait for. A step on W devices keeps
all of them for its time, less those that a burst leaves idle while its units compute, so that

    used = alone + smaller shares + updates + executor + slowing + waiting

where every part but the first is what the division costs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.budget import single_device_s, unit_s
from ..cost.cost import CostModel
from ..schema.options import Option
from ..schema.record import Record, Seconds
from ..solve.evaluate import Evaluation


class DeviceTime(Record, frozen=True, kw_only=True):
    """Device-seconds of a step. ``used_s`` is their sum; ``alone_s`` is one device's time for the
    whole batch, and the others come on top, or are saved where they are negative:

    ``shares_s``    units at smaller shares of the batch (a kernel's fixed cost is paid on each
                    device), divided, or run again
    ``updates_s``   the update on every device that holds a parameter
    ``executor_s``  the executor's own work, as the probe measured it
    ``slowing_s``   computing beside communication, where each slows the other
    ``waiting_s``   redistribution, collectives inside units, exposed gradient exchange
    """

    used_s: Seconds
    alone_s: Seconds
    shares_s: float
    updates_s: float
    executor_s: Seconds
    slowing_s: float
    waiting_s: float

    @property
    def amplification(self) -> float:
        """Device-seconds as a multiple of what one device takes."""
        return self.used_s / self.alone_s if self.alone_s else 0.0


def device_time(done: Evaluation) -> DeviceTime:
    """The parts of what an evaluated plan uses."""
    model, decisions = done.model, done.decisions
    units = range(len(decisions))
    sizes = [option.layout.size for option in decisions]
    computing_s = sum(sizes[k] * unit_s(model, k, decisions[k]) for k in units)
    executor_s = sum(sizes[k] * model.micro_batches * own_s(model, k, decisions) for k in units)
    updates_s = sum(sizes[k] * model.unit(k, decisions[k]).update_s for k in units)
    alone_s, once_s = sum(single_device_s(model, k) for k in units), _updates_alone_s(model)
    busy_s = sum(unit_s(model, k, decisions[k]) for k in units)
    # With branches side by side the step is a critical path, on which the units of a rank do not
    # add up: what is slowed by communication is then counted as waiting.
    branches = any(option.layout.first for option in decisions)
    slowed_s = 0.0 if branches else done.prediction.compute_s - busy_s
    slowing_s = model.world_size * max(slowed_s, 0.0)
    return DeviceTime(
        used_s=done.prediction.gpu_seconds,
        alone_s=alone_s,
        shares_s=computing_s - executor_s - updates_s - (alone_s - once_s),
        updates_s=updates_s - once_s,
        executor_s=executor_s,
        slowing_s=slowing_s,
        waiting_s=done.prediction.gpu_seconds - computing_s - slowing_s,
    )


def own_s(model: CostModel, k: int, decisions: Sequence[Option]) -> float:
    """The executor's own seconds in one backward of unit ``k``."""
    option = decisions[k]
    sent = model.unit(k, option).trained_bytes if option.layout.groups > 1 else 0
    return model.overhead_s(k, sent)


def _updates_alone_s(model: CostModel) -> float:
    trained = sum(p.bytes for owned in model.owned for p in owned if p.trainable)
    return trained * model.profile.update_seconds_per_byte(model.goal.optimizer)
