"""Warnings of this package are notes; those of others are what they were."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from meshwright.executor import notes


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is shown otherwise."""
    given: list[object] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *what: given.append(what))
    return given


@pytest.mark.parametrize(("category", "ours"), [(UserWarning, True), (DeprecationWarning, False)])
def test_a_warning_of_ours_is_a_line_without_code(
    capsys: pytest.CaptureFixture[str], told: list[object], category: type[Warning], ours: bool
) -> None:
    notes.show_warnings_as_notes()
    warnings.showwarning("mend it", category, notes.__file__, 7)
    assert (capsys.readouterr().err == "note: mend it\n") is ours
    assert bool(told) is not ours


def test_what_others_warn_of_is_theirs(tmp_path: Path, told: list[object]) -> None:
    notes.show_warnings_as_notes()
    theirs = str(tmp_path / "theirs.py")
    warnings.showwarning("mend it", UserWarning, theirs, 7)
    assert told == [("mend it", UserWarning, theirs, 7)]


def test_who_tells_may_be_chosen(told: list[object]) -> None:
    said: list[str] = []
    notes.show_warnings_as_notes(said.append)
    warnings.showwarning("mend it", UserWarning, notes.__file__, 7)
    assert said == ["mend it"]
    assert not told
