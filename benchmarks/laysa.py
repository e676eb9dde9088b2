"""Memory and sparse communication together, on the test bed: LaySA's question.

    python benchmarks/laysa.py [--models vgg16-32-narrow] [--own] [--markdown docs/results/laysa.md]

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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exchange import on_a_bed
from laysa_page import page
from page import put_into
from testbed import missing

PROGRAM = str(Path(__file__).with_name("laysa_ranks.py"))
MIB = 2**20


class Case(NamedTuple):
    """A model's budget for each rank, and the batches of a rank at which it is profiled."""

    budget_mib: int
    sizes: tuple[int, int]


CASES = {"resnet50-32": Case(400, (2, 8)), "vgg16-32-narrow": Case(96, (64, 192))}


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
    turns = {"steps": asked.steps, "rounds": asked.rounds}
    return {**rows[0], **turns, "burst_bytes": burst_bytes}


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
            put_into(asked.markdown, model, part)
        rows += found["rows"]
    print(json.dumps({"rows": rows}), flush=True)


if __name__ == "__main__":
    main()
