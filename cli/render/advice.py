"""The ways to train a model on a cluster, the quickest first, and one sentence on top of them."""

from itertools import islice

from rich.table import Table

from ...planner.explain.advice import Advice, Changes, Way
from ...planner.schema.text import rate, seconds
from .comparisons import QUANTITIES
from .table import empty_table

CHANGES: dict[Changes, str] = {
    "nothing": "nothing",
    "rounding": "the rounding of gradients",
    "waiting": "which gradients wait",
    "batch": "the samples in a step",
    "algorithm": "the algorithm",
}
# A way that reaches this share of another's gain is about as good.
AS_GOOD = 0.95
# Ways without a plan, as a sentence speaks of them; the others have an article.
_SPOKEN = {
    "data parallel (DDP)": "data parallelism as DDP does it",
    "one device": "one device by itself",
    "one host": "one host by itself",
    "half of the hosts": "half of the hosts",
}


def ways_table(found: Advice) -> Table:
    """A line for each way; what ``plan`` has to be told besides is in the last column. Why some
    cannot be had is said below (``why_sentences``), where there is room for it."""
    table = empty_table(
        f"Ways to train {found.target}, as predicted",
        ("way", "changes in the training", "ranks", "samples/s", "step", "gain", "plan with"),
        left=2,
    )
    table.columns[-1].justify = "left"
    for way in found.ways:
        table.add_row(way.name, CHANGES[way.changes], str(way.ranks), *_figures(way))
    return table


def _figures(way: Way) -> tuple[str, ...]:
    options = "(no plan needed)" if way.options is None else " ".join(way.options)
    if way.step_s is None or way.samples_per_s is None:
        return "-", "-", "-", "(cannot be had)"
    speed = QUANTITIES["samples_per_s"][1](way.samples_per_s)
    gain = "" if way.gain is None else f"{way.gain:.2f}"
    return speed, seconds(way.step_s), gain, options


def why_sentences(found: Advice) -> list[str]:
    """Why some of the ways cannot be had; those with the same reason together."""
    ways: dict[str, list[str]] = {}
    for way in found.ways:
        if way.step_s is None:
            ways.setdefault(way.why, []).append(way.name)
    return [f"Cannot be had ({', '.join(names)}): {why}." for why, names in ways.items()]


def advice_sentence(found: Advice) -> str:
    """What binds plain data parallelism, and what the quickest way that changes nothing, and the
    quickest of all, make of it."""
    told = told_ways(found)
    if not told:
        why = next((way.why for way in found.ways if way.changes == "nothing" and way.why), "")
        return f"{_binds(found)} No way fits that changes nothing: {why}."
    exact, others = told[0], told[1:]
    if exact.gain == 1.0:  # data parallelism itself, or a plan that is no more
        words = f"{spoken(exact)} is the quickest way that changes nothing"
    else:
        words = f"{_as_fast(exact)} as data parallelism and changes nothing"
    for way in others:
        if way.changes == "algorithm":
            words += (
                f". If nothing else is quick enough, {_as_fast(way)} in rounds of "
                f"{way.inner_steps} inner steps and changes the algorithm"
            )
        else:
            words += f", {_as_fast(way)} and changes {CHANGES[way.changes]}"
    return f"{_binds(found)} {words[0].upper()}{words[1:]}."


def told_ways(found: Advice) -> list[Way]:
    """The ways that the sentence on top tells of: the quickest that changes nothing, the quickest
    that rounds where that is about as good as another change, the quickest that keeps the
    algorithm, the quickest of all; none where no way fits that changes nothing."""
    had = [way for way in found.ways if way.gain is not None]
    exact = next((way for way in had if way.changes == "nothing"), None)
    if exact is None:
        return []
    # Local steps are the last resort, whatever they reach.
    best = next(way for way in had if way.changes != "algorithm")
    rounds = (way for way in had if way.changes == "rounding")
    as_good = (
        way for way in rounds if _about_as_good(way, best) and not _about_as_good(exact, way)
    )
    return list(dict.fromkeys((exact, *islice(as_good, 1), best, had[0])))


def _about_as_good(way: Way, other: Way) -> bool:
    return (way.gain or 0.0) >= AS_GOOD * (other.gain or 0.0)


def gain_sentences(found: Advice) -> list[str]:
    """What gains are over, where ``plan`` would compare a way with something else."""
    if not any(way.gain is not None and way.ranks < found.ranks for way in found.ways):
        return []
    return [
        f"Gains are over data parallelism as DDP does it on all {found.ranks} ranks; a plan for "
        "fewer says how it compares with data parallelism on its own."
    ]


def slow_sentences(found: Advice) -> list[str]:
    """The hosts that hold the others up."""
    return [
        f"The links of {host.name} reach {rate(host.bytes_per_s)} where others reach "
        f"{rate(host.others_bytes_per_s)}: look after them, or leave that host out."
        for host in found.slow_hosts
    ]


def _binds(found: Advice) -> str:
    ratio = found.exchange_ratio
    if ratio > 1:
        return (
            "Your network binds: a step of data parallelism would communicate "
            f"{ratio:.1f} times as long as it computes."
        )
    return (
        "Computing binds: a step of data parallelism would communicate "
        f"{ratio:.2f} times as long as it computes."
    )


def _as_fast(way: Way) -> str:
    return f"{spoken(way)} is {way.gain:.2f} times as fast"


def spoken(way: Way) -> str:
    """A way as a sentence speaks of it."""
    return _SPOKEN.get(way.name, f"the {way.name}")
