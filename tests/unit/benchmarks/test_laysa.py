"""The arithmetic of ``benchmarks/laysa.py``: largest batches, gains, tables, variants."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meshwright.cli.render.memory import memory_tables
from meshwright.planner.explain.memory_timeline import memory_timeline
from meshwright.planner.memory import gradient_buffers
from meshwright.planner.schema.curve import proportional
from meshwright.planner.schema.profile import (
    FidelityProfile,
    ModelProfile,
    ParameterProfile,
    ShareProfile,
    UnitProfile,
)

from tests.strategies import chain_profile, share


@pytest.fixture(scope="module")
def laysa() -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are no package; what they set is put back."""
    folder = str(Path(__file__).parents[3] / "benchmarks")
    before = gradient_buffers.FIRST_RATIO
    sys.path.append(folder)
    try:
        import laysa as pages
        import laysa_plans as plans
        import rows as pages_of_docs
    finally:
        sys.path.remove(folder)
    yield SimpleNamespace(pages=pages, plans=plans, rows=pages_of_docs)
    gradient_buffers.FIRST_RATIO = before


# -- the largest batch ---------------------------------------------------------------------------


@given(limit=st.integers(0, 300), most=st.integers(1, 256))
def test_bisection_finds_the_largest(laysa, limit: int, most: int) -> None:
    asked = []

    def fits(batch: int) -> bool:
        asked.append(batch)
        return batch <= limit

    assert laysa.plans.bisected(fits, most) == min(limit, most)
    assert all(1 <= batch <= most for batch in asked)
    assert len(asked) <= 2 * most.bit_length() + 2


def largest_batch(
    laysa, error: Callable[[int], float], budget: int = 1000, most: int = 256
) -> tuple[int, int, list[int]]:
    """The largest batch where a batch is predicted to take 100 + 10 b bytes, and takes so many
    times that; and the batches that were run."""
    ran = []

    def predicted(batch: int) -> int:
        return 100 + 10 * batch

    def run(batch: int, limit: float) -> object:
        assert predicted(batch) <= limit or error(batch) > 1
        ran.append(batch)
        return laysa.plans.Peak(predicted(batch), round(error(batch) * predicted(batch)))

    found = laysa.plans.largest_within(predicted, run, budget, most)
    return found.batch, found.peak_bytes, ran


@pytest.mark.parametrize(
    ("error", "best"),
    [(1.0, 90), (0.9, 101), (1.1, 80), (0.5, 190)],
)
def test_what_was_predicted_wrongly_is_guessed_anew(laysa, error: float, best: int) -> None:
    batch, peak, ran = largest_batch(laysa, lambda _: error)
    assert batch == best
    assert peak == round(error * (100 + 10 * best)) <= 1000
    assert len(ran) <= laysa.plans.TRIES


def test_no_batch_counts_that_was_not_run_within_the_budget(laysa) -> None:
    batch, peak, ran = largest_batch(laysa, lambda b: 1.0 if b < 60 else 1.5)
    assert batch in ran
    assert batch < 60
    assert peak <= 1000
    assert largest_batch(laysa, lambda _: 20.0)[0] == 0
    assert largest_batch(laysa, lambda _: 1.0, budget=105) == (0, 0, [])


def test_no_more_than_the_most_is_tried(laysa) -> None:
    batch, _, ran = largest_batch(laysa, lambda _: 1.0, most=16)
    assert batch == 16
    assert max(ran) == 16


# -- gains and tables ----------------------------------------------------------------------------


