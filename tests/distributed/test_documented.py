"""Every block of code in README and in docs/getting-started.md runs as it stands."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from textwrap import dedent

import pytest
from test_launch_commands import ROOT, command, meshwright

from tests.sampling import sampled

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# What a script has before the lines that a page shows: each rank's share of 256 samples.
BEFORE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(128, 8), torch.randint(4, (128,))
loader, loss_fn = [(x, y)] * 3, nn.functional.cross_entropy
"""
# Only these are not run here, and why.
ELSEWHERE = {
    "git clone": "a clone has an address of its own",
    "cd ": "where the clone lies",
    "make demo": "test_launch_commands and CI run the demo",
    "pip install": "these tests run in such an environment",
    "torchrun ": "there are no such hosts: the test bed's tests probe several",
}
# There are no such hosts: what would run on them is printed instead.
DRY = "--hosts node1,node2"


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each block of a page that is no drawing and no output."""
    found = [(m[2], dedent(m[3])) for m in BLOCK.finditer((ROOT / page).read_text())]
    assert found
    # What begins with `$` has its output below it: tests/unit/cli/test_readme.py compares both.
    return [(lang, text) for lang, text in found if "──▶" not in text and text[:2] != "$ "]


def commands(page: str) -> list[list[str]]:
    """The command lines of each block of them, without their comments."""
    found = []
    for language, text in blocks(page):
        if not language:
            joined = text.replace("\\\n", " ")
            lines = [line.partition("  #")[0].strip() for line in joined.splitlines()]
            found.append([part for line in lines for part in line.split(" && ") if part])
    return found


def run(line: str, folder: Path) -> None:
    if line.startswith(tuple(ELSEWHERE)):
        return
    name, *arguments = shlex.split(line.replace(DRY, f"{DRY} --dry-run"))
    assert name == "meshwright", line
    meshwright(*arguments, cwd=folder)


def torchrun(script: str, folder: Path) -> None:
    (folder / "documented.py").write_text(script)
    started = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    command(*started, "documented.py", cwd=folder)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Where a user would stand: with the examples, and with the script that is launched."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sampled(["README.md", "docs/getting-started.md"], 1))
def test_the_commands_of_a_page_run(page, folder):
    known: list[list[str]] = commands("README.md") if page != "README.md" else []
    own = [lines for lines in commands(page) if lines not in known]
    assert own
    meshwright(
        *("cluster", "--device", "a100-sxm-40gb", "--nodes", 2, "--devices-per-node", 4),
        *("--inter-gbit-s", 1, "--intra-gbyte-s", 100, "-o", "eight.json"), cwd=folder,
    )  # fmt: skip
    for lines in own:
        if any(DRY in line for line in lines):
            meshwright(
                *("plan", "vgg16", "-c", "eight.json", "--batch", 256, "-o", "plan.json"),
                cwd=folder,
            )
        for line in lines:
            run(line, folder)


def python_blocks(page: str) -> list[str]:
    return [text for language, text in blocks(page) if language == "python"]


@pytest.mark.slow
def test_the_loop_of_readme_trains(folder):
    (shown,) = python_blocks("README.md")
    torchrun(BEFORE + shown + "assert loss < 2 and plan.world_size == 2\n", folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_getting_started_saves_is_loaded_later(folder):
    call, saving = python_blocks("docs/getting-started.md")
    save, mark, load = saving.partition("# later, on every rank, after auto_parallelize\n")
    assert mark
    step = "loss_fn(model(x), y).backward()\noptimizer.step()\n"
    kept = "kept = [p.clone() for p in model.parameters()]\n"
    torchrun(BEFORE + call + step + save, folder)
    assert (folder / "checkpoint.pt").exists()
    changed = "assert not all(map(torch.equal, kept, model.parameters()))\n"
    torchrun(BEFORE + call + kept + load + changed, folder)


def test_every_block_is_known():
    """Each language of a block is one that is run here."""
    for page in ("README.md", "docs/getting-started.md"):
        assert {language for language, _ in blocks(page)} <= {"", "python"}
        for lines in commands(page):
            for line in lines:
                assert line.startswith(("meshwright ", *ELSEWHERE)), line
