"""How much computing and communicating slow each other on the ranks of a process group."""

import sys
import time
from math import ceil
from statistics import median

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ..executor.comm.moments import Moment, now, seconds_between
from ..planner.schema.cluster import Interference
from .collectives import MeasuredGroup
from .timing import keep_busy, longer, timed

MESSAGE_BYTES = 4 * 2**20
"""The largest message that is sent beside computing, as large as slices mostly are: short ones wait
for cores longer than for links. On slow links it is one that takes half of ``LOAD_S``, and between
GPUs a larger one where ``MOST_MESSAGES`` would not last so long."""
MOST_MESSAGES = 64
"""As many are sent at most to find out how many take ``LOAD_S``; between GPUs as many at all."""
SLOWDOWN_ROUNDS = 5
# On a CPU the communication library's threads take cores and memory bandwidth from the computation;
# on a GPU its kernels take multiprocessors. Three things are timed in turn, several rounds: a fixed
# amount of computing, a fixed amount of communicating, and the computing while the communicating
# goes on.
LOAD_S = 0.15
# No further round is begun after so long.
SLOWDOWN_BUDGET_S = 3.0

# [Note: Loads on a GPU]
# A host takes some 10 µs to launch a kernel. A load of small pieces and messages takes as long as
# its launches, alone or in company, and tells nothing about the device. So three things differ from
# a CPU. Pieces are so large that a few fill LOAD_S, and so are messages: a load is about 200
# launches, far fewer than a driver lets wait, so that the host is never held up. The device is kept
# busy until the host has issued all of it (``ahead_s``), and what is timed begins then. And
# messages and pieces are issued in turns, in case the host falls behind after all.
# Messages are issued on a stream of their own: a collective begins when the stream on which it was
# issued has come so far, and on the one that computes each would wait for the pieces before it.

MOST_PIECES = 64
"""Of so many a load on a GPU consists at most, of two launches each."""
PIECE_S = LOAD_S / MOST_PIECES
"""A piece takes a GPU so long, or as much memory as it may: ``PIECE_BYTES``."""
PIECE_BYTES = 2**31


