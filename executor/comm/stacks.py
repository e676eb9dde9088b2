"""The sentence that says where every rank is, when one waits no longer, and what to look at."""

from __future__ import annotations

from .heartbeat import Heard, Heartbeat

ENDED = "has ended"
"""How the place of a rank begins whose process has ended."""
TIMEOUT_VARIABLE = "MESHWRIGHT_TIMEOUT_S"
LISTED = 8
"""So many other ranks are named in a sentence; the rest are counted."""


def where_all_are(
    pulse: Heartbeat, doing: str, heard: list[Heard] | None, failure: str = ""
) -> str:
    """This rank waits in ``doing``; where the others are, by what was ``heard`` of them (None: the
    store does not answer). ``failure`` is what the collective ended with, if it did."""
    lost = f" and lost the connection to another rank ({failure})" if failure else ""
    start = f"{pulse.name(pulse.rank)} waits in {doing}{lost}; "
    others = [r for r in range(pulse.size) if r != pulse.rank]
    if heard is None:
        gone = "the launcher or rank 0, whichever keeps it, has ended or stalled"
        if not pulse.one_host:
            gone = "the link or the host between them is gone"
        return start + (
            "the process group's store does not answer, so nothing is heard of "
            f"{_listed([pulse.name(r) for r in others])}: {gone}"
        )
    silent = [r for r in others if not is_present(heard[r]) and not _ended(heard[r])]
    shown = (silent + [r for r in others if r not in silent])[:LISTED]
    places = [f"{pulse.name(r)} {_place(heard[r])}" for r in shown]
    if len(others) > len(shown):
        places.append(f"{len(others) - len(shown)} more ranks are not listed")
    failed = bool(failure) and not any(_ended(heard[r]) for r in others)
    remedy = _remedy(silent=bool(silent), failed=failed, one_host=pulse.one_host)
    return f"{start}{'; '.join(places)}: {remedy}"


def is_present(heard: Heard) -> bool:
    """Whether a rank lives and has not said goodbye."""
    return heard.alive and not _ended(heard)


def _remedy(*, silent: bool, failed: bool, one_host: bool) -> str:
    """What to look at. On one host there is no link to be cut."""
    if silent and one_host:
        return (
            "a rank that is not heard of has stalled or ended; what it printed last says more, or "
            "the kernel's log where memory ran out"
        )
    if silent:
        return (
            "a rank that is not heard of has stalled or ended, or its link is cut; look at its host"
        )
    if failed:
        where = "what the ranks printed last" if one_host else "the link between their hosts"
        return (
            f"all ranks still run, so their connections have failed by themselves; look at {where}"
        )
    return (
        "every rank must call the model and backward equally often, with an empty batch where it "
        f"has no samples; where ranks are only slow, set {TIMEOUT_VARIABLE} to more seconds"
    )


def _ended(heard: Heard) -> bool:
    return heard.place is not None and heard.place.startswith(ENDED)


def _place(heard: Heard) -> str:
    place = heard.place or "has not called the model yet"
    if heard.alive or _ended(heard):
        return place
    return f"is not heard of any more (its last word: it {place})"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
