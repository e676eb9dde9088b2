"""``calibrate`` on the command line: files in, files out, and what the next plan says."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import load, save
from meshwright.planner.schema.report import Figures, RunReport, predicted_figures

OUT = ("cluster.calibrated.json", "profile.calibrated.json")


@pytest.fixture
def report(plan: Plan) -> RunReport:
    """A run whose waits were three times as long as predicted."""
    found = plan.prediction
    waits = 3 * found.blocking_s, 3 * found.exposed_s
    return RunReport(
        target=plan.target, world_size=plan.world_size, steps=20,
        predicted=predicted_figures(found), data_parallel=predicted_figures(plan.baseline),
        measured=Figures(
            step_s=found.compute_s + sum(waits), blocking_s=waits[0], exposed_s=waits[1]
        ),
    )  # fmt: skip


@pytest.fixture
def result_file(report: RunReport, tmp_path: Path) -> Path:
    path = tmp_path / "result.json"
    save(report, path)
    return path


def test_the_next_plan_is_made_from_what_was_corrected(
    meshwright, plan_file: Path, result_file: Path, report: RunReport, tmp_path: Path
):
    done = meshwright("calibrate", plan_file, result_file)
    assert done.code == 0, done.err
    assert "Corrected: links between nodes carry" in done.out
    command = " ".join(done.out.split()).split("to plan from them: meshwright ")[1].split()
    again = tmp_path / "again.json"
    done = meshwright(*command, "-o", again, "--json")
    assert done.code == 0, done.err
    # The plan was the best of many at other speeds: the new one is at least as quick as it is now.
    assert load(Plan, again).prediction.step_s <= 1.03 * report.measured.step_s
    assert load(Plan, again).prediction.step_s > load(Plan, plan_file).prediction.step_s
    shown = " ".join(meshwright(*command).out.split())
    assert "Calibrated: links between nodes carry" in shown
    assert "by a run of vgg16 on 8 ranks." in shown


def test_files_are_named(
    meshwright, plan_file: Path, result_file: Path, cluster_file: Path, profile_file: Path
):
    given = ("--profile", profile_file, "--cluster", cluster_file)
    named = ("--cluster-out", "c.json", "--profile-out", "p.json")
    done = meshwright("calibrate", plan_file, result_file, *given, *named, "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert [change["part"] for change in answer["changes"]] == ["inter"]
    assert load(Cluster, "c.json") == msgspec.convert(answer["cluster"], Cluster)
    assert load(ModelProfile, "p.json") == load(ModelProfile, profile_file)
    assert not any(Path(name).exists() for name in OUT)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"target": "resnet50"}, "its model is resnet50 and the plan's vgg16"),
        ({"steps": 2}, "launch with --steps 5 or more"),
        ({"measured": Figures(step_s=1.0)}, "launch the plan again with --report"),
    ],
)
def test_a_wrong_report_writes_nothing(
    meshwright, plan_file: Path, report: RunReport, changed: dict[str, object], sentence: str
):
    save(msgspec.structs.replace(report, **changed), "wrong.json")
    done = meshwright("calibrate", plan_file, "wrong.json")
    assert done.code == 2
    assert sentence in done.sentence
    assert not any(Path(name).exists() for name in OUT)


def test_wrong_files_are_named_with_what_makes_right_ones(
    meshwright, plan_file: Path, result_file: Path
):
    other = meshwright("calibrate", plan_file, plan_file)
    assert other.code == 2
    assert "is a Plan, and a RunReport is needed" in other.sentence
    assert "launch plan.json --report result.json" in other.sentence
    older = json.loads(result_file.read_text())
    Path("older.json").write_text(json.dumps({**older, "background": {"beside_s": 4.0}}))
    refused = meshwright("calibrate", plan_file, "older.json")
    assert refused.code == 2
    assert "launch plan.json --report result.json" in refused.sentence
    none = meshwright("calibrate", plan_file, "none.json")
    assert none.code == 2
    assert "cannot read none.json" in none.sentence
    twice = ("--cluster-out", "a.json", "--profile-out", "a.json")
    same = meshwright("calibrate", plan_file, result_file, *twice)
    assert same.code == 2
    assert "name two files" in same.sentence
    nowhere = meshwright("calibrate", plan_file, result_file, "--cluster-out", "no/where.json")
    assert nowhere.code == 2
    assert "there is no folder" in nowhere.sentence
