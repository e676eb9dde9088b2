"""Options that take a number, an amount or a list, and refuse in our words what cannot be."""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial

import typer

from ..planner.schema.errors import InputError
from ..planner.schema.profile import ModelProfile
from ..planner.schema.record import load

OptionInfo = typer.models.OptionInfo

# 8GB and 8GiB are two amounts: powers of 1000 and of 1024.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}i": 1024**n for n, u in enumerate("kmgt", start=1)}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}


# What ``typer`` would say of a wrong value depends on its version and names Python's types. So each
# option parses its own, and ``app`` puts the option's name before the sentence.
def _option(
    parse: Callable[[str], object], metavar: str, words: str, *, shows: bool = False
) -> OptionInfo:
    """The option whose text ``parse`` reads, and whether it ``shows`` its default: ``words`` tell
    those that Python would write otherwise than people."""

    # typer gives a parser the text of the command line, and also an option's default value.
    def read(given: object) -> object:
        return parse(given) if isinstance(given, str) else given

    option: OptionInfo = typer.Option(parser=read, metavar=metavar, help=words, show_default=shows)
    return option


def whole(words: str, *, least: int = 1) -> OptionInfo:
    """An option that takes a whole number of at least ``least``."""
    return _option(partial(_whole, least=least), "N", words, shows=True)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{text!r} is not a whole number: give at least {least}") from None
    if value < least:
        raise InputError(f"{value} cannot be: give at least {least}")
    return value


def number(
    words: str, *, above: float | None = None, least: float = 0.0, most: float = math.inf
) -> OptionInfo:
    """An option that takes a number ``above`` one, or else from ``least`` to ``most``."""
    parse = partial(_number, above=above, least=least, most=most)
    return _option(parse, "NUMBER", words, shows=True)


def _number(text: str, above: float | None, least: float, most: float) -> float:
    if above is not None:
        bounds = f"more than {above:g}"
    else:
        bounds = f"{least:g} to {most:g}" if most < math.inf else f"{least:g} or more"
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a number: give {bounds}") from None
    # float() takes "inf" and "nan" too.
    enough = value >= least if above is None else value > above
    if not (enough and value <= most and math.isfinite(value)):
        raise InputError(f"{value:g} cannot be: give {bounds}")
    return value


def amount(words: str) -> OptionInfo:
    """An option that takes an amount of memory, in bytes."""
    return _option(_whole_amount, "SIZE", words)


def _whole_amount(text: str) -> int:
    """As ``_parse_bytes``, but of a device or a host nobody means so few bytes."""
    found = _parse_bytes(text)
    if found < _FEW and text.strip().isdigit():
        raise InputError(f"{text} is {text} bytes: write a unit, as in {text}GiB")
    return found


def amounts(words: str) -> OptionInfo:
    """An option that takes several amounts of memory."""
    return _option(_amounts, "SIZE,…", words)


def _amounts(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(_parse_bytes, text.split(",")))
    except InputError:
        raise InputError(
            f"{text!r} is not a list of amounts of memory: write it like 1MiB,4MiB"
        ) from None


def duration(words: str) -> OptionInfo:
    """An option that takes a time, in seconds."""
    return _option(_parse_seconds, "TIME", words)


def counts(words: str) -> OptionInfo:
    """An option that takes whole numbers of at least 1."""
    return _option(_counts, "N,…", words)


def _counts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is not a list of counts: write it like 1,2,4") from None
    if min(found) < 1:
        raise InputError(f"{text!r} holds {min(found)}, which cannot be: give at least 1")
    return found


def given_options(context: typer.Context) -> set[str]:
    """The parameters that the command line has. Defaults look like values: only the context knows
    which were given."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {n for n, source in sources.items() if source and source.name == "COMMANDLINE"}


def by_name(given: Sequence[str] | None, option: str) -> dict[str, str]:
    """The values of an option that is given as NAME=VALUE, several times: by name."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{option} {text!r} is not NODE=VALUE: write it like host1=0.5")
        if name in found:
            raise InputError(f"{option} is given twice for {name!r}: leave one of them out")
        found[name] = value
    return found


def speeds(given: Sequence[str] | None) -> dict[str, float]:
    """The relative speeds of ``--relative-speed NODE=SPEED``."""
    option, found = "--relative-speed", {}
    for name, value in by_name(given, option).items():
        try:
            found[name] = _number(value, above=0.0, least=0.0, most=math.inf)
        except InputError as error:
            several = f", and {option} once for each node" if "=" in value else ""
            raise InputError(f"{option} {name}={value}: {error}{several}") from None
    return found


def profiles_of(given: Sequence[str] | None) -> dict[str, ModelProfile]:
    """The profiles of ``--profile-of NODE=FILE``."""
    option = "--profile-of"
    return {node: load(ModelProfile, file, option) for node, file in by_name(given, option).items()}


# Below this a plain number is taken for one whose unit was forgotten.
_FEW = 2**20


def _parse_bytes(text: str) -> int:
    """Bytes from ``8GiB``, ``500 MB``, ``1.5g`` or a plain number; raises ``InputError``."""
    # "i" alone and "1.2.3" fit the pattern: the table and float() refuse them.
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]?i?)b?\s*", text.lower())
    try:
        count = float(match[1]) * _UNITS[match[2]] if match else math.nan
    except (ValueError, KeyError):
        count = math.nan
    # A comparison with nan is False: whatever was no number is refused here too.
    if not 1 <= count < 2**62:
        raise InputError(f"{text!r} is not an amount of memory: write it like 8GiB or 500MB")
    if "." in text and not re.search("[a-z]", text.lower()):
        asked = text.strip()
        raise InputError(f"{asked} is no whole number of bytes: write a unit, as in {asked}GiB")
    return round(count)


def amount_text(count: int) -> str:
    """So many bytes as ``_parse_bytes`` reads them, in the largest unit that they are whole of."""
    for unit in ("GiB", "MiB", "KiB"):
        whole, rest = divmod(count, _UNITS[unit[:-1].lower()])
        if not rest:
            return f"{whole}{unit}"
    return str(count)


def _parse_seconds(text: str) -> float:
    """Seconds from ``0.25``, ``1.5s``, ``250ms`` or ``80us``; raises ``InputError``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e-?[0-9]+)?)\s*(s|ms|us|µs)?\s*", text.lower())
    try:
        value = float(match[1]) * _SECONDS[match[2] or ""] if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{text!r} is not a time above 0: write it like 250ms or 1.5s")
    return value
