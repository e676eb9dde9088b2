"""A background job beside a run: what the user asks for, what became of it in sentences for people,
and the training of a second plan.

``python -m meshwright.executor.launch.background PLAN [BYTES]`` trains a plan for one device here,
in at most so many bytes of a GPU's memory, from its checkpoint if there is one, until it is told to
end; it then writes the checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...planner.schema.errors import InputError, MeshwrightError
from ...planner.schema.goal import BACKGROUND_LIMIT
from ...planner.schema.plan import Plan
from ...planner.schema.record import load
from ..background.gate import Hold
from ..background.job import check_limit, command_of
from ..background.protocol import GRACE_S, Settings, State

if TYPE_CHECKING:
    import torch

AtEnd = Literal["finish", "stop"]
LOG = "background.log"
# Below normal, where NVIDIA's multi-process service shares the device (its manual, "Environment
# Variables"); without it the driver gives contexts turns, and only pacing helps. Priorities of
# streams order the work of one process only.
GPU_PRIORITY = (("CUDA_MPS_CLIENT_PRIORITY", "1"),)
# The most of each GPU's memory, by their numbers, under the same service.
GPU_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
# A job that used less of a processor beside the foreground has hardly run.
HARDLY = 0.01
MIB = 2**20
# Why it was held.
_TO = {
    Hold.LEARN: "to learn what steps take without it",
    Hold.LIMIT: "to keep the limit",
    Hold.GAP: "as the run left no gap",
    Hold.ELSE: "while the run did something else than steps",
}


@dataclass(frozen=True)
class Background:
    """A job for what the foreground leaves idle on this host.

    ``run`` is a command, or the file of a plan for one device. ``limit`` is what the foreground's
    step may be slowed by, ``memory_bytes`` the most data of each of its processes and
    ``gpu_memory_bytes`` the most of a GPU's memory (a plan's training keeps to it by itself, a
    command where NVIDIA's multi-process service holds it to that). At the foreground's end it may
    ``finish`` (the default of a command), or is told to ``stop`` (that of a plan, whose training
    has no end): SIGTERM, and SIGKILL after ``grace_s``. Its output is appended to ``log``.
    """

    run: str
    limit: float = BACKGROUND_LIMIT
    memory_bytes: int | None = None
    at_end: AtEnd | None = None
    grace_s: float = GRACE_S
    log: str = LOG
    gpu_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit)
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise InputError(f"a background memory of {self.memory_bytes} bytes cannot be")
        if self.gpu_memory_bytes is not None and self.gpu_memory_bytes < MIB:
            raise InputError(
                f"a background GPU memory of {self.gpu_memory_bytes} bytes cannot be: give 1MiB or "
                "more"
            )
        if not 0 <= self.grace_s < float("inf"):
            raise InputError(f"a grace of {self.grace_s:g} s cannot be: give 0 or more")
        if self.at_end not in (None, "finish", "stop"):
            raise InputError(f"at the end {self.at_end!r} cannot be: finish or stop")

    @property
    def is_plan(self) -> bool:
        return self.run.endswith(".json") and Path(self.run).is_file()

    @property
    def finishes(self) -> bool:
        """Whether it goes on when the foreground has ended well."""
        return (self.at_end or ("stop" if self.is_plan else "finish")) == "finish"

    def settings(self) -> Settings:
        """What the pacer is told. Raises ``InputError`` for a plan that cannot run so."""
        if self.is_plan:
            _check_plan(self.run)  # here, where the user reads it, and not only in the job's log
            most = () if self.gpu_memory_bytes is None else (str(self.gpu_memory_bytes),)
            command: tuple[str, ...] = (sys.executable, "-m", __name__, self.run, *most)
        else:
            command = command_of(self.run)
        return Settings(
            command=command, log=self.log, limit=self.limit, grace_s=self.grace_s,
            memory_bytes=self.memory_bytes, environment=(*GPU_PRIORITY, *self._gpu_limits()),
        )  # fmt: skip

    def _gpu_limits(self) -> tuple[tuple[str, str], ...]:
        if self.gpu_memory_bytes is None:
            return ()
        import torch  # takes seconds

        # Each GPU has to be named. Whole megabytes, as the service has them.
        gpus = range(torch.cuda.device_count())
        each = ",".join(f"{gpu}={self.gpu_memory_bytes // MIB}M" for gpu in gpus)
        return ((GPU_MEMORY, each),) if each else ()


def _check_plan(file: str) -> Plan:
    plan = load(Plan, file)
    if plan.world_size != 1:
        raise InputError(
            f"the background plan {file} is for {plan.world_size} ranks, and a background job has "
            "one device: plan for a cluster of one, or give the command that starts it"
        )
    return plan


# -- what it may have, and what became of it -------------------------------------------------------


def idle_share(plan: Plan, rank: int) -> float:
    """The share of a step in which ``plan`` predicts that units leave that rank idle."""
    position = plan.placement.index(rank)
    idle = sum(u.forward_s + u.backward_s for u in plan.units if u.layout.place(position) is None)
    step_s = plan.prediction.step_s
    return min(plan.micro_batches * idle / step_s, 1.0) if step_s else 0.0


def outlook(plan: Plan, ranks: Iterable[int]) -> str:
    """What the plan leaves a background job beside these ranks, for people."""
    shares = [idle_share(plan, rank) for rank in ranks]
    if not any(shares):
        more = (
            "; all its units run on every rank, though device time was to be saved"
            if plan.goal.objective == "gpu_seconds"
            else "; plan with --bursts --objective gpu-seconds for more"
        )
        return (
            "the plan leaves no rank here idle, so a background job gets what waits for others "
            f"leave{more}"
        )
    least, most = min(shares), max(shares)
    span = f"{most:.0%}" if least == most else f"{least:.0%} to {most:.0%}"
    return f"the plan leaves the ranks here idle for {span} of a step, by its prediction"


def over_step_limit(plan: Plan, limit: float) -> str | None:
    """That a step may pass the plan's limit on its time for the sake of a background job."""
    most_s, slowed_s = plan.goal.time_limit_s, plan.prediction.step_s * limit
    if most_s is None or slowed_s <= most_s:
        return None
    return (
        f"the plan's step limit is {most_s:.3g} s, and with a background job a step may take up to "
        f"{slowed_s:.3g} s ({limit:g} times {plan.prediction.step_s:.3g} s): plan with "
        f"--background-limit {limit:g} to keep it"
    )


