"""``report``: one page that needs nothing else; and ``explain --trace``."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import msgspec
import pytest
from meshwright.cli.render.charts import COLOURS, Scale, byte_unit, round_step, time_unit
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import Figures, RunReport, predicted_figures

from tests.traces import check_trace, tracks

from .conftest import cluster_of, short_vgg

VOID = {"meta", "br"}
NASTY = """a<b>&"c'<script>alert(1)</script>"""
SECTIONS = (
    "The step", "Predicted and measured", "Decisions", "Which rank has what",
    "When each thing goes on", "Memory", "What if", "Made from",
)  # fmt: skip


class Page(HTMLParser):
    """A page's elements, its texts, and whether every element that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def nasty_plan(folder):
    """A plan whose names hold all that HTML gives a meaning to, and what it was made from."""
    profile = short_vgg()
    units = list(profile.units)
    units[-2] = msgspec.structs.replace(units[-2], name=NASTY)
    names = {profile.units[-2].name: NASTY}
    edges = tuple(
        msgspec.structs.replace(
            e, source=names.get(e.source, e.source), target=names.get(e.target, e.target)
        )
        for e in profile.edges
    )
    profile = msgspec.structs.replace(profile, target=NASTY, units=tuple(units), edges=edges)
    there = cluster_of(4)
    nodes = tuple(msgspec.structs.replace(node, name=NASTY) for node in there.nodes)
    there = msgspec.structs.replace(there, name=NASTY, nodes=nodes)
    save(profile, folder / "nasty-profile.json")
    save(there, folder / "nasty-cluster.json")


@pytest.fixture
def page(meshwright, plan_file, tmp_path):
    def made(*more: object) -> Page:
        out = tmp_path / "report.html"
        done = meshwright("report", plan_file, "-o", out, *more)
        assert done.code == 0, done.err
        assert done.out == f"written to {out}; any browser opens it\n"
        return Page(out.read_text(encoding="utf-8"))

    return made


def check_offline(found: Page) -> None:
    assert found.open == []
    tags = {tag for tag, _ in found.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    for _, attributes in found.elements:
        assert not any(name.startswith("on") for name in attributes)
        assert not attributes.keys() & {"href", "src", "srcset", "action", "style"}
    (style,) = found.said("style")
    assert "url(" not in style
    assert "@import" not in style


def test_a_page_has_every_section_and_needs_nothing_else(page):
    found = page()
    check_offline(found)
    assert tuple(found.said("h2")) == SECTIONS
    # Each chart in both widths: step, map, timeline, memory, two curves and their kinds.
    widths = [svg["width"] for svg in found.of("svg")]
    assert widths.count("340") == widths.count("720") >= 6
    assert found.said("h3")[-3:] == [
        "Bandwidth between nodes", "Memory of a rank", "Number of ranks",
    ]  # fmt: skip
    words = " ".join(text for _, text in found.texts)
    assert "times as fast as plain data parallelism" in words
    assert "Held fixed: the model, the global batch of 256" in words
    assert "Bound by gradient exchange between nodes" in words
    assert "A plan for 8 ranks on 8 nodes (" in words
    # What plan says last, as it matters most.
    assert "One device by itself would take" in words
    assert "--ranks 1,8 compares sizes." in words
    assert "Decisions: layout is (groups, members of each)" in words
    assert "launch the plan with --report" in words


def test_a_measured_run_is_set_beside_what_was_predicted(page, plan, tmp_path):
    predicted = predicted_figures(plan.prediction)
    measured = Figures(step_s=2 * predicted.step_s, blocking_s=0.1, exposed_s=0.2, peak_bytes=5)
    result = RunReport(
        target=plan.target, world_size=plan.world_size, steps=20, predicted=predicted,
        measured=measured, data_parallel=predicted_figures(plan.baseline),
    )  # fmt: skip
    save(result, tmp_path / "result.json")
    found = page("--result", tmp_path / "result.json", "--no-what-if")
    words = " ".join(text for _, text in found.texts)
    assert "2.00" in found.said("td")
    assert "outside of what was expected nine times in ten" in words
    assert "Not asked for (--no-what-if)" in words


def test_the_result_of_another_plan_is_refused(meshwright, plan, plan_file, tmp_path):
    figures = predicted_figures(plan.prediction)
    result = RunReport(
        target="other", world_size=8, steps=9, predicted=figures, measured=figures,
        data_parallel=figures,
    )  # fmt: skip
    save(result, tmp_path / "result.json")
    out = tmp_path / "page.html"
    done = meshwright("report", plan_file, "--result", tmp_path / "result.json", "-o", out)
    assert done.code == 2
    assert "of another plan" in done.sentence
    assert not out.exists()


def test_names_are_texts_and_nothing_else(meshwright, tmp_path):
    nasty_plan(tmp_path)
    files = tmp_path / "nasty-profile.json", tmp_path / "nasty-cluster.json"
    done = meshwright("plan", files[0], "-c", files[1], "--batch", 64, "-o", "p.json")
    assert done.code == 0, done.err
    plan = load(Plan, tmp_path / "p.json")
    assert plan.target == NASTY
    assert meshwright("report", "p.json", "-o", "r.html", "--time-limit", 3).code == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>" not in text
    found = Page(text)
    check_offline(found)
    assert found.said("h1") == [NASTY]
    assert any(NASTY in words for words in found.said("td"))
    assert any(NASTY in words for words in found.said("p"))


def test_time_that_is_too_short_leaves_points_out(page):
    found = page("--time-limit", "0.000001")
    words = " ".join(text for _, text in found.texts)
    assert "Bandwidth" not in " ".join(found.said("h3"))
    assert "No point was reached in the time there was (--time-limit)" in words


def test_one_device_has_no_curves_of_links(meshwright, profile_file, tmp_path):
    save(cluster_of(1), tmp_path / "one.json")
    made = meshwright("plan", profile_file, "-c", "one.json", "--batch", 64, "-o", "p.json")
    assert made.code == 0, made.err
    assert meshwright("report", "p.json").code == 0
    found = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Bandwidth between nodes" not in found.said("h3")
    assert "Memory of a rank" in found.said("h3")


def test_a_plan_with_local_steps_has_a_page(meshwright, profile_file, tmp_path):
    save(cluster_of(8, gbit_s=0.05), tmp_path / "slow.json")
    asked = ("plan", profile_file, "-c", "slow.json", "--batch", 256, "--allow-local-steps")
    assert meshwright(*asked, "-o", "p.json").code == 0
    assert load(Plan, tmp_path / "p.json").local_steps is not None
    assert meshwright("report", "p.json", "-o", "r.html").code == 0
    found = Page((tmp_path / "r.html").read_text(encoding="utf-8"))
    words = " ".join(text for _, text in found.texts)
    assert "The round is held fixed" in words
    assert meshwright("explain", "p.json", "--no-what-if", "--trace", "t.json").code == 0
    check_trace(json.loads((tmp_path / "t.json").read_text())["traceEvents"])


def test_explain_writes_the_predicted_step_as_a_trace(meshwright, plan_file, plan, tmp_path):
    out = tmp_path / "trace.json"
    done = meshwright("explain", plan_file, "--no-what-if", "--json", "--trace", out)
    assert done.code == 0
    assert json.loads(done.out)["step_s"] == pytest.approx(plan.prediction.step_s)
    assert "https://ui.perfetto.dev opens it" in done.err
    events = json.loads(out.read_text())["traceEvents"]
    check_trace(events)
    assert {process for process, _ in tracks(events)} == {f"rank {n}" for n in range(8)}


@pytest.mark.parametrize("verb", ["explain", "report"])
def test_what_cannot_be_written_is_said_before_anything_else(meshwright, plan_file, verb):
    option = {"explain": "--trace", "report": "-o"}[verb]
    done = meshwright(verb, plan_file, option, "nowhere/file")
    assert done.code == 2
    assert "there is no folder" in done.sentence


def test_a_plan_made_elsewhere_asks_for_what_it_was_made_from(meshwright, plan, tmp_path):
    made = plan.provenance
    other = msgspec.structs.replace(
        plan, provenance=msgspec.structs.replace(made, profile="0" * 16)
    )
    save(other, tmp_path / "other.json")
    done = meshwright("report", "other.json")
    assert done.code == 2
    assert "--profile" in done.sentence
    assert not (tmp_path / "report.html").exists()


def test_profile_and_cluster_may_be_named(meshwright, plan_file, profile_file, cluster_file):
    done = meshwright(
        "report", plan_file, "--profile", profile_file, "--cluster", cluster_file, "--no-what-if"
    )
    assert done.code == 0
    load(ModelProfile, profile_file)
    load(Cluster, cluster_file)


def test_axes_have_round_figures():
    assert Scale(0, 7.7, 0, 100).ticks(4) == [0, 2, 4, 6]
    assert Scale(0.4, 9, 0, 100, logarithmic=True).ticks(6) == [0.5, 1, 2, 5]
    assert Scale(1, 10_000, 0, 100, logarithmic=True).ticks(5) == [1, 10, 100, 1000, 10_000]
    # Between two powers there is no round figure of theirs.
    short = Scale(0.54, 0.94, 0, 100, logarithmic=True)
    assert short.ticks(6) == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert Scale(850, 1300, 0, 100, logarithmic=True).ticks(6) == [900, 1000, 1100, 1200, 1300]
    assert Scale(1, 100, 0, 100, logarithmic=True).at(10) == pytest.approx(50)
    assert [round_step(x) for x in (0.11, 0.2, 3, 5.1)] == pytest.approx([0.2, 0.2, 5, 10])
    assert (time_unit(0.002).name, time_unit(2).name, byte_unit(2**21).name) == ("ms", "s", "MiB")


def test_letters_can_be_read_on_every_colour():
    """By the contrast of WCAG 2: at least 4.5."""
    from meshwright.cli.render.charts import DARK_INK

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for number, colour in enumerate(COLOURS):
        ink = 0.0 if number in DARK_INK else 1.0
        bright, dark = sorted((luminance(colour), ink), reverse=True)
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, colour