class _Pieces:
    """Pieces of computing like training's, a convolution and a matrix product."""

    ahead_s = 0.0
    """What a GPU's host takes to issue a load; see [Note: Loads on a GPU]. None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pieces = device, 1
        self.size(1)

    def size(self, times: int) -> None:
        """From now on a piece is so many times the work of the smallest one."""
        self.image = torch.randn(4 * times, 32, 32, 32, device=self.device)
        self.kernel = torch.randn(32, 32, 3, 3, device=self.device)
        # A product's work grows with the third power of the side.
        side = 32 * round(12 * times ** (1 / 3))
        self.matrix = torch.randn(side, side, device=self.device)

    def compute(self) -> float:
        """Seconds of computing."""
        start = self._begun()
        for _ in range(self.pieces):
            self.piece()
        return seconds_between(start, now(self.device))

    @torch.no_grad()
    def piece(self) -> None:
        F.conv2d(self.image, self.kernel, padding=1)
        self.matrix @ self.matrix

    def enlarged(self) -> int:
        """Makes pieces larger until one takes a GPU long enough; how many times as large."""
        times = 1
        while self.piece_s() < PIECE_S:
            # Results take as much as what they are made of, and the next size is twice this one.
            if 2 * 2 * (self.image.nbytes + self.matrix.nbytes) > PIECE_BYTES:
                break
            times *= 2
            self.size(times)
        return times

    def piece_s(self) -> float:
        """Seconds that a GPU takes for one piece by itself, without those of its host."""
        # The first of a size allocates and chooses kernels.
        first = timed(self.piece, self.device)
        return max(timed(self.piece, self.device, first.issued_s).done_s, 1e-6)

    def _begun(self) -> Moment:
        """The moment at which a load begins: on a GPU once the host has had time to issue it."""
        if self.ahead_s:
            keep_busy(self.device, longer(self.ahead_s))
        return now(self.device)


class _Load(_Pieces):
    """Pieces of computing and messages, each for about ``LOAD_S``: the same numbers of messages on
    all members, who would else wait for ever, and on CPUs of pieces."""

    def __init__(self, group: MeasuredGroup) -> None:
        super().__init__(group.device)
        self.group = group
        self.message = torch.zeros(_message_bytes(group) // 4, device=group.device)
        self.messages = 1
        on_streams = group.device.type != "cpu"
        # The first run starts threads and allocates; it does not count.
        self.compute()
        if on_streams:
            # Alike, as ``links.taken_bytes`` supposes of ranks that share a GPU.
            self.size(_agreed(group, self.enlarged()))
            self.pieces = min(max(int(LOAD_S / self.piece_s()), 1), MOST_PIECES)
        else:
            self.pieces = _agreed(group, max(int(LOAD_S / max(self.compute(), 1e-6)), 1))
        # Twice: what a link has saved up, as a token bucket does, lets the first ones through.
        for most in (MOST_MESSAGES, MOST_MESSAGES if on_streams else sys.maxsize):
            each_s = self.send() / self.messages
            self.messages = _agreed(group, min(max(int(LOAD_S / max(each_s, 1e-6)), 2), most))
        if on_streams:
            self.ahead_s = self._issuing_s()

    def send(self) -> float:
        """Seconds of communicating. Collective."""
        start = self._begun()
        for _ in range(self.messages):
            dist.all_reduce(self.message, group=self.group.handle)
        return seconds_between(start, now(self.device))

    def both(self) -> tuple[float, float]:
        """Seconds of computing under communication, and until communication is over. Collective."""
        return self._both_on_streams() if self.device.type != "cpu" else self._both_on_host()

    def _both_on_host(self) -> tuple[float, float]:
        start, over = now(self.device), None
        issued = [self._message() for _ in range(self.messages)]
        works = [work for work in issued if work is not None]
        for _ in range(self.pieces):
            self.piece()
            if over is None and works and works[-1].is_completed():
                over = now(self.device)
        computed = now(self.device)
        if over is None:
            for work in works:
                work.wait()
            over = now(self.device)
        return seconds_between(start, computed), seconds_between(start, over)

    def _both_on_streams(self) -> tuple[float, float]:
        # The host is far ahead of both: only streams can tell.
        own_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        start = self._begun()
        works = self._issue_in_turns(own_stream)
        computed = now(self.device)
        # The stream that computes would tell when both are over.
        with torch.cuda.stream(own_stream):
            for work in works:
                work.wait()
            over = now(self.device)
        # The message's memory must not be written again before.
        torch.cuda.current_stream(self.device).wait_stream(own_stream)
        return seconds_between(start, computed), seconds_between(start, over)

    def _issue_in_turns(self, own_stream: torch.cuda.Stream) -> list[dist.Work]:
        """Issues messages on ``own_stream``, and pieces where the device computes. Collective."""
        works = []
        own_stream.wait_stream(torch.cuda.current_stream(self.device))
        for turn in range(max(self.messages, self.pieces)):
            if turn < self.messages:
                with torch.cuda.stream(own_stream):
                    works.append(self._message())
            if turn < self.pieces:
                self.piece()
        return [work for work in works if work is not None]

    def _message(self) -> dist.Work | None:
        work: dist.Work | None
        work = dist.all_reduce(self.message, group=self.group.handle, async_op=True)
        return work

    def _issuing_s(self) -> float:
        """What the slowest member's host takes to issue both: all are kept busy for as long, and
        begin at about the same time. Collective."""
        own_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        for _ in range(2):  # the first may make what is used again
            issued_s = timed(lambda: self._issue_in_turns(own_stream), self.device).issued_s
        return _agreed(self.group, ceil(1e6 * issued_s)) / 1e6


def measure_interference(group: MeasuredGroup) -> Interference:
    """The slowdowns, as medians over rounds and the mean over ranks. Collective over the group."""
    load, start = _Load(group), time.perf_counter()
    rows: list[tuple[float, float]] = []
    while len(rows) < SLOWDOWN_ROUNDS:
        group.meet()
        compute_s = load.compute()
        group.meet()
        # What a link has saved up while it was idle, as a token bucket does, is used up first.
        load.send()
        group.meet()
        sent = load.send()
        group.meet()
        together, over = load.both()
        rows.append((_stretch(compute_s, over, together), _stretch(sent, together, over)))
        # The clock of one member must not end the rounds of another's.
        if _agreed(group, int(time.perf_counter() - start > SLOWDOWN_BUDGET_S)):
            break
    medians = [median(column) for column in zip(*rows, strict=True)]
    slow = torch.tensor(medians, dtype=torch.float64, device=group.device)
    dist.all_reduce(slow, group=group.handle)
    compute, communicate = (slow / group.size).tolist()
    # Less than 1 is noise: nothing gets quicker by having company.
    return Interference(
        compute_slowdown=max(compute, 1.0), communication_slowdown=max(communicate, 1.0)
    )


def _message_bytes(group: MeasuredGroup) -> int:
    """The largest size up to ``MESSAGE_BYTES`` whose all-reduce takes no more than half of
    ``LOAD_S``, by what was measured; between GPUs the first one from there on of which
    ``MOST_MESSAGES`` take ``LOAD_S``, or the largest."""
    taken = {
        size: median(seconds)
        for (name, size), seconds in sorted(group.seconds.items())
        if name == "all_reduce"
    }
    quick = [size for size, seconds in taken.items() if seconds <= LOAD_S / 2] or [min(taken)]
    size = min(quick[-1], MESSAGE_BYTES)
    if group.device.type == "cpu":
        return size
    larger = [s for s in quick if s >= size]
    return next((s for s in larger if MOST_MESSAGES * taken[s] >= LOAD_S), larger[-1])


def _agreed(group: MeasuredGroup, count: int) -> int:
    """The largest count of all members: all must do the same."""
    value = torch.tensor([count], dtype=torch.int64, device=group.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group.handle)
    return int(value)


def _stretch(alone: float, other: float, over: float) -> float:
    """How much slower work was that takes ``alone`` seconds by itself and was ``over`` after some,
    while the other kind of work went on for ``other`` seconds.

    If it was over before the other, all of it was slowed; else what was left ran alone:
    over = other + (alone - other / slowdown).
    """
    if over <= other:
        return max(over / max(alone, 1e-9), 1.0)
    done_meanwhile = alone - (over - other)
    return other / done_meanwhile if done_meanwhile > 0.05 * other else 1.0
