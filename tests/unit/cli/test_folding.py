"""Long plans in few rows: equal layers are one block, and nothing else is put together."""

from __future__ import annotations

import random
import time

from meshwright.cli.render.documents import decision_table, units_table
from meshwright.cli.render.folding import SHORT, Row, fold, fold_short
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan, UnitPlan
from meshwright.profiler.estimate import load_table
from msgspec.structs import replace
from rich.console import Console

LAYER = {
    "input_norm": "data",
    "q_proj": "column",
    "k_proj": "column",
    "v_proj": "column",
    "o_proj": "row",
    "post_norm": "data",
    "gate_proj": "column",
    "up_proj": "column",
    "down_proj": "row",
}
OTHER = {"data": "data", "column": "row", "row": "column"}


def llama(layers=32, decide=lambda layer, decision: decision):
    units = [("model.embed_tokens", "data")]
    for i in range(layers):
        units += [(f"model.layers.{i}.{name}", decide(i, d)) for name, d in LAYER.items()]
    return [*units, ("model.norm", "data"), ("lm_head", "column")]


def folded(units):
    return fold(units, lambda u: u[0], lambda u: (u[1],))


def shown(units):
    return [row.indented for row in folded(units)]


INSIDE = ["  input_norm", "  q_proj … v_proj (3)", "  o_proj", "  post_norm",
          "  gate_proj, up_proj", "  down_proj"]  # fmt: skip


def test_equal_layers_are_one_block():
    names = shown(llama())
    assert names == [
        "model.embed_tokens", "model.layers.0 … 31 ×32", *INSIDE, "model.norm", "lm_head",
    ]  # fmt: skip


def test_every_unit_is_in_one_row_and_in_its_block():
    rows = folded(llama())
    inside = [u for row in rows if not row.is_block for u in row.units]
    assert sorted(inside) == sorted(llama())
    block = rows[1]
    assert len(block.units) == 32 * 9
    assert block.mean(lambda u: 1.0) == 32 * 9
    assert rows[3].mean(lambda u: 1.0) == 3  # of one layer: q, k and v


def test_the_first_and_the_last_layer_may_differ():
    names = shown(llama(decide=lambda i, d: OTHER[d] if i in (0, 31) else d))
    assert [n for n in names if "layers" in n] == [
        "model.layers.0, 31 ×2",
        "model.layers.1 … 30 ×30",
    ]


def test_a_layer_unlike_all_others_has_a_heading():
    names = shown(llama(decide=lambda i, d: f"{d} alone" if i == 5 else d))
    assert [n for n in names if "layers" in n] == [
        "model.layers.0 … 4, 6 … 31 ×31",
        "model.layers.5",
    ]


def test_two_kinds_in_turn_are_two_blocks():
    names = shown(llama(decide=lambda i, d: OTHER[d] if i % 2 else d))
    assert [n for n in names if "layers" in n] == [
        "model.layers.0, 2 … 30 ×16",
        "model.layers.1, 3 … 31 ×16",
    ]


def test_layers_that_differ_partway_are_two_blocks():
    names = shown(llama(decide=lambda i, d: OTHER[d] if i >= 20 else d))
    assert [n for n in names if "layers" in n] == [
        "model.layers.0 … 19 ×20",
        "model.layers.20 … 31 ×12",
    ]


def shortened(units):
    return fold_short(units, lambda u: u[0], lambda u: (u[1],))


