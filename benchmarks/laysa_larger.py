"""What the variants of ``laysa.py`` are predicted to need at batches too large to train here.

    python benchmarks/laysa_larger.py [--models resnet50-32] [--batches 12 64 256 1024]

Profiles a model in one process and prints the least memory of sparse exchange only, and of the
collaborative plan with its mirrors on the device and on a host beside it. Nothing is trained. The
last line is one JSON object: rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from laysa import CASES, HOST_BYTES_PER_S, named, profile_of
from laysa_page import OURS, mb
from laysa_plans import RANKS, Chooser, two_hosts
from rows import markdown, print_json

# Any: what needs least memory does not depend on it.
LINK_BYTES_PER_S = 1e8
HEADINGS = ("batch", "sparse only MB", "collaborative MB", "below", "mirrors on a host MB", "below")


def rows_of(model: str, batches: Sequence[int]) -> list[dict[str, Any]]:
    """The least bytes of each at each batch of both hosts."""
    found = profile_of(model, CASES[model].sizes)
    device, beside = (
        Chooser(found, two_hosts(LINK_BYTES_PER_S, host), 2**40)
        for host in (None, HOST_BYTES_PER_S)
    )
    sparse, ours = named("sparse only"), named(OURS)
    return [
        {
            "model": model,
            "batch": batch,
            "sparse_bytes": device.least(sparse, batch // RANKS).peak_bytes,
            "collaborative_bytes": device.least(ours, batch // RANKS).peak_bytes,
            "host_mirror_bytes": beside.least(ours, batch // RANKS).peak_bytes,
        }
        for batch in batches
    ]


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    lines = []
    for row in rows:
        figures = [row[f"{n}_bytes"] for n in ("sparse", "collaborative", "host_mirror")]
        sparse, ours, host = map(mb, figures)
        cuts = [f"{1 - f / figures[0]:.0%}" for f in figures[1:]]
        lines.append([row["batch"], sparse, ours, cuts[0], host, cuts[1]])
    return markdown(HEADINGS, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Predicts what was asked for and prints it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=["resnet50-32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[12, 64, 256, 1024])
    asked = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    for model in asked.models:
        rows += (own := rows_of(model, asked.batches))
        print(page(own), flush=True)
    print_json({"rows": rows})


if __name__ == "__main__":
    main()
