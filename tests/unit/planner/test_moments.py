"""The memory timeline as a document, a table and a plot."""

import pytest
from meshwright.cli.render import memory as memory_tables
from meshwright.cli.render import plots
from meshwright.cli.render.memory import plot_memory
from meshwright.executor.launch.progress import console
from meshwright.planner.explain.memory_timeline import memory_timeline
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear


@pytest.fixture
def timeline():
    profile = chain_profile([linear(f"fc{i}", 512, 512, saved=4096.0) for i in range(30)])
    links = cluster(4, memory_bytes=2**28)
    plan = make_plan(profile, links, Goal(batch=6, optimizer="adam"))
    return plan, memory_timeline(plan, profile, links)


def test_every_point_of_the_step_is_there(timeline):
    plan, found = timeline
    full, other = found.timelines
    assert (full.ranks, other.ranks) == ((0, 1), (2, 3))  # six samples on four ranks
    assert full.limit_bytes == 2**28
    assert full.peak.total == plan.prediction.peak_bytes[0]
    assert full.peak == plan.prediction.fullest
    phases = [m.phase for m in full.moments]
    assert phases == ["forward"] * 32 + ["backward"] * 32 + ["update"]
    names = [m.unit for m in full.moments if m.phase == "forward"]
    assert names == [m.unit for m in full.moments if m.phase == "backward"][::-1]


def test_a_folded_table_shows_the_peak(timeline):
    _, found = timeline
    screen = console()
    for fold in (True, False):
        with screen.capture() as capture:
            for part in memory_tables.memory_tables(found, fold=fold):
                screen.print(part)
        text = capture.get()
        assert "optimizer state" in text
        assert "residuals" not in text  # there are none
        assert text.count(" <") == 2
        assert text.count("backward") == 2 * (11 if fold else 32)
        assert text.count("Most is alive in the update of fc0") == 2


def test_a_plot_without_matplotlib_says_what_to_install(timeline, monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="meshwright\\[report\\]"):
        plot_memory(timeline[1], tmp_path / "memory.png")


def test_the_plot_is_drawn(timeline, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.svg"
    plot_memory(timeline[1], path)
    text = path.read_text()
    assert "optimizer state" in text
    assert "limit" in text
    with pytest.raises(InputError, match="cannot be written"):
        plot_memory(timeline[1], tmp_path / "memory.what")
