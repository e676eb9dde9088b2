"""Rows of all ranks: in one piece where a device's streams carry them, else in a list."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshwright.executor.comm.groups import Group
from meshwright.executor.comm.two_way import gather_rows
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.local_steps import AgreedPart
from torch import Tensor, nn


class Library:
    """What all ranks have, in the order of their numbers: without ``every`` two have the same; what
    it was given."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, every: Sequence[Tensor] | None = None
    ) -> None:
        self.given: list[str] = []
        self.every = every
        for name in ("all_gather_single", "all_gather_into_tensor"):
            if hasattr(dist, name):
                monkeypatch.setattr(dist, name, self.single)
        monkeypatch.setattr(dist, "all_gather", self.parts)

    def single(self, into: Tensor, own: Tensor, **_: Any) -> str:
        self.given.append("one piece")
        assert into.dim() == 1
        into.copy_(torch.cat(list(self.every or [own, own])))
        return "work"

    def parts(self, into: list[Tensor], own: Tensor, **_: Any) -> str:
        self.given.append("a list")
        for part, row in zip(into, self.every or [own, own], strict=True):
            part.copy_(row)
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


@pytest.mark.parametrize("ranks", [(2, 5, 7), (7, 2, 5)])
@pytest.mark.parametrize("on_stream", [True, False])
def test_what_hosts_agree_on_is_gathered_in_one_piece_in_any_order(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], on_stream: bool
) -> None:
    """Each member has its third of the elements, and torch puts those of lower ranks first."""
    handle: Any = "not None"
    inside = Group(ranks, 0, handle, "agreed", on_stream)
    values = torch.arange(1.0, 8.0)
    padded = torch.cat([values, torch.zeros(2)]).split(3)
    by_number = [padded[ranks.index(rank)] for rank in sorted(ranks)]
    library = Library(monkeypatch, by_number)
    weights = [nn.Parameter(torch.zeros(n)) for n in (2, 5)]
    params = [GradParam(str(i), w, inside, 1, w.numel()) for i, w in enumerate(weights)]
    part = AgreedPart(params, inside)
    watch: Any = SimpleNamespace(wait=lambda work, group, doing: 0.0)
    with torch.no_grad():
        part.write(padded[0], watch, lambda *_: None, "averages")
    assert torch.cat([w.detach() for w in weights]).tolist() == values.tolist()
    assert library.given == ["one piece" if on_stream else "a list"]
