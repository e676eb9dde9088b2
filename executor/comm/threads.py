"""Which thread has the processor when computing and communicating both want it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def computing_first() -> Iterator[None]:
    """Threads that are started inside do not interrupt one that computes.

    On CPUs a library's threads wake for every packet. Each time they take the processor from the
    thread that computes, and its caches. As batch threads (Linux's SCHED_BATCH, which needs no
    privilege) they get their turn a few milliseconds later and find more packets, which the kernel
    has kept for them meanwhile: a third of the switches (docs/results/exchange.md). Where a
    processor is idle they start at once, as ever. Does nothing on other systems, or where the user
    has chosen a scheduling class.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    # New threads inherit the class of the one that starts them.
    plain = os.sched_param(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, plain)
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, plain)
