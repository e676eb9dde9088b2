"""What a user decides beforehand: pins and prohibitions, as written and as a search has them.

Written:            ``UNIT=WHAT`` with a unit's name or a pattern (``*``, ``?``, ``[…]``)
    pin a unit      ``fc1=4x2``  ``fc1=(4,2)``  ``fc1=column``  ``fc1=4x2:row``  ``fc1=8x1/4x2``
    forbid a unit   ``fc1=4x2``  ``fc1=row``
    forbid all      ``4x2``  ``row``, or a policy: ``recompute``  ``offload``  ``sharded`` …
"""

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from itertools import product
from typing import NamedTuple, Protocol, get_args

import msgspec

from .capability import Capability
from .errors import InputError
from .goal import Goal, Pin
from .layout import Layout, Style, lattice
from .options import Option, allowed, tied_units, ties_agree
from .plan import ExchangePolicy, FeedbackPolicy, MemoryPolicy, WireFormat
from .profile import FIXED_KINDS, ModelProfile

STYLES: tuple[Style, ...] = get_args(Style)
EARLY_RELEASE = "early-release"
BY_HOST = "by-host"
POLICIES: tuple[str, ...] = (
    *get_args(MemoryPolicy),
    *get_args(ExchangePolicy),
    *get_args(FeedbackPolicy),
    *get_args(WireFormat),
    EARLY_RELEASE,
    BY_HOST,
)
# Policies that a unit falls back on: without them nothing would be left to plan.
ALWAYS = ("keep", "dense", "residual", "exact")
FORBIDDABLE = tuple(policy for policy in POLICIES if policy not in ALWAYS)
# Names are proposed from this ratio of ``SequenceMatcher`` on, difflib's own default.
LEAST_LIKE = 0.6
MOST_NAMES = 3


class PinsAndForbids(NamedTuple):
    """Pins by unit or pattern, and the policies that no unit shall have."""

    pins: tuple[Pin, ...] = ()
    without: tuple[str, ...] = ()


def parse_wishes(pins: Iterable[str], forbidden: Iterable[str]) -> PinsAndForbids:
    """What ``--pin`` and ``--forbid`` say; raises ``InputError``."""
    found: list[Pin] = []
    without: list[str] = []
    for text in pins:
        if "=" not in text:
            raise InputError(f"{text!r} pins no unit: write UNIT=LAYOUT, such as fc1=4x2")
        unit, layouts, style = _parts(text)
        found.append(Pin(unit=unit, only=layouts, styles=(style,) if style else ()))
    for text in forbidden:
        if text in ALWAYS:
            raise InputError(f"{text!r} is what remains without a policy: forbid another")
        if text in POLICIES:
            without.append(text)
            continue
        unit, layouts, style = _parts(text, everywhere="=" not in text)
        # "Not this layout in that style" cannot be said with lists of layouts and of styles.
        if layouts and style:
            raise InputError(f"{text!r} forbids a layout and a style at once: forbid one of them")
        found.append(Pin(unit=unit, never=layouts, never_styles=(style,) if style else ()))
    return PinsAndForbids(tuple(found), tuple(without))