def sentence(state: State, limit: float) -> str:
    """What the background has had and done beside the foreground."""
    ended = f", ended with {state.ended}" if state.ended else ""
    return f"background job {state.pid}{ended}: {_had(state)}; {_cost(state, limit)}"


def _had(state: State) -> str:
    usage = state.during_steps
    if not usage.seconds:
        return f"no step of a plan ran beside it; it used {state.cpu_s:.1f} s of CPU"
    shares = {why: usage.stopped_s.get(why, 0.0) / usage.seconds for why in _TO}
    held = [f"{share:.0%} {_TO[why]}" for why, share in shares.items() if share >= 0.005]
    return (
        f"in the {usage.seconds:.1f} s beside the run it was let run "
        f"{usage.open_s / usage.seconds:.0%} of the time ({state.priority}) and used "
        f"{usage.cpu_s:.1f} s of CPU; it was stopped {usage.stops} "
        + ("time" if usage.stops == 1 else "times")
        + (f", held {', '.join(held)}" if held else "")
    )


def _cost(state: State, limit: float) -> str:
    if not state.steps:
        return "the foreground made too few steps to tell what it cost"
    return (
        f"the foreground's steps took {state.slowdown:.2f} times their "
        f"{state.undisturbed_s:.3g} s without it (limit {limit:g})"
    )


def hardly_ran(state: State, limit: float) -> str | None:
    """Why a background job hardly ran beside the foreground, and what would let it run more; None
    where it ran, or has ended by itself."""
    usage = state.during_steps
    if state.ended or not usage.seconds or usage.cpu_s >= HARDLY * usage.seconds:
        return None
    used = f"the background hardly ran ({usage.cpu_s:.2f} s of CPU in {usage.seconds:.1f} s)"
    if usage.open_s >= HARDLY * usage.seconds or not usage.stopped_s:
        return (
            f"{used}, although it was let run: the processors had no time left for the lowest "
            "priority, or it waited for something itself; start fewer ranks or threads here, or "
            "look into its output"
        )
    reason = max(usage.stopped_s, key=lambda why: usage.stopped_s[why])
    return f"{used}: {_remedy(Hold(reason), limit)}"