def test_layers_that_differ_in_a_unit_or_two_are_one_block():
    """A plan that a search made: nearly every layer is unlike the one before it."""

    def decide(layer, decision):
        return OTHER[decision] if decision == "row" and layer % 5 in (0, 3) else decision

    units = [(n, "keep" if n.endswith("layers.7.o_proj") else d) for n, d in llama(decide=decide)]
    rows = shortened(units)
    assert [row.indented for row in rows] == [
        "model.embed_tokens", "model.layers.0 … 31 ×32", "  input_norm", "  q_proj … v_proj (3)",
        "  o_proj of 0, 3, 5, 8, 10, 8 more", "  o_proj of 1, 2, 4, 6, 9, 11, 12, 11 more",
        "  o_proj of 7", "  post_norm", "  gate_proj, up_proj",
        "  down_proj of 0, 3, 5, 8, 10, 8 more",
        "  down_proj of 1, 2, 4, 6, 7, 9, 11, 12, 11 more", "model.norm", "lm_head",
    ]  # fmt: skip
    assert len(rows) <= SHORT < len(folded(units))
    inside = [unit for row in rows if not row.is_block for unit in row.units]
    assert sorted(inside) == sorted(units)
    assert all(len({decision for _, decision in row.units}) == 1 for row in rows[2:])
    assert [row.repeats for row in rows[4:7]] == [13, 18, 1]
    assert {row.mean(lambda u: 1.0) for row in rows[4:7]} == {1.0}


def test_recomputing_up_to_the_own_layer_is_one_way_to_be_decided():
    draw = random.Random(1)
    units = [
        (f"h.{i}.{name}", draw.choice((f"recompute to h.{i}.mlp", "keep")))
        for i in range(32)
        for name in ("ln", "attn", "mlp")
    ]
    rows = shortened(units)
    inside = [row.repeats for row in rows[1:]]
    assert [a + b for a, b in zip(inside[::2], inside[1::2], strict=True)] == [32, 32, 32]
    assert {
        len({u[1].replace(u[0].rpartition(".")[0], "") for u in r.units}) for r in rows[1:]
    } == {1}


def test_a_table_that_is_short_enough_stays():
    units = llama(decide=lambda i, d: OTHER[d] if i >= 20 else d)
    assert shortened(units) == folded(units)


def test_layers_that_come_again_are_counted_to_the_first_of_their_kind():
    names = shown(llama(decide=lambda i, d: OTHER[d] if i in (*range(7, 14), 15) else d))
    assert [n for n in names if "layers" in n] == [
        "model.layers.0 … 6, 14, 16 … 31 ×24",
        "model.layers.7 … 13, 15 ×8",
    ]


def test_blocks_inside_blocks():
    experts = [(f"experts.{j}.{w}", d) for j in range(8) for w, d in (("up", "c"), ("down", "r"))]
    units = [(f"h.{i}.{n}", d) for i in range(12) for n, d in [("ln", "d"), *experts]]
    rows = folded([("wte", "x"), *units])
    assert [row.indented for row in rows] == [
        "wte", "h.0 … 11 ×12", "  ln", "  experts.0 … 7 ×8", "    up", "    down",
    ]  # fmt: skip
    assert [row.repeats for row in rows] == [1, 1, 12, 12, 96, 96]


def test_a_number_in_the_middle_of_a_block_stays():
    units = [(f"h.{i}.attn.{j}", "ab"[j]) for i in range(3) for j in range(2)]
    assert shown(units) == ["h.0 … 2 ×3", "  attn.0", "  attn.1"]


def test_code_between_modules_belongs_to_the_layer_before_it():
    units = []
    for i in range(4):
        units += [(f"h.{i}.attn", "a"), (f"@glue.{2 * i}", "b"), (f"h.{i}.mlp", "c")]
        units += [(f"@glue.{2 * i + 1}", "b")]
    assert shown([("@input", "b"), *units]) == [
        "@input", "h.0 … 3 ×4", "  attn", "  @glue", "  mlp", "  @glue",
    ]  # fmt: skip


def test_what_names_the_layers_own_modules_is_equal():
    units = [
        (f"h.{i}.{name}", decision)
        for i in range(4)
        for name, decision in (("ln", f"recompute as h.{i}.ln to h.{i}.mlp"), ("mlp", "row"))
    ]
    assert shown(units) == ["h.0 … 3 ×4", "  ln", "  mlp"]
    other = [(name, d.replace("h.2.mlp", "h.3.mlp")) for name, d in units]
    assert shown(other) != shown(units)


def test_neighbours_that_are_alike_stay_one_row():
    assert shown([(f"features.{i}", "d") for i in range(0, 29, 2)]) == [
        "features.0 … features.28 (15)"
    ]
    assert shown([("a", "x"), ("b", "y"), ("c", "x")]) == ["a", "b", "c"]
    assert shown([]) == []


