"""The names that a misspelt one may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

LEAST = 0.6
"""Names are proposed from this ratio of ``SequenceMatcher`` on, difflib's own default."""
MOST = 3


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """At most three of ``names``, those most like ``name`` first; capitals and wildcards do not
    count. Of dotted names the last part may be what was written, or the first ones."""
    word = name.strip("*?").casefold()
    found = [(_likeness(word, other.casefold()), other) for other in names]
    near = sorted((f for f in found if f[0] >= LEAST), key=lambda f: -f[0])
    return [other for _, other in near[:MOST]]


def _likeness(word: str, other: str) -> float:
    parts = other.split(".")
    whole = _ratio(word, other)
    # Less than the whole name, where two are as like: "fc" is "fc" before it is "block.fc".
    ends = max(_ratio(word, ".".join(parts[-k:])) for k in range(1, len(parts) + 1))
    starts = max(_ratio(word, ".".join(parts[:k])) for k in range(1, len(parts) + 1))
    return max(whole, 0.95 * ends, 0.95 * starts)


def _ratio(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second, autojunk=False).ratio()


def quoted(names: Iterable[str]) -> str:
    """Names to choose from, in a sentence."""
    return " or ".join(repr(name) for name in names)
