"""Files and command lines that are wrong in the ways in which they go wrong: by hand, by another
program, by a disk, and on purpose. All of it is drawn from a number, so that a case can be run
again by its number alone."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DEEP = 100_000
"""Brackets inside each other: more than any reader's stack holds."""
LONG = 50_000
"""Characters of a name that is too long, and items of such a list."""


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs in order: one name may stand there twice."""


class Raw(str):
    """Text that is written as it is: what no encoder of JSON would write."""


JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1000, 1e-9, 0.5, -0.5, 1e9, 1e308, -1e308, 5e-324, -0.0,
    2**31, 2**53 + 1, 2**63, 2**64, -(2**70), Raw("1" * 400), Raw("1e400"), Raw("-1e400"),
    Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("nan"), Raw("0x10"), Raw("01"), Raw("1."),
    Raw(""), Raw("'a'"), Raw('"\\ud800"'), Raw('"\x01"'), Raw('"\\u0000"'), "", " ", "NaN", "0",
    "1", "-1", "1e999", "true", "null", "..", "../../etc/passwd", "/", "\u202eevil", "a\nb",
    "\x1b[31m", "x" * LONG, [], Pairs(), [[]], [None], [0], [1, 2], Pairs([("a", 1)]),
    Pairs([("", None)]), Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * 3000 + "1" + "}" * 3000),
)  # fmt: skip


def read(text: bytes) -> Any:
    """A JSON document whose objects are ``Pairs``."""
    return json.loads(text, object_pairs_hook=Pairs)


def written(node: Any) -> str:
    """The same as text."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{json.dumps(k)}:{written(v)}" for k, v in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(written, node)) + "]"
    return json.dumps(node)


Place = tuple[Any, int]
"""A value: the list or object that has it, and where in that."""


def places(node: Any) -> Iterator[Place]:
    """Where each value of a document stands."""
    for i, item in enumerate(node):
        yield node, i
        child = item[1] if isinstance(node, Pairs) else item
        if isinstance(child, list):
            yield from places(child)


def value_at(place: Place) -> Any:
    holder, i = place
    return holder[i][1] if isinstance(holder, Pairs) else holder[i]


def put(place: Place, value: Any) -> None:
    holder, i = place
    holder[i] = (holder[i][0], value) if isinstance(holder, Pairs) else value


def _other_type(value: Any) -> Any:
    """The same said in another type."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return [*value] if value else 0
    if isinstance(value, Pairs):
        return [v for _, v in value]
    return Pairs((str(i), v) for i, v in enumerate(value))


def _scaled(value: Any, chance: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return chance.choice(JUNK)
    factor = chance.choice((-1, 0, 2, 10, 1000, 10**6, 10**12, 0.5, 1e-6, 1e-300, 1e300))
    try:
        found = value * factor
    except OverflowError:
        return 2**62
    return int(found) if isinstance(value, int) and abs(found) < 2**80 else found


def _in_list(items: list[Any], chance: random.Random) -> None:
    """Changes a list or an object as such."""
    how = chance.randrange(7)
    if not items:
        items.append(("new", 1) if isinstance(items, Pairs) else chance.choice(JUNK))
    elif how == 0:
        del items[chance.randrange(len(items))]
    elif how == 1:
        items.append(copy.deepcopy(chance.choice(items)))
    elif how == 2:
        items.reverse()
    elif how == 3:
        chance.shuffle(items)
    elif how == 4:
        items.clear()
    elif how == 5:
        del items[chance.randrange(len(items)) :]
    else:
        items.extend(items * min(200, LONG // len(items)))


def _in_object(pairs: Pairs, chance: random.Random) -> None:
    """Changes a key of an object."""
    i = chance.randrange(len(pairs))
    name, value = pairs[i]
    how = chance.randrange(5)
    if how == 0:
        del pairs[i]
    elif how == 1:
        pairs.append((name, chance.choice(JUNK)))  # the same name twice
    elif how == 2:
        renamed = (name.upper(), f"{name}s", "", "document", f"{name}\u200b", "x" * LONG)
        pairs[i] = (chance.choice(renamed), value)
    elif how == 3:
        pairs.append((chance.choice(("extra", "schema_version", "__proto__")), 1))
    else:
        other = chance.randrange(len(pairs))
        pairs[i], pairs[other] = (name, pairs[other][1]), (pairs[other][0], value)


def _strings(document: Any, chance: random.Random) -> None:
    """Gives one string the value of another: a unit twice, an edge that goes back, a name of
    nothing."""
    found = [p for p in places(document) if type(value_at(p)) is str]
    if len(found) > 1:
        one, other = chance.sample(found, 2)
        kept = value_at(one)
        put(one, value_at(other))
        if chance.random() < 0.5:
            put(other, kept)


def mutate(document: Any, chance: random.Random) -> None:
    """Changes one thing in a document."""
    place = chance.choice(list(places(document)))
    value = value_at(place)
    how = chance.randrange(8)
    if how == 0:
        put(place, chance.choice(JUNK))
    elif how == 1:
        put(place, _other_type(value))
    elif how in (2, 3):
        # Numbers: most of what a plan says is one.
        numbers = [p for p in places(document) if type(value_at(p)) in (int, float)]
        place = chance.choice(numbers or [place])
        put(place, _scaled(value_at(place), chance))
    elif how == 4 and isinstance(value, list):
        _in_list(value, chance)
    elif how == 5:
        _strings(document, chance)
    elif how == 6:
        put(place, copy.deepcopy(value_at(chance.choice(list(places(document))))))
    else:
        objects = [v for p in places(document) if isinstance(v := value_at(p), Pairs) and v]
        _in_object(chance.choice([document, *objects]), chance)


def bad_document(good: bytes, chance: random.Random) -> bytes:
    """A document in which up to three things are wrong, as JSON says them."""
    document = read(good)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if isinstance(document, list) and document:
            mutate(document, chance)
    return written(document).encode("utf-8", "surrogatepass")


def bad_bytes(good: bytes, chance: random.Random) -> bytes:
    """A file that a disk, an editor or a copy has damaged."""
    data = bytearray(good)
    at = chance.randrange(len(data))
    how = chance.randrange(10)
    if how == 0:
        return bytes(data[:at])
    if how == 1:
        return bytes(data[at:])
    if how in (2, 3):
        for _ in range(chance.choice((1, 1, 8))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif how == 4:
        data[at:at] = chance.randbytes(chance.choice((1, 4, 100)))
    elif how == 5:
        data[at : at + 40] = b"\xff\xfe\x80" * 10
    elif how == 6:
        return good + good
    elif how == 7:
        return good.decode().encode(chance.choice(("utf-16", "utf-8-sig", "utf-32")))
    elif how == 8:
        data[at : at + chance.choice((1, 30))] = b"\x00"
    else:
        return chance.choice((b"", b"\n", b"{}", b"[]", b"null", b"\x80\x05K\x01.", b"PK\x03\x04"))
    return bytes(data)


def bad_file(good: Sequence[bytes], other: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the ``good`` files changed, or in a few cases one of the ``other`` kinds."""
    start, how = chance.choice(good), chance.random()
    if how < 0.05:
        return chance.choice(other)
    return bad_bytes(start, chance) if how < 0.2 else bad_document(start, chance)


