"""The failures that a user can cause, each one sentence with the value and the remedy.

The command line turns them into an exit code; Python callers catch them by type.
"""

from collections.abc import Sequence
from typing import Protocol, Self


class Failure(Protocol):
    """What is known of a failure besides its sentence, as of ``MeshwrightError``."""

    @property
    def failed_at(self) -> float | None: ...
    @property
    def lost(self) -> bool: ...
    @property
    def of_peer(self) -> bool: ...


class MeshwrightError(Exception):
    """Base of the errors that Meshwright raises on purpose."""

    exit_code = 1
    failed_at: float | None = None
    """When a rank failed so, in seconds since 1970; None: not known, or not on a rank."""
    lost = False
    """Whether a process or a host has gone, rather than failed at what it does."""
    of_peer = False
    """Whether it is what a rank saw of another one's end, which that one may tell itself."""
    broken: tuple[int, ...] = ()
    """The hosts, by their numbers in the run, that failed before they began to train."""
    host: int | None = None
    """The number in the run of the host that it is told of; None: of none by itself."""

    def standing_for(self, failure: Failure) -> Self:
        """This error, which says more of that failure, or says it elsewhere."""
        self.failed_at, self.lost, self.of_peer = failure.failed_at, failure.lost, failure.of_peer
        return self


class InputError(MeshwrightError, ValueError):
    """A wrong argument, file or environment: nothing was run and nothing was written."""

    exit_code = 2


class NoRoomError(InputError):
    """A plan that needs more memory than is free, refused before its first step. ``limit_bytes`` is
    what each rank may take in one that is made instead."""

    def __init__(self, sentence: str, remedy: str, limit_bytes: int) -> None:
        super().__init__(f"{sentence}: {remedy}")
        self.sentence, self.remedy, self.limit_bytes = sentence, remedy, limit_bytes


class InfeasibleError(MeshwrightError):
    """No plan satisfies the limits; the message names the tightest unit and what would help."""

    exit_code = 3


class RunError(MeshwrightError, RuntimeError):
    """A run that had started went wrong (a rank that never came, a rank that died)."""

    exit_code = 1


class StoppedError(MeshwrightError):
    """Stopped by the user (Ctrl-C) where there is more to say of it than that."""

    exit_code = 130


class MemoryRunError(RunError):
    """A run that lacked memory, or was killed as if it had. ``details`` are lines that say what was
    held and what would help; ``limit_bytes`` is what a rank could have taken, where that is known.
    """

    def __init__(
        self, sentence: str, details: Sequence[str] = (), limit_bytes: int | None = None
    ) -> None:
        super().__init__("\n  ".join([sentence, *details]))
        self.sentence, self.details, self.limit_bytes = sentence, tuple(details), limit_bytes