def test_400_units_fold_at_once():
    alternating = [(f"{i}.linear", "ab"[i % 2]) for i in range(400)]
    draw = random.Random(0)
    drawn = [(f"u{i}", draw.choice("abc")) for i in range(400)]
    start = time.perf_counter()
    assert len(shown(alternating)) == 4
    rows = folded(drawn)
    assert time.perf_counter() - start < 5  # a fraction of a second where nothing else runs
    assert [u for row in rows for u in row.units] == drawn


def unit(name, decision):
    style = "none" if decision == "data" else decision
    layout = Layout(groups=8) if decision == "data" else Layout(groups=1, degree=8)
    return UnitPlan(
        name=name, kind="linear", modules=(name,), layout=layout, style=style,
        parameter_bytes=2**20, forward_s=0.001, backward_s=0.002, blocking_s=0.0, exchange_s=0.0,
    )  # fmt: skip


def lines(table) -> list[str]:
    console = Console(width=118)
    with console.capture() as caught:
        console.print(table)
    return caught.get().splitlines()


def test_a_plan_of_32_layers_is_under_25_lines(plan: Plan):
    units = tuple(unit(name, decision) for name, decision in llama())
    made = replace(plan, units=units)
    text = lines(decision_table(made))
    assert len(text) < 25
    block = next(line for line in text if "×32" in line)
    assert "288.0 MiB" in block
    inner = next(line for line in text if "q_proj … v_proj" in line)
    assert "3.0 MiB" in inner
    assert "(1,8)" in inner
    assert "equal layers, on average" in " ".join(" ".join(text).split())
    assert len(lines(decision_table(made, fold=False))) > 290


def test_a_plan_of_400_units_is_under_25_lines(plan: Plan):
    units = tuple(unit(name, decision) for name, decision in llama(layers=44))
    assert len(units) == 399
    assert len(lines(decision_table(replace(plan, units=units)))) < 25


def test_vgg_reads_as_before(plan: Plan):
    """Its layers are few and differ: neighbours fold, and there is no block."""
    text = lines(decision_table(plan))
    assert not any("×" in line for line in text)
    assert len(text) < 15


def test_a_profile_of_equal_layers_is_few_rows():
    profile = load_table("vgg16")
    first = profile.units[0]
    names = [name for name, _ in llama()]
    kinds = ("norm", "linear", "mlp")
    units = tuple(replace(first, name=name, kind=kinds[len(name) % 3]) for name in names)
    ends = (profile.units[0], *units, profile.units[-1])
    ends = (replace(ends[0], kind="input"), *units, replace(ends[-1], kind="output"))
    long = replace(profile, units=ends, edges=())
    assert len(lines(units_table(long))) < 25
    assert len(lines(units_table(long, fold=False))) > 290


def test_a_rows_mean_is_of_one_block():
    assert Row("x", [1, 2, 3, 6], repeats=2).mean(float) == 6


def test_layers_of_one_unit_are_one_row_for_each_way_to_be_decided():
    """No row says how many layers there are: it counts as one block, however it is divided."""
    draw = random.Random(40)
    units = [(f"layers.{i}.fc", draw.choice(("keep", "recompute"))) for i in range(40)]
    rows = shortened(units)
    assert len(rows) == 2 < len(folded(units))
    assert [row.mean(lambda u: 1.0) for row in rows] == [18, 22]


def test_rows_of_two_units_of_each_layer_are_of_one_layer():
    draw = random.Random(3)
    units = []
    for i in range(48):
        decision = draw.choice(("keep", "recompute", "offload"))
        units += [(f"layers.{i}.{name}", decision) for name in ("attn", "mlp")]
        units.append((f"layers.{i}.norm", draw.choice(("keep", "early", "late"))))
    inner = shortened(units)[1:]
    assert {row.name.split(" of ")[0] for row in inner} == {"attn, mlp", "norm"}
    assert [row.mean(lambda u: 1.0) for row in inner] == [2, 2, 2, 1, 1, 1]
