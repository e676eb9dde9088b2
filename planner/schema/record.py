"""What all records share: immutable, typed, validated, and the same bytes in and out of JSON."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import msgspec

from .errors import InputError

MOST = 2**53
"""The largest whole number in a record: times are predicted in floating point, which holds every
whole number up to here."""

# Real numbers beyond these are none that anybody has measured. Products of a few stay finite, and
# quotients too.
SMALLEST, LARGEST = 1e-60, 1e60

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
# Bytes per sample and the like need not be whole.
BytesReal = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Spread = Annotated[float, msgspec.Meta(ge=0)]
"""How much longer than the median one measurement in six takes, relative to it: a standard
deviation, were they normally distributed. Zero where it is not known."""
Slowdown = Annotated[float, msgspec.Meta(gt=1)]
"""How many times as long something may take."""


# Unknown fields are refused: a misspelt one would in silence be its default.
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An immutable record. Subclasses check in ``__post_init__`` what types cannot say."""

    _reals: ClassVar[tuple[float, float]] = SMALLEST, LARGEST
    """How small and how large its real numbers may be."""

    def __post_init__(self) -> None:
        for path, value in _floats(self):
            check_real(path, value, *self._reals)


class Document(Record, frozen=True, kw_only=True, tag_field="document"):
    """A record that is a file of its own: it carries its type's name and a schema version."""

    # Each kind has its own, raised when a field goes or means something else: files of another
    # version are refused by name, and those of other kinds can still be read.
    schema_version: int = 1


def check_real(
    path: str, value: float, smallest: float = SMALLEST, largest: float = LARGEST
) -> None:
    """Raises ``InputError`` for what is no number, and for one that is so large or small that what
    is computed from it would not be finite."""
    # Written so that what is no number is refused, too. A record that was computed from figures
    # that are only just allowed is refused here like one that was read.
    if value and not smallest <= abs(value) <= largest:
        raise InputError(
            f"{path} is {value:g}, expected 0 or a number from {smallest:g} to {largest:g} in size"
        )


RecordT = TypeVar("RecordT", bound=Record)
DocumentT = TypeVar("DocumentT", bound=Document)


def _floats(record: msgspec.Struct) -> Iterator[tuple[str, float]]:
    """The float fields of one record (nested records have checked themselves)."""
    # JSON has no infinity or NaN: msgspec would write null, which could not be read again.
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if isinstance(value, float):
            yield name, value
        elif isinstance(value, tuple):
            for i, item in enumerate(value):
                if isinstance(item, float):
                    yield f"{name}[{i}]", item


# How a user makes each kind of file, said where another kind was given.
MADE_BY = {
    "Plan": "'meshwright plan TARGET -c CLUSTER --batch N -o plan.json'",
    "Cluster": "'meshwright probe -o cluster.json', or 'meshwright cluster' for one that is not "
    "here",
    "ModelProfile": "'meshwright profile TARGET -o profile.json'",
    "RunReport": "'meshwright launch plan.json --report result.json'",
}


