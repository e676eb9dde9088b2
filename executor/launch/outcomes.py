"""What became of a background job, in sentences for people."""

from __future__ import annotations

from ..background.gate import Hold
from ..background.protocol import State

# A job that used less of a processor beside the foreground has hardly run.
HARDLY = 0.01
# Why it was held.
_TO = {
    Hold.LEARN: "to learn what steps take without it",
    Hold.LIMIT: "to keep the limit",
    Hold.GAP: "as the run left no gap",
    Hold.ELSE: "while the run did something else than steps",
}


def sentence(state: State, limit: float) -> str:
    """What the background has had and done beside the foreground."""
    ended = f", ended with {state.ended}" if state.ended else ""
    return f"background job {state.pid}{ended}: {_had(state)}; {_cost(state, limit)}"


def _had(state: State) -> str:
    beside = state.beside
    if not beside.seconds:
        return f"no step of a plan ran beside it; it used {state.cpu_s:.1f} s of CPU"
    shares = {why: beside.held_s.get(why, 0.0) / beside.seconds for why in _TO}
    held = [f"{share:.0%} {_TO[why]}" for why, share in shares.items() if share >= 0.005]
    return (
        f"in the {beside.seconds:.1f} s beside the run it was let run "
        f"{beside.open_s / beside.seconds:.0%} of the time ({state.priority}) and used "
        f"{beside.cpu_s:.1f} s of CPU; it was stopped {beside.stops} "
        + ("time" if beside.stops == 1 else "times")
        + (f", held {', '.join(held)}" if held else "")
    )


def _cost(state: State, limit: float) -> str:
    if not state.steps:
        return "the foreground made too few steps to tell what it cost"
    return (
        f"the foreground's steps took {state.slowdown:.2f} times their "
        f"{state.undisturbed_s:.3g} s without it (limit {limit:g})"
    )


def hardly_ran(state: State, limit: float) -> str | None:
    """Why a background job hardly ran beside the foreground, and what would let it run more; None
    where it ran, or has ended by itself."""
    beside = state.beside
    if state.ended or not beside.seconds or beside.cpu_s >= HARDLY * beside.seconds:
        return None
    used = f"the background hardly ran ({beside.cpu_s:.2f} s of CPU in {beside.seconds:.1f} s)"
    if beside.open_s >= HARDLY * beside.seconds or not beside.held_s:
        return (
            f"{used}, although it was let run: the processors had no time left for the lowest "
            "priority, or it waited for something itself; start fewer ranks or threads here, or "
            "look into its output"
        )
    reason = max(beside.held_s, key=lambda why: beside.held_s[why])
    return f"{used}: {_remedy(Hold(reason), limit)}"


def has_ended(state: State, log: str) -> str:
    """That a background job is over, and where it wrote."""
    return f"background job {state.pid} has ended with {state.ended}; its output is in {log}"


def _remedy(reason: Hold, limit: float) -> str:
    if reason is Hold.LEARN:
        return (
            "the run's first steps measure what a step takes without it, and few came after them; "
            "train for more steps"
        )
    if reason is Hold.LIMIT:
        return (
            f"beside it steps soon took more than {limit:g} times as long; allow more with "
            "--background-limit, or give a background that needs less memory bandwidth"
        )
    if reason is Hold.ELSE:
        return (
            "the run was mostly busy with something else than steps (an evaluation, a checkpoint), "
            "and is left alone in that; train for more steps"
        )
    return (
        "the ranks here hardly wait as long as 2 ms at a time; plan with --bursts --objective "
        "gpu-seconds to leave them idle for longer, or allow more with --background-limit "
        f"(now {limit:g})"
    )
