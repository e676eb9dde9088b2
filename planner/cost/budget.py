"""What a plan may use beyond memory: device-seconds, and gradient energy left for later steps.

Device-seconds are DeepPool's measure (Park et al., arXiv 2112.10065): a step keeps all devices for
its time, less those that a burst leaves idle while its units compute. All of it is additive over
units, given the seconds of the step.
"""

from collections.abc import Sequence

from ..schema.layout import Layout
from ..schema.options import Option
from ..schema.profile import ModelProfile
from .compute import backward_s, forward_s
from .cost import CostModel

# Rounding to bfloat16's eight significant bits moves a number by at most 2⁻⁹ of itself, whatever
# the model: a bound that needs no measuring.
ROUNDED_AWAY = 2.0**-18


def unit_s(model: CostModel, k: int, option: Option) -> float:
    """Seconds of a step in which unit ``k`` computes."""
    cost = model.unit(k, option)
    return model.micro_batches * (cost.forward_s + cost.backward_s) + cost.update_s


def idle_s(model: CostModel, k: int, option: Option) -> float:
    """Device-seconds of a step that unit ``k`` leaves to others."""
    return (model.world_size - option.layout.size) * unit_s(model, k, option)


def gpu_seconds(model: CostModel, decisions: Sequence[Option], step_s: float) -> float:
    """Device-seconds of a step of ``step_s`` seconds."""
    idle = sum(idle_s(model, k, option) for k, option in enumerate(decisions))
    return max(step_s * model.world_size - idle, 0.0)


def profile_of_one(model: CostModel) -> ModelProfile:
    """The profile on the device that is meant by one device: the cluster's, or where these are
    unequal the one that was profiled."""
    return model.kinds[0].profile if len(model.kinds) == 1 else model.profile


def single_device_s(model: CostModel, k: int) -> float:
    """Seconds that one device would take for unit ``k`` and the whole batch at once."""
    profile, batch = profile_of_one(model), model.goal.batch
    unit = profile.units[k]
    trained = sum(p.bytes for p in model.owned[k] if p.trainable)
    update = trained * profile.update_seconds_per_byte(model.goal.optimizer)
    return forward_s(unit, "none", 1, batch) + backward_s(unit, "none", 1, batch) + update


def single_device_batch_s(model: CostModel) -> float:
    """Seconds that one device would take for the whole batch: what amplification counts in."""
    units = range(len(model.profile.units))
    computing_s = sum(single_device_s(model, k) for k in units)
    # Its host issues the same operators, without what the executor adds.
    return max(computing_s, sum(model.alone_host_s(k) for k in units))


def gpu_seconds_limit(model: CostModel) -> float:
    """Device-seconds that a step may use, infinite without a limit."""
    limit = model.goal.amplification_limit
    if limit is None:
        return float("inf")
    return limit * single_device_batch_s(model)


def within_unit_limit(model: CostModel, k: int, option: Option) -> bool:
    """Whether a unit keeps the goal's limit on its own amplification."""
    limit = model.goal.unit_amplification_limit
    # The measure is what one device takes, so a unit on one device keeps every limit.
    if limit is None or option.layout == Layout(groups=1):
        return True
    # A unit that stands exactly at the limit must not fail it by rounding.
    return unit_amplification(model, k, option) <= limit * (1 + 1e-12)


def unit_amplification(model: CostModel, k: int, option: Option) -> float:
    """A unit's own time times its devices, as a multiple of what one device takes; what exchanges
    and collectives it waits for counts as its time."""
    # Nothing can be decided of a fixed unit, so no limit is held against it.
    if model.profile.units[k].fixed:
        return 0.0
    cost, times = model.unit(k, option), model.micro_batches
    inner = cost.inner_forward.seconds + cost.inner_backward.seconds
    took = times * (cost.forward_s + cost.backward_s + inner) + cost.update_s
    took += cost.exchange.seconds + cost.released.seconds
    used, single_s = took * option.layout.size, single_device_s(model, k)
    if single_s == 0:
        return 0.0 if used == 0 else float("inf")
    return used / single_s


def lost_energy(model: CostModel, k: int, option: Option) -> float:
    """The share of the whole gradient's energy that unit ``k`` does not send at once."""
    if option.rounded:
        return ROUNDED_AWAY * model.energy_shares[k]
    if not option.lossy:
        return 0.0
    kept = model.profile.units[k].kept(option.exchange, option.ratio)
    assert kept is not None, "refused where it was not measured"
    return (1.0 - kept) * model.energy_shares[k]


def energy_budget(model: CostModel) -> float:
    """The share of the gradient's energy that a plan may leave for later steps."""
    return 1.0 - model.goal.min_fidelity if model.goal.allow_lossy else 0.0


def overdrawn(model: CostModel, decisions: Sequence[Option], step_s: float) -> float:
    """By what share a plan goes over its limits on device-seconds, fidelity and time, added up."""
    over, limit = 0.0, gpu_seconds_limit(model)
    if limit < float("inf"):
        # Units that take no time may use none.
        over += max(gpu_seconds(model, decisions, step_s) / max(limit, 1e-300) - 1.0, 0.0)
    if model.goal.undisturbed_limit_s is not None:
        over += max(step_s / model.goal.undisturbed_limit_s - 1.0, 0.0)
    if model.goal.allow_lossy:
        lost = sum(lost_energy(model, k, option) for k, option in enumerate(decisions))
        over += max(lost - energy_budget(model), 0.0)
    return over


def permitted(model: CostModel, decisions: Sequence[Option]) -> bool:
    """Whether the limit on each unit and the pins are kept."""
    # They may leave a unit nothing: it then stands as it is under data parallelism.
    return all(
        model.goal.permits(unit.name, option.layout, option.style)
        and within_unit_limit(model, k, option)
        for k, (unit, option) in enumerate(zip(model.profile.units, decisions, strict=True))
    )
