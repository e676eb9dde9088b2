"""Gradient exchange on the test bed: priority, DDP, FSDP2 and the planner's choice, and the bound.

    python benchmarks/exchange.py --keep rows.jsonl --markdown docs/results/exchange.md

Needs root. Builds a bed of hosts with a core each, starts a rank on every one with torchrun, and
measures each model at bandwidths where plain communication takes ``ratio`` times the compute.
Systems take turns in the same processes. With ``--keep`` rows are written to a file as they come,
and those that it has are not measured again; with ``--markdown`` all of them are put between the
page's marks. ``--ablation`` compares the four ways {first come first served, priority} × {whole
gradients, slices} instead, with what the planner's simulation says. The last line is one JSON
object: rows. An efficiency (bound / measured) above 1.02 means that the benchmark is wrong, and
fails it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from page import keep, known, put_into
from page import table as markdown
from testbed import Bed

BATCHES = {"vgg19-32": 32, "resnet50-32": 8, "seq2seq": 12, "gpt-mini": 8}
"""Samples of a rank in a step."""
LIMIT_S = 1800.0
START_MBIT_S = 1000.0
TOO_GOOD = 1.02
WATCH_S = 0.02
COLUMNS = (
    "model", "hosts", "batch", "ratio", "mbit_s", "compute_s", "ddp_default_s", "ddp_best_s",
    "fsdp_s", "priority_s", "plan_s", "bound_s", "efficiency", "exchange_processor_s",
    "ddp_jitter_s", "priority_jitter_s",
    "ddp_default / priority", "ddp_best / priority", "ddp_best / plan",
)  # fmt: skip


def serve_rates(bed: Bed, folder: Path, over: threading.Event) -> None:
    """Sets the rates that rank 0 asks for, until told that it is over."""
    while not over.wait(WATCH_S):
        if (folder / "asked").exists():
            mbit_s = float((folder / "asked").read_text())
            (folder / "asked").unlink()
            for host in bed.hosts:
                bed.set_rate(host, mbit_s)
            (folder / "done").touch()


def on_a_bed(
    script: Sequence[str], told: dict[str, Any], hosts: int
) -> tuple[list[dict[str, Any]], int]:
    """The rows that ``script``, told so and where, writes on a bed of its own, and the bed's bursts
    in bytes. Exits where the ranks failed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name, Bed(hosts, START_MBIT_S) as bed:
        folder, over = Path(name), threading.Event()
        watcher = threading.Thread(target=serve_rates, args=(bed, folder, over), daemon=True)
        watcher.start()
        try:
            done = bed.launch([*script, json.dumps({**told, "folder": name})], timeout_s=LIMIT_S)
        finally:
            over.set()
            watcher.join()
        if any(d.returncode for d in done):
            sys.exit("\n".join(d.stderr[-3000:] for d in done))
        lines = (folder / "rows").read_text().splitlines()
        return [json.loads(line) for line in lines], bed.burst_bytes


def measure(model: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A model's rows at the ratios of which none is known."""
    there = {(r["model"], r["hosts"], r["ratio"]) for r in known(asked.keep)}
    ratios = [r for r in asked.ratios if (model, asked.hosts, r) not in there]
    if not ratios:
        return []
    told = {
        "model": model, "batch": BATCHES[model], "ratios": ratios,
        "steps": asked.steps, "rounds": asked.rounds, "ablation": asked.ablation,
    }  # fmt: skip
    script = str(Path(__file__).with_name("exchange_rank.py"))
    rows, burst_bytes = on_a_bed([script], told, asked.hosts)
    return [{**row, "burst_bytes": burst_bytes} for row in rows]


def shown(value: object) -> str:
    """A figure for people."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    """The rows as Markdown."""
    return markdown(columns, [[shown(row[c]) for c in columns] for row in rows])


def with_gains(row: dict[str, Any]) -> dict[str, Any]:
    """A row with how many times as fast priority and the planner's choice are."""
    pairs = (("ddp_default", "priority"), ("ddp_best", "priority"), ("ddp_best", "plan"))
    gains = {f"{a} / {b}": f"{row[f'{a}_s'] / row[f'{b}_s']:.2f}" for a, b in pairs}
    return {**row, **gains}


def page_of(rows: Sequence[dict[str, Any]]) -> str:
    """All rows, by model, and what the targets make of those of two hosts."""
    models = list(BATCHES)
    ordered = sorted(rows, key=lambda r: (r["hosts"], models.index(r["model"]), r["ratio"]))
    two = [row for row in ordered if row["hosts"] == 2]
    parts = [table([with_gains(row) for row in ordered], COLUMNS)]
    return "\n\n".join(parts + ([verdict(two)] if two else []))


def verdict(rows: list[dict[str, Any]]) -> str:
    """The targets beside the figures."""
    found = [row["efficiency"] for row in rows]
    slower = max(row["priority_s"] / row["ddp_best_s"] for row in rows)
    equal = [row["ddp_best_s"] / row["priority_s"] for row in rows if row["ratio"] == 1.0]
    lines = [
        "Of two hosts:\n",
        f"- Efficiency (bound / measured): {median(found):.2f} in the median row (target 0.90), "
        f"{min(found):.2f} in the worst (0.80).",
        f"- Priority against the best DDP: at most {slower:.2f} times its time (1.03).",
    ]
    if equal:
        lines.append(
            f"- Where communication takes as long as compute, the best DDP takes {min(equal):.2f} "
            f"to {max(equal):.2f} times as long as priority (1.2)."
        )
    wide = [r for r in rows if r["model"] == "vgg19-32" and r["ratio"] == 4.0]
    if wide:
        gain = wide[0]["ddp_best_s"] / wide[0]["plan_s"]
        lines.append(
            f"- vgg19-32 at ratio 4: the planner's choice is {gain:.2f} times as fast (2)."
        )
    return "\n".join(lines)


def main() -> None:
    """Measures what was asked for and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=list(BATCHES))
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system")
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--keep", type=Path, help="a file of rows (JSON lines), to go on from")
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    if asked.ablation and (asked.keep or asked.markdown):
        parser.error("--ablation prints its rows only: leave --keep and --markdown out")
    rows = known(asked.keep)
    for model in asked.models:
        for row in measure(model, asked):
            rows.append(row)
            keep(asked.keep, row)
            print("  ".join(f"{k} {shown(v)}" for k, v in row.items()), flush=True)
    if asked.markdown:
        put_into(asked.markdown, "rows", page_of(rows))
    print(json.dumps({"rows": rows}), flush=True)
    wrong = [row for row in rows if row.get("efficiency", 0.0) > TOO_GOOD]
    if wrong:
        sys.exit(f"{len(wrong)} rows are quicker than their bound: the benchmark is wrong")


if __name__ == "__main__":
    main()
