"""Mixtures of experts are divided inside every expert, where that is shown to be right."""

import meshwright as mw
import pytest
import torch
from meshwright.models.splits import find_splits
from meshwright.models.units import stays_whole
from meshwright.models.units.discover import discover
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, INNER, EXPERTS, LENGTH = 6, 8, 3, 4


class Stacked(nn.Module):
    """All experts in two parameters, as linear layers have them or ``transposed``."""

    def __init__(self, *, transposed: bool = False, gated: bool = True) -> None:
        super().__init__()
        into, outof = ((2 if gated else 1) * INNER, WIDTH), (WIDTH, INNER)
        if transposed:
            into, outof = into[::-1], outof[::-1]
        first = nn.Parameter(torch.randn(EXPERTS, *into))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, *outof))
        if gated:
            self.gate_up_proj = first
        else:
            self.up_proj = first
        self.gated, self.transposed, self.intermediate_size = gated, transposed, INNER

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, place = torch.where(chosen == expert)
            first = (self.gate_up_proj if self.gated else self.up_proj)[expert]
            last = self.down_proj[expert]
            if self.transposed:
                first, last = first.T, last.T
            inner = F.linear(x[rows], first)
            if self.gated:
                # By the attribute, as some do.
                inner = (
                    F.silu(inner[:, : self.intermediate_size]) * inner[:, -inner.shape[1] // 2 :]
                )
            made = F.linear(F.relu(inner), last) * weights[rows, place, None]
            total = total.index_add(0, rows, made.to(total.dtype))
        return total


class Biased(nn.Module):
    """Experts with biases; of each inner feature the gate and the product are side by side, or in
    two ``halves``."""

    def __init__(self, *, halves: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.down_proj_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.halves = halves

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, place = torch.where(chosen == expert)
            packed = x[rows] @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
            gate, up = packed.chunk(2, -1) if self.halves else (packed[..., ::2], packed[..., 1::2])
            made = (F.silu(gate) * up) @ self.down_proj[expert] + self.down_proj_bias[expert]
            total = total.index_add(0, rows, (made * weights[rows, place, None]).to(total.dtype))
        return total


class Expert(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(WIDTH, INNER), nn.GELU()
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Listed(nn.ModuleList):
    def __init__(self, **options: bool) -> None:
        super().__init__(Expert(**options) for _ in range(EXPERTS))


class Block(nn.Module):
    """A router, its experts, and perhaps one that all samples share."""

    def __init__(self, experts: nn.Module, *, shared: bool = False, own: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts
        if shared:
            self.shared_expert, self.gate = Expert(), nn.Linear(WIDTH, 1)
        self.after = nn.ReLU() if own else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(2)
        if isinstance(self.experts, nn.ModuleList):
            made = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                rows, place = torch.where(chosen == number)
                given = expert(flat[rows]) * weights[rows, place, None]
                made = made.index_add(0, rows, given.to(made.dtype))
        else:
            made = self.experts(flat, chosen, weights)
        if hasattr(self, "gate"):
            made = made + torch.sigmoid(self.gate(flat)) * self.shared_expert(flat)
        return self.after(made).reshape(x.shape)


class Network(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.before, self.block, self.head = nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.before(x)))


def found(block: nn.Module):
    torch.manual_seed(0)
    batch = mw.Batch((torch.randn(4, LENGTH, WIDTH),), torch.zeros(4))
    return {unit.name: unit for unit in discover(Network(block), batch).units}


@pytest.mark.parametrize(("transposed", "gated"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("shared", [False, True])
def test_stacked_experts_are_one_unit_that_divides(transposed, gated, shared):
    unit = found(Block(Stacked(transposed=transposed, gated=gated), shared=shared))["block"]
    assert unit.kind == "experts"
    (split,) = unit.splits
    assert (split.style, split.parts, split.features) == ("pair", INNER, WIDTH)
    assert split.uneven
    cut = {c.name: (c.dim, c.blocks) for c in split.cuts}
    by_columns, by_rows = (2, 1) if transposed else (1, 2)
    first = "gate_up_proj" if gated else "up_proj"
    assert cut[f"block.experts.{first}"] == (by_columns, 2 if gated else 1)
    assert cut["block.experts.down_proj"] == (by_rows, 1)
    assert "block.router.weight" not in cut
    assert ("block.shared_expert.up.weight" in cut) == shared


def test_experts_with_biases_are_divided_in_whole_features():
    (split,) = found(Block(Biased()))["block"].splits
    assert (split.style, split.parts, split.uneven) == ("pair", INNER, False)
    cut = {c.name.removeprefix("block.experts."): (c.dim, c.blocks) for c in split.cuts}
    # The last bias is whole: each member adds its share of it.
    assert cut == {"gate_up_proj": (2, 1), "gate_up_proj_bias": (1, 1), "down_proj": (1, 1)}


def test_experts_with_biases_in_another_order_stay_whole():
    assert not any(
        u.splits for u in found(Block(Biased(halves=True))).values() if "block" in u.name
    )


def test_a_list_of_experts_is_divided_in_each_of_them():
    (split,) = found(Block(Listed(), shared=True))["block"].splits
    cut = {c.name: c.dim for c in split.cuts}
    assert cut["block.experts.2.up.weight"] == cut["block.experts.2.up.bias"] == 0
    assert cut["block.experts.2.down.weight"] == 1
    assert len(cut) == 3 * (EXPERTS + 1)


class Dropping(Expert):
    """Drops features of its own, or of what it adds to the others'."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.drop, self.last = nn.Dropout(0.5), last

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act(self.up(x))
        return self.drop(self.down(inner)) if self.last else self.down(self.drop(inner))


class Noisy(Block):
    """Adds noise to its scores (Shazeer et al., arXiv 1701.06538)."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat)
        scores = scores + torch.randn_like(scores) if self.training else scores
        weights, chosen = scores.softmax(-1, dtype=torch.float32).topk(2)
        return self.experts(flat, chosen, weights).reshape(x.shape)


def test_experts_draw_for_their_own_features_only():
    """Members would drop other parts of a sum, and send a sample to other experts."""
    inner, last = (
        nn.ModuleList(Dropping(last=last) for _ in range(EXPERTS)) for last in (False, True)
    )
    assert found(Block(inner))["block"].splits
    for block in (Block(last), Noisy(Stacked())):
        unit = found(block)["block"]
        assert (unit.kind, unit.splits, unit.stays_whole) == ("experts", (), stays_whole.DRAWS)


def test_what_follows_the_sum_must_be_linear():
    # The reduction comes last: a ReLU before it sees partial sums.
    units = found(Block(Stacked(), own=True))
    assert not any(unit.kind == "experts" and unit.splits for unit in units.values())


def test_a_bias_after_the_sum_is_added_once_or_the_block_stays_whole():
    units = found(Block(Listed(bias=True)))
    assert not any(unit.kind == "experts" and unit.splits for unit in units.values())


def test_a_list_of_other_modules_is_no_mixture():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Listed()

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    assert not find_splits(Network(Chain()), ["block"])
    assert found(Chain())["block.layers.0"].kind == "mlp"
