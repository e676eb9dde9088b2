"""One name, one thing: no class has another's name, and no private word is in a name of the
code."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict

from tests.unit.test_imports import modules

# Words that the code once had for things that the field has a name for. None of them is plain
# English for anything in this package; the glossary has the words that came for them.
GONE = {
    "aside", "beside", "brought", "carried", "lane", "lanes", "lean", "multipliers", "noun",
    "nouns", "parcel", "parcels", "picked", "picking", "picks", "residence", "settle", "settles",
    "spared", "taking", "traveller", "travelling", "trip", "trips", "unfit",
}  # fmt: skip


def names(tree: ast.AST) -> set[str]:
    """What a module names: classes, functions, arguments, variables, attributes, modules."""
    found: set[str | None] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return {name for name in found if name}


def words(name: str) -> set[str]:
    """The words of a name: ``min_fidelity`` and ``MinFidelity`` have two."""
    return {part.lower() for part in re.findall(r"[A-Z]*[a-z]+|[A-Z]+", name)}


@functools.cache
def parsed() -> dict[str, ast.Module]:
    return {n: ast.parse(p.read_text(encoding="utf-8")) for n, p in modules().items()}


def test_no_two_classes_have_one_name():
    homes = defaultdict(list)
    for name, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    assert len(homes) > 200
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_name_has_a_word_that_is_gone():
    wrong = {
        f"{module}: {name}"
        for module, tree in parsed().items()
        for name in (*names(tree), *module.split("/"))
        if words(name) & GONE
    }
    assert wrong == set()


def test_the_words_of_names_are_found():
    tree = ast.parse(
        "import a as trip\nclass MyLane(Base): x = y.aside_of\ndef f(*, LEAN): g(nouns=1)"
    )
    assert GONE & set().union(*map(words, names(tree))) == {
        "trip",
        "lane",
        "aside",
        "lean",
        "nouns",
    }
