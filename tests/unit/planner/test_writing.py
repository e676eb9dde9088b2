"""A document is written whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.record import write_whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_is_one_sentence_and_leaves_no_file(tmp_path, monkeypatch, number):
    def full(*arguments):
        raise OSError(number, "no room")

    path = tmp_path / "plan.json"
    path.write_text("as before")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"cannot write .*plan\.json: no room; name another place"):
        write_whole(path, b"{}")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "as before"


def test_ctrl_c_is_no_wrong_input_and_leaves_no_file(tmp_path, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "plan.json", b"{}")
    assert not list(tmp_path.iterdir())
