"""Single steps of a random model, in one process and on the ranks of a plan: what each does to
every tensor, from the same state and with other random numbers (``draws`` compares them)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.replay import held_buffers, put_back
from ...models.workload import Batch, Workload
from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan
from ..parallel import full_state_dict
from .draws import Draw, seed_all, sketch
from .train import loss_of, train_step

# For steps of which only the gradient is asked: where a value is large beside its gradient, that
# would be lost in the rounding of the value at a small rate.
DRAW_RATE = 64.0

Progress = Callable[[int, int, str], None]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Puts parameters and buffers back at the end, and gradients away."""
    parameters = [(p, p.detach().clone()) for p in model.parameters()]
    buffers = held_buffers(model)
    yield
    with torch.no_grad():
        for parameter, value in parameters:
            parameter.copy_(value)
            parameter.grad = None
    put_back(buffers)


def check_finite(loss: float, where: str) -> None:
    if not isfinite(loss):
        raise InputError(
            f"in one process the loss of {where} is {loss}, so there is nothing to compare with: "
            "mend the model or what it is fed (make_batch)"
        )


def draws_alone(
    workload: Workload, parts: list[Batch], seed: int, count: int, progress: Progress
) -> list[Draw]:
    """So many steps of one process on the ``parts`` of a batch, each from the model as it is and
    with other random numbers; the model stays as it is. Streams of different seeds do not meet."""
    model, size = workload.model, sum(part.size for part in parts)
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    parameters = parameter_names(model)
    drawn = []
    for number in range(count):
        seed_all(_seed_of(seed, number))
        total = 0.0
        with restored(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=DRAW_RATE)
            for part in parts:
                loss = loss_of(workload, part)
                loss = loss * (part.size / size)
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            check_finite(total, "a step")
            optimizer.step()
            drawn.append(_drawn(total, before, model.state_dict(), parameters))
        progress(number + 1, count, "draws of one process")
    return drawn


def draws_together(
    plan: Plan,
    workload: Workload,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    start: Mapping[str, Tensor],
    seed: int,
    count: int,
    progress: Progress,
) -> list[Draw]:
    """So many steps of the plan's ranks, each from ``start``; every rank draws for itself, as in
    training. On rank 0; empty elsewhere. Collective."""
    model, rank = workload.model, dist.get_rank()
    for group in optimizer.param_groups:
        group["lr"], group["momentum"] = DRAW_RATE, 0.0
    model.load_state_dict(start)
    before = {
        name: t.detach().clone() for name, t in full_state_dict(model, rank0_only=True).items()
    }
    parameters = parameter_names(model)
    drawn = []
    for number in range(count):
        seed_all(_seed_of(seed + rank, number))
        loss = train_step(workload, plan, batch, optimizer)
        state = full_state_dict(model, rank0_only=True)
        if rank == 0:
            drawn.append(_drawn(loss, before, state, parameters))
        model.load_state_dict(start)
        progress(number + 1, count, "draws of the ranks")
    return drawn


def _seed_of(stream: int, number: int) -> int:
    # As far apart as generators take them: numpy's has 32 bits.
    return stream * 100_003 + number


def own_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def _drawn(
    loss: float, before: Mapping[str, Tensor], after: Mapping[str, Tensor], parameters: set[str]
) -> Draw:
    """What a step did, with gradients for parameters."""
    made = {"loss": torch.tensor([loss], dtype=torch.float64)}
    for name, tensor in after.items():
        # In double precision, or the subtraction would round as well.
        a, b = (t.detach().to("cpu", wide(t.dtype)) for t in (before[name], tensor))
        made[name] = sketch(name, (a - b) / (DRAW_RATE if name in parameters else 1.0))
    return made


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64
