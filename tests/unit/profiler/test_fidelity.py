"""What lossy exchanges keep of a gradient: hand-made cases, and what must hold for every one."""

import msgspec
import pytest
import torch
from meshwright.executor.gradients.low_rank import Directions
from meshwright.models import zoo as models
from meshwright.models.workload import Batch, Workload
from meshwright.planner.schema.capability import EVERYTHING
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.solve.problem import Problem
from meshwright.planner.solve.request import problem_for
from meshwright.planner.solve.solver import solve
from meshwright.profiler import model as measuring
from meshwright.profiler.fidelity import RATIOS, TURNS, Fidelity
from meshwright.profiler.model import profile
from torch import nn

from tests.strategies import cluster


def counted(gradients, bias=True):
    layer = nn.Linear(100, 1, bias=bias)
    found = Fidelity(layer)
    for gradient in gradients:
        layer.weight.grad = torch.tensor(gradient).float().view(1, 100)
        if bias:
            layer.bias.grad = torch.ones(1)
        found.add()
    return found


def kept(found, exchange, ratio, names=("weight",)):
    curve = next(c for c in found.profiles(names) if c.exchange == exchange)
    return curve.kept[curve.ratios.index(ratio)]


def test_top_k_sends_the_largest_and_the_rest_adds_up():
    one = [3.0] + [1.0] * 99
    # of 9 + 99 the one element of 1% sends 9; then a 2 among 98 others that have waited and 3 again
    found = counted([one, one], bias=False)
    sent, held = 9 + 9, (9 + 99) + (9 + 99 * 4)
    assert kept(found, "topk", 0.01) == pytest.approx(sent / held)


def test_dropping_sends_all_now_and_then():
    ones = [1.0] * 100
    found = counted([ones] * 4, bias=False)
    # accumulated 1, 2, 1, 2: every second time it is sent
    assert kept(found, "dropped", 0.5) == pytest.approx((4 + 4) / (1 + 4 + 1 + 4))
    assert kept(found, "dropped", 0.25) == pytest.approx(16 / (1 + 4 + 9 + 16))


def test_thin_matrices_keep_all_of_a_gradient_of_their_rank_and_part_of_others():
    layer = nn.Linear(40, 30, bias=False)
    found = Fidelity(layer)
    rows, columns = torch.randn(30, 3), torch.randn(3, 40)
    columns *= torch.tensor([[1.0], [0.5], [0.25]])
    for _ in range(4):
        layer.weight.grad = rows @ columns
        found.add()
    (curve,) = (c for c in found.profiles(["weight"]) if c.exchange == "low_rank")
    assert curve.ratios == pytest.approx([r * 70 / 2 / 1200 for r in (1, 2, 4)])
    assert 0.1 < curve.kept[0] < curve.kept[1] < 0.995
    assert curve.kept[2] == pytest.approx(1.0)


def test_thin_matrices_are_of_whole_ones():
    """Of noise a rank keeps little of a large matrix, and much of a small part of it."""
    layer = nn.Linear(900, 1100, bias=False)
    found, by_step = Fidelity(layer), {1: [], 2: [], 4: []}
    noise = [torch.randn(1100, 900) for _ in range(3)]
    for gradient in noise:
        layer.weight.grad = gradient.clone()
        found.add()
    for rank, kept_of in by_step.items():
        one = Directions(1100, 900, rank, torch.float32, torch.device("cpu"), "weight")
        for _ in range(TURNS):
            one.turn(one.of(noise[0]))
        left, sent, whole = torch.zeros(1100, 900), 0.0, 0.0
        for gradient in noise:
            whole += float((gradient + left).square().sum())
            made = one.thin(gradient.clone(), left)
            sent += float(made.square().sum())
            one.turn(made)
        kept_of.append(sent / whole)
    (curve,) = (c for c in found.profiles(["weight"]) if c.exchange == "low_rank")
    assert curve.kept == pytest.approx([kept_of[0] for kept_of in by_step.values()], rel=1e-3)
    assert curve.kept[-1] < 0.03


def test_where_no_element_that_is_looked_at_has_a_gradient_nothing_is_kept():
    table = nn.Embedding(100_000, 8)
    found = Fidelity(table)
    table.weight.grad = torch.zeros_like(table.weight)
    found._places["weight"] = torch.arange(65_536)
    table.weight.grad[-1] = 1.0
    found.add()
    assert kept(found, "topk", 0.01) == 0.0


