"""The memory timeline as a table and as a plot."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.table import Table

from ...planner.explain.memory_timeline import MemoryTimeline, RankTimeline
from ...planner.schema.plan import CLASS_NAMES, Moment, Plan
from ...planner.schema.text import size
from .plots import figure_in
from .table import empty_table

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
WIDTH = 22
# A table of more moments shows the fullest of every few.
SHOWN = 24


def memory_tables(found: MemoryTimeline, *, fold: bool = True) -> list[Table | str]:
    """Each different timeline as a table, and a sentence on its peak."""
    parts: list[Table | str] = []
    for one in found.timelines:
        parts += [_table(found.target, one, fold=fold), peak_sentence(one)]
    return parts


def peak_sentence(one: RankTimeline) -> str:
    """When ranks hold most, and of what."""
    peak = one.peak
    largest = sorted(peak.by_class().items(), key=lambda item: -item[1])[:2]
    most = " and ".join(f"{CLASS_NAMES[name]} {size(count)}" for name, count in largest)
    return (
        f"Most is alive in the {peak.phase} of {peak.unit}: {size(peak.total)} of "
        f"{size(one.limit_bytes)}, of it {most}."
    )


def kept_sentences(plan: Plan, found: MemoryTimeline) -> list[str]:
    """What hosts that train apart keep besides what the timeline shows."""
    if plan.local_steps is None:
        return []
    fullest = max(plan.prediction.peak_bytes)
    kept = fullest - max(one.peak.total for one in found.timelines)
    return [
        f"Besides, a rank keeps {size(kept)} of what hosts have agreed on and of messages, "
        f"{size(fullest)} in all: the limit above is what this leaves."
    ]


def classes_of(one: RankTimeline) -> list[str]:
    """The classes of memory that these ranks hold anything of."""
    return [name for name in CLASS_NAMES if any(getattr(m, name) for m in one.moments)]


def _table(target: str, one: RankTimeline, *, fold: bool) -> Table:
    used = classes_of(one)
    headings = ("point", "unit", *(CLASS_NAMES[name] for name in used), "total")
    unit, bytes_ = next((u, n) for u, n in _UNITS if one.peak.total >= n or n == 1)
    title = f"Memory of {target} on {ranks_in_words(one.ranks)}, in {unit}"
    table = empty_table(title, headings, left=2)
    for column in (*table.columns[:2], table.columns[-1]):
        column.no_wrap = True
    for moment, names in _rows(one, fold=fold):
        figures = [getattr(moment, name) / bytes_ for name in used]
        mark = " <" if moment == one.peak else ""
        total = f"{moment.total / bytes_:,.1f}{mark}"
        table.add_row(moment.phase, names, *(f"{n:,.1f}" if n else "" for n in figures), total)
    return table


def _rows(one: RankTimeline, *, fold: bool) -> list[tuple[Moment, str]]:
    """(the moment shown, the units it stands for): with ``fold`` the fullest of every few."""
    if not fold or len(one.moments) <= SHOWN:
        return [(m, _short(m.unit)) for m in one.moments]
    rows = []
    for _, group in groupby(one.moments, lambda m: m.phase):
        run = list(group)
        # Half of the rows for each phase: forward and backward have nearly all moments.
        step = -(-len(run) // (SHOWN // 2))
        for start in range(0, len(run), step):
            part = run[start : start + step]
            fullest = max(part, key=lambda m: m.total)
            rows.append((fullest, f"{_short(fullest.unit)} (of {len(part)})"))
    return rows


def _short(name: str) -> str:
    # The end of a long name says more than its beginning.
    return name if len(name) <= WIDTH else f"…{name[1 - WIDTH :]}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"


def plot_memory(found: MemoryTimeline, path: Path) -> None:
    """Draws the fullest ranks' timeline into ``path`` (.png, .svg or .pdf). Raises ``InputError``
    where matplotlib is missing or cannot write such a file."""
    # The timelines come with the fullest ranks first.
    one = found.timelines[0]
    used = classes_of(one)
    layers = [[getattr(m, name) / 2**20 for m in one.moments] for name in used]
    turn = sum(m.phase == "forward" for m in one.moments)
    with figure_in(path, figsize=(10, 5)) as axes:
        labels = [CLASS_NAMES[name] for name in used]
        axes.stackplot(range(len(one.moments)), layers, labels=labels, step="mid")
        axes.axhline(one.limit_bytes / 2**20, color="black", linestyle="--", label="limit")
        axes.axvline(turn - 0.5, color="grey", linewidth=0.8)
        axes.set_xlabel("forward, backward, update: units in the order in which they work")
        axes.set_ylabel("MiB")
        # By what is held, not by the limit: that may be many times as high.
        axes.set_ylim(bottom=0, top=1.15 * max(one.peak.total / 2**20, 1e-9))
        axes.legend(loc="upper left", fontsize="small")
        axes.set_title(f"{found.target}: {ranks_in_words(one.ranks)}")