def rows() -> list[dict[str, object]]:
    figures = {
        "dense": (1000, 1.0, 10, 5.0),
        "memory only": (400, 1.3, 30, 6.0),
        "sparse only": (1100, 0.8, 8, 8.0),
        "naive": (450, 1.2, 28, 7.0),
        "collaborative": (300, 1.05, 28, 9.0),
    }
    classes = {"weights": 100, "optimizer": 100, "residuals": 0, "gradients": 50,
               "feature_maps": 700, "map_gradients": 40, "buffers": 10, "workspace": 0,
               "total": 1000}  # fmt: skip
    found: list[dict[str, object]] = [
        {
            "model": "m", "variant": name, "what": "", "max_what": "", "peak_bytes": peak,
            "predicted_bytes": peak, "step_s": step_s, "max_batch": batch, "max_peak_bytes": 900,
            "max_step_s": batch / rate, "samples_per_s": rate, "classes": classes,
        }
        for name, (peak, step_s, batch, rate) in figures.items()
    ]  # fmt: skip
    found[-1]["quick"] = {"what": "less", "peak_bytes": 700, "predicted_bytes": 710, "step_s": 0.9}
    return found


def test_gains_are_against_the_best_and_the_worst_single_strategy(laysa) -> None:
    found = laysa.pages.gains(rows())
    assert found.over_best == pytest.approx(9 / 8)
    assert found.over_worst == pytest.approx(9 / 6)
    assert found.over_dense == pytest.approx(9 / 5)
    assert found.slowdown == pytest.approx(1.05)
    assert found.quick_slowdown == pytest.approx(0.9)
    assert found.cut == pytest.approx(
        {"dense": 0.7, "memory only": 0.25, "sparse only": 1 - 3 / 11, "naive": 1 / 3}
    )
    without = rows()
    without[2]["samples_per_s"] = 0.0
    found = laysa.pages.gains(without)
    assert found.over_best == pytest.approx(9 / 6)
    assert found.over_worst == float("inf")


def test_the_page_holds_each_models_part_once(laysa) -> None:
    found = {
        "model": "m", "budget_bytes": 10**6, "parameter_bytes": 10**5, "batch": 10,
        "compute_s": 1.0, "mbit_s": 100.0, "goodput_mbit_s": 95.0,
        "host": {"what": "that", "predicted_bytes": 5}, "rows": rows(), "own": [],
        "rounds": 3, "steps": 1,
    }  # fmt: skip
    part = laysa.pages.page(found)
    shown = [line for line in part.splitlines() if line.startswith("| collaborative")]
    assert len(shown) == 2
    assert "feature map gradients" in part
    assert "workspace" not in part  # no variant has any
    assert "1.12 times the best" in part
    assert "1.50 times the worst" in part
    once = laysa.rows.put("# Head\n", "m", part)
    both = laysa.rows.put(once, "other", "text\n")
    again = laysa.rows.put(both, "m", "new\\1\n")
    assert again == both.replace(part, "new\\1\n")
    json.dumps({"rows": rows()})


# -- variants ------------------------------------------------------------------------------------