def checked_policies(names: Iterable[str]) -> tuple[str, ...]:
    """The policies of those names; raises ``InputError`` for what is none, or cannot be ruled
    out."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        if name not in FORBIDDABLE:
            known = ", ".join(FORBIDDABLE)
            raise InputError(f"{name!r} is no policy that can be forbidden: choose from {known}")
    return found


def forbidding(*policies: str) -> str:
    """How to plan without some policies: by the command line, and from Python."""
    options = " ".join(f"--forbid {policy}" for policy in policies)
    return f"{options} (plan=mw.plan(..., forbidden={list(policies)}))"


def _parts(text: str, *, everywhere: bool = False) -> tuple[str, tuple[Layout, ...], Style | None]:
    """(unit, layouts, style) of ``UNIT=LAYOUT/LAYOUT:STYLE``, each part of WHAT optional; of
    ``LAYOUT/LAYOUT:STYLE`` for all units where it holds ``everywhere``."""
    unit, what = ("*", text) if everywhere else text.rpartition("=")[::2]
    first, _, second = what.partition(":")
    # A style may stand alone: the last word is looked at first.
    words = [w for w in (first.strip(), second.strip()) if w]
    style = next((s for s in STYLES if words and s == words[-1]), None)
    if style:
        words.pop()
    if not unit.strip() or len(words) > 1 or (not words and style is None):
        raise _unreadable(text, everywhere=everywhere)
    layouts = []
    for part in words[0].split("/") if words else ():
        match = re.fullmatch(r"\(?\s*(\d+)\s*[x,]\s*(\d+)\s*\)?", part.strip())
        if not match or "0" in (match[1], match[2]):
            raise _unreadable(text, everywhere=everywhere)
        layouts.append(Layout(groups=int(match[1]), degree=int(match[2])))
    return unit.strip(), tuple(layouts), style


def _unreadable(text: str, *, everywhere: bool) -> InputError:
    _, _, style = text.rpartition("=")[2].rpartition(":")
    # To be told of a policy by its own name would not help: it can be forbidden, not pinned.
    near = None if style in FORBIDDABLE else nearest(style, (*STYLES, *FORBIDDABLE))
    attempt = f"try {quoted(near)}, or " if near else ""
    if everywhere:
        return InputError(
            f"{text!r} is nothing that can be forbidden for all units: {attempt}choose a policy "
            f"({', '.join(FORBIDDABLE)}), a style ({', '.join(STYLES)}) or a layout such as 4x2; "
            "for one unit write UNIT=4x2"
        )
    return InputError(
        f"{text!r} says no layout: {attempt}"
        "write UNIT=GROUPSxMEMBERS such as fc1=4x2, a style "
        f"({', '.join(STYLES)}) or both as 4x2:row; a policy ({', '.join(FORBIDDABLE)}) can only "
        "be forbidden, for all units"
    )


def without(capability: Capability, policies: Sequence[str]) -> Capability:
    """The capability less some policies."""
    return msgspec.structs.replace(
        capability,
        memory=tuple(m for m in capability.memory if m not in policies),
        exchange=tuple(e for e in capability.exchange if e not in policies),
        early_release=capability.early_release and EARLY_RELEASE not in policies,
        feedback=tuple(f for f in capability.feedback if f not in policies),
        wire=tuple(w for w in capability.wire if w not in policies),
        by_host=capability.by_host and BY_HOST not in policies,
    )


State = tuple[Layout, Style]


def spelled_out(goal: Goal, profile: ModelProfile, capability: Capability, world: int) -> Goal:
    """The goal with each pin on a unit by its name; raises ``InputError`` where a pin names no
    unit, or pins leave a unit nothing that it can be."""
    if not goal.pins:
        return goal
    # Without pins, so that a refusal can list all that the unit can be.
    bare = msgspec.structs.replace(goal, pins=())
    states = _States(profile, bare, capability, world)
    pins = tuple(dict.fromkeys(p for pin in goal.pins for p in states.pins(pin)))
    found = msgspec.structs.replace(goal, pins=pins)
    states.check(found)
    return found


class NamedUnit(Protocol):
    """A unit as pins name it: of a profile, or of a model that has not been measured."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def modules(self) -> Sequence[str]: ...


def check_named(pins: Iterable[Pin], units: Sequence[NamedUnit]) -> None:
    """Raises ``InputError`` for a pin or a prohibition that names no unit."""
    for pin in pins:
        if not any(pin.unit == u.name or fnmatchcase(u.name, pin.unit) for u in units):
            raise no_such_unit(pin, units)


def no_such_unit(pin: Pin, units: Sequence[NamedUnit]) -> InputError:
    """That a pin or a prohibition names no unit; the nearest names, and what lists them all."""
    every = [unit.name for unit in units]
    names = [unit.name for unit in units if unit.kind not in FIXED_KINDS] or every
    near = nearest(pin.unit, names)
    home = next((unit.name for unit in units if pin.unit in unit.modules), None)
    if home is not None:
        return InputError(
            f"{pin.unit!r}, which shall be {pin.wish}, is a module of unit {home!r}: write "
            f"{home!r} for all of it"
        )
    some = f"try {quoted(near)}" if near else f"they are {names[0]!r} to {names[-1]!r}"
    return InputError(
        f"no unit is called {pin.unit!r}, which shall be {pin.wish}: {some}; 'meshwright plan' "
        f"without that and with --all-units lists all {len(names)}"
    )


