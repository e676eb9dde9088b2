"""What a lossy exchange holds, saved and loaded: it is a part of the state of training.

Gradients that were computed and not sent differ from rank to rank, so each rank saves its own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..planner.schema.errors import InputError
from .gradients.feedback import LossyGradGroup
from .gradients.priority import PriorityExchange
from .parallel import run_of


def exchange_state_dict(model: nn.Module) -> dict[str, Any]:
    """What this rank's exchange of gradients depends on beyond the state of model and optimizer:
    what it has computed and not sent, and what the ranks have agreed on for the next backward.

    Each rank saves its own, beside the model's. Take it between ``optimizer.step()`` and the next
    forward, on every rank; it sends nothing. Under a plan without lossy exchange it is almost
    empty.
    """
    run = run_of(model)
    state: dict[str, Any] = {"rank": run.world.rank, "world_size": run.world.size}
    if run.priority is not None:
        state |= state_of(run.priority)
    return state


def load_exchange_state_dict(model: nn.Module, state: dict[str, Any]) -> None:
    """Goes on from what ``exchange_state_dict`` gave on this rank, under the same plan.

    Raises ``InputError`` where it was another rank's, or of another number of ranks.
    """
    run = run_of(model)
    for what, saved, here in (
        ("rank", state.get("rank"), run.world.rank),
        ("world_size", state.get("world_size"), run.world.size),
    ):
        if saved != here:
            raise InputError(
                f"the exchange state was saved with {what} {saved}, this is {what} {here}: load "
                "on each rank what that rank saved, or train on without it"
            )
    if run.priority is not None:
        load_state(run.priority, state)


def state_of(exchange: PriorityExchange) -> dict[str, Any]:
    """What an exchange holds and has agreed on."""
    held: dict[str, Any] = {}
    for grad_group in exchange.grad_groups:
        if isinstance(grad_group, LossyGradGroup):
            held |= grad_group.state()
    return {"held": held, "policies": {p.name: p.state() for p in exchange.policies}}


def load_state(exchange: PriorityExchange, state: dict[str, Any]) -> None:
    """The same exchange goes on from there."""
    held, policies = state.get("held", {}), state.get("policies", {})
    lossy = [p for p in exchange.grad_groups if isinstance(p, LossyGradGroup)]
    names = {entry.name for grad_group in lossy for entry in grad_group.feedback}
    strange = next((name for name in held if name not in names), None)
    missing = next((p.name for p in exchange.policies if p.name not in policies), None)
    if strange is not None or missing is not None:
        what = (
            f"holds parts of {strange!r}" if strange is not None else f"says nothing of {missing!r}"
        )
        raise InputError(
            f"the exchange state {what}, unlike this plan: load it under the plan that saved it"
        )
    for grad_group in lossy:
        grad_group.load(held)
    for policy in exchange.policies:
        policy.load(policies[policy.name])
