"""Folds a long list of units: neighbours that are alike become one row, equal layers one block.

A model of 32 equal layers is one block, ``model.layers.0 … 31 ×32``, with the rows of one layer
inside. Layers are equal where the names inside them and what is shown of their units are the same;
they need not be neighbours (``layers.0 … 6, 23 … 30 ×15``). Of all ways to fold, the one with the
fewest rows is taken. Where many layers differ in a unit or two, that leaves a long table: then
layers with the same names are one block, and inside it a unit has a row for each way in which it is
decided (``mlp of 18, 19``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Generic, NamedTuple, TypeVar

from .table import names_of

UnitT = TypeVar("UnitT")
# Code between modules is numbered through the whole model, so its number says nothing about the
# layer that it lies in: it is counted to the module of the unit before it.
GLUE = re.compile(r"@\w+\.\d+")
# So many ranges of numbers a block's name holds; the rest is only counted.
LISTED = 5
# A layer that no other equals has a heading of its own from so many rows on.
HEADED = 3
# Layers that take more rows than this when equal ones are put together are left in order.
MOST = 200
# With its heading and caption, a table of so many rows is under 25 lines.
SHORT = 17


class Row(NamedTuple, Generic[UnitT]):
    """One row of a folded table. ``units`` are all that it stands for, in ``repeats`` equal blocks.

    A block's own row comes before those inside it, which are one ``depth`` deeper and called as
    they are inside ``module``, the first of the equal ones.
    """

    name: str
    units: Sequence[UnitT]
    repeats: int = 1
    depth: int = 0
    module: str = ""
    is_block: bool = False

    @property
    def indented(self) -> str:
        """Its name, further right inside blocks."""
        return "  " * self.depth + self.name

    def mean(self, figure: Callable[[UnitT], float]) -> float:
        """The sum of a figure over its units in one block, on average over the blocks."""
        return sum(map(figure, self.units)) / self.repeats


class _Column(NamedTuple, Generic[UnitT]):
    """Units at the same place of equal blocks, under the name of the first of them. ``path`` is
    that name, or where a unit belongs whose name does not say so."""

    name: str
    path: str
    key: tuple[str, ...]
    units: list[UnitT]


class _Layer(NamedTuple):
    """Neighbours from ``start`` up to ``end`` inside one numbered module (``layers.3``). Layers of
    one ``series`` differ in that number; those with the same ``content`` are equal."""

    module: str
    start: int
    end: int
    series: tuple[str, str]
    content: int


class _Division(NamedTuple):
    """What the columns up to ``end`` are shown as: one row, or ``layers`` with equal ones together,
    whose names are fixed up to the ``number``-th number."""

    end: int
    layers: list[_Layer]
    number: int = 0


def fold(
    units: Sequence[UnitT], name: Callable[[UnitT], str], key: Callable[[UnitT], tuple[str, ...]]
) -> list[Row[UnitT]]:
    """The rows of ``units``, roughly in order; units with equal ``key`` may share one."""
    columns: list[_Column[UnitT]] = []
    for unit in units:
        path = name(unit)
        if GLUE.fullmatch(path) and columns:
            above = columns[-1].path.rpartition(".")[0]
            path = f"{above}.@glue" if above else path
        columns.append(_Column(name(unit), path, key(unit), [unit]))
    return list(_rows(columns))


def fold_short(
    units: Sequence[UnitT], name: Callable[[UnitT], str], key: Callable[[UnitT], tuple[str, ...]]
) -> list[Row[UnitT]]:
    """As ``fold``; where that leaves more than ``SHORT`` rows and putting unequal layers with the
    same names together leaves fewer, so."""
    exact = fold(units, name, key)
    if len(exact) <= SHORT:
        return exact

    def decision(unit: UnitT) -> tuple[str, ...]:
        above = f"{_layer_of(name(unit))}."
        return tuple(text.replace(above, "") for text in key(unit))

    # The same unit of all layers is called alike: neighbours share a row where they are decided
    # alike in every one of them.
    alike: dict[str, list[str]] = {}
    for unit in units:
        alike.setdefault(_unnumbered(name(unit)), []).append("\n".join(decision(unit)))
    mixed = fold(units, name, lambda unit: tuple(alike[_unnumbered(name(unit))]))
    rows = [part for row in mixed for part in _by_decision(row, name, decision)]
    return rows if len(rows) < len(exact) else exact


def _by_decision(
    row: Row[UnitT], name: Callable[[UnitT], str], decision: Callable[[UnitT], tuple[str, ...]]
) -> Iterator[Row[UnitT]]:
    """A row for each way in which units of one row are decided, and the numbers of their layers."""
    found: dict[tuple[str, ...], list[UnitT]] = {}
    for unit in row.units:
        found.setdefault(decision(unit), []).append(unit)
    if row.is_block or len(found) == 1:
        yield row
        return
    every = list(dict.fromkeys(_layer_of(name(unit)) for unit in row.units))
    for some in found.values():
        layers = list(dict.fromkeys(_layer_of(name(unit)) for unit in some))
        places = [(every.index(layer), layer.rpartition(".")[2]) for layer in layers]
        yield row._replace(
            name=f"{row.name} of {_listed(places)}",
            units=some,
            repeats=_blocks_with(some, name, row.module),
            module=layers[0],
        )


def _blocks_with(units: Sequence[UnitT], name: Callable[[UnitT], str], module: str) -> int:
    """How many blocks like ``module`` contain some of the units; what is in no block is one."""
    # A block need not contain as many of them as the next one.
    if not module:
        return 1
    return len({_module(name(unit), len(_numbered(module))) for unit in units})


def _layer_of(name: str) -> str:
    """A unit's name up to its last number that has a part of the name behind it."""
    return name[: max((m.end() for m in re.finditer(r"(?<![^.])\d+(?=\.)", name)), default=0)]


