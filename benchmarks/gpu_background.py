"""Two models on one device, one in the background: what the first loses and the second reaches.

    python benchmarks/gpu_background.py [--models resnet50 gpt-small] [--steps 60]
        [--markdown docs/results/gpu.md]

The first model trains by itself, then the second, then both, the second in the background
(docs/background.md). On the GPU that torch sees, else on the CPU with small models, which shows
only that the benchmark itself works. Whether NVIDIA's multi-process service runs is said beside
the figures: with it both compute at once. Prints a table, and as the last line one JSON object.
"""

import os
import re
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import meshwright as mw
import torch
from meshwright.executor.comm.setups import device_name
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import save
from meshwright.planner.schema.report import RunReport
from meshwright.profiler.sessions import single_rank
from rows import command_line, markdown, print_json, print_table, put_into

STEPS = 60
ON_GPUS, ON_CPUS = ("resnet50", "gpt-small"), ("vgg11-32", "gpt-tiny")
BATCHES = {"resnet50": 64, "gpt-small": 8}
BATCH = 16
HEADINGS = ("foreground", "background", "step", "beside it", "slowdown", "background's speed")
LOGGED = re.compile(r"^step \d+ loss \S+ (\S+) s$", re.MULTILINE)
"""What a step of the background took, with the time in which it was held."""


def mps_runs() -> bool:
    """Whether NVIDIA's multi-process service does, where it listens by default or as it is told."""
    where = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(where, "control").exists()


def plan_for(name: str, device: torch.device) -> Plan:
    """The model on one device, as it is measured there."""
    profile = mw.profile(name, device=str(device), batches=[1, BATCHES.get(name, BATCH)])
    goal = Goal(batch=BATCHES.get(name, BATCH))
    return mw.plan(profile, single_rank(device), goal)


def run(plan: Plan, steps: int, background: mw.Background | None = None) -> RunReport:
    found = mw.launch(plan, steps=steps, background=background, progress=False, quiet=True)
    assert found is not None
    return found


def row_of(names: tuple[str, str], device: torch.device, steps: int) -> dict[str, Any]:
    """Both models by themselves, and together."""
    plans = [plan_for(name, device) for name in names]
    alone, other = (run(plan, steps).measured.step_s for plan in plans)
    with TemporaryDirectory() as folder:
        file, log = Path(folder, "background.json"), Path(folder, "background.log")
        save(plans[1], file)
        figures = run(plans[0], steps, mw.Background(str(file), log=str(log))).background
        logged = [float(seconds) for seconds in LOGGED.findall(log.read_text())]
    assert figures is not None
    return {
        "foreground": names[0], "background": names[1], "device": device_name(device),
        "mps": mps_runs(), "alone_s": alone, "background_alone_s": other,
        "undisturbed_s": figures.undisturbed_s, "slowdown": figures.slowdown,
        "allowed": figures.limit, "open_share": figures.during_steps_open_share,
        "background_steps": len(logged),
        "background_speed": other / mean(logged) if logged else 0.0,
    }  # fmt: skip


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs=2, default=ON_GPUS if on_gpu else ON_CPUS,
                        help="reference workloads: the run, the background job")  # fmt: skip
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--markdown", type=Path, help="puts the table into that page")
    asked = parser.parse_args()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    row = row_of(tuple(asked.models), device, asked.steps)
    cells = (
        row["foreground"], row["background"], f"{1e3 * row['alone_s']:.1f} ms",
        f"{1e3 * row['undisturbed_s'] * row['slowdown']:.1f} ms", f"{row['slowdown']:.2f}",
        f"{row['background_speed']:.0%}",
    )  # fmt: skip
    service = "with" if row["mps"] else "without"
    title = f"two models on one {row['device']}, {service} its multi-process service"
    print_table(title if on_gpu else f"two models on {row['device']}", HEADINGS, [cells])
    put_into(asked.markdown, "background", markdown(HEADINGS, [cells], left=(0, 1)))
    print_json({"rows": [row]})


if __name__ == "__main__":
    main()
