"""The tensor-parallel plans that models of transformers publish, beside the splits found here.

    OMP_NUM_THREADS=1 python benchmarks/zoo_published.py [--models llama gemma2]
        [--markdown docs/results/zoo.md]

A model's ``tp_plan`` names the modules whose weights its authors divide, by columns or by rows. Of
each such weight of the small models of ``zoo_models.py`` this says whether the splits that
discovery offers, each shown equal to the whole, divide it along the same dimension. Weights that a
published plan keeps whole or that a step does not use (of models for images too, which get text
only) do not count. Prints a row for each architecture of which some are not divided, and last a
JSON object with the sums.
"""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from meshwright import Workload
from meshwright.models.units.discover import discovered
from rows import command_line, print_json, print_row, put_into
from zoo_models import architectures, from_transformers, try_training

# Styles by the dimension of a product's weight [out, in] and of an embedding [symbol, feature] that
# they divide; of packed experts and others the dimension is not compared.
DIMENSIONS = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "embedding_rowwise": 0}
WHOLE = ("replicate", "replicated_with_grad_allreduce")


def named(workload: Workload) -> Iterator[tuple[str, torch.Tensor, str]]:
    """The weights with a gradient that a model's own plan divides, with the style that it names."""
    styles: dict[str, str] = getattr(workload.model, "tp_plan", None) or {}
    for name, parameter in workload.model.named_parameters():
        for pattern, style in styles.items():
            known = re.escape(pattern).replace(r"\*", r"\d+") + r"(\.weight)?"
            used = parameter.ndim > 1 and parameter.grad is not None
            if used and style not in WHOLE and re.fullmatch(known, name):
                yield name, parameter, style
                break


def row_of(kind: str) -> dict[str, Any] | None:
    """How many weights an architecture's plan names, and which of them are not divided here; None
    where it has no plan or no small model."""
    try:
        workload = from_transformers(kind)
        try_training(workload, keep=True)
    except Exception:  # whatever a configuration that fits nothing raises
        return None
    wanted = list(named(workload))
    if not wanted:
        return None
    workload.model.zero_grad()
    found, _ = discovered(workload.model, workload.make_batch)
    cuts = [cut for unit in found.units for split in unit.splits for cut in split.cuts]
    missed: Counter[str] = Counter()
    for name, parameter, style in wanted:
        own = {cut.dim for cut in cuts if cut.name == name}
        dim = DIMENSIONS.get(style) if parameter.ndim == 2 else None
        if not own or (dim is not None and dim not in own):
            missed[re.sub(r"\d+", "*", name)] += 1
    return {"model": kind, "named": len(wanted), "missed": missed.total(), "which": [*missed]}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=sorted(architectures()))
    parser.add_argument("--markdown", type=Path, help="puts the sums into that page")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    weights, missed, models, complete = 0, 0, 0, 0
    for kind in asked.models:
        row = row_of(kind)
        if row is None:
            continue
        if row["missed"]:
            print_row(row)
        models, complete = models + 1, complete + (not row["missed"])
        weights, missed = weights + row["named"], missed + row["missed"]
    put_into(
        asked.markdown,
        "published",
        f"{models} architectures publish a tensor-parallel plan. Of the {weights} weights that "
        f"these plans divide, {weights - missed} ({1 - missed / max(weights, 1):.1%}) are divided "
        f"here along the same dimension; in {complete} architectures all are.",
    )
    print_json(
        {"models": models, "complete": complete, "weights": weights, "found": weights - missed}
    )


if __name__ == "__main__":
    main()
