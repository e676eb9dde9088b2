"""Imports flow one way, and the planner never needs torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {
    "planner": set(),
    "units": {"planner"},
    "models": {"units"},
    "testbed": {"planner"},
    "profiler": {"planner", "units"},
    "executor": {"planner", "units"},
}
"""Which other rooms the modules of a room may import; modules at the top may import all."""
INSIDE_EXECUTOR = {
    "ranks": set(),
    "layout": {"ranks"},
    "exchange": {"ranks", "layout"},
    "memory": {"ranks", "layout"},
    "background": {"ranks"},
}
"""The same inside the executor, whose own modules may import all of them."""
PLANNERS = ("nouns", "costs", "steps", "memory", "evaluation", "search", "exact", "scale")
"""The planner's, each of which may import those before it; ``solver`` comes next."""
INSIDE_PLANNER = {name: set(PLANNERS[:i]) for i, name in enumerate(PLANNERS)} | {
    name: {*PLANNERS, "solver"} for name in ("multiplex", "answers")
}


def modules(room):
    return sorted((ROOT / room).glob("**/*.py"))


def imported_rooms(path):
    """(line, room) of every import of a room, absolute or relative, wherever it stands."""
    depth = len(path.relative_to(ROOT).parts) - 1  # folders between the root and the module
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for name in node.names:
                parts = name.name.split(".")
                if parts[0] == "meshwright":
                    yield node.lineno, parts[1] if len(parts) > 1 else ""
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level == 0 and parts[0] == "meshwright":
                names = parts[1:2] or [alias.name for alias in node.names]
                yield from ((node.lineno, name) for name in names)
            elif node.level == depth + 1:
                names = parts[:1] if node.module else [alias.name for alias in node.names]
                yield from ((node.lineno, name) for name in names)


@pytest.mark.parametrize("room", ALLOWED)
def test_no_upward_import(room):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target or 'the package itself'}"
        for path in modules(room)
        for line, target in imported_rooms(path)
        if target not in ALLOWED[room] | {room}
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("house", "room", "allowed"),
    [("executor", *each) for each in INSIDE_EXECUTOR.items()]
    + [("planner", *each) for each in INSIDE_PLANNER.items()],
)
def test_no_upward_import_inside(house, room, allowed):
    wrong = [
        f"{path.name}:{node.lineno} imports {node.module}"
        for path in modules(f"{house}/{room}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.level == 2
        if (node.module or "").split(".")[0] not in allowed
    ]
    assert modules(f"{house}/{room}")
    assert not wrong


def test_the_walk_sees_every_form(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "planner" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import meshwright.executor.run\nfrom meshwright import api\n"
        "from meshwright.models import vgg\nfrom ..profiler import measure\n"
        "def f():\n    from .. import cli\nfrom .plan import Plan\n"
    )
    assert {room for _, room in imported_rooms(path)} == {
        "executor",
        "api",
        "models",
        "profiler",
        "cli",
    }


def test_the_planner_imports_no_torch():
    paths = [p.relative_to(ROOT).with_suffix("") for p in modules("planner")]
    names = [".".join(("meshwright", *p.parts)).removesuffix(".__init__") for p in paths]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "loaded = [m for m in sys.modules if m == 'torch' or m.startswith('torch.')]\n"
        "assert not loaded, loaded[:5]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
