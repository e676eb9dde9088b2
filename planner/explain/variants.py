"""A plan with another exchange of gradients, for comparing policies on the same layouts."""

from __future__ import annotations

import msgspec

from ..schema.plan import ExchangePolicy, Plan


def with_exchange(plan: Plan, policy: ExchangePolicy) -> Plan:
    """The plan by priority with every unit's exchange under ``policy``. Its prediction stays that
    of the plan that it was made from."""
    units = tuple(
        msgspec.structs.replace(u, exchange=policy, feedback="residual") for u in plan.units
    )
    return msgspec.structs.replace(plan, schedule="priority", units=units)
