"""What the network carries from each host to each other one, measured by streams.

In each round every host sends to the one that is so many places after it, and receives from the
one as many before: all interfaces are busy both ways, as under a ring of ranks, and no two streams
share one. All ranks of a host send at once.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from .collectives import slowest

Rates = npt.NDArray[np.float64]
"""Bytes per second [from host, to host], zero on the diagonal."""

# A stream travels in so many messages. Its rate is that of the second half: the first holds what a
# token bucket or a buffer lets through at once, and TCP's slow start.
MESSAGES = 16
# A stream that grows lasts about so long; long ones are taken as they are.
STREAM_S, LONG_S = 0.3, 1.0
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 28
GROWTH = 4
# A stream has settled where its last two quarters differ by no more.
SETTLED = 1.15
# Each pair is measured at least so often, and further where no two of its streams agree.
SWEEPS, MOST_SWEEPS = 2, 4
BUDGET_S = 8.0
# Hosts whose rates differ by less are taken to be equal: so much is noise on a busy machine.
ALIKE = 1.25


class Stream(NamedTuple):
    """What one rank received: bytes per second of the second half, seconds of all of it, and
    whether the rate had settled by then."""

    bytes_per_s: float
    seconds: float
    settled: bool


def measure_host_rates(
    hosts: Sequence[str],
    device: torch.device,
    tick: Callable[[float], None] = lambda share: None,
    budget_s: float = BUDGET_S,
) -> Rates:
    """The rates between the hosts, given the host of each rank. Collective over all ranks.

    Each pair is measured twice, and up to twice more where others' work disturbed one; where that
    takes longer than ``budget_s`` what is left takes what both hosts have been seen to carry.
    """
    order = list(dict.fromkeys(hosts))
    members = [[r for r, host in enumerate(hosts) if host == name] for name in order]
    count, start = len(order), time.perf_counter()
    rates, bytes_of = np.zeros((count, count)), np.zeros((count, count), dtype=np.int64)
    seen: dict[tuple[int, int], list[float]] = {}
    for done, (sweep, shift) in enumerate(product(range(MOST_SWEEPS), range(1, count)), 1):
        pairs = [(a, (a + shift) % count) for a in range(count)]
        pairs = [p for p in pairs if sweep < SWEEPS or not agree(seen[p])]
        for a, b in pairs:
            if not bytes_of[a, b]:
                likely = min(rates[a].max(), rates[:, b].max()) * STREAM_S
                bytes_of[a, b] = min(max(int(likely), FIRST_BYTES), MOST_BYTES)
        for pair, found in _grow(pairs, members, bytes_of, device).items():
            seen.setdefault(pair, []).append(found)
            rates[pair] = np.median(seen[pair])
        tick(min(done / (SWEEPS * (count - 1)), 1.0))
        if slowest([time.perf_counter() - start], device)[0] > budget_s:
            break
    return without_noise(filled(rates))


def without_noise(rates: Rates) -> Rates:
    """The rates with those that are the same within noise set to their median: ranks are not to be
    placed, nor plans made, by what noise says."""
    found, left = rates.copy(), np.unique(rates[rates > 0])
    while len(left):
        alike = left[left <= SETTLED * left[0]]
        links = (rates >= alike[0]) & (rates <= alike[-1])
        found[links] = np.median(rates[links])
        left = left[len(alike) :]
    return found


def agree(found: Sequence[float]) -> bool:
    """Whether two of the rates that were found for a pair are the same, within noise."""
    return any(b <= SETTLED * a for a, b in pairwise(sorted(found)))


def filled(rates: Rates) -> Rates:
    """The rates with what was not measured: what the sender and the receiver carried at most."""
    guess = np.minimum(rates.max(axis=1)[:, None], rates.max(axis=0)[None, :])
    found: Rates = np.where(rates > 0, rates, guess)
    np.fill_diagonal(found, 0.0)
    return found


def differ(rates: Rates) -> bool:
    """Whether hosts have unequal links, beyond noise."""
    links = rates[~np.eye(len(rates), dtype=bool)]
    return bool(links.max() > ALIKE * links.min())


def common_rate(rates: Rates) -> float:
    """What counts for all hosts together: the median of equal ones, else the slowest link's, which
    a ring over all of them must pass."""
    links = rates[~np.eye(len(rates), dtype=bool)]
    return float(links.min() if differ(rates) else np.median(links))


def _grow(
    pairs: Sequence[tuple[int, int]],
    members: Sequence[Sequence[int]],
    bytes_of: npt.NDArray[np.int64],
    device: torch.device,
) -> dict[tuple[int, int], float]:
    """The rates of one round: the streams of all pairs at once, those that ended too soon again
    and longer. Fills ``bytes_of`` with what a stream takes."""
    left, rates = list(pairs), {}
    while left:
        found = _streams(left, members, bytes_of, device)
        again = []
        for (a, b), stream in zip(left, found, strict=True):
            short = stream.seconds < STREAM_S / 2 or not stream.settled
            if short and stream.seconds < LONG_S and bytes_of[a, b] < MOST_BYTES:
                # By no more at a time: the first bytes may have gone at any speed.
                bytes_of[a, b] = min(GROWTH * bytes_of[a, b], MOST_BYTES)
                again.append((a, b))
            else:
                rates[a, b] = stream.bytes_per_s
        left = again
    return rates


def _streams(
    pairs: Sequence[tuple[int, int]],
    members: Sequence[Sequence[int]],
    bytes_of: npt.NDArray[np.int64],
    device: torch.device,
) -> list[Stream]:
    """Sends once between all ``pairs`` of hosts at the same time; the same answer on all ranks."""
    rank = dist.get_rank()
    sends, receives = [], []
    for a, b in pairs:
        # Each rank of a host has a partner as long as there are some on both.
        partners = list(zip(members[a], members[b], strict=False))
        each = max(int(bytes_of[a, b]) // len(partners) // MESSAGES, 1)
        sends += [(to, each) for of, to in partners if of == rank]
        receives += [(of, each) for of, to in partners if to == rank]
    dist.barrier()
    own = _stream(sends, receives, device)
    row = torch.tensor(own, dtype=torch.float64, device=device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    table = torch.stack(rows).cpu().numpy()
    found = []
    for a, b in pairs:
        into = table[[to for _, to in zip(members[a], members[b], strict=False)]]
        # Together over one interface: their rates add up.
        found.append(
            Stream(float(into[:, 0].sum()), float(into[:, 1].max()), bool(into[:, 2].all()))
        )
    return found


def _stream(
    sends: Sequence[tuple[int, int]], receives: Sequence[tuple[int, int]], device: torch.device
) -> Stream:
    """This rank's part: at most one partner and message size each way."""

    def buffer(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    # What arrives is of no interest: all messages use one buffer.
    operations = [dist.P2POp(dist.irecv, buffer(size), of) for of, size in receives]
    operations += [dist.P2POp(dist.isend, buffer(size), to) for to, size in sends]
    if not operations:
        return Stream(0.0, 0.0, True)
    start = time.perf_counter()
    # Gloo answers with a work for each operation, the receiving one first; NCCL with one for both.
    works = [dist.batch_isend_irecv(operations) for _ in range(MESSAGES)]
    arrivals = []
    for first, *_ in works:
        first.wait()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        arrivals.append(time.perf_counter() - start)
    for _, *others in works:
        for work in others:
            work.wait()
    return stream_of(arrivals, receives[0][1]) if receives else Stream(0.0, 0.0, True)


def stream_of(arrivals: Sequence[float], message_bytes: int) -> Stream:
    """The stream whose messages had arrived after so many seconds each."""
    half, quarter = len(arrivals) // 2, len(arrivals) // 4
    last = np.array(arrivals[-1 - half :])
    # The median of all slopes: a rank that was not woken finds several messages at once.
    one, other = np.triu_indices(len(last), 1)
    each_s = max(float(np.median((last[other] - last[one]) / (other - one))), 1e-9)
    third, fourth = (max(float(t), 1e-9) for t in np.diff(last[[0, half - quarter, half]]))
    settled = max(third, fourth) <= SETTLED * min(third, fourth)
    return Stream(message_bytes / each_s, arrivals[-1], settled)