def test_an_empty_parameter_has_no_share():
    layer = nn.Linear(4, 2)
    layer.register_parameter("tokens", nn.Parameter(torch.zeros(1, 0, 4)))
    found = Fidelity(layer)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    found.add()
    assert not found.profiles(["tokens"])
    assert kept(found, "topk", 0.1, ("weight", "tokens")) == pytest.approx(1 / 8)


def test_a_bias_is_always_sent():
    found = counted([[1.0] * 100] * 4)
    # the bias has 1/101 of the energy
    with_bias = kept(found, "dropped", 0.5, ("weight", "bias"))
    assert with_bias == pytest.approx((1 + 100 * 0.8) / 101)
    assert found.profiles(["bias"]) == ()
    assert found.energy(["weight", "bias"]) == pytest.approx(101)


def test_a_profile_says_what_is_kept_and_plans_use_it_only_where_it_counts():
    found = profile(models.build("mlp"), batches=(4,), degrees=(), budget_s=20)
    linear = [u for u in found.units if u.kind == "linear"]
    assert linear
    for unit in linear:
        assert {c.exchange for c in unit.fidelity} == {"dropped", "topk", "int8", "low_rank"}
        assert unit.gradient_energy > 0
        shares = [unit.kept("topk", r) for r in RATIOS["topk"]]
        assert shares == sorted(shares)
        assert 0 < shares[0] < shares[-1] <= 1
    whole = msgspec.structs.replace(
        EVERYTHING, styles=("none",), memory=("keep",), idle_positions=False, branches=False
    )
    goal = Goal(batch=8, allow_lossy=True, min_fidelity=0.3)

    def lossy(bytes_per_s):
        links = cluster(2, inter=bytes_per_s, intra=bytes_per_s, latency_s=0.0)
        problem = Problem(found, links, goal, whole, schedule="priority", message_bytes=2**20)
        return [u for u in solve(problem, "lagrangian", 10).checked().units if u.exchange_ratio < 1]

    assert lossy(1e6), "communication takes many times the compute"
    assert not lossy(1e13), "bandwidth is ample"


def test_it_is_measured_before_units_are_divided(monkeypatch):
    """Dividing may take all the time that is left."""
    done = []

    def noted(owner, name):
        ordinary = getattr(owner, name)

        def call(*args, **how):
            done.append(name)
            return ordinary(*args, **how)

        monkeypatch.setattr(owner, name, call)

    noted(measuring, "measure_fidelity")
    noted(measuring.ShareMeter, "shares")
    profile(models.build("mlp"), batches=(2, 4), degrees=(2,), repeats=1, budget_s=60)
    assert done[0] == "measure_fidelity"
    assert "shares" in done


def test_without_time_it_is_left_out_and_told():
    with pytest.warns(UserWarning, match="time ran out before it was measured what lossy"):
        found = profile(models.build("mlp"), batches=(4,), degrees=(2,), repeats=1, budget_s=0)
    assert not any(unit.fidelity for unit in found.units)
    goal = Goal(batch=8, allow_lossy=True, min_fidelity=0.9)
    with pytest.raises(InputError, match=r"as time ran out.*measure fewer batches.*--min-fid"):
        problem_for(found, cluster(2), goal, EVERYTHING)
    estimated = msgspec.structs.replace(found, origin="estimated")
    with pytest.raises(InputError, match=r"as estimates do not know it: measure .* on this"):
        problem_for(estimated, cluster(2), goal, EVERYTHING)


class RootOfZero(nn.Module):
    def forward(self, x):
        return x + (0 * x).sqrt()


def test_a_gradient_that_is_not_finite_has_no_fidelity():
    model = nn.Sequential(nn.Linear(8, 8), RootOfZero(), nn.Linear(8, 4))

    def make_batch(size):
        return Batch((torch.randn(size, 8),), torch.randn(size, 4))

    workload = Workload("root", model, make_batch, nn.functional.mse_loss)
    with pytest.warns(UserWarning, match=r"gradients of 1 units \('0' first\) are not finite"):
        found = profile(workload, batches=(4,), degrees=(), repeats=1, budget_s=60)
    first, second = (u for u in found.units if u.kind == "linear")
    assert (first.fidelity, first.gradient_energy) == ((), 0.0)
    assert second.fidelity
    assert second.gradient_energy > 0


def test_complex_gradients_count_like_pairs():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(10, 10, dtype=torch.complex64))
    found = Fidelity(layer)
    layer.weight.grad = torch.full((10, 10), 3 + 4j)
    found.add()
    assert found.energy(["weight"]) == pytest.approx(100 * 25)
    # 2 of 200 numbers, both of the larger part
    assert kept(found, "topk", 0.01) == pytest.approx(2 * 16 / (100 * 25))
