"""What the foreground's ranks tell the pacer of their host, as records in a named pipe.

A record is written whole or not at all (it is shorter than PIPE_BUF) and never waited for: what a
full pipe refuses is lost, and the next one corrects it. A foreground therefore cannot be held up by
its pacer, nor hurt by its death.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

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
        """As it travels."""
        return _RECORD.pack(
            self.kind, self.foreground & 0xFF, self.rank & 0xFFFF, self.number, self.seconds
        )


SIZE = _RECORD.size


def unpacked(data: bytes) -> Iterator[PacerMessage]:
    """The records in ``data``, a whole number of them."""
    for kind, *rest in _RECORD.iter_unpack(data):
        yield PacerMessage(Kind(kind), *rest)
