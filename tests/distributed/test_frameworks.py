"""The Trainer, Accelerate and Lightning Fabric train as our own loop does, under plans of all
kinds: the examples, run on two ranks, end with the same parameters bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from meshwright.executor.apply import apply
from meshwright.executor.frameworks.adapt import adapt
from meshwright.executor.parallel import full_optimizer_state_dict, full_state_dict
from meshwright.models.units.discover import discover
from meshwright.models.workload import Batch
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import save
from plans import by_columns_and_rows, plan_for, scheduled
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests import frameworks
from tests.sampling import sampled

STEPS = 4
PLANS = ("data parallel", "divided", "sharded", "fully sharded")


@pytest.fixture(scope="module")
def two(ranks) -> Iterator[Ranks]:
    """Two ranks that import accelerate, which no other test's ranks are to have."""
    pool = Ranks(2)
    yield pool
    pool.stop()


# -- on each rank -------------------------------------------------------------------------------


def begin(rank: int) -> None:
    """As torchrun starts a rank."""
    frameworks.use()
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(value) for name, value in named.items()})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    if "accelerate" in sys.modules:  # it has one state for all that a process does
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def made_plan(model: nn.Module, batch: Batch, kind: str) -> Plan:
    divided = by_columns_and_rows(model, 2, ("linear", "conv", "mlp", "attention", "embedding"))
    choose = {"choose": divided} if kind == "divided" else {}
    with scheduled("barrier" if kind == "data parallel" else "priority"):
        made = plan_for(discover(model, batch), 2, **choose, statistics="local")
    exchange = {"sharded": "sharded", "fully sharded": "fully_sharded"}.get(kind, "dense")
    units = tuple(msgspec.structs.replace(unit, exchange=exchange) for unit in made.units)
    if kind == "divided":
        assert any(unit.layout.degree == 2 for unit in units)
    return msgspec.structs.replace(made, units=units)


def given(plan: Plan, folder: str, rank: int) -> None:
    """The plan is what the next ``auto_parallelize`` applies, as ``launch`` has it."""
    path = Path(folder) / f"plan-{rank}.json"
    save(plan, path)
    os.environ["MESHWRIGHT_PLAN"] = str(path)


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), (name, (found[name] - value).abs().max())


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in state.items()}


# -- the Trainer --------------------------------------------------------------------------------


def trainer_for(rank: int, folder: str, kind: str, **more: Any) -> Any:
    import with_trainer as example

    model = example.network()
    shown = torch.zeros(2, example.LENGTH, dtype=torch.long)
    given(
        made_plan(model, Batch((), None, {"input_ids": shown, "labels": shown}), kind), folder, rank
    )
    settings = {"max_steps": STEPS, "save_strategy": "no", "logging_steps": STEPS}
    return example.planned_trainer(example.settings(f"{folder}/out", **{**settings, **more}))


def by_our_loop(trainer: Any, plan: Plan, fed: list[dict[str, Any]], parts: int) -> nn.Module:
    """What the Trainer does in a step, written out, on the batches that it has fed."""
    import with_trainer as example
    from transformers import Trainer, get_scheduler

    model = example.network()
    optimizer = Trainer(model, trainer.args).create_optimizer()
    apply(model, optimizer, plan)
    mixed = torch.autocast("cpu", torch.bfloat16) if trainer.args.bf16 else nullcontext()
    schedule = get_scheduler("linear", optimizer, 0, STEPS)
    model.train()
    for number, batch in enumerate(fed, start=1):
        last = number % parts == 0
        with nullcontext() if last else model.no_sync():
            with mixed:
                loss = model(**batch).loss
            (loss * dist.get_world_size()).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
            optimizer.step()
            schedule.step()
            model.zero_grad()
    return model


def trainer_trains(rank: int, folder: str, kind: str, parts: int = 1, **more: Any) -> None:
    begin(rank)
    from meshwright.executor.parallel import run_of

    trainer = trainer_for(rank, folder, kind, gradient_accumulation_steps=parts, **more)
    fed: list[dict[str, Any]] = []
    handle = trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(dict(kwargs)), with_kwargs=True
    )
    trainer.train()
    handle.remove()
    assert len(fed) == STEPS * parts
    # Each rank has had samples of its own.
    both: list[Any] = [None, None]
    dist.all_gather_object(both, fed[0]["input_ids"])
    assert not torch.equal(*both)
    mine = by_our_loop(trainer, run_of(trainer.model).whole_plan, fed, parts)
    same(full_state_dict(trainer.model), full_state_dict(mine))


