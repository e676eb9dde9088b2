"""The site has every page of docs/, and every public name."""

from __future__ import annotations

import re
from pathlib import Path

import meshwright

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_public_name_is_on_the_page_of_python():
    named = re.findall(r"^::: meshwright\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(meshwright.__all__)


def test_every_page_is_in_the_navigation():
    named = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    assert sorted(named) == sorted({*there, "index.md"})
