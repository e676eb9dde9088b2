"""Both step-time formulas, on a chain of units with their separate costs.

A rank computes and waits in this order; l is a link, A^l what occupies it while the rank waits:

    forward of unit k:    A_k entry (forward), [its exchange and update], F_k, A_k inner (forward)
    backward of unit k:   A_k inner (backward), B_k, A_k entry (backward)

*Entry* is the redistribution of a unit's input: it touches no parameter, so the unit's own exchange
may still be under way. *Inner* collectives lie between: the unit's gradient is complete, and its
new parameters are needed, outside them. Blocking communication takes a wire before any gradient.

All this is on the rank's device. Where that is a GPU, its host issues what unit k does in a step
in H_k seconds, ahead of the device and without waiting for it, redistributions at its entry among
them. Steps follow one another, so none
takes less than ΣH: both steps are the larger of that and of their formula.

The derivations stand in docs/planner.md.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..schema.cluster import LevelName

LINKS: tuple[LevelName, ...] = ("intra", "inter")
"""The order of links in every per-link array."""

Vector = npt.NDArray[np.float64]
"""One value for each unit, in forward order."""
LinkMatrix = npt.NDArray[np.float64]
"""[link, unit], links in the order of ``LINKS``."""


class OnLink(NamedTuple):
    """Seconds of communication, the link it occupies (index in ``LINKS``), and what the busiest
    rank sends."""

    seconds: float = 0.0
    link: int = 0
    sent_bytes: float = 0.0


class Chain(NamedTuple):
    """Seconds of each unit on the busiest rank, for one micro-batch (exchange: for one step).

    ``slice_s`` is the time of one slice of the exchange, where slices are not taken to be small;
    ``host_s`` what a GPU's host takes to issue all that the unit does in a step (none: nothing),
    and ``entry_host_s`` the redistributions at its entry.
    """

    forward_s: Vector
    backward_s: Vector
    update_s: Vector
    entry_forward_s: LinkMatrix
    entry_backward_s: LinkMatrix
    inner_forward_s: LinkMatrix
    inner_backward_s: LinkMatrix
    exchange_s: LinkMatrix
    slice_s: LinkMatrix | None = None
    host_s: Vector | None = None
    entry_host_s: Vector | None = None


def empty_chain(units: int) -> Chain:
    """A chain of units that cost nothing, to be filled."""
    vectors = [np.zeros(units) for _ in range(3)]
    links = [np.zeros((len(LINKS), units)) for _ in range(6)]
    hosts = {name: np.zeros(units) for name in ("host_s", "entry_host_s")}
    return Chain(*vectors, *links)._replace(**hosts)


def compute_s(chain: Chain) -> float:
    """Σ(F + B): forward and backward of one micro-batch."""
    return float(chain.forward_s.sum() + chain.backward_s.sum())


def host_s(chain: Chain) -> float:
    """ΣH of one step."""
    return float(hosts_s(chain).sum())


def hosts_s(chain: Chain) -> Vector:
    """H of each unit."""
    if chain.host_s is None:
        return np.zeros_like(chain.forward_s)
    return chain.host_s if chain.entry_host_s is None else chain.host_s + chain.entry_host_s


def blocking_s(chain: Chain) -> float:
    """ΣA of one micro-batch, both ways, over all links."""
    entry = chain.entry_forward_s.sum() + chain.entry_backward_s.sum()
    return float(entry + chain.inner_forward_s.sum() + chain.inner_backward_s.sum())


def barrier_step(chain: Chain, micro_batches: int = 1) -> float:
    """Seconds of a step whose exchange is first in, first out and ends before the update.

        T = (M-1)·Σ(F+B+A) + Σ(F + A forward) + ΣU
            + max( Σ(B + A backward),
                   max over l, j of ( ΣA^l + Σ_{k≥j} B_k + Σ_{k>j} A^other_k + Σ_{k≤j} C^l_k ) )

    with A of the backward only, and inner A^other_k counted for k ≥ j; the symbols are those of
    docs/planner.md. GHP's step, and what DDP does at best.
    """
    whole = compute_s(chain) + blocking_s(chain)
    forward = chain.forward_s.sum() + chain.entry_forward_s.sum() + chain.inner_forward_s.sum()
    end, _ = _longest(chain, priority=False)
    step_s = float((micro_batches - 1) * whole + forward + end + chain.update_s.sum())
    return max(step_s, host_s(chain))


def priority_step(chain: Chain, micro_batches: int = 1) -> float:
    """Seconds of a step in the steady state of preemptive priority, slices → 0.

        T = (M-1)·Σ(F+B+A) + max( Σ(F+B+U+A),
            max over l, j of ( ΣA^l + Σ_{k≥j} (F_k+B_k+U_k) + Σ_{k>j} A^other_k + Σ_{k≤j} C^l_k ) )

    with inner A^other_k counted for k ≥ j. Where slices take time, a more urgent one may find one
    of a later unit on the wire and wait for it, once: the term of j has the longest slice of the
    units after j as well. The update of a unit runs just before its forward: then
    those of units before j hide in the wait for j, and the others do not. Exact for gradients on
    one link; a lower bound where several links carry gradients at once (the simulation tells).
    """
    whole = compute_s(chain) + blocking_s(chain)
    return max((micro_batches - 1) * whole + _longest(chain, priority=True)[0], host_s(chain))


def priority_bound(chain: Chain, micro_batches: int = 1) -> float:
    """Seconds that no synchronous schedule on these wires can beat, however it updates:
    ``priority_step`` without U_k in the terms of j."""
    whole = compute_s(chain) + blocking_s(chain)
    # Another schedule might update a unit in an earlier stall. Σ(F+B+U+A) still bounds.
    bare = chain._replace(slice_s=None, update_s=np.zeros_like(chain.update_s))
    end = max(whole + float(chain.update_s.sum()), _longest(bare, priority=True)[0])
    return max((micro_batches - 1) * whole + end, host_s(chain))


def binding_term(chain: Chain, *, priority: bool) -> tuple[int, int] | None:
    """(link, unit) of the largest term over l and j of ``barrier_step`` or ``priority_step``, None
    where what the rank itself has to do, one thing after another, takes longer."""
    return _longest(chain, priority=priority)[1]


def _overlapped(chain: Chain, *, priority: bool) -> tuple[Vector, LinkMatrix, LinkMatrix]:
    """(own seconds, inner A, entry A) of what the exchange can overlap with."""
    if not priority:
        return chain.backward_s, chain.inner_backward_s, chain.entry_backward_s
    # The last backward and the first forward of the next step, with the updates in it.
    return (
        chain.forward_s + chain.backward_s + chain.update_s,
        chain.inner_forward_s + chain.inner_backward_s,
        chain.entry_forward_s + chain.entry_backward_s,
    )


def _longest(chain: Chain, *, priority: bool) -> tuple[float, tuple[int, int] | None]:
    """The longest of what the rank itself has to do while gradients are exchanged and of the terms
    over l and j; and (link, unit) of the term, None where it is the former."""
    own, inner, entry = _overlapped(chain, priority=priority)
    if priority:
        end = compute_s(chain) + blocking_s(chain) + float(chain.update_s.sum())
    else:
        end = float(own.sum() + entry.sum() + inner.sum())
    found = None
    for link in range(len(LINKS)):
        # The terms of a link without gradients are never the largest: they have no C.
        if not chain.exchange_s[link].any():
            continue
        other = 1 - link  # LINKS has two
        # Σ_{k≥j} (own_k + inner A^other_k) + Σ_{k>j} entry A^other_k + ΣA^l, for each j
        ready = _from(own + inner[other]) + _from(entry[other]) - entry[other]
        ready = ready + inner[link].sum() + entry[link].sum()
        late = ready + chain.exchange_s[link].cumsum()
        if priority and chain.slice_s is not None:
            # The barrier's buckets are sent in order: no other goes before.
            late = late + longest_after(chain.slice_s[link], chain.exchange_s[link])
        # Terms that are equal but for rounding: what the rank itself does binds.
        if late.max() > end * (1 + 1e-12):
            found = link, int(late.argmax())
        end = max(end, float(late.max()))
    return end, found


def _from(values: Vector) -> Vector:
    """Σ over k ≥ j, for each j."""
    return values[::-1].cumsum()[::-1]


def longest_after(slice_s: Vector, exchange_s: Vector) -> Vector:
    """For each unit, the last axis, the longest slice of the units after it, which one of its own
    may find on the wire; zero where it exchanges nothing, as nothing is waited for there that was
    not waited for before."""
    waits = np.zeros_like(slice_s)
    # Backwards: the maximum runs from the last unit to each.
    waits[..., :-1] = np.maximum.accumulate(slice_s[..., :0:-1], axis=-1)[..., ::-1]
    return waits * (exchange_s > 0)


class Terms(NamedTuple):
    """The linear form of a step for an integer program: T ≥ row of each unit's choice.

    For link l and unit j the bound is the sum over units of ``before`` (k < j), ``at`` (k = j) and
    ``after`` (k > j); ``always`` is the bound Σ(F+B+U+A), ``host`` ΣH.
    """

    before: LinkMatrix
    at: LinkMatrix
    after: LinkMatrix
    always: Vector
    host: Vector


def step_terms(chain: Chain, micro_batches: int, *, priority: bool) -> Terms:
    """Each unit's contribution to every bound on the step by priority, or by the barrier."""
    own, inner, entry = _overlapped(chain, priority=priority)
    blocking = entry + inner
    terms = Terms(
        before=blocking + chain.exchange_s,
        # ``[::-1]``: waiting on the other of the two links, while this one is free.
        at=own + inner[::-1] + blocking + chain.exchange_s,
        after=own + blocking[::-1] + blocking,
        always=own + blocking.sum(axis=0),
        host=hosts_s(chain),
    )
    forward = chain.forward_s + (chain.entry_forward_s + chain.inner_forward_s).sum(axis=0)
    backward = chain.backward_s + (chain.entry_backward_s + chain.inner_backward_s).sum(axis=0)
    # Nothing but the last micro-batch overlaps the exchange.
    common = (micro_batches - 1) * (forward + backward)
    if not priority:
        common = common + forward + chain.update_s  # before and after the overlap
    return Terms(
        terms.before + common, terms.at + common, terms.after + common, terms.always + common,
        terms.host,
    )  # fmt: skip