def _remedy(reason: Hold, limit: float) -> str:
    if reason is Hold.LEARN:
        return (
            "the run's first steps measure what a step takes without it, and few came after them; "
            "train for more steps"
        )
    if reason is Hold.LIMIT:
        return (
            f"beside it steps soon took more than {limit:g} times as long; allow more with "
            "--background-limit, or give a background that needs less memory bandwidth"
        )
    if reason is Hold.ELSE:
        return (
            "the run was mostly busy with something else than steps (an evaluation, a checkpoint), "
            "and is left alone in that; train for more steps"
        )
    return (
        "the ranks here hardly wait as long as 2 ms at a time; plan with --bursts --objective "
        "gpu-seconds to leave them idle for longer, or allow more with --background-limit "
        f"(now {limit:g})"
    )


def has_ended(state: State, log: str) -> str:
    """That a background job is over, and where it wrote."""
    return f"background job {state.pid} has ended with {state.ended}; its output is in {log}"


# -- the training of a second plan -----------------------------------------------------------------


def train(file: Path, gpu_memory_bytes: int | None = None) -> None:
    """Trains the plan in ``file`` on this device until SIGTERM, and writes the checkpoint."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    # Importing these takes seconds, in which it may be told already.
    import torch

    from ...models.target import planned, try_out
    from .start import start_process_group
    from .train import begin_training, drawing, scaler_for, timed_step

    plan = _check_plan(str(file))
    chosen = planned(plan.target, plan.precision)
    try_out(chosen)
    device = start_process_group()
    if gpu_memory_bytes is not None:
        limit_gpu_memory(device, gpu_memory_bytes)
    chosen, optimizer = begin_training(chosen, plan, device)
    model, scaler = chosen.model, scaler_for(chosen)
    checkpoint, number = file.with_suffix(".pt"), 0
    if checkpoint.exists():  # what a former run has left
        state = torch.load(checkpoint, weights_only=True)
        _check_precision(checkpoint, state.get("precision"), plan.precision)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])
        number = int(state["step"])
        print(f"goes on from step {number} of {checkpoint}", flush=True)
    draw = drawing(chosen, plan.goal.batch)
    with _in_short_pieces(model, device):
        while not told:
            spent = timed_step(chosen, plan, draw(number), optimizer, scaler)
            number += 1
            print(f"step {number} loss {spent.loss:.4f} {spent.step_s:.3f} s", flush=True)
    state = {
        "step": number, "model": model.state_dict(), "optimizer": optimizer.state_dict(),
        "precision": plan.precision, "scaler": scaler.state_dict() if scaler is not None else None,
    }  # fmt: skip
    # Whole or not at all: it may be killed while it writes, and another host may write it too.
    part = checkpoint.with_suffix(f".{socket.gethostname()}-{os.getpid()}.part")
    torch.save(state, part)
    part.replace(checkpoint)
    print(f"wrote {checkpoint} after step {number}", flush=True)


def _check_precision(checkpoint: Path, former: str | None, precision: str | None) -> None:
    """Raises ``InputError`` for a checkpoint of another precision than the plan's: loading would
    turn its numbers into another type without a word."""
    if former != precision:
        was, wanted = (name or "the model's own precision" for name in (former, precision))
        raise InputError(
            f"{checkpoint} was trained in {was} and the plan is for {wanted}: move the file to "
            "another place to begin anew, or plan for the precision that it was trained in"
        )


def limit_gpu_memory(device: torch.device, most_bytes: int) -> None:
    """Lets torch's allocator have no more of a GPU's memory; nothing to do on a CPU."""
    import torch

    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(most_bytes / total, 1.0), device)


def _in_short_pieces(model: torch.nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """On a GPU a stream of its own, and work in short pieces."""
    import torch

    if device.type != "cuda":  # the process's own priority does it all
        return nullcontext()
    from ...models.opened import tensors_in

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    # A stopped process's kernels that are queued already would still run, so no more than one
    # module's are queued.
    def wait(*_: object) -> None:
        stream.synchronize()

    # Hooks of tensors: those of a module's backward hand its output on as a view, which what
    # follows may not change in place.
    def forward_wait(_module: torch.nn.Module, _inputs: object, output: object) -> None:
        wait()
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(wait)  # type: ignore[no-untyped-call]

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(forward_wait)
    return torch.cuda.stream(stream)


if __name__ == "__main__":
    try:
        train(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
    except MeshwrightError as raised:
        print(raised, file=sys.stderr)
        sys.exit(raised.exit_code)
