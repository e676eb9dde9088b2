"""RecordedSteps: when each thing went on in a few steps of one rank, as it measured them."""

from .record import Bytes, Index, Record, Seconds


class RecordedSpan(Record, frozen=True, kw_only=True):
    """Something that went on from ``start_s`` to ``end_s``, counted from where recording began. A
    message is one of ``message_bytes`` that was issued at the start."""

    name: str
    start_s: float
    end_s: float
    message_bytes: Bytes = 0


class RecordedGroup(Record, frozen=True, kw_only=True):
    """The messages among ``ranks``, of one kind (``label``), in the order of their ends."""

    label: str
    ranks: tuple[Index, ...]
    messages: tuple[RecordedSpan, ...]


class RecordedStep(Record, frozen=True, kw_only=True):
    """One step, from the first forward to the optimizer's step."""

    start_s: Seconds
    end_s: Seconds


class RecordedSteps(Record, frozen=True, kw_only=True):
    """What rank ``rank`` did in ``steps``: what it computed, unit by unit; for what it waited; what
    the optimizer updated; what was on its way."""

    rank: Index
    steps: tuple[RecordedStep, ...]
    computing: tuple[RecordedSpan, ...]
    waiting: tuple[RecordedSpan, ...]
    updating: tuple[RecordedSpan, ...]
    groups: tuple[RecordedGroup, ...]