# -- command lines ----------------------------------------------------------------------------

# No path in here may be one that somebody could write to outside of the working folder.
VALUES = (
    "", " ", "0", "1", "-1", "2", "3.5", "-0.5", "1e400", "nan", "inf", "-inf", "1e308", "5e-324",
    "9" * 30, "9" * 5000, "1,2", "1,,2", ",", "0x10", "1_000", "٣", "8GiB", "8 GiB", "1e9GiB",
    "1ms", "a=b", "=", "*=1x1", "[=1x1", "u=99999999x99999999", "u=1x1:row", "true", "None", "-",
    "--", "-o", "--json", "cpu", "cuda", "cuda:99", "mlp", "file.py:make", ":", "a:b:c",
    "[::1]:99999", "a,b,a", "user@", "-oProxyCommand=x", "~", ".", "..", "/proc/none/x",
    "plan.json/x", "missing.json", "missing/out.json", "folder", "plan.json", "profile.json",
    "cluster.json", "kept", "x" * 300, "x" * 5000, "a\nb", "\x1b[31m", "\u202e", "é", "\udcff",
    "%s", "{}", "$(id)", "; id", "'", '"',
)  # fmt: skip


def bad_line(good: Sequence[str], options: Sequence[str], chance: random.Random) -> list[str]:
    """A command line with up to three mistakes; ``options`` are those of all commands."""
    words = list(good)
    for _ in range(chance.choice((1, 1, 2, 3))):
        _one_mistake(words, options, chance)
    return words


def _one_mistake(words: list[str], options: Sequence[str], chance: random.Random) -> None:
    at = chance.randrange(1, len(words)) if len(words) > 1 else 0
    named = [i for i, word in enumerate(words) if word.startswith("-")]
    ways: list[Callable[[], object]] = [
        lambda: words.pop(at),
        lambda: words.__setitem__(at, chance.choice(VALUES)),
        lambda: words.insert(at, chance.choice(VALUES)),
        lambda: words.extend(words[at : at + 2]),
        lambda: words.extend((chance.choice(options), chance.choice(VALUES))),
        lambda: words.extend((chance.choice(options), chance.choice(VALUES))),
        lambda: words.append(chance.choice(options)),
        lambda: words.append(f"{chance.choice(options)}={chance.choice(VALUES)}"),
        lambda: words.append(chance.choice(("--no-such", "-z", "--out=", "--batc", "-hh", "--"))),
        lambda: chance.shuffle(words),
        lambda: words.__setitem__(at, words[at].upper()),
        lambda: words.__setitem__(0, chance.choice(("", "plam", "-h", "--version", "help"))),
    ]
    if named:
        value = min(chance.choice(named) + 1, len(words) - 1)
        ways += [lambda: words.__setitem__(value, chance.choice(VALUES))] * 4
    if words:
        chance.choice(ways)()
