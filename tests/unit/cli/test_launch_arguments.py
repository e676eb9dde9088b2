"""Where ``launch``'s own options end and those of the script begin."""

import pytest
from meshwright.cli.launch import separate_script


@pytest.mark.parametrize(
    ("given", "script"),
    [
        ("launch p.json", None),
        ("launch p.json --nproc 2", None),
        ("launch --nproc 2 p.json --json", None),
        ("launch p.json s.py --lr 1 --json", "s.py --lr 1 --json"),
        ("launch p.json --nproc 2 s.py --nproc 3", "s.py --nproc 3"),
        ("launch p.json --json s.py p.json", "s.py p.json"),
        ("launch --timeout=9 p.json -m mine.train -v", "-m mine.train -v"),
        ("launch p.json -- s.py -x", "s.py -x"),
        ("plan launch p.json s.py", None),
        ("launch p.json --hosts a,b --dry-run s.py --submit", "s.py --submit"),
        ("launch --submit p.json --slurm job s.py", "s.py"),
    ],
)
def test_the_script_begins_after_the_plan(given, script):
    found = separate_script(given.split())
    assert [w for w in found if w != "--"] == [w for w in given.split() if w != "--"]
    if script is None:
        assert "--" not in found
    else:
        assert found[found.index("--") + 1 :] == script.split()


def test_what_is_not_as_planned_is_said_before_anything_starts(meshwright, plan_file, monkeypatch):
    """A plan for eight A100s, on a host with two cores: said first, whatever the run does."""
    started: list[object] = []
    monkeypatch.setattr("meshwright.executor.launch.launch.cores", lambda: 2)
    monkeypatch.setattr(
        "meshwright.executor.launch.launch.run_task", lambda *given: started.append(given)
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = meshwright("launch", plan_file)
    assert len(started) == 1
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert "8 ranks of the plan start on this host, which has 2 cores" in notes[0]
    assert "made for a100 and this host has cpu" in notes[1]
    started.clear()
    done = meshwright("launch", plan_file, "--nproc", 2)
    assert (done.code, started) == (2, [])
    assert "the plan is for 8 ranks and 2 would be started" in done.sentence
    assert "note: " not in done.err
