"""A small training with something of everything, and plans for it: for the tests of checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from meshwright.executor.apply import apply
from meshwright.executor.checkpoint.checkpoint import Checkpoint, checkpoint
from meshwright.executor.gradients.feedback import Lossy
from meshwright.executor.parallel import (
    exchange_state_dict,
    full_optimizer_state_dict,
    full_state_dict,
    run_of,
)
from meshwright.planner.explain.compare import with_exchange
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.plan import Plan
from plans import plan, scheduled, unit
from torch import Tensor, nn
from torch.nn import functional as F


class Net(nn.Module):
    """Convolution, normalisation, attention, linear layers, a tied weight, dropout, a parameter
    with fewer elements than ranks, one in another memory format, and one large enough that those
    who hold it alike write a share each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.up = nn.Linear(6 * 9, 1300)
        self.down = nn.Linear(1300, 6)
        self.tied = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.tied.weight
        self.scale = nn.Linear(1, 1)
        self.last = nn.Linear(6, 3)
        self.conv.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        x = x.flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.down(torch.tanh(self.up(x.flatten(1))))
        x = F.dropout(torch.tanh(self.again(torch.tanh(self.tied(x)))), 0.1, self.training)
        return self.last(self.scale(x.unsqueeze(-1)).squeeze(-1))


UNITS = ("conv", "norm", "attention", "up", "down", "tied", "again", "scale", "last")
STYLES = {"conv": "column", "attention": "pair", "up": "column", "down": "row"}


def whole(world: int, exchange: str = "dense", ratio: float = 1.0, **options: Any) -> Plan:
    """Every unit data parallel, with that exchange."""
    units = [unit(name, 1, "none", world) for name in UNITS]
    return with_exchange(plan(world, units, message_bytes=2**16, **options), exchange, ratio)


def divided(world: int, exchange: str = "dense", ratio: float = 1.0) -> Plan:
    """Convolution, attention and linear layers divided over two ranks."""
    units = []
    for name in UNITS:
        style = STYLES.get(name, "none")
        inputs = (0, 1, 2) if name == "attention" else (0,)
        units.append(unit(name, 1 if style == "none" else 2, style, world, inputs))
    placement = list(reversed(range(world)))
    return with_exchange(plan(world, units, placement=placement), exchange, ratio)


def burst(world: int) -> Plan:
    """Units on a part of the ranks, one of them divided there."""
    units = [unit(name, 1, "none", world) for name in UNITS]
    places = {
        "tied": Layout(groups=1, first=1), "again": Layout(groups=1, first=1),
        "last": Layout(groups=1),
    }  # fmt: skip
    if world > 2:
        places["up"] = Layout(groups=1, degree=2, first=1)
        units[UNITS.index("up")] = unit("up", 2, "column", world)
    units = [msgspec.structs.replace(u, layout=places.get(u.name, u.layout)) for u in units]
    return plan(world, units)


def by_priority(make: Callable[..., Plan], *args: Any) -> Callable[[int], Plan]:
    def made(world: int) -> Plan:
        with scheduled("priority"):
            return make(world, *args)

    return made


def mirrored(world: int) -> Plan:
    made = by_priority(whole, "topk", 0.05)(world)
    units = [
        msgspec.structs.replace(one, feedback="mirror" if one.name == "up" else "in_place")
        for one in made.units
    ]
    return msgspec.structs.replace(made, units=tuple(units))


PLANS: dict[str, Callable[[int], Plan]] = {
    "data parallel": whole,
    "priority": by_priority(whole),
    "sharded": by_priority(whole, "sharded"),
    "fully sharded": by_priority(whole, "fully_sharded"),
    "divided": divided,
    "divided, priority": by_priority(divided),
    "divided and sharded": by_priority(divided, "sharded"),
    "divided and fully sharded": by_priority(divided, "fully_sharded"),
    "burst": burst,
    "burst, priority": by_priority(burst),
    "topk": by_priority(whole, "topk", 0.05),
    "divided and topk": by_priority(divided, "topk", 0.05),
    "mirror": mirrored,
    "dropped": by_priority(whole, "dropped", 0.3),
    "int8": by_priority(whole, "int8"),
    "low rank": by_priority(whole, "low_rank", 0.2),
}
LOSSY = {"topk", "divided and topk", "mirror", "dropped", "int8", "low rank"}


