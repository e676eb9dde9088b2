"""What a launcher and a host tell each other over ssh, line by line.

To the host: a token and the launcher's version, a line each; then lines of a word and JSON:
``order``, on host 0 ``meet``, ``go``, and meanwhile ``alive`` and perhaps ``signal``, with its
number. The end of them, or none for ``remote.SILENCE_S``, ends the host's ranks.

From the host, among the lines that ranks print: the token, a word and JSON, as ``ready``, ``met``,
``saved`` (on host 0, of each checkpoint), ``report``, ``recorded`` and ``failed``.
"""

from ....planner.schema.errors import (
    InfeasibleError,
    InputError,
    MemoryRunError,
    MeshwrightError,
    NoRoomError,
    RunError,
)
from ....planner.schema.plan import Plan
from ....planner.schema.record import Bytes, Count, Index, Record
from ....planner.schema.recorded import RecordedSteps
from ...comm.setups import HostSetup
from ..background import Background

HEARTBEAT_S = 10.0


class HostWork(Record, frozen=True, kw_only=True):
    """What the hosts run: ``launch``'s arguments, with ``per_host`` ranks on each."""

    plan: Plan
    script: tuple[str, ...]
    steps: Count
    per_host: tuple[Count, ...]
    timeout_s: float | None = None
    quiet: bool = False
    background: Background | None = None
    checkpoint: str | None = None
    checkpoint_every: Count = 50
    resume: bool = True
    restarted: bool = False
    progress: bool = True
    trace: bool = False


class HostOrder(HostWork, frozen=True, kw_only=True):
    """One host's part of it: which of them it is, its working folder and the environment."""

    node_rank: Index
    folder: str
    environment: dict[str, str]


class HostReady(Record, frozen=True, kw_only=True):
    """What a host has, before anything runs on it: the address at which ssh reached it, its free
    memory where its ranks would compute on the CPU, and what is not as the plan has it."""

    setup: HostSetup
    address: str
    free_bytes: Bytes | None
    notes: tuple[str, ...]


class RendezvousAddress(Record, frozen=True, kw_only=True):
    """Where hosts meet: an address of host 0 and a port. Asked for: the address of another host
    from which the first one's is found, and port 0 for a free one."""

    address: str
    port: Index


class SavedStep(Record, frozen=True, kw_only=True):
    """The step of the latest checkpoint that is there, 0 for none."""

    step: Index


class HostRecording(Record, frozen=True, kw_only=True):
    """What the ranks of a host have recorded of their steps."""

    ranks: tuple[RecordedSteps, ...]


class HostFailure(Record, frozen=True, kw_only=True):
    """An error, to be raised again by the launcher."""

    message: str
    exit_code: Index
    memory: bool = False
    details: tuple[str, ...] = ()
    remedy: str = ""
    limit_bytes: Bytes | None = None
    failed_at: float | None = None
    lost: bool = False
    of_peer: bool = False


def failure_of(error: MeshwrightError) -> HostFailure:
    of_memory = error if isinstance(error, MemoryRunError | NoRoomError) else None
    return HostFailure(
        message=of_memory.sentence if of_memory else str(error),
        exit_code=error.exit_code,
        memory=isinstance(error, MemoryRunError),
        details=error.details if isinstance(error, MemoryRunError) else (),
        remedy=error.remedy if isinstance(error, NoRoomError) else "",
        limit_bytes=of_memory.limit_bytes if of_memory else None,
        failed_at=error.failed_at,
        lost=error.lost,
        of_peer=error.of_peer,
    )


def error_of(failure: HostFailure, host: str) -> MeshwrightError:
    """The failure of a host as an error whose sentence names it."""
    message = f"on {host}: {failure.message}"
    raised: MeshwrightError
    if failure.memory:
        raised = MemoryRunError(message, failure.details, failure.limit_bytes)
    elif failure.remedy and failure.limit_bytes is not None:
        raised = NoRoomError(message, failure.remedy, failure.limit_bytes)
    else:
        kinds: dict[int, type[MeshwrightError]] = {
            kind.exit_code: kind for kind in (InputError, InfeasibleError, RunError)
        }
        raised = kinds.get(failure.exit_code, RunError)(message)
    return raised.standing_for(failure)