def _unnumbered(name: str) -> str:
    """A unit's name without the numbers of the layers that it is in."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "#", name)


def unfolded(units: Sequence[UnitT], name: Callable[[UnitT], str]) -> list[Row[UnitT]]:
    """A row for each unit."""
    return [Row(name(unit), [unit]) for unit in units]


def _rows(
    columns: Sequence[_Column[UnitT]], numbers: int = 0, inside: str = "", depth: int = 0
) -> Iterator[Row[UnitT]]:
    """The rows of columns that lie ``inside`` one module, whose name has so many ``numbers``."""
    start = 0
    for end, layers, number in _divisions(columns, numbers):
        if not layers:
            run = columns[start:end]
            names = [_relative(c.path, inside) if inside else c.name for c in run]
            units = [unit for column in run for unit in column.units]
            yield Row(names_of(names), units, len(run[0].units), depth, inside)
        places = {layer.module: place for place, layer in enumerate(layers)}
        for content in dict.fromkeys(layer.content for layer in layers):
            equal = [layer for layer in layers if layer.content == content]
            block = _stacked(columns, equal)
            rows = list(_rows(block, number, equal[0].module, depth + 1))
            if len(equal) == 1 and len(rows) < HEADED:
                yield from _rows(block, number, inside, depth)
                continue
            units = [unit for column in block for unit in column.units]
            repeats = len(columns[equal[0].start].units)
            title = _title([(places[layer.module], layer.module) for layer in equal], inside)
            yield Row(title, units, repeats, depth, inside, is_block=True)
            yield from rows
        start = end


def _divisions(columns: Sequence[_Column[UnitT]], numbers: int) -> Iterator[_Division]:
    """The division of columns into runs and groups of equal layers with the fewest rows."""
    count = len(columns)
    series = _series(columns, numbers)
    # from the end: fewest[i] is for columns[i:], and first[i] what stands at their beginning
    fewest = [0] * (count + 1)
    first = [_Division(count, [])] * count
    for i in reversed(range(count)):
        fewest[i] = count + 1
        end = i + 1
        while end <= count and columns[end - 1].key == columns[i].key:
            if 1 + fewest[end] <= fewest[i]:  # of equally few rows the longest run
                fewest[i], first[i] = 1 + fewest[end], _Division(end, [])
            end += 1
        for one, place in series.get(i, ()):
            for rows, last in one.rows_from(place):
                end = one.layers[last].end
                if rows + fewest[end] <= fewest[i]:  # layers before runs of units
                    fewest[i] = rows + fewest[end]
                    first[i] = _Division(end, one.layers[place : last + 1], one.number)
    at = 0
    while at < count:
        yield first[at]
        at = first[at].end


class _Series(NamedTuple):
    """Layers that follow each other and differ in the ``number``-th number of their names, and the
    rows that each takes inside."""

    layers: list[_Layer]
    number: int
    inner: list[int]

    def starts(self) -> Iterator[tuple[int, int]]:
        """(column, layer) where a group may begin: the first layer, and those unlike the last."""
        for place, layer in enumerate(self.layers[:-1]):
            if not place or layer.content != self.layers[place - 1].content:
                yield layer.start, place

    def rows_from(self, first: int) -> Iterator[tuple[int, int]]:
        """How many rows layers from ``first`` up to each later one take, equal ones together."""
        rows = 0
        seen: dict[int, _Places] = {}
        for place in range(first, len(self.layers)):
            content, inner = self.layers[place].content, self.inner[place]
            before = seen.get(content)
            if before is None:
                rows += inner
                seen[content] = _Places(place)
            else:
                # A block in many pieces is hard to find a layer in: each piece counts as a row.
                now = before.with_next(place)
                rows += now.pieces - before.pieces
                rows += now.number == 2  # its heading
                seen[content] = now
            if rows > MOST:
                return
            yield rows, place


class _Places(NamedTuple):
    """Ascending places as far as they have been seen: whether all are one ``step`` apart, and how
    many ``runs`` without a gap they make."""

    last: int
    number: int = 1
    step: int = 0
    regular: bool = True
    runs: int = 1

    @property
    def pieces(self) -> int:
        """How many pieces name them: ``1, 3 … 9``, or a piece for each run."""
        return 1 if self.regular and self.number > 2 else self.runs

    def with_next(self, place: int) -> _Places:
        """Those and one more."""
        step = place - self.last
        regular = self.regular and (self.number == 1 or step == self.step)
        return _Places(place, self.number + 1, step, regular, self.runs + (step > 1))


def _series(
    columns: Sequence[_Column[UnitT]], numbers: int
) -> dict[int, list[tuple[_Series, int]]]:
    """The series of layers by the columns at which a group of theirs may begin; ``numbers`` of the
    names are the same for all columns."""
    found: dict[int, list[tuple[_Series, int]]] = {}
    deepest = max((len(_numbered(column.path)) for column in columns), default=0)
    for number in range(numbers + 1, deepest + 1):
        inner: dict[int, int] = {}
        for _, group in groupby(_layers(columns, number), lambda layer: layer.series):
            layers = list(group)
            if len(layers) == 1:
                continue
            for layer in layers:
                if layer.content not in inner:
                    block = columns[layer.start : layer.end]
                    inner[layer.content] = len(list(_rows(block, number, layer.module)))
            one = _Series(layers, number, [inner[layer.content] for layer in layers])
            for start, place in one.starts():
                found.setdefault(start, []).append((one, place))
    return found


def _layers(columns: Sequence[_Column[UnitT]], number: int) -> Iterator[_Layer]:
    """Neighbours inside the same module, whose name ends with its ``number``-th number."""
    start = 0
    contents: dict[object, int] = {}
    for module, group in groupby(columns, lambda column: _module(column.path, number)):
        inside = list(group)
        above, _, last = module.rpartition(".")
        pattern = re.sub(r"\d+", "#", last) if len(_numbered(module)) == number else last
        content = tuple((_relative(c.path, module), _distances(c.key, above, last)) for c in inside)
        equal = contents.setdefault(content, len(contents))
        yield _Layer(module, start, start + len(inside), (above, pattern), equal)
        start += len(inside)


def _numbered(name: str) -> list[int]:
    """Which parts of a dotted name hold a number."""
    return [i for i, part in enumerate(name.split(".")) if re.search(r"\d", part)]


def _module(name: str, number: int) -> str:
    """A name up to its ``number``-th part that holds a number; all of it where it has fewer."""
    numbered = _numbered(name)
    if len(numbered) < number:
        return name
    return ".".join(name.split(".")[: numbered[number - 1] + 1])


def _distances(key: tuple[str, ...], above: str, number: str) -> tuple[str, ...]:
    """What is shown of a unit, with other layers named by their distance: layers that are
    recomputed from their first to their last unit are equal."""
    if not number.isdigit():
        return key
    layer = re.compile(rf"(?<![\w.]){re.escape(f'{above}.' if above else '')}(\d+)(?=\.)")
    return tuple(layer.sub(lambda m: f"{int(m[1]) - int(number):+d}", text) for text in key)


def _relative(name: str, module: str) -> str:
    """A name as it is called inside a module."""
    return name.removeprefix(f"{module}.") if module else name


def _title(equal: Sequence[tuple[int, str]], inside: str) -> str:
    """``model.layers.0 … 6, 23 … 30 ×15``: equal layers, each with its place in the series."""
    above, dot, first = _relative(equal[0][1], inside).rpartition(".")
    if len(equal) == 1:
        return f"{above}{dot}{first}"
    places = [(place, module.rpartition(".")[2]) for place, module in equal]
    return f"{above}{dot}{_listed(places)} ×{len(equal)}"


def _listed(layers: Sequence[tuple[int, str]]) -> str:
    """``0 … 6, 23 … 30``: the numbers of layers, each after its place in the series."""
    places = [place for place, _ in layers]
    numbers = [number for _, number in layers]
    steps = {high - low for low, high in pairwise(places)}
    if len(steps) == 1 and len(layers) > 2 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]} … {numbers[-1]}"
    starts = [i for i, p in enumerate(places) if not i or p - places[i - 1] > 1]
    pieces = [numbers[i:j] for i, j in pairwise([*starts, len(places)])]
    shown = [f"{p[0]} … {p[-1]}" if len(p) > 2 else ", ".join(p) for p in pieces[:LISTED]]
    if len(pieces) > LISTED:
        shown.append(f"{sum(map(len, pieces[LISTED:]))} more")
    return ", ".join(shown)


def _stacked(columns: Sequence[_Column[UnitT]], layers: Sequence[_Layer]) -> list[_Column[UnitT]]:
    """The columns of equal layers on top of each other."""
    return [
        columns[layers[0].start + i]._replace(
            units=[unit for layer in layers for unit in columns[layer.start + i].units]
        )
        for i in range(layers[0].end - layers[0].start)
    ]
