"""What an executor can run, as data: the planner plans only that unless asked for more."""

from typing import get_args

from .layout import Layout, Style
from .local_steps import LocalSteps
from .plan import (
    SHARDING,
    ExchangePolicy,
    FeedbackPolicy,
    MemoryPolicy,
    Plan,
    UnitPlan,
    WireFormat,
)
from .precision import is_scaled
from .profile import UnitProfile
from .record import Record


class Capability(Record, frozen=True, kw_only=True):
    """The executor's statement. ``idle_positions`` allows layouts smaller than the world,
    ``branches`` such layouts at other positions than the first, ``priority`` the schedule by
    priority. ``in_buckets`` are the exchange policies that the barrier has as well,
    ``idle_exchange`` those of units that leave ranks idle; ``idle_release`` says whether such units
    can have early release, ``by_host`` whether gradients are added up on each host before hosts
    exchange them, ``local_steps`` whether hosts can train apart."""

    styles: tuple[Style, ...]
    memory: tuple[MemoryPolicy, ...]
    exchange: tuple[ExchangePolicy, ...]
    idle_positions: bool
    early_release: bool
    micro_batches: bool
    priority: bool = False
    branches: bool = False
    in_buckets: tuple[ExchangePolicy, ...] = get_args(ExchangePolicy)
    feedback: tuple[FeedbackPolicy, ...] = ("residual",)
    wire: tuple[WireFormat, ...] = ("exact",)
    idle_exchange: tuple[ExchangePolicy, ...] = get_args(ExchangePolicy)
    idle_release: bool = True
    by_host: bool = False
    local_steps: bool = False

    def exchanges(self, *, sliced: bool) -> tuple[ExchangePolicy, ...]:
        """The exchange policies, with gradients in slices or in buckets."""
        return tuple(e for e in self.exchange if sliced or e in self.in_buckets)

    def allows(self, layout: Layout, world_size: int) -> bool:
        """Whether units may have that layout."""
        if layout.first and not self.branches:
            return False
        return self.idle_positions or layout.size == world_size

    def suits(
        self, layout: Layout, world_size: int, exchange: ExchangePolicy, early_release: bool
    ) -> bool:
        """Whether a unit of that layout may have that exchange of its gradients."""
        # A burst leaves ranks idle: an executor may have fewer policies there.
        if layout.size == world_size:
            return True
        return exchange in self.idle_exchange and (self.idle_release or not early_release)

    def refusal(self, unit: UnitPlan, world_size: int) -> str | None:
        """Why this unit's decision cannot be run, or None."""
        if not self.allows(unit.layout, world_size):
            what = "starts at another position" if unit.layout.first else "leaves ranks idle"
            return f"unit {unit.name!r} {what} (layout {unit.layout})"
        for what, value, known in (
            ("split style", unit.style, self.styles),
            ("memory policy", unit.memory, self.memory),
            ("exchange policy", unit.exchange, self.exchange),
            ("feedback", unit.feedback, self.feedback),
            ("wire format", unit.wire, self.wire),
        ):
            if value not in known:
                return f"unit {unit.name!r} asks for {what} {value!r}"
        if unit.rounded and unit.lossy:
            return (
                f"unit {unit.name!r} asks for exchange {unit.exchange!r} and wire format "
                f"{unit.wire!r} at once"
            )
        if not self.suits(unit.layout, world_size, unit.exchange, unit.early_release):
            released = unit.exchange in self.idle_exchange
            what = "early release" if released else f"exchange {unit.exchange!r}"
            return (
                f"unit {unit.name!r} leaves ranks idle (layout {unit.layout}) and asks for {what}"
            )
        if unit.early_release and not self.early_release:
            return f"unit {unit.name!r} asks for early release of its gradients"
        return self._refusal_by_host(unit, world_size) if unit.peers_per_host > 1 else None

    def _refusal_by_host(self, unit: UnitPlan, world_size: int) -> str | None:
        """Why this unit's gradients cannot be exchanged by host, or None."""
        asks = f"unit {unit.name!r} asks for an exchange by host"
        each, groups = unit.peers_per_host, unit.layout.groups
        if not self.by_host:
            return asks
        if unit.exchange != "dense" or unit.early_release:
            what = "early release" if unit.early_release else f"exchange {unit.exchange!r}"
            return f"{asks} and for {what} at once"
        if unit.layout.size < world_size:
            return f"{asks} and leaves ranks idle (layout {unit.layout})"
        if each >= groups:
            return f"{asks} with {each} of {groups} peers on each host"
        return None

    def refusals(self, plan: Plan) -> tuple[str, ...]:
        """Why a plan cannot be run, one reason for each unit that stands in the way."""
        reasons = [self.refusal(unit, plan.world_size) for unit in plan.units]
        if plan.schedule == "barrier":
            reasons += [
                f"unit {unit.name!r} asks for exchange policy {unit.exchange!r}, which needs the "
                "schedule by priority"
                for unit in plan.units
                if unit.exchange in self.exchange and unit.exchange not in self.in_buckets
            ]
        if plan.micro_batches > 1 and not self.micro_batches:
            reasons.append(f"the plan has {plan.micro_batches} micro-batches")
        if plan.schedule == "priority" and not self.priority:
            reasons.append("the plan exchanges gradients by priority")
        if plan.local_steps is not None:
            reasons.append(self._refusal_apart(plan, plan.local_steps))
        reasons.append(_offload_and_gathers(plan))
        return tuple(filter(None, reasons))

    def _refusal_apart(self, plan: Plan, local: LocalSteps) -> str | None:
        """Why hosts cannot train apart by a plan, or None."""
        if not self.local_steps:
            return "the plan has local steps"
        if is_scaled(plan.precision):
            return (
                f"the plan has local steps and precision {plan.precision}, under which hosts leave "
                "out different steps"
            )
        if plan.goal.batch_statistics == "global" and plan.units:
            return (
                "the plan has local steps and batch statistics 'global', which hosts do not share"
            )
        for unit in plan.units:
            asks = f"the plan has local steps, and unit {unit.name!r}"
            if unit.exchange in SHARDING:
                return f"{asks} asks for exchange {unit.exchange!r}"
            if unit.layout.size < plan.world_size:
                return f"{asks} leaves ranks idle (layout {unit.layout})"
            if unit.layout.groups % local.hosts:
                return f"{asks} is divided across {local.hosts} hosts (layout {unit.layout})"
            if unit.peers_per_host > 1:
                return f"{asks} asks for an exchange by host"
        return None


