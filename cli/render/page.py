"""``report``: all that is known of a plan on one page, which needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple
from xml.etree.ElementTree import Element

from ...planner.cost.step_time import LINKS
from ...planner.explain.curves import WhatIfCurve, WhatIfCurves
from ...planner.explain.memory_timeline import MemoryTimeline
from ...planner.explain.step_trace import UPDATE, PredictedStep
from ...planner.explain.what_if import FewerDevices
from ...planner.explain.why import StepBottleneck
from ...planner.schema.cluster import LINK_NAMES, Cluster
from ...planner.schema.plan import CLASS_NAMES, Moment, Plan, Prediction, UnitPlan
from ...planner.schema.profile import ModelProfile
from ...planner.schema.report import Figures, RunReport
from ...planner.schema.text import rate, seconds, size
from ...planner.solve.device_timelines import Busy, DeviceTimeline
from . import charts
from .charts import AxisX, Bar, ChartLine, GridRow, MemoryLayer, Spans, both, key
from .comparisons import measured_table
from .documents import (
    bound_sentence,
    decision_table,
    fewer_sentence,
    memory_sentences,
    origin_sentences,
    prediction_table,
    training_sentences,
    verdict,
)
from .folding import fold_short
from .markup import html_table, make, written
from .memory import classes_of, kept_sentences, peak_sentence, ranks_in_words

# So many kinds of ranks are told one by one, those that are fullest or first.
KINDS = 3
# Ranks that the map shows.
COLUMNS = 64
# Moments that a chart of memory shows: of more, the fullest of every few.
MOMENTS = 180
PARTS = (("computing", 0), ("blocking communication", 1), ("exposed gradient exchange", 3))
"""The parts of a step, and their colours."""
FORWARD, BACKWARD, UPDATES, BLOCKING, EXCHANGE = 0, 4, 2, 1, 3
WHOLE, SLICES = 0, (1, 5)
"""Colours of a unit that a rank has whole, and of slices in every other group."""
STEPS = (
    ("held_s", "this plan's decisions", 0, False),
    ("again_s", "planned again", 2, True),
    ("data_parallel_s", "plain data parallelism", 1, False),
)
SHAPES = ("circles", "squares", "triangles")
HEADINGS = {
    "inter": "Bandwidth between nodes",
    "intra": "Bandwidth inside nodes",
    "memory": "Memory of a rank",
    "ranks": "Number of ranks",
}
CSS = """
:root{color-scheme:light dark;--ink:#1a1a1a;--paper:#fff;--soft:#5a5a5a;
--rule:#d5d5d5;--idle:#ececec}
@media(prefers-color-scheme:dark){:root{--ink:#e8e8e8;--paper:#16181b;--soft:#aaa;
--rule:#3a3d42;--idle:#2a2d31}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:760px;padding:14px 10px 40px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5em;margin:.2em 0}
h2{font-size:1.15em;margin:1.6em 0 .4em;border-top:1px solid var(--rule);padding-top:.7em}
h3{font-size:1em;margin:1.2em 0 .3em}p{margin:.5em 0}.note,footer{color:var(--soft);font-size:.9em}
svg{display:block;max-width:100%;height:auto}.wide{display:none}
@media(min-width:760px){.wide{display:block}.narrow{display:none}}
.t{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
.strong{font-weight:600}.light-ink{fill:#fff}.dark-ink{fill:#000}
.over{paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--rule)}.axis{stroke:var(--soft)}
.limit{stroke:var(--ink);stroke-width:2;stroke-dasharray:6 3}
.dashed{stroke-dasharray:5 4}.curve{fill:none;stroke-width:2.5}.idle{fill:var(--idle)}
.key{list-style:none;padding:0;margin:.3em 0;display:flex;flex-wrap:wrap;
gap:2px 16px;font-size:.9em}
.key span{display:inline-block;width:11px;height:11px;margin-right:6px}
table{border-collapse:collapse;width:100%;font-size:.88em;font-variant-numeric:tabular-nums}
th{text-align:left;font-weight:600;border-bottom:1px solid var(--soft);vertical-align:bottom}
th,td{padding:3px 6px 3px 0}td{border-bottom:1px solid var(--rule);vertical-align:top}
th{overflow-wrap:normal}.figure{text-align:right}td.in{padding-left:1.2em}
@media screen and (max-width:560px){thead{display:none}
table,tbody,tr{display:block}tr{padding:5px 0;border-bottom:1px solid var(--rule)}
td,td.figure{display:flex;justify-content:space-between;gap:10px;
border:0;padding:1px 0;text-align:right}
td:first-child{font-weight:600;text-align:left}td:empty{display:none}
td[data-label]::before{content:attr(data-label);color:var(--soft);font-weight:400;
text-align:left;flex:none}
td:first-child::before{display:none}}
@media print{:root{--ink:#000;--paper:#fff;--soft:#444;--rule:#ccc;--idle:#eee}
body{max-width:none;padding:0;font-size:11pt}.wide{display:block}.narrow{display:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
h2,h3{break-after:avoid}.chart,tr{break-inside:avoid}}
"""


class PageContents(NamedTuple):
    """What a page is made of: a plan, what it was made from, what follows from them, and what a run
    of it has measured, where there is one."""

    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    bottleneck: StepBottleneck
    memory: MemoryTimeline
    step: PredictedStep
    fewer: FewerDevices | None
    curves: WhatIfCurves | None
    result: RunReport | None


def page(found: PageContents) -> str:
    """The HTML of the report."""
    plan = found.plan
    body = make("body", *_head(found))
    for heading, parts in (
        ("The step", _step(found)),
        ("Predicted and measured", _measured(found)),
        ("Decisions", _decisions(plan)),
        ("Which rank has what", _map(plan, found.cluster)),
        ("When each thing goes on", _timelines(found.step)),
        ("Memory", _memory(plan, found.memory)),
        ("What if", _curves(found)),
    ):
        body.append(make("section", make("h2", heading), *parts))
    body.append(_foot(found))
    head = make(
        "head",
        make("meta", charset="utf-8"),
        make("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make("title", f"{plan.target}: plan for {plan.world_size} ranks"),
        make("style", CSS + charts.STYLE),
    )
    return f"<!DOCTYPE html>\n{written(make('html', head, body, lang='en'))}\n"


def _sentences(found: Iterable[str], class_: str = "") -> Iterator[Element]:
    attributes: dict[str, object] = {"class_": class_} if class_ else {}
    for words in found:
        yield make("p", words, **attributes)


def _head(found: PageContents) -> Iterator[Element]:
    plan, cluster = found.plan, found.cluster
    yield make("h1", plan.target)
    hosts = "one node" if len(cluster.nodes) == 1 else f"{len(cluster.nodes)} nodes"
    yield make(
        "p",
        f"A plan for {plan.world_size} ranks on {hosts} ({cluster.name}): global batch "
        f"{plan.goal.batch}, {plan.goal.optimizer}, gradients by {plan.schedule}, precision "
        f"{plan.precision or 'as built'}.",
        class_="note",
    )
    yield from _sentences([verdict(plan), *training_sentences(plan, cluster)])
    yield from _sentences(origin_sentences(plan, found.profile, cluster))
    yield from _sentences(memory_sentences(plan, found.profile, cluster))
    yield from _sentences([bound_sentence(found.bottleneck)])
    if found.fewer is not None:
        yield make("p", fewer_sentence(plan, found.fewer))


# -- the step --------------------------------------------------------------------------------------


def _bar(label: str, figures: Prediction | Figures) -> Bar:
    blocking_s, exposed_s = figures.blocking_s or 0.0, figures.exposed_s or 0.0
    computing_s = max(figures.step_s - blocking_s - exposed_s, 0.0)
    parts = zip(PARTS, (computing_s, blocking_s, exposed_s), strict=True)
    return Bar(label, [(c, s) for (_, c), s in parts if s > 0], figures.low_s, figures.high_s)


def _parts_key() -> Element:
    return key((colour, name) for name, colour in PARTS)


def _step(found: PageContents) -> Iterator[Element]:
    plan = found.plan
    rows = [
        _bar("this plan, predicted", plan.prediction),
        _bar("plain data parallelism, predicted", plan.baseline),
    ]
    yield both(partial(charts.bars, rows, seconds, "The parts of a step"))
    yield _parts_key()
    yield make(
        "p", "The line below a bar is the interval in which the step is expected.", class_="note"
    )
    yield html_table(prediction_table(plan))


def _measured(found: PageContents) -> Iterator[Element]:
    result = found.result
    if result is None:
        yield make(
            "p",
            "No run is given: launch the plan with --report result.json, and report it with "
            "--result result.json.",
            class_="note",
        )
        return
    rows = [_bar("predicted", result.predicted), _bar("measured", result.measured)]
    yield both(partial(charts.bars, rows, seconds, "The step as predicted and as measured"))
    yield _parts_key()
    table = measured_table(result)
    yield make("p", f"{table.title}.", class_="note")
    yield html_table(table)


def _decisions(plan: Plan) -> Iterator[Element]:
    table = decision_table(plan)
    yield make("p", f"{table.title}.", class_="note")
    yield html_table(table)


# -- the map ---------------------------------------------------------------------------------------


def _map(plan: Plan, cluster: Cluster) -> Iterator[Element]:
    ranks = range(min(plan.world_size, COLUMNS))
    nodes = [
        (cluster.nodes[node].name, len(list(mine)))
        for node, mine in groupby(cluster.node_of_rank[rank] for rank in ranks)
    ]
    shown = [u for u in plan.units if u.kind not in ("input", "output", "glue")]

    def has(unit: UnitPlan) -> tuple[str, ...]:
        return (str(unit.layout),)

    rows = [
        GridRow(
            row.indented.replace("  ", "\u00a0\u00a0"),
            [] if row.is_block else [_cell(plan, row.units[0], rank) for rank in ranks],
        )
        for row in fold_short(shown, lambda unit: unit.name, has)
    ]
    names = [str(rank) for rank in ranks]
    yield both(partial(charts.grid, rows, names, nodes, "Which part of each unit a rank has"))
    entries = [(WHOLE, "the whole unit, for the rank's own samples")]
    if any(unit.layout.degree > 1 for unit in shown):
        words = "its slice of the unit (2/4: the second of four), for a group's samples"
        entries.append((SLICES[0], words))
    if any(unit.layout.degree > 1 and unit.layout.groups > 1 for unit in shown):
        entries.append((SLICES[1], "the same, of every other group"))
    yield key(entries)
    if any(unit.layout.size < plan.world_size for unit in shown):
        yield make("p", "Grey: the unit leaves this rank idle.", class_="note")
    if plan.world_size > COLUMNS:
        words = f"Ranks 0 to {COLUMNS - 1} of {plan.world_size} are shown."
        yield make("p", words, class_="note")


def _cell(plan: Plan, unit: UnitPlan, rank: int) -> tuple[int | None, str]:
    place = unit.layout.place(plan.placement.index(rank))
    if place is None:
        return None, "idle"
    group, member = place
    if unit.layout.degree == 1:
        return WHOLE, "whole"
    return SLICES[group % 2], f"{member + 1}/{unit.layout.degree}"


# -- the timeline ----------------------------------------------------------------------------------


def _timelines(step: PredictedStep) -> Iterator[Element]:
    found = step.timelines
    for kind, ranks in list(zip(found.kinds, step.ranks, strict=True))[:KINDS]:
        if len(found.kinds) > 1:
            yield make("h3", ranks_in_words(ranks))
        rows = _rows(kind, found.units)
        words = f"What {ranks_in_words(ranks)} does in a step of {seconds(found.step_s)}"
        yield both(partial(charts.timeline, rows, found.step_s, words))
    yield key(
        (
            (FORWARD, "forward"), (BACKWARD, "backward"), (UPDATES, "update of parameters"),
            (BLOCKING, "communication that is waited for"), (EXCHANGE, "exchange of gradients"),
        )
    )  # fmt: skip
    if len(found.kinds) > KINDS:
        words = f"{KINDS} of {len(found.kinds)} kinds of ranks are shown."
        yield make("p", words, class_="note")
    yield make(
        "p",
        "As simulated, in the steady state. explain --trace writes every span for Perfetto, "
        "launch --trace with what was measured below.",
        class_="note",
    )


def _rows(kind: DeviceTimeline, units: Sequence[str]) -> list[Spans]:
    def spans(found: Iterable[Busy]) -> list[tuple[int, float, float, str]]:
        return [(_colour(b.phase), b.start_s, b.end_s, f"{b.phase} {units[b.unit]}") for b in found]

    rows = [
        Spans("computing", spans(b for b in kind.computing if b.phase != UPDATE)),
        Spans("optimizer", spans(b for b in kind.computing if b.phase == UPDATE)),
    ]
    for link in LINKS:
        mine = spans(b for b in kind.communicating if b.resource == link)
        if mine:
            rows.append(Spans(f"links {LINK_NAMES[link]}", mine))
    return rows


def _colour(phase: str) -> int:
    known = {"forward": FORWARD, "backward": BACKWARD, UPDATE: UPDATES, "exchange": EXCHANGE}
    return known.get(phase, BLOCKING)


# -- memory ----------------------------------------------------------------------------------------


def _memory(plan: Plan, found: MemoryTimeline) -> Iterator[Element]:
    for one in found.timelines[:KINDS]:
        used = classes_of(one)
        moments = _fewer(one.moments)
        layers = [
            MemoryLayer(list(CLASS_NAMES).index(name), [getattr(m, name) for m in moments])
            for name in used
        ]
        phases = [(phase, len(list(run))) for phase, run in groupby(m.phase for m in moments)]
        yield make("h3", ranks_in_words(one.ranks))
        words = f"Memory of {ranks_in_words(one.ranks)} at each point of a step"
        yield both(partial(charts.areas, layers, phases, float(one.limit_bytes), words))
        at_peak = one.peak.by_class()
        yield key(
            (list(CLASS_NAMES).index(name), f"{CLASS_NAMES[name]} ({size(at_peak[name])})")
            for name in used
        )
        words = f"{peak_sentence(one)} In brackets: what each class has then."
        yield make("p", words, class_="note")
    if len(found.timelines) > KINDS:
        words = f"The {KINDS} fullest of {len(found.timelines)} kinds of ranks are shown."
        yield make("p", words, class_="note")
    yield from _sentences(kept_sentences(plan, found), "note")


def _fewer(moments: Sequence[Moment]) -> list[Moment]:
    """The moments, or of many the fullest of every few of one phase."""
    step = -(-len(moments) // MOMENTS)
    found = []
    for _, group in groupby(moments, lambda m: m.phase):
        run = list(group)
        parts = (run[start : start + step] for start in range(0, len(run), step))
        found += [max(part, key=lambda m: m.total) for part in parts]
    return found


# -- what if ---------------------------------------------------------------------------------------


def _curves(found: PageContents) -> Iterator[Element]:
    plan, curves = found.plan, found.curves
    if curves is None:
        yield make("p", "Not asked for (--no-what-if).", class_="note")
        return
    for one in curves.curves:
        yield make("h3", HEADINGS[one.name])
        yield from _curve(one)
    if not curves.curves:
        words = "Nothing can be changed of this plan."
        if not curves.complete:
            words = "No point was reached in the time there was (--time-limit)."
        yield make("p", words, class_="note")
        return
    names = [
        (colour, f"{name} ({SHAPES[colour % 3]})")
        for field, name, colour, _ in STEPS
        if any(getattr(p, field) is not None for c in curves.curves for p in c.points)
    ]
    yield key(names)
    if plan.local_steps is not None:
        yield make("p", "The round is held fixed; nothing is planned again.", class_="note")
        return
    yield make(
        "p",
        f"One thing is changed at a time. Held fixed: the model, the global batch of "
        f"{plan.goal.batch}, {plan.goal.optimizer}, gradients by {plan.schedule}, latencies and "
        "all other limits. Planned again: by the heuristic solver, or the plan as it is where that "
        "is quicker. Where a line has no point, what it stands for does not fit in memory.",
        class_="note",
    )
    if not curves.complete:
        yield make("p", "Some points were left out for lack of time (--time-limit).", class_="note")


def _curve(one: WhatIfCurve) -> Iterator[Element]:
    known_as: dict[str, Callable[[float], str]] = {"memory": size, "ranks": lambda x: f"{x:.0f}"}
    show = known_as.get(one.name, rate)
    ticks = {point.x: show(point.x) for point in one.points}
    now = min(ticks, key=lambda x: abs(x - one.now))
    axis = AxisX(
        {"memory": "limit of a rank", "ranks": "ranks"}.get(one.name, "bandwidth"), ticks, now
    )
    lines = []
    for field, name, colour, dashed in STEPS:
        known = [(p.x, getattr(p, field)) for p in one.points if getattr(p, field) is not None]
        if known:
            lines.append(ChartLine(colour, name, known, dashed))
    yield both(partial(charts.curves, lines, axis, f"The step over {HEADINGS[one.name].lower()}"))
    lacking = [p.x for p in one.points if p.again_s is None and p.held_s is None]
    if lacking:
        words = ", ".join(show(x) for x in lacking)
        yield make("p", f"Nothing was found that fits at {words}.", class_="note")


def _foot(found: PageContents) -> Element:
    by = found.plan.provenance
    software = ", ".join(f"{name} {version}" for name, version in by.software)
    return make(
        "footer",
        make("h2", "Made from"),
        make("p", f"Profile {by.profile}, cluster {by.cluster}, solver {by.solver}; {software}."),
    )
