"""Charts as SVG: stacked bars, areas, a grid, spans in rows, and curves.

Each is drawn twice, for narrow and for wide screens and paper, with letters of one size; the page
shows the one that fits. Colours are those of Okabe and Ito, which people with colour-blindness tell
apart; they are named by the classes of ``STYLE``, with which the page is light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

from .markup import make

NARROW, WIDE = 340, 720
LETTER = 6.3
"""The mean width of a letter of 12 pixels."""
LINE = 16
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442", "#999999")
DARK_INK = range(1, len(COLOURS))
"""Those of the colours on which black letters are read better than white ones."""
STYLE = "".join(
    f".c{i}{{fill:{colour}}}.l{i}{{stroke:{colour}}}.b{i}{{background:{colour}}}"
    for i, colour in enumerate(COLOURS)
)


def both(draw: Callable[[int], Element]) -> Element:
    """A chart in both widths."""
    narrow, wide = draw(NARROW), draw(WIDE)
    narrow.set("class", "narrow")
    wide.set("class", "wide")
    return make("div", narrow, wide, class_="chart")


def canvas(width: int, height: float, what: str) -> Element:
    """An empty chart, and what it shows, for those who do not see it."""
    return make(
        "svg", make("title", what), xmlns="http://www.w3.org/2000/svg", role="img",
        viewBox=f"0 0 {width} {height:.0f}", width=width, height=round(height),
    )  # fmt: skip


def text(
    x: float, y: float, words: str, anchor: str = "start", class_: str = "t", **more: object
) -> Element:
    return make("text", words, x=float(x), y=float(y), text_anchor=anchor, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Element:
    return make("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, title: str = "") -> Element:
    made = make(
        "rect", x=float(x), y=float(y), width=float(max(width, 0.0)), height=float(height),
        class_=class_,
    )  # fmt: skip
    if title:
        made.append(make("title", title))
    return made


def width_of(words: str) -> float:
    return LETTER * len(words)


def shortened(words: str, room: float) -> str:
    """The words, or their end where there is room for no more: the end of a long name says more
    than its beginning."""
    letters = int(room / LETTER)
    if len(words) <= letters:
        return words
    return f"…{words[len(words) - letters + 1 :]}" if letters > 1 else ""


def key(entries: Iterable[tuple[int, str]]) -> Element:
    """What the colours stand for."""
    return make(
        "ul",
        *(make("li", make("span", class_=f"b{i}"), words) for i, words in entries),
        class_="key",
    )


# -- scales ----------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """Values from ``low`` to ``high`` over pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """At most so many round values, or a few more."""
        if self.logarithmic:
            return _logarithmic_ticks(self.low, self.high, most)
        step = round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [n * step for n in range(first, last + 1)]


def round_step(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * n for n in (1, 2, 5, 10) if power * n >= least * (1 - 1e-9))


def _logarithmic_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1, 2, 5), (1, 3), (1,)):
        found = [
            d * 10.0**p
            for p in powers
            for d in digits
            if low * 0.999 <= d * 10.0**p <= high * 1.001
        ]
        if len(found) < 2:  # a scale this short is almost an even one
            return Scale(low, high, 0.0, 1.0).ticks(most)
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


class Unit(NamedTuple):
    """What a figure is shown in: its name, and how many of the plain unit it is."""

    name: str
    size: float

    def show(self, value: float) -> str:
        shown = value / self.size
        return f"{shown:.0f}" if shown >= 100 or shown == int(shown) else f"{shown:.3g}"


def time_unit(most_s: float) -> Unit:
    for name, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if most_s >= size:
            return Unit(name, size)
    return Unit("ns", 1e-9)


def byte_unit(most: float) -> Unit:
    for name, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if most >= 2**power:
            return Unit(name, float(2**power))
    return Unit("bytes", 1.0)


