"""Memory and sparse communication together, on the test bed: LaySA's question.

    python benchmarks/laysa.py [--models vgg11-32] [--own] [--markdown docs/results/laysa.md]

Two hosts with slow links train each model densely, with memory policies only, with sparse exchange
only, with both combined naively, and by the collaborative plan: peak memory and time at an equal
batch, the largest batch within a budget, and the samples a second there. All in one micro-batch;
``--own`` adds a table in which each variant has the number that is best for it. Needs root and
iproute2, as the test bed does. With ``--markdown`` the page's tables are put between its marks, for
the models that were run. The last line is one JSON object: rows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exchange import on_a_bed
from laysa_figures import MAIN, OWN, mb, table, verdict
from meshwright.planner.peak import CLASS_NAMES
from meshwright.testbed import missing

PROGRAM = str(Path(__file__).with_name("laysa_ranks.py"))
MIB = 2**20


class Case(NamedTuple):
    """A model's budget for each rank, and the batches of a rank at which it is profiled."""

    budget_mib: int
    sizes: tuple[int, int]


CASES = {"resnet50-32": Case(512, (2, 8)), "vgg11-32": Case(448, (16, 64))}


def measure(model: str, asked: argparse.Namespace) -> dict[str, Any]:
    """All that was found of a model."""
    case = CASES[model]
    told = {
        "model": model, "budget_bytes": MIB * (asked.budget_mib or case.budget_mib),
        "sizes": case.sizes, "steps": asked.steps, "rounds": asked.rounds, "own": asked.own,
        "plans": str(asked.plans.resolve()) if asked.plans else "",
        "log": str(asked.log.resolve()) if asked.log else "",
    }  # fmt: skip
    rows, burst_bytes = on_a_bed([PROGRAM], told, 2)
    return {**rows[0], "burst_bytes": burst_bytes}


def page(found: Mapping[str, Any]) -> str:
    """A model's tables and what they say of the targets."""
    intro = (
        f"Budget {mb(found['budget_bytes'])} MB for each rank; parameters "
        f"{mb(found['parameter_bytes'])} MB. Dense training's largest batch is {found['batch']}, "
        f"which computes for {found['compute_s']:.3f} s: links of {found['mbit_s']:.0f} Mbit/s "
        f"({found['goodput_mbit_s']:.0f} measured)."
    )
    parts = [
        f"## {found['model']}",
        intro,
        f"At a batch of {found['batch']}, the plan that needs least memory; then at each variant's "
        "own largest batch:",
        table(MAIN, found["rows"]),
        _quick(found["rows"]),
        "At their largest batches: "
        + "; ".join(f"{r['variant']}: {r['max_what']}" for r in found["rows"])
        + ".",
        verdict(found["rows"]),
        f"Where devices have a host beside them, {found['host']['what']} is predicted to take "
        f"{mb(found['host']['predicted_bytes'])} MB at the equal batch (not run here).",
        "Predicted MB by class at the equal batch, each at the moment at which it is largest "
        "(`explain --memory` has all moments):",
        table(_class_columns(found["rows"]), found["rows"]),
    ]
    if found["own"]:
        parts += ["Each with its own best number of micro-batches:", table(OWN, found["own"])]
    return "\n\n".join(parts) + "\n"


def _quick(rows: Sequence[Mapping[str, Any]]) -> str:
    """The collaborative plan that is quickest at the equal batch."""
    quick = next(row["quick"] for row in rows if "quick" in row)
    return (
        f"At the batch of the first columns the quickest collaborative plan within the budget "
        f"({quick['what']}) takes {mb(quick['peak_bytes'])} MB "
        f"({mb(quick['predicted_bytes'])} predicted) and {quick['step_s']:.3f} s a step."
    )


def _class_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The classes that any row has, and the peak."""
    used = [n for n in CLASS_NAMES if any(row["classes"][n] for row in rows)]
    columns: dict[str, Any] = {"variant": lambda r: r["variant"]}
    for name in used:
        columns[CLASS_NAMES[name]] = lambda r, name=name: mb(r["classes"][name])
    return {**columns, "at the peak": lambda r: mb(r["classes"]["total"])}


def put(text: str, model: str, part: str) -> str:
    """The page with a model's part between its marks; at the end of the page where there are
    none."""
    first, last = f"<!-- {model} -->", f"<!-- end of {model} -->"
    block = f"{first}\n{part}{last}"
    if first not in text:
        return f"{text.rstrip()}\n\n{block}\n"
    return re.sub(f"{re.escape(first)}.*?{re.escape(last)}", lambda _: block, text, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what was asked for and prints it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--budget-mib", type=int, help="of each rank, instead of the model's own")
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each variant")
    parser.add_argument("--own", action="store_true", help="also with each one's own micro-batches")
    parser.add_argument("--markdown", type=Path, help="puts the tables into that page")
    parser.add_argument("--plans", type=Path, help="a folder for plans, profiles and clusters")
    parser.add_argument("--log", type=Path, help="what is going on is written there")
    asked = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        sys.exit(reason)
    rows = []
    for model in asked.models:
        found = measure(model, asked)
        part = page(found)
        print(part, flush=True)
        if asked.markdown:
            before = asked.markdown.read_text() if asked.markdown.exists() else ""
            asked.markdown.write_text(put(before, model, part))
        rows += found["rows"]
    print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    main()