def encode(record: Record) -> bytes:
    """JSON, indented, ending in a newline; equal records give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def decode(cls: type[RecordT], data: bytes, origin: str = "JSON") -> RecordT:
    """The record in ``data``; ``origin`` names the source in the message of an ``InputError``."""
    if cls.__name__ in MADE_BY:
        _check_head(cls, data, origin)
    try:
        return msgspec.json.decode(data, type=cls)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The typed decoder stops at a wrong field, also of what ends too early or is no JSON.
        wrong = _malformed(data) or error
        # What a file holds may break lines or steer a terminal.
        text = str(wrong) or type(wrong).__name__
        detail = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
        # A number that is cut off at its point is malformed to msgspec, at the byte after the last.
        if "truncated" in detail or f"(byte {len(data)})" in detail:
            what = f"ends in the middle of a {cls.__name__}: {_anew(cls)}"
        else:
            what = f"is not a valid {cls.__name__}: {detail}; mend that field, or {_anew(cls)}"
        raise InputError(f"{origin} {what}") from None


def _malformed(data: bytes) -> Exception | None:
    """Why ``data`` is no JSON; None where it is."""
    try:
        msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return error
    return None


def _anew(cls: type[Record]) -> str:
    made_by = MADE_BY.get(cls.__name__)
    return f"make it anew with {made_by}" if made_by else "write it anew"


def _check_head(cls: type[Record], data: bytes, origin: str) -> None:
    """Refuses another kind of document, and another version of the schema."""
    # Before the typed decoder, whose words on unknown fields would confuse there.
    try:
        head = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # the typed decoder says what is wrong
    if not isinstance(head, dict):
        return
    kind, version = head.get("document"), head.get("schema_version")
    if {"predicted", "measured"} <= head.keys():  # the one kind of file that is no document
        kind = "RunReport"
    if isinstance(kind, str) and kind in MADE_BY and kind != cls.__name__:
        raise InputError(
            f"{origin} is a {kind}, and a {cls.__name__} is needed: make one with "
            f"{MADE_BY[cls.__name__]}"
        )
    known = {f.name: f.default for f in msgspec.structs.fields(cls)}.get("schema_version", version)
    if isinstance(version, int) and version != known:
        raise InputError(
            f"{origin} is a {cls.__name__} of schema version {version}, and this Meshwright reads "
            f"{known}: {_anew(cls)}"
        )


def load(cls: type[RecordT], path: str | Path, given: str = "") -> RecordT:
    """Reads a record from a file; ``InputError`` names the file and the path of a bad field, and
    ``given``, the option that the file was given to."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        how = f", or make one with {MADE_BY[cls.__name__]}" if cls.__name__ in MADE_BY else ""
        raise InputError(f"cannot read {path}: {reason}; check the path{how}") from None
    return decode(cls, data, f"{given} {path}".lstrip())


def check_is(value: object, cls: type[Record]) -> None:
    """Refuses what is no such record, most often the name of a file that has not been read."""
    if isinstance(value, cls):
        return
    wanted = cls.__name__
    if isinstance(value, str | Path):
        raise InputError(
            f"{str(value)!r} is a name, and a {wanted} is needed: load({wanted}, {str(value)!r}) "
            "reads one from a file"
        )
    raise InputError(f"got {type(value).__name__}, expected a {wanted}: give one in its place")


def save(record: Record, path: str | Path) -> None:
    """Writes a record whole or not at all. Raises ``InputError`` for one that could not be read
    again: its figures come from a file with figures that no machine has."""
    data = encode(record)
    try:
        msgspec.json.decode(data, type=type(record))
    except msgspec.ValidationError as error:
        raise InputError(
            f"{path} is not written, as it would be no valid {type(record).__name__}: {error}; a "
            "file that it was made from has figures out of all measure"
        ) from None
    write_whole(path, data)


def write_whole(path: str | Path, data: bytes) -> None:
    """Writes bytes to ``path`` so that no reader ever sees half a file."""
    target = Path(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        # A device or a pipe (/dev/stdout) is written to, and not replaced by a file.
        _write_into(target, data)
        return
    # A temporary file beside it, then a rename: this is atomic inside one file system only.
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot write {path}: {reason}; name a folder that exists") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp gives its files to their owner alone. A document gets the mode of any new file,
        # and the umask can only be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(target)
    except BaseException as error:  # Ctrl-C as well leaves no temporary file
        Path(name).unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        # The disk is full, or as much as the user may have of it.
        reason = error.strerror or str(error)
        raise InputError(f"cannot write {path}: {reason}; name another place") from None


def _write_into(target: Path, data: bytes) -> None:
    try:
        with target.open("wb") as file:
            file.write(data)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"cannot write {target}: {reason}; name another file") from None


def fingerprint(record: Record) -> str:
    """Sixteen hexadecimal digits that stand for the record's content."""
    return hashlib.sha256(msgspec.json.encode(record)).hexdigest()[:16]