# -- stacked bars ----------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A row of a chart of bars: parts (colour, seconds) from left to right, and the interval in
    which their sum is expected."""

    label: str
    parts: Sequence[tuple[int, float]]
    low: float | None = None
    high: float | None = None

    @property
    def total(self) -> float:
        return sum(part for _, part in self.parts)


def bars(rows: Sequence[Bar], show: Callable[[float], str], what: str, width: int) -> Element:
    """Bars of seconds, with their labels above them."""
    most = max((max(row.total, row.high or 0.0) for row in rows), default=0.0) or 1.0
    unit = time_unit(most)
    left, right, each = 2.0, width - 14.0, 54.0
    scale = Scale(0.0, most / unit.size, left, right)
    height = each * len(rows) + 40
    drawing = canvas(width, height, what)
    bottom = each * len(rows) + 4
    for tick in scale.ticks(max(width // 90, 3)):
        drawing.append(line(scale.at(tick), 4, scale.at(tick), bottom, "grid"))
        anchor = "start" if not tick else "middle"
        drawing.append(text(scale.at(tick), bottom + 14, f"{tick:g}", anchor))
    drawing.append(text(right, bottom + 29, unit.name, "end"))
    for i, row in enumerate(rows):
        top = each * i + 4
        total = show(row.total)
        drawing.append(text(left, top + 12, shortened(row.label, right - 80)))
        drawing.append(text(right, top + 12, total, "end", "t strong"))
        at = 0.0
        for colour, seconds in row.parts:
            start, end = (scale.at(s / unit.size) for s in (at, at + seconds))
            drawing.append(box(start, top + 19, end - start, 20, f"c{colour}", show(seconds)))
            words = show(seconds)
            if width_of(words) + 6 < end - start:
                ink = "dark-ink" if colour in DARK_INK else "light-ink"
                drawing.append(text((start + end) / 2, top + 33, words, "middle", f"t {ink}"))
            at += seconds
        if row.low is not None and row.high is not None:
            drawing.extend(_interval(scale, unit, row.low, row.high, top + 44))
    return drawing


def _interval(scale: Scale, unit: Unit, low: float, high: float, y: float) -> Iterator[Element]:
    start, end = scale.at(low / unit.size), scale.at(high / unit.size)
    yield line(start, y, end, y, "axis")
    for x in (start, end):
        yield line(x, y - 3, x, y + 3, "axis")


# -- areas -----------------------------------------------------------------------------------------


class MemoryLayer(NamedTuple):
    """One class of what an area chart adds up: its colour and a value for each moment."""

    colour: int
    values: Sequence[float]


def areas(
    layers: Sequence[MemoryLayer],
    phases: Sequence[tuple[str, int]],
    limit: float | None,
    what: str,
    width: int,
) -> Element:
    """Bytes over the moments of a step, class upon class. ``phases`` are names and how many moments
    each has."""
    count = max(sum(n for _, n in phases), 1)
    totals = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    peak = max(totals, default=0.0) or 1.0
    # A limit far above what is held would press that flat: then it is named and not drawn.
    drawn = limit is not None and limit <= 2.5 * peak
    most = 1.08 * (max(peak, limit or 0.0) if drawn else peak)
    unit = byte_unit(most)
    left, right, top, bottom = 50.0, width - 8.0, 24.0, 214.0
    up = Scale(0.0, most / unit.size, bottom, top)
    along = Scale(0.0, float(count), left, right)
    drawing = canvas(width, bottom + 22, what)
    for tick in up.ticks(5):
        drawing.append(line(left, up.at(tick), right, up.at(tick), "grid"))
        drawing.append(text(left - 5, up.at(tick) + 4, f"{tick:g}", "end"))
    drawing.append(text(2, 12, unit.name))
    below = [0.0] * count
    for layer in layers:
        above = [b + v for b, v in zip(below, layer.values, strict=True)]
        drawing.append(_area(layer.colour, below, above, up, along, unit))
        below = above
    at = 0
    for name, moments in phases:
        middle = along.at(at + moments / 2)
        if at:
            drawing.append(line(along.at(at), top, along.at(at), bottom, "axis dashed"))
        if along.at(at + moments) - along.at(at) > width_of(name):
            drawing.append(text(middle, bottom + 15, name, "middle"))
        at += moments
    if limit is not None and drawn:
        y = up.at(limit / unit.size)
        drawing.append(line(left, y, right, y, "limit"))
        drawing.append(
            text(right, y - 4, f"limit {unit.show(limit)} {unit.name}", "end", "t strong")
        )
    return drawing


def _area(
    colour: int, below: Sequence[float], above: Sequence[float], up: Scale, along: Scale, unit: Unit
) -> Element:
    # Steps: a moment's bytes are there all along.
    upper = [(along.at(i + e), up.at(v / unit.size)) for i, v in enumerate(above) for e in (0, 1)]
    lower = [(along.at(i + e), up.at(v / unit.size)) for i, v in enumerate(below) for e in (0, 1)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *reversed(lower)))
    return make("polygon", points=points, class_=f"c{colour}")


# -- spans in rows ---------------------------------------------------------------------------------


class Spans(NamedTuple):
    """A row of a timeline: its label and (colour, from, to, what) in seconds."""

    label: str
    spans: Sequence[tuple[int, float, float, str]]


def timeline(rows: Sequence[Spans], length_s: float, what: str, width: int) -> Element:
    """What goes on at the same time, row by row."""
    unit = time_unit(length_s)
    left, right, each = 2.0, width - 14.0, 40.0
    along = Scale(0.0, length_s / unit.size, left, right)
    bottom = each * len(rows) + 4
    drawing = canvas(width, bottom + 36, what)
    for tick in along.ticks(max(width // 90, 3)):
        drawing.append(line(along.at(tick), 4, along.at(tick), bottom, "grid"))
        drawing.append(
            text(along.at(tick), bottom + 13, f"{tick:g}", "middle" if tick else "start")
        )
    drawing.append(text(right, bottom + 28, unit.name, "end"))
    for i, row in enumerate(rows):
        top = each * i + 4
        drawing.append(text(left, top + 12, row.label))
        drawing.append(line(left, top + 34, right, top + 34, "grid"))
        for colour, start, end, title in _visible(row.spans, along, unit):
            drawing.append(box(start, top + 17, end - start, 17, f"c{colour}", title))
    return drawing


def _visible(
    spans: Iterable[tuple[int, float, float, str]], along: Scale, unit: Unit
) -> Iterator[tuple[int, float, float, str]]:
    """Where spans lie in pixels; those of one colour that nobody could tell apart are one."""
    last: tuple[int, float, float, str] | None = None
    for colour, start_s, end_s, title in sorted(spans, key=lambda span: span[1]):
        start, end = along.at(start_s / unit.size), along.at(end_s / unit.size)
        if last is not None and last[0] == colour and start - last[2] < 0.3 and end - last[1] < 3:
            last = (colour, last[1], max(end, last[2]), last[3])
            continue
        if last is not None:
            yield last
        last = (colour, start, end, title)
    if last is not None:
        yield (*last[:2], max(last[2], last[1] + 0.4), last[3])


# -- a grid ----------------------------------------------------------------------------------------


class GridRow(NamedTuple):
    """A row of a map: its label and for each column a colour (None: nothing there) and a word."""

    label: str
    cells: Sequence[tuple[int | None, str]]


def grid(
    rows: Sequence[GridRow],
    columns: Sequence[str],
    groups: Sequence[tuple[str, int]],
    what: str,
    width: int,
) -> Element:
    """What each column has of each row. ``groups`` are names over so many columns each."""
    left = 2.0
    room = (width - 2 * left) / max(len(columns), 1)
    named = room >= 26
    each = 38.0
    drawing = canvas(width, 40 + each * len(rows), what)
    at = 0
    for name, count in groups:
        start = left + room * at
        drawing.append(line(start + 1, 16, start + room * count - 1, 16, "axis"))
        drawing.append(text(start + 2, 12, shortened(name, room * count - 4)))
        at += count
    step = max(math.ceil(22 / room), 1)
    for i, name in enumerate(columns):
        if i % step == 0:
            drawing.append(text(left + room * (i + 0.5), 30, name, "middle"))
    for n, row in enumerate(rows):
        top = 36 + each * n
        drawing.append(text(left, top + 12, shortened(row.label, width - 2 * left)))
        for i, (colour, word) in enumerate(row.cells):
            x = left + room * i
            shape = "idle" if colour is None else f"c{colour}"
            drawing.append(box(x + 0.5, top + 16, room - 1, 17, shape, word))
            if named and width_of(word) < room:
                ink = "t" if colour is None else "t light-ink"
                if colour in DARK_INK:
                    ink = "t dark-ink"
                drawing.append(text(x + room / 2, top + 29, word, "middle", ink))
    return drawing


# -- curves ----------------------------------------------------------------------------------------


class ChartLine(NamedTuple):
    """A line of a chart: its colour, its name, its points, and whether it is dashed."""

    colour: int
    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class AxisX(NamedTuple):
    """The axis below curves: where there is a figure to read, and how that is written."""

    label: str
    ticks: Mapping[float, str]
    now: float


def curves(lines: Sequence[ChartLine], axis: AxisX, what: str, width: int) -> Element:
    """Seconds over a quantity, both on logarithmic scales, with names at the lines' ends."""
    every = [point for one in lines for point in one.points]
    low, high = min(y for _, y in every), max(y for _, y in every)
    unit = time_unit(high)
    left, right, top, bottom = 46.0, width - 10.0, 36.0, 222.0
    # A little of room, so that a line that is level lies in the middle.
    up = Scale(low / unit.size / 1.25, high / unit.size * 1.25, bottom, top, logarithmic=True)
    values = sorted(axis.ticks)
    along = Scale(values[0], values[-1], left + 8, right - 8, logarithmic=True)
    drawing = canvas(width, bottom + 41, what)
    for tick in up.ticks(6):
        drawing.append(line(left, up.at(tick), right, up.at(tick), "grid"))
        drawing.append(text(left - 5, up.at(tick) + 4, f"{tick:g}", "end"))
    drawing.append(text(2, 12, f"step, {unit.name}"))
    drawing.append(line(along.at(axis.now), top, along.at(axis.now), bottom, "axis dashed"))
    drawing.append(text(along.at(axis.now), top - 4, "now", "middle", "t strong"))
    free = -math.inf
    for value in values:
        words = axis.ticks[value]
        x, long = along.at(value), width_of(words)
        # Letters may be wider than the mean: what would reach over the edge ends there.
        over = x + long / 2 > width - 4
        start = width - 2 - long if over else max(x - long / 2, 0.0)
        if start > free + 4:
            at, anchor = (width - 2.0, "end") if over else (start + long / 2, "middle")
            drawing.append(text(at, bottom + 18, words, anchor))
            free = start + long
    drawing.append(text(right, bottom + 34, axis.label, "end"))
    ends: list[tuple[float, float, str]] = []
    for one in lines:
        points = [(along.at(x), up.at(y / unit.size)) for x, y in sorted(one.points)]
        drawing.append(
            make(
                "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points),
                class_=f"curve l{one.colour}" + (" dashed" if one.dashed else ""),
            )
        )  # fmt: skip
        drawing.extend(_mark(one.colour, x, y) for x, y in points)
        ends.append((points[-1][1] - 9, points[-1][0] + 4, one.name))
    # From the lowest up, each above the one before it where they would meet.
    free = bottom - 4
    for y, x, name in sorted(ends, reverse=True):
        free = max(min(y, free), top + 12)
        drawing.append(text(x, free, name, "end", "t over"))
        free -= LINE
    return drawing


def _mark(colour: int, x: float, y: float) -> Element:
    """A point of a line, in a shape of its colour's own."""
    if colour % 3 == 0:
        return make("circle", cx=float(x), cy=float(y), r=4, class_=f"c{colour}")
    if colour % 3 == 1:
        return box(x - 3.5, y - 3.5, 7, 7, f"c{colour}")
    points = f"{x:.1f},{y - 5:.1f} {x + 4.5:.1f},{y + 3.5:.1f} {x - 4.5:.1f},{y + 3.5:.1f}"
    return make("polygon", points=points, class_=f"c{colour}")
