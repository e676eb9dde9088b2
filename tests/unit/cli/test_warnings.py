"""Warnings of this package are notes; those of others are what they were."""

import pytest
from meshwright.cli import app


@pytest.mark.parametrize(("category", "ours"), [(UserWarning, True), (DeprecationWarning, False)])
def test_a_warning_of_ours_is_a_line_without_code(capsys, category, ours):
    told = []
    app._note_of_ours(lambda *given: told.append(given), "mend it", category, app.__file__, 7)
    assert (capsys.readouterr().err == "note: mend it\n") is ours
    assert bool(told) is not ours


def test_what_others_warn_of_is_theirs(tmp_path):
    told = []
    theirs = str(tmp_path / "theirs.py")
    app._note_of_ours(lambda *rest: told.append(rest), "mend it", UserWarning, theirs, 7)
    assert told == [("mend it", UserWarning, theirs, 7)]