def _offload_and_gathers(plan: Plan) -> str | None:
    """That a plan offloads and has parameters in shards, where it does."""
    # Both look at all that a forward saves, and one hides it from the other.
    away = next((u.name for u in plan.units if u.memory == "offload"), None)
    gathered = next((u.name for u in plan.units if u.exchange == "fully_sharded"), None)
    if away is None or gathered is None:
        return None
    return (
        f"unit {away!r} asks for offload and unit {gathered!r} for exchange 'fully_sharded', which "
        "cannot be in one plan"
    )


# All that a decision can say: the bounds of a hypothetical plan. The cost model refuses by name
# what it does not know yet.
EVERYTHING = Capability(
    styles=get_args(Style),
    memory=get_args(MemoryPolicy),
    exchange=get_args(ExchangePolicy),
    idle_positions=True,
    early_release=True,
    micro_batches=True,
    priority=True,
    branches=True,
    feedback=get_args(FeedbackPolicy),
    wire=get_args(WireFormat),
    by_host=True,
    local_steps=True,
)

# What is planned when no executor has stated what it can run.
PLAIN = Capability(
    styles=get_args(Style),
    memory=("keep",),
    exchange=("dense",),
    idle_positions=False,
    early_release=False,
    micro_batches=True,
)


def degrees(unit: UnitProfile, style: Style, degree: int) -> bool:
    """Whether a unit's parameters can be divided by ``degree`` in that style."""
    if style == "none":
        return degree == 1
    split = unit.split(style)
    if split is None or degree < 2:
        return False
    # Uneven parts are cut into ceiling-sized runs: the last members may get less, or nothing.
    return degree <= split.parts if split.uneven else split.parts % degree == 0
