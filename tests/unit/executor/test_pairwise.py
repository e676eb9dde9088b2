"""Messages between pairs of ranks: what the works of an exchange tell of it."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from meshwright.executor.comm.pairwise import PairwiseWork


class Message(dist.Work):
    """One that comes when it is let, or is lost."""

    def __init__(self, comes: threading.Event, error: Exception | None = None) -> None:
        super().__init__()
        self.comes, self.error = comes, error

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert timeout is None, "a wait that runs out of time closes the connection"
        assert self.comes.wait(10)
        if self.error is not None:
            raise self.error
        return True


def started(*errors: Exception | None) -> tuple[PairwiseWork, threading.Event, list[bool]]:
    comes, told = threading.Event(), []
    work = PairwiseWork()
    for error in errors:
        work.add(Message(comes, error))
    work.get_future().add_done_callback(lambda _: told.append(True))
    threading.Thread(target=work.finish, daemon=True).start()
    return work, comes, told


def test_an_exchange_ends_with_its_messages() -> None:
    work, comes, told = started(None, None)
    assert not work.is_completed()
    with pytest.raises(RuntimeError, match="still under way"):
        work.wait(timedelta(seconds=0.01))
    assert not told
    comes.set()
    assert work.wait()
    assert work.is_completed()
    assert told == [True]


def test_a_lost_message_is_told_to_everyone_who_waits() -> None:
    work, comes, told = started(None, RuntimeError("Connection reset by peer"), None)
    comes.set()
    for limit in (timedelta(seconds=5), None):
        with pytest.raises(RuntimeError, match="Connection reset"):
            work.wait(limit)
    assert work.is_completed()
    assert told == [True]
