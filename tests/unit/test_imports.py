"""Imports flow one way, without circles, and the planner never needs torch."""

import ast
import subprocess
import sys
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    "planner/schema",
    "planner/cost",
    "planner/simulate",
    "planner/memory",
    "planner/solve",
    "planner/explain",
    "planner/multiplex",
    "planner",
    "models/failing",
    "models/trial_sizes",
    "models/trees",
    "models/opened",
    "models/workload",
    "models/compiled",
    "models/meta_autocast",
    "models/precision",
    "models/spec",
    "models/replay",
    "models/lazy_parameters",
    "models/splits",
    "models/units",
    "models/zoo",
    "models/target",
    "models",
    "executor/comm",
    "executor/redistribution",
    "executor/gradients",
    "executor/optimizer",
    "executor/memory",
    "executor/background",
    "executor",
    "executor/checkpoint",
    "executor/frameworks",
    "executor/launch",
    "executor/launch/hosts",
    "profiler",
    "cli/render",
    "api",
    "",
    "cli",
    "__main__",
)
"""The rooms, each of which may import those before it. A folder's own line means the modules that
lie in it directly, and "" the package itself, whose public names load when they are first used."""
APART = (
    {"executor/memory", "executor/gradients"},
    {"executor/background", "executor/redistribution"},
    {"executor/background", "executor/gradients"},
    {"executor/background", "executor/optimizer"},
    {"executor/background", "executor/memory"},
    {"models/zoo", "models/splits"},
)
"""Rooms that know nothing of each other."""
PACKAGE = ("planner", "models", "executor", "profiler", "cli")


def modules(root=ROOT):
    """Path of every module of the package, by its name without the suffix."""
    paths = [*root.glob("*.py"), *(p for room in PACKAGE for p in (root / room).glob("**/*.py"))]
    names = (p.relative_to(root).with_suffix("").as_posix() for p in paths)
    return {
        n.removesuffix("__init__").removesuffix("/"): p for n, p in zip(names, paths, strict=True)
    }


def imported(name, path, known, lazy=True):
    """(line, module) of every import of one of the ``known`` modules, absolute or relative, and
    with ``lazy`` also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = name if path.name == "__init__.py" else name.rpartition("/")[0]
    for node in ast.walk(tree) if lazy else at_import(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, "/".join(alias.name.split(".")[1:]))
                for alias in node.names
                if alias.name.split(".")[0] == "meshwright"
            )
        elif isinstance(node, ast.ImportFrom):
            base = resolved(node, package)
            if base is None:
                continue
            for alias in node.names:
                inner = f"{base}/{alias.name}".lstrip("/")
                yield node.lineno, inner if inner in known else base


def resolved(node, package):
    """The module that a from-import names, as a path from the root; None for another package."""
    parts = (node.module or "").split(".") if node.module else []
    if node.level == 0:
        return "/".join(parts[1:]) if parts[:1] == ["meshwright"] else None
    above = package.split("/") if package else []
    return "/".join([*above[: len(above) - node.level + 1], *parts])


def at_import(tree):
    """The statements that run when a module is imported, types aside."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def room_of(name):
    """The line of ``ORDER`` that a module belongs to."""
    fitting = [r for r in ORDER if name == r or (r and name.startswith(f"{r}/"))]
    return max(fitting, key=len)


def test_no_upward_import():
    known = modules()
    wrong = []
    for name, path in known.items():
        if name in ("", "planner"):  # they list public names of the rooms below and above
            continue
        mine = room_of(name)
        for line, target in imported(name, path, known):
            other = room_of(target)
            if ORDER.index(other) > ORDER.index(mine) or {mine, other} in APART:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target or 'the package'}")
    assert not wrong, "\n".join(wrong)


def test_no_circle():
    known = modules()
    graph = nx.DiGraph(
        (name, target)
        for name, path in known.items()
        for _, target in imported(name, path, known, lazy=False)
        if target != name
    )
    assert not list(nx.simple_cycles(graph, length_bound=12))


def test_nothing_else_lies_in_the_root():
    assert {p.name for p in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "api.py"}


def test_the_walk_sees_every_form(tmp_path):
    for room in PACKAGE:
        (tmp_path / room).mkdir()
    path = tmp_path / "planner" / "x.py"
    path.write_text(
        "import meshwright.executor.run\nfrom meshwright import api\n"
        "from meshwright.models import vgg\nfrom ..profiler import measure\n"
        "def f():\n    from .. import cli\nfrom .plan import Plan\n"
    )
    known = {*modules(tmp_path), "api", "cli", "models/vgg", "planner/plan"}
    found = {target for _, target in imported("planner/x", path, known)}
    assert found == {"executor/run", "api", "models/vgg", "profiler", "cli", "planner/plan"}


def test_the_planner_imports_no_torch():
    names = [f"meshwright.{n}".replace("/", ".") for n in modules() if n.startswith("planner")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "loaded = [m for m in sys.modules if m == 'torch' or m.startswith('torch.')]\n"
        "assert not loaded, loaded[:5]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
