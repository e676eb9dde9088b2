"""Rows of all ranks: in one piece where a device's streams carry them, else in a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.executor.comm.groups import Group
from meshwright.executor.comm.two_way import gather_rows
from torch import Tensor


class Library:
    """Two ranks with the same elements; what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[str] = []
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self.single)
        monkeypatch.setattr(dist, "all_gather", self.parts)

    def single(self, into: Tensor, own: Tensor, **_: Any) -> str:
        self.given.append("one piece")
        assert into.dim() == 1
        into.copy_(torch.cat([own, own]))
        return "work"

    def parts(self, into: list[Tensor], own: Tensor, **_: Any) -> str:
        self.given.append("a list")
        for part in into:
            part.copy_(own)
        return "work"


@pytest.mark.parametrize(
    ("on_stream", "apart", "given"),
    [(True, False, "one piece"), (True, True, "a list"), (False, False, "a list")],
)
def test_lists_are_for_hosts_and_for_rows_that_lie_apart(
    monkeypatch: pytest.MonkeyPatch, on_stream: bool, apart: bool, given: str
) -> None:
    library = Library(monkeypatch)
    rows = torch.zeros(2, 12)[:, :8] if apart else torch.zeros(2, 8)
    own = torch.arange(8.0)
    work, carried = gather_rows(rows, own, Group((0, 1), 0, None, "exchange", on_stream))
    assert (work, library.given) == ("work", [given])
    assert rows.tolist() == [own.tolist()] * 2
    # Tensors of the library's own, whose memory can be taken away.
    assert not any(tensor is own or tensor is rows for tensor in carried)