def trainer_saves(rank: int, folder: str, kind: str) -> None:
    """A training that goes on from the Trainer's checkpoint ends as one without interruption."""
    begin(rank)
    from transformers import LlamaForCausalLM

    half = STEPS // 2
    keeps = {"save_strategy": "steps", "save_steps": half}
    trainer = trainer_for(rank, folder, kind, **keeps)
    trainer.train()
    ended = copied(full_state_dict(trainer.model))
    found = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        pieces = trainer.eval_dataset.pieces
        trainer.model.eval()
        mine = trainer.model(input_ids=pieces, labels=pieces).loss.item()
    assert found == pytest.approx(mine, rel=1e-5)
    dist.barrier()
    kept = Path(folder) / "out" / f"checkpoint-{half}"
    again = trainer_for(rank, folder, kind, **keeps)
    again.train(resume_from_checkpoint=str(kept))
    same(full_state_dict(again.model), ended)
    # What was saved is a model of transformers, and the optimizer's state one process's.
    whole = LlamaForCausalLM.from_pretrained(f"{folder}/out/checkpoint-{STEPS}").state_dict()
    same({name: whole[name] for name in ended}, ended)
    state = full_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer)
    saved = torch.load(f"{folder}/out/checkpoint-{STEPS}/optimizer.pt", weights_only=True)
    for number, kept_state in saved["state"].items():
        same(kept_state, state["state"][number])
    trainer.save_model(f"{folder}/model")
    dist.barrier()
    same(LlamaForCausalLM.from_pretrained(f"{folder}/model").state_dict(), whole)


@frameworks.needs("accelerate")
@pytest.mark.parametrize(
    ("kind", "parts", "more"),
    [
        ("divided", 1, {}),
        *sampled(
            [
                ("data parallel", 1, {}),
                *((kind, 2, {}) for kind in PLANS),
                *((kind, 1, {"bf16": True}) for kind in PLANS),
            ],
            5,
        ),
    ],
)
def test_the_trainer_trains_as_our_loop(two, tmp_path, kind, parts, more):
    two(trainer_trains, str(tmp_path), kind, parts, **more, limit_s=100)


@frameworks.needs("accelerate")
@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
def test_the_trainer_saves_and_goes_on(two, tmp_path, kind):
    two(trainer_saves, str(tmp_path), kind, limit_s=100)


# -- digits, by Accelerate and by Fabric --------------------------------------------------------


def digits_plan(rank: int, folder: str, kind: str) -> Plan:
    from train_digits import digits, network

    torch.manual_seed(0)
    plan = made_plan(network(), Batch((digits()[0][:4],), None), kind)
    given(plan, folder, rank)
    return plan


def digits_by_our_loop(
    plan: Plan, batches: list[tuple[Tensor, Tensor]], parts: int, mixed: bool
) -> nn.Module:
    from train_digits import network

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    apply(model, optimizer, plan)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    for number, (images, labels) in enumerate(batches, start=1):
        last = number % parts == 0
        with nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext():
                output = model(images)
            (F.cross_entropy(output.float(), labels) / parts).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def accelerate_trains(rank: int, folder: str, kind: str, parts: int, mixed: bool) -> None:
    begin(rank)
    import with_accelerate as example

    plan = digits_plan(rank, folder, kind)
    settings = {"mixed_precision": "bf16"} if mixed else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plan was made without, which is said
        # The order goes on from one pass to the next: of another one's first pass.
        batches = list(example.Training(gradient_accumulation_steps=parts, **settings).train)
        training = example.Training(gradient_accumulation_steps=parts, **settings)
    training.epoch()
    mine = digits_by_our_loop(plan, batches, parts, mixed)
    same(full_state_dict(training.model), full_state_dict(mine))
    assert training.accuracy() > 0.2


def accelerate_saves(rank: int, folder: str, kind: str) -> None:
    begin(rank)
    import with_accelerate as example

    digits_plan(rank, folder, kind)
    training = example.Training()
    training.epoch()
    training.accelerator.save_state(f"{folder}/state")
    training.epoch()
    again = example.Training()
    again.epoch()  # other values than those that are loaded
    again.accelerator.load_state(f"{folder}/state")
    again.epoch()
    assert again.schedule.get_last_lr() == training.schedule.get_last_lr()
    same(full_state_dict(again.model), full_state_dict(training.model))
    training.accelerator.save_model(training.model, f"{folder}/model")
    training.accelerator.wait_for_everyone()
    from safetensors.torch import load_file

    saved = load_file(f"{folder}/model/model.safetensors")
    same({n: saved[n] for n in full_state_dict(training.model)}, full_state_dict(training.model))


def fabric_trains(rank: int, folder: str, kind: str, parts: int, mixed: bool) -> None:
    begin(rank)
    import with_fabric as example

    plan = digits_plan(rank, folder, kind)
    settings = {"precision": "bf16-mixed"} if mixed else {}
    batches = list(example.Training(parts, **settings).train)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, batches[0][0])
    assert not torch.equal(*both)  # each rank has samples of its own
    training = example.Training(parts, **settings)
    training.epoch()
    mine = digits_by_our_loop(plan, batches, parts, mixed)
    same(full_state_dict(training.model.module), full_state_dict(mine))
    assert training.accuracy() > 0.2


