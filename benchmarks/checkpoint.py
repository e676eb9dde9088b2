"""What checkpoints cost: blocks of steps with one checkpoint each beside blocks without, in turns.

    python benchmarks/checkpoint.py --model gpt-mini --every 50 --pairs 6

Two ranks on this machine. A block with a checkpoint ends when that is on disk, so that nothing of
its cost falls into the next. ``ratio`` is the median over pairs of neighbouring blocks of the time
with over the time without; ``copying`` the part of a block in which training waits for the copies.
The last line is one JSON object: rows.
"""

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from meshwright.executor.checkpoint.checkpoint import checkpoint
from meshwright.executor.checkpoint.folder import step_name, steps_in
from meshwright.executor.launch.train import begin_training, take_step
from meshwright.models import zoo
from meshwright.models.units.discover import discover
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import data_parallel
from meshwright.planner.schema.plan import ExchangePolicy, Plan, Provenance, UnitPlan
from meshwright.profiler.overhead import UNPREDICTED
from ranks import joined
from rows import command_line, print_json, print_row

RANKS = 2
EXCHANGES: tuple[ExchangePolicy, ...] = ("dense", "fully_sharded")


def plan_for(model: str, exchange: ExchangePolicy, batch: int) -> Plan:
    """Every unit data parallel, with that exchange, by priority."""
    workload = zoo.build(model)
    units = [
        UnitPlan(
            name=unit.name, kind=unit.kind, modules=unit.modules,
            batched_inputs=unit.batched_inputs, batch_dims=unit.batch_dims,
            layout=data_parallel(RANKS),
        )
        for unit in discover(workload.model, workload.make_batch(2)).units
    ]  # fmt: skip
    plan = Plan(
        target=model,
        model=model,
        world_size=RANKS,
        goal=Goal(batch=batch, optimizer="adamw"),
        placement=tuple(range(RANKS)),
        schedule="priority",
        units=tuple(units),
        prediction=UNPREDICTED,
        baseline=UNPREDICTED,
        provenance=Provenance(solver="hand", status="manual", profile="", cluster=""),
    )
    return with_exchange(plan, exchange)


def measure(
    model: str, exchange: ExchangePolicy, batch: int, every: int, pairs: int, folder: str
) -> dict[str, object]:
    """One row. Collective."""
    plan = plan_for(model, exchange, batch)
    torch.manual_seed(0)
    workload, optimizer = begin_training(zoo.build(model), plan, "cpu")
    drawn = workload.make_batch(batch)
    kept = checkpoint(folder, workload.model, optimizer, keep=1)
    kept.resume()

    def block(*, saving: bool) -> tuple[float, float]:
        """(seconds of a block, those until what is saved was copied), of the slowest rank."""
        dist.barrier()
        start, copied_s = time.perf_counter(), 0.0
        for number in range(every):
            take_step(workload, plan, drawn, optimizer)
            if saving and not number:
                begin = time.perf_counter()
                kept.save()
                copied_s = time.perf_counter() - begin
        kept.wait()
        seconds = torch.tensor([time.perf_counter() - start, copied_s], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds[0]), float(seconds[1])

    block(saving=True)  # connections, caches and the memory for copies
    ratios, plain, copying = [], [], []
    for pair in range(pairs):
        with_first = pair % 2 == 0
        found = {saving: block(saving=saving) for saving in (with_first, not with_first)}
        ratios.append(found[True][0] / found[False][0])
        plain.append(found[False][0])
        copying.append(found[True][1] / found[False][0])
    files = (Path(folder) / step_name(steps_in(Path(folder))[0])).iterdir()
    written = sum(path.stat().st_size for path in files)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return {
        "model": model,
        "exchange": exchange,
        "every": every,
        "checkpoint_mib": written / 2**20,
        "step_ms": 1000 * median(plain) / every,
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "copying": median(copying),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="gpt-mini")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--folder", help="where checkpoints are written (default: temporary)")
    asked = parser.parse_args()
    if not joined(RANKS):
        return
    rows = []
    for exchange in EXCHANGES:
        names = [tempfile.mkdtemp(prefix="bench-", dir=asked.folder) if not dist.get_rank() else ""]
        dist.broadcast_object_list(names)
        rows.append(measure(asked.model, exchange, asked.batch, asked.every, asked.pairs, names[0]))
        if dist.get_rank() == 0:
            print_row(rows[-1])
    if dist.get_rank() == 0:
        print_json({"rows": rows})


if __name__ == "__main__":
    main()
