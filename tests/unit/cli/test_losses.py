"""``verify --steps``: what is said of losses, and of plans that have none to compare."""

from __future__ import annotations

from types import SimpleNamespace

import meshwright as mw
import msgspec
import pytest
from meshwright.cli.render.comparisons import losses_sentence
from meshwright.cli.render.documents import lossy_sentences
from meshwright.executor.launch.losses import LossComparison, SeedLosses, steps_to_begin
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.local_steps import LocalSteps

from tests.strategies import chain_profile, cluster, linear


def comparison(*ends: tuple[float, float], data: bool = True) -> LossComparison:
    seeds = tuple(
        SeedLosses(seed=k, exact=(3.0, *[e] * 9), plan=(3.0, *[p] * 9))
        for k, (e, p) in enumerate(ends)
    )
    return LossComparison(target="net", world_size=2, steps=10, data=data, seeds=seeds)


def test_the_end_is_the_mean_of_the_last_fifth() -> None:
    one = SeedLosses(seed=0, exact=(9.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0), plan=(6.0,))
    assert (one.exact_end, one.plan_end, one.ratio) == (3.0, 6.0, 2.0)


def test_a_difference_beyond_that_of_seeds_is_told() -> None:
    said = losses_sentence(comparison((1.0, 1.02), (1.0, 1.03)))
    assert "2.50% higher than with exact gradients after 10 steps on the model's data" in said
    # Of two ratios 0.01 apart the mean's standard error is 0.005.
    assert "more than what seeds leave open (± 1.00%)" in said


def test_a_difference_within_it_is_not_more() -> None:
    said = losses_sentence(comparison((1.0, 0.97), (1.0, 1.01), data=False))
    assert "1.00% lower" in said
    assert "no more than what seeds leave open" in said
    assert "random batches" in said


def test_a_loss_that_does_not_fall_shows_nothing() -> None:
    said = losses_sentence(comparison((2.99, 2.99), data=False))
    assert "does not fall in 10 steps on random batches, so they show nothing" in said
    assert "Under the plan" not in said


def test_what_keeps_a_part_is_told_to_change_the_training() -> None:
    assert lossy_sentences(made()) == lossy_sentences(made(wire="bf16")) == []
    (said,) = lossy_sentences(made(exchange="low_rank", exchange_ratio=0.02))
    assert said.startswith("1 unit keeps a part of its gradient for later steps (low_rank; ")
    assert "changes the training: compare with meshwright verify PLAN --steps 50" in said
    (rounded,) = lossy_sentences(made(exchange="int8"))
    assert "for later steps (int8). That" in rounded


def test_one_seed_leaves_nothing_to_compare_with() -> None:
    said = losses_sentence(comparison((1.0, 1.0)))
    assert "as high (within 0.01%) as with exact gradients" in said
    assert "seeds" not in said


def made(**policy: object) -> mw.Plan:
    profile = chain_profile([linear("a")])
    goal = mw.Goal(batch=8)
    found = mw.plan(profile, cluster(2), goal, solver="heuristic", schedule="priority")
    units = tuple(
        msgspec.structs.replace(unit, **policy) if unit.modules else unit for unit in found.units
    )
    return msgspec.structs.replace(found, units=units)


def test_exact_plans_have_no_loss_to_compare() -> None:
    with pytest.raises(InputError, match="sends all gradients whole and exact"):
        mw.compare_losses(made())


@pytest.mark.parametrize("name", ["steps", "seeds"])
def test_nothing_is_compared_in_no_steps(name: str) -> None:
    with pytest.raises(InputError, match=f"0 {name} compare nothing: give at least 1"):
        mw.compare_losses(made(wire="bf16"), **{name: 0})


def test_verify_names_the_comparison() -> None:
    with pytest.raises(InputError, match=r"verify --steps 50"):
        mw.verify(made(exchange="topk", exchange_ratio=0.01))


@pytest.mark.parametrize(
    ("exchange", "local", "steps"),
    [
        ("dense", None, 0),
        ("int8", None, 0),
        ("topk", None, 100),  # its warm-up: four stages of 25 backwards
        ("dense", LocalSteps(hosts=2, inner_steps=40, fragments=(0,), delay=5), 45),
        ("topk", LocalSteps(hosts=2, inner_steps=400, fragments=(0,)), 400),
    ],
)
def test_when_all_that_a_lossy_plan_does_has_begun(exchange, local, steps):
    units = [SimpleNamespace(exchange=exchange)]
    assert steps_to_begin(SimpleNamespace(units=units, local_steps=local)) == steps