def parts_of(training: Any) -> dict[str, Any]:
    names = ("model", "optimizer", "schedule")
    return {name: getattr(training, name) for name in names}


def fabric_saves(rank: int, folder: str, kind: str) -> None:
    begin(rank)
    import with_fabric as example

    digits_plan(rank, folder, kind)
    training = example.Training()
    training.epoch()
    state = {**parts_of(training), "epoch": 1}
    training.fabric.save(f"{folder}/state.ckpt", state)
    kept = copied(full_state_dict(training.model.module))
    training.epoch()
    again = example.Training()
    again.epoch()
    found = {**parts_of(again), "epoch": 0}
    assert again.fabric.load(f"{folder}/state.ckpt", found) == {}
    assert found["epoch"] == 1
    same(full_state_dict(again.model.module), kept)
    again.epoch()
    same(full_state_dict(again.model.module), full_state_dict(training.model.module))
    # One process loads it as it is.
    from train_digits import network

    saved = torch.load(f"{folder}/state.ckpt", weights_only=True)
    network().load_state_dict(saved["model"])
    only = {"model": lambda name, value: name == "0.bias"}
    training.fabric.save(f"{folder}/part.ckpt", {"model": training.model}, filter=only)
    assert list(torch.load(f"{folder}/part.ckpt")["model"]) == ["0.bias"]
    with pytest.raises(InputError, match="has no 'more', only model, optimizer, schedule, epoch"):
        again.fabric.load(f"{folder}/state.ckpt", {"model": again.model, "more": 1})
    with pytest.raises(InputError, match="No such file"):
        again.fabric.load(f"{folder}/no.ckpt", {"model": again.model})


ALSO = [
    ("divided", 2, False),
    *sampled(
        [
            ("data parallel", 1, False),
            *((kind, 2, False) for kind in PLANS if kind != "divided"),
            *((kind, 1, True) for kind in PLANS),
        ],
        4,
    ),
]


@frameworks.needs("accelerate")
@pytest.mark.parametrize(("kind", "parts", "mixed"), ALSO)
def test_accelerate_trains_as_our_loop(two, tmp_path, kind, parts, mixed):
    two(accelerate_trains, str(tmp_path), kind, parts, mixed, limit_s=100)


@frameworks.needs("accelerate")
@pytest.mark.parametrize("kind", sampled(PLANS, 2))
def test_accelerate_saves_and_goes_on(two, tmp_path, kind):
    two(accelerate_saves, str(tmp_path), kind, limit_s=100)


@frameworks.needs("lightning_fabric")
@pytest.mark.parametrize(("kind", "parts", "mixed"), ALSO)
def test_fabric_trains_as_our_loop(two, tmp_path, kind, parts, mixed):
    two(fabric_trains, str(tmp_path), kind, parts, mixed, limit_s=100)


@frameworks.needs("lightning_fabric")
@pytest.mark.parametrize("kind", sampled(PLANS, 2))
def test_fabric_saves_and_goes_on(two, tmp_path, kind):
    two(fabric_saves, str(tmp_path), kind, limit_s=100)


# -- what is refused ----------------------------------------------------------------------------


def refuses_to_be_wrapped(rank: int, folder: str) -> None:
    begin(rank)
    from accelerate import Accelerator
    from train_digits import network

    plan = digits_plan(rank, folder, "data parallel")
    model = network()
    apply(model, None, plan)
    with pytest.raises(InputError, match="exchanges its gradients itself"):
        DistributedDataParallel(model)
    with pytest.raises(InputError, match="give the module inside it, and let the plan come before"):
        discover(DistributedDataParallel(network()), Batch((torch.ones(2, 1, 8, 8),), None))
    with pytest.raises(InputError, match=r"mw\.adapt"):
        Accelerator(cpu=True).prepare(model)
    with pytest.raises(InputError, match="a Linear cannot be adapted: give a Trainer"):
        adapt(nn.Linear(1, 1))


def leaves_parts_with_a_plan(rank: int, folder: str) -> None:
    """A plan for a part of what is wrapped, which torch looks up in the whole only."""
    begin(rank)
    from accelerate import Accelerator
    from train_digits import network

    plan = digits_plan(rank, folder, "data parallel")
    model = nn.Sequential(network(), nn.Linear(10, 10))
    apply(model[0], None, plan)
    accelerator = Accelerator(cpu=True)
    adapt(accelerator)
    for wrap in (DistributedDataParallel, accelerator.prepare):
        with pytest.raises(InputError, match="'0' of this Sequential has a plan"):
            wrap(model)
    DistributedDataParallel(nn.Linear(2, 2))