class _States:
    """What the units can be without pins."""

    def __init__(
        self, profile: ModelProfile, goal: Goal, capability: Capability, world: int
    ) -> None:
        self.profile, self.world = profile, world
        bursts = capability.idle_positions
        every = product(lattice(world, complete=goal.all_layouts, bursts=bursts), STYLES)
        both = [(y, s) for y, s in every if (s == "none") == (y.degree == 1)]
        self.of: dict[str, list[State]] = {
            unit.name: [s for s in both if allowed(unit, Option(*s), goal, capability, world)]
            for unit in profile.units
        }

    def pins(self, pin: Pin) -> list[Pin]:
        """The pin on each unit that it concerns."""
        # A name that is written out must be able to be what is asked. A pattern concerns those of
        # its units that can, so that ``*=1x8`` divides what can be divided.
        if pin.unit in self.of:
            if not self.left(pin.unit, (pin,)):
                raise InputError(self._cannot(pin.unit, (pin,)))
            return [pin]
        named = [name for name in self.of if fnmatchcase(name, pin.unit)]
        able = [name for name in named if self.left(name, (pin,))]
        if not named:
            raise no_such_unit(pin, self.profile.units)
        if not able:
            raise InputError(self._cannot(named[0], (pin,)))
        return [msgspec.structs.replace(pin, unit=name) for name in able]

    def left(self, name: str, pins: Sequence[Pin]) -> list[State]:
        """What the pins leave of a unit's states."""
        return [state for state in self.of[name] if all(pin.permits(*state) for pin in pins)]

    def _cannot(self, name: str, pins: Sequence[Pin]) -> str:
        asked = " and ".join(pin.wish for pin in pins)
        able = ", ".join(f"{y}" if s == "none" else f"{y} {s}" for y, s in self.of[name])
        return f"unit {name!r} cannot be {asked} on {self.world} ranks: choose from {able}"

    def check(self, goal: Goal) -> None:
        """Refuses pins that leave a unit, or units tied to each other, nothing."""
        mine: dict[str, list[Pin]] = {}
        for pin in goal.pins:
            mine.setdefault(pin.unit, []).append(pin)
        for name, pins in mine.items():
            if not self.left(name, pins):
                raise InputError(self._cannot(name, pins))
        units = self.profile.units
        for ties in dict.fromkeys(tied_units(self.profile)):
            names = [units[k].name for k in ties]
            if len(ties) > 1 and not self._agree(ties, mine):
                raise InputError(
                    f"units {', '.join(names)} share parameters and must be divided alike, which "
                    "their pins forbid: pin one of them, or all of them to the same"
                )

    def _agree(self, ties: Sequence[int], mine: dict[str, list[Pin]]) -> bool:
        """Whether some state of the first tied unit goes with one of each other."""
        units = [self.profile.units[k] for k in ties]
        left = [self.left(u.name, mine.get(u.name, ())) for u in units]
        return any(
            all(
                any(ties_agree((units[0], u), (Option(*state), Option(*o))) for o in theirs)
                for u, theirs in zip(units[1:], left[1:], strict=True)
            )
            for state in left[0]
        )


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """At most three of ``names``, those most like ``name`` first; capitals and wildcards do not
    count. Of dotted names the last part may be what was written, or the first ones."""
    word = name.strip("*?").casefold()
    found = [(_likeness(word, other.casefold()), other) for other in names]
    near = sorted((f for f in found if f[0] >= LEAST_LIKE), key=lambda f: -f[0])
    return [other for _, other in near[:MOST_NAMES]]


def _likeness(word: str, other: str) -> float:
    def ratio(part: str) -> float:
        return SequenceMatcher(None, word, part, autojunk=False).ratio()

    parts = other.split(".")
    ends = max(ratio(".".join(parts[-k:])) for k in range(1, len(parts) + 1))
    starts = max(ratio(".".join(parts[:k])) for k in range(1, len(parts) + 1))
    # Less than the whole name, where two are as like: "fc" is "fc" before it is "block.fc".
    return max(ratio(other), 0.95 * ends, 0.95 * starts)


def quoted(names: Iterable[str]) -> str:
    """Names to choose from, in a sentence."""
    return " or ".join(repr(name) for name in names)