class Loader:
    """Data of which each rank has a position of its own."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(rank)

    def next(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(3, 2, 3, 3, generator=self.generator)
        return inputs, torch.randint(3, (3,), generator=self.generator)

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "plain": lambda groups: torch.optim.SGD(groups, lr=0.05),
}


class Trained:
    """One rank's part in the training, with its checkpoints in ``folder``."""

    def __init__(
        self,
        rank: int,
        chosen: Plan,
        folder: Path | str | None,
        seed: int,
        optimizer: str = "adamw",
        dtype: torch.dtype = torch.float32,
        data: bool = True,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Net().to(dtype)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], 0.5)
        lossy = Lossy(patience=3, stages=2, stage_backwards=2)
        apply(self.model, self.optimizer, chosen, timeout_s=20, lossy=lossy)
        self.loader, self.dtype = Loader(rank), dtype
        torch.manual_seed(100 * seed + rank)
        self.losses: list[float] = []
        self.ckpt: Checkpoint = checkpoint(
            folder, self.model, self.optimizer, scheduler=self.scheduler,
            data=self.loader if data else None, **options,
        )  # fmt: skip

    def train(self, steps: int) -> None:
        """So many steps, each told to the checkpoint."""
        for _ in range(steps):
            inputs, target = self.loader.next()
            loss = F.cross_entropy(self.model(inputs.to(self.dtype)).float(), target)
            loss.backward()
            self.losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ckpt.step()

    def digest(self) -> dict[str, str]:
        """What stands for each tensor of the model and the optimizer, put together."""
        state = full_state_dict(self.model)
        found = {f"model {name}": digest_of(tensor) for name, tensor in state.items()}
        whole = full_optimizer_state_dict(self.model, self.optimizer)
        for number, values in whole["state"].items():
            for key, value in values.items():
                found[f"optimizer {number} {key}"] = digest_of(value)
        found["groups"] = repr(whole["param_groups"])
        found["scheduler"] = repr(self.scheduler.state_dict())
        return found


def digest_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr((value.dtype, tuple(value.shape))).encode() + content).hexdigest()


def unequal(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """What differs."""
    names = found.keys() | expected.keys()
    return sorted(name for name in names if found.get(name) != expected.get(name))


def held_back(model: nn.Module) -> dict[str, Tensor]:
    """What the exchange of all ranks has held back in sum, by parameter: what is still to be
    applied."""
    run = run_of(model)
    own = exchange_state_dict(model).get("residuals", {})
    found = {}
    for name, parameter in model.named_parameters():
        mine = own.get(name, {}).get("residual", torch.zeros_like(parameter))
        total = mine.detach().double().clone()
        dist.all_reduce(total)
        found[name] = total / run.world.size
    return found


def in_turn(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each with the next, and the last with the first."""
    listed = list(names)
    return list(zip(listed, [*listed[1:], listed[0]], strict=True))


def trains(rank: int, world: int, name: str, folder: str, attempt: int, steps: int) -> None:
    """One rank: goes on from what there is, up to so many steps, and leaves what it has then."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store-{attempt}", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )
    optimizer = "sgd" if name == "topk" else "adamw"
    kept = f"{folder}/kept"
    trained = Trained(rank, PLANS[name](world), kept, 1, optimizer=optimizer, every=2, keep=2)
    done = trained.ckpt.resume()
    progress = Path(f"{folder}/progress")
    while done < steps:
        trained.train(1)
        done += 1
        if rank == 0:
            progress.write_text(str(done))
    trained.ckpt.close()
    digest = trained.digest()
    if rank == 0:
        Path(f"{folder}/end.partial").write_text(json.dumps(digest))
        Path(f"{folder}/end.partial").rename(f"{folder}/end.json")
    os._exit(0)  # nothing is to be waited for
