"""What the launcher asks of a background job, and what it hears of it."""

import enum
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import msgspec

GRACE_S = 30.0
"""So long a background that is told to end may take to write a checkpoint."""


class JsonLine:
    """A record that the launcher and the pacer send each other as one line of JSON."""

    def text(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls, text: str) -> Self:
        return msgspec.json.decode(text, type=cls)


@dataclass(frozen=True)
class Settings(JsonLine):
    """``command`` is run with ``environment`` added to the launcher's, its output appended to
    ``log``. ``limit`` is what the foreground's step may be slowed by, ``memory_bytes`` the most
    data of each of its processes."""

    command: tuple[str, ...]
    log: str
    limit: float
    grace_s: float = GRACE_S
    memory_bytes: int | None = None
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Usage:
    """What a background job has had while a foreground made its steps.

    Of ``seconds`` it was let run for ``open_s``, and was stopped ``stops`` times;
    ``stopped_s`` says for how long for each reason (``gate.Hold``). It used ``cpu_s`` of processors
    meanwhile.
    """

    seconds: float = 0.0
    open_s: float = 0.0
    cpu_s: float = 0.0
    stops: int = 0
    stopped_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class State(JsonLine):
    """A background job as its pacer sees it.

    ``ended`` says how, in words, and is empty while it runs. It was let run for ``open_s`` of the
    ``seconds`` since it started, and has used ``cpu_s`` of processors; ``during_steps`` is the
    part of it while a foreground made its steps. That made ``steps`` steps that count, in
    ``disturbed`` of which the background might run; ``slowdown`` is their mean over
    ``undisturbed_s``, held ones included.
    """

    pid: int
    ended: str
    seconds: float
    open_s: float
    cpu_s: float
    steps: int
    disturbed: int
    undisturbed_s: float
    slowdown: float
    priority: str
    during_steps: Usage = Usage()


VARIABLE = "MESHWRIGHT_BACKGROUND"
"""The named pipe of this host's pacer, in the environment of its ranks."""
_RECORD = struct.Struct("<BBHId")


class Kind(enum.IntEnum):
    """``BEGAN``: a plan was applied. ``STEPPED``: step ``number`` took ``seconds``. ``WAITS``: the
    rank waits, probably for ``seconds``. ``WORKS``: it goes on."""

    BEGAN = 1
    STEPPED = 2
    WAITS = 3
    WORKS = 4


class PacerMessage(NamedTuple):
    """``foreground`` counts the plans that a process has applied; ``rank`` is the local one."""

    kind: Kind
    foreground: int
    rank: int
    number: int = 0
    seconds: float = 0.0

    def packed(self) -> bytes:
        # Both numbers only tell one from another, so that of a large one the lower bits suffice.
        return _RECORD.pack(
            self.kind, self.foreground & 0xFF, self.rank & 0xFFFF, self.number, self.seconds
        )


SIZE = _RECORD.size


def unpacked(data: bytes) -> Iterator[PacerMessage]:
    """The records in ``data``, a whole number of them."""
    for kind, *rest in _RECORD.iter_unpack(data):
        yield PacerMessage(Kind(kind), *rest)
