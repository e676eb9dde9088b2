"""What the launcher asks of a background job, and what it hears of it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

GRACE_S = 30.0
"""So long a background that is told to end may take to write a checkpoint."""


@dataclass(frozen=True)
class Settings:
    """``command`` is run with ``environment`` added to the launcher's, its output appended to
    ``log``. ``limit`` is what the foreground's step may be slowed by, ``memory_bytes`` the most
    data of each of its processes."""

    command: tuple[str, ...]
    log: str
    limit: float
    grace_s: float = GRACE_S
    memory_bytes: int | None = None
    environment: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Settings:
        """The settings that ``text`` has written."""
        told: dict[str, Any] = json.loads(text)
        told["command"] = tuple(told["command"])
        told["environment"] = tuple((name, value) for name, value in told["environment"])
        return cls(**told)


@dataclass(frozen=True)
class State:
    """A background job as its pacer sees it.

    ``ended`` says how, in words, and is empty while it runs. It was let run for ``open_s`` of the
    ``seconds`` since it started, and has used ``cpu_s`` of processors (children that it has not
    waited for left out). The foreground made ``steps`` steps that count, in ``disturbed`` of which
    the background might run; ``slowdown`` is their mean over ``undisturbed_s``, held ones included.
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

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, text: str) -> State:
        """The state that ``text`` has written."""
        return cls(**json.loads(text))