def counts_a_scalers_steps(rank: int, folder: str) -> None:
    """Accelerate puts a step of its own on the optimizer while a scaler steps."""
    begin(rank)
    from accelerate import Accelerator
    from train_digits import network

    plan = digits_plan(rank, folder, "sharded")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    apply(model, optimizer, plan)
    accelerator = Accelerator(cpu=True)
    adapt(accelerator)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    prepared = accelerator.prepare_optimizer(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = model(torch.ones(4, 1, 8, 8)).square().mean()
        accelerator.scaler.scale(loss).backward()
        prepared.step()
    assert not prepared.step_was_skipped
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def refuses_what_a_trainer_cannot(rank: int, folder: str) -> None:
    begin(rank)
    import with_trainer as example
    from transformers import Trainer

    args = example.settings(f"{folder}/out", save_strategy="no")
    with pytest.raises(InputError, match="have no plan yet: call"):
        adapt(Trainer(example.network(), args))
    with pytest.raises(InputError, match="model_init"):
        adapt(Trainer(model_init=example.network, args=args))
    trainer = trainer_for(rank, folder, "data parallel")
    trainer.args.accelerator_config.even_batches = False
    with pytest.raises(InputError, match="even_batches"):
        adapt(trainer)


def says_what_a_trainer_feeds(rank: int, folder: str) -> None:
    """All ranks alike, whatever shares the plan has."""
    begin(rank)
    import with_trainer as example

    model, shown = example.network(), torch.zeros(2, example.LENGTH, dtype=torch.long)
    plan = made_plan(model, Batch((), None, {"input_ids": shown, "labels": shown}), "data parallel")
    batch = plan.goal.batch
    given(msgspec.structs.replace(plan, local_batch_sizes=(batch - 1, 1)), folder, rank)
    args = example.settings(f"{folder}/out", save_strategy="no", max_steps=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        example.planned_trainer(args).train()
    said = [str(one.message) for one in told if "unequal" in str(one.message)]
    expected = (
        "the Trainer feeds all ranks alike, and the plan, made for ranks of unequal speed, has "
        f"{batch - 1}, 1 samples"
    )
    assert [text.startswith(expected) for text in said] == ([] if rank else [True])


def refuses_what_fabric_cannot(rank: int, folder: str) -> None:
    """A strategy that was not adapted; and a rank's own rest of a gradient is in no checkpoint."""
    begin(rank)
    import with_fabric as example

    plan = digits_plan(rank, folder, "sharded")
    units = tuple(
        msgspec.structs.replace(u, exchange="dropped", exchange_ratio=0.5) for u in plan.units
    )
    given(msgspec.structs.replace(plan, units=units), folder, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.mw, "adapt", lambda strategy: strategy)
        with pytest.raises(InputError, match="of which the ModelParallelStrategy of Fabric does"):
            example.Training()
    training = example.Training()
    with pytest.raises(InputError, match="leaves part of its gradient for later steps"):
        training.fabric.save(f"{folder}/state.ckpt", {"model": training.model})
    assert not Path(f"{folder}/state.ckpt").exists()


@frameworks.needs("accelerate")
@pytest.mark.parametrize(
    "check",
    [
        refuses_to_be_wrapped,
        leaves_parts_with_a_plan,
        counts_a_scalers_steps,
        refuses_what_a_trainer_cannot,
        says_what_a_trainer_feeds,
    ],
)
def test_what_cannot_be_is_said(two, tmp_path, check):
    two(check, str(tmp_path), limit_s=100)


@frameworks.needs("lightning_fabric")
def test_what_fabric_cannot_is_said(two, tmp_path):
    two(refuses_what_fabric_cannot, str(tmp_path), limit_s=100)


# -- as a user starts them ----------------------------------------------------------------------


def leaves_a_plan(rank: int, folder: str, example: str) -> None:
    begin(rank)
    if example == "with_trainer":
        trainer_for(rank, folder, "divided")
    else:
        digits_plan(rank, folder, "divided")


@pytest.mark.slow
@pytest.mark.timeout(400)
@frameworks.needs("accelerate", "lightning_fabric")
@pytest.mark.parametrize(
    ("example", "options", "words"),
    [
        ("with_trainer", ("--steps", "8"), "2 ranks, test loss "),
        ("with_accelerate", ("--epochs", "1"), "2 ranks, test accuracy "),
        ("with_fabric", ("--epochs", "1"), "2 ranks, test accuracy "),
    ],
)
def test_examples_are_launched(two, tmp_path, example, options, words):
    two(leaves_a_plan, str(tmp_path), example, limit_s=100)
    command = [
        sys.executable, "-m", "meshwright", "launch", str(tmp_path / "plan-0.json"),
        str(frameworks.EXAMPLES / f"{example}.py"), *options,
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(frameworks.FOLDER)]))
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "step time" in done.stdout  # predicted beside measured