def block_unit(name: str, saved: float, work: float, parameters: int = 100) -> UnitProfile:
    weight = ParameterProfile(
        name=f"{name}.weight", shared=f"{name}.weight", shape=(parameters // 4,), bytes=parameters
    )
    whole = ShareProfile(
        style="none", degree=1, forward=proportional(1.0), backward=proportional(2.0),
        saved=proportional(saved), gradient=proportional(saved), workspace=proportional(work),
        parameter_bytes=parameters,
    )  # fmt: skip
    fidelity = FidelityProfile(exchange="topk", ratios=(0.01, 0.1), kept=(0.5, 0.9))
    return UnitProfile(
        name=name, kind="conv", modules=(name,), batched_inputs=(0,), parameters=(weight,),
        shares=(whole,), fidelity=(fidelity,), gradient_energy=1.0,
    )  # fmt: skip


@pytest.fixture
def residual() -> ModelProfile:
    """A stem, four blocks of two units with the model's own code after each, and a head."""
    units = [block_unit("stem", 100.0, 10.0)]
    for block in range(4):
        units += [
            block_unit(f"layer1.{block}.conv1", 100.0, 30.0),
            block_unit(f"layer1.{block}.conv2", 60.0, 0.0),
            UnitProfile(name=f"@glue.{block}", kind="glue", shares=(share(saved=20.0),)),
        ]
    units.append(block_unit("head", 10.0, 0.0))
    return chain_profile(units, bytes_per_sample=20.0)


@pytest.fixture
def chooser(laysa, residual: ModelProfile):
    found = laysa.plans.with_ratio(residual, 0.01)
    return laysa.plans.Chooser(found, laysa.plans.two_hosts(1e3), 10**9)


def test_each_variant_decides_what_it_may(laysa, chooser) -> None:
    found = {v.name: chooser.least(v, 8) for v in laysa.plans.VARIANTS}
    shown = {
        name: (
            {o.memory for o in one.decisions},
            {o.exchange for o in one.decisions},
            {o.feedback for o in one.decisions},
        )
        for name, one in found.items()
    }
    both = {"keep", "recompute"}
    assert shown["dense"] == ({"keep"}, {"dense"}, {"residual"})
    assert shown["memory only"] == (both, {"dense"}, {"residual"})
    assert shown["sparse only"] == ({"keep"}, {"dense", "topk"}, {"residual"})
    assert shown["naive"] == (both, {"dense", "topk"}, {"residual"})
    assert shown["collaborative"] == (both, {"dense", "topk"}, {"residual", "mirror"})
    assert found["naive"].common.early
    peaks = {name: one.peak_bytes for name, one in found.items()}
    assert peaks["memory only"] < peaks["dense"] < peaks["sparse only"]
    assert peaks["collaborative"] <= peaks["naive"]


def test_no_more_is_recomputed_than_the_limit_asks_for(laysa, chooser) -> None:
    ours = laysa.plans.VARIANTS[-1]
    free = chooser.quickest(ours, 8, 10**9)
    assert not any(o.memory == "recompute" for o in free.decisions)
    tight = chooser.least(ours, 8)
    limit = (free.peak_bytes + tight.peak_bytes) / 2
    between = chooser.quickest(ours, 8, limit)
    assert between.peak_bytes <= limit
    assert free.step_s <= between.step_s <= tight.step_s


def test_each_takes_the_batch_that_is_best_for_it(laysa, chooser) -> None:
    for variant in laysa.plans.VARIANTS:
        parts, size = chooser.best(variant, 16)
        best = chooser.quickest(variant, size, chooser.budget_bytes, parts)
        assert size % parts == 0
        assert size <= 16
        assert best.peak_bytes <= chooser.budget_bytes
        for other in (16, 8):
            alone = chooser.quickest(variant, other, chooser.budget_bytes)
            assert 2 * size / best.step_s >= 2 * other / alone.step_s * (1 - 1e-9)
    chooser.budget_bytes = 1
    assert chooser.best(laysa.plans.VARIANTS[0], 16) == (1, 0)


def test_plans_show_their_classes(laysa, chooser) -> None:
    """What ``explain --memory`` prints of each variant's plan."""
    for variant in laysa.plans.VARIANTS:
        chosen = chooser.least(variant, 8)
        plan = chooser.plan(chosen)
        assert not plan.hypothetical
        timeline = memory_timeline(plan, chooser.profile, chooser.cluster)
        assert timeline.timelines[0].peak.total == pytest.approx(chosen.peak_bytes, abs=16)
        text = str([str(c.header) for c in memory_tables(timeline)[0].columns])
        assert "feature maps" in text
        assert ("residuals" in text) == variant.sparse


def test_a_device_with_a_host_keeps_mirrors_there(laysa, chooser) -> None:
    ours = laysa.plans.VARIANTS[-1]
    with_host = laysa.plans.Chooser(chooser.profile, laysa.plans.two_hosts(1e3, 1e9), 10**9)
    there = with_host.least(ours, 8)
    assert there.common.feedback == "host_mirror"
    assert there.peak_bytes < chooser.least(ours, 8).peak_bytes
