"""Equality of a plan's training with a single process, on the user's own model (docs/executor.md).

Three steps of SGD with momentum on the ranks of the plan, and the same three in one process on the
whole batch; the second batch is one sample larger, so that shares are uneven. Equality is claimed
for dropout off and for batch statistics over the whole batch: both are set so here, and the notes
say where that changed something. A model that is random nevertheless is first compared with equal
random numbers in both, then by what it does in the mean (``draws``).
"""

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...models.compiled import Uncompiled
from ...models.failing import in_module
from ...models.opened import tensors_in
from ...models.precision import forbid_tf32, in_precision, tf32_kept, to_type
from ...models.replay import copied, fix_statistics, preserved
from ...models.target import trial, try_out
from ...models.units.chance import layer_drop_rates
from ...models.units.trace import coarse_modules, record
from ...models.workload import Batch, Workload
from ...planner.explain.compare import policy_words, with_wire
from ...planner.schema.errors import InputError
from ...planner.schema.plan import Plan
from ...planner.schema.record import Count, Record
from ..apply import apply
from ..comm.agreement import rank_zero_decides, together
from ..optimizer.kinds import optimizer_for
from ..parallel import full_state_dict
from .attribution import batch_buffers, mixing_cause, restless_module, used_buffers
from .draws import (
    FALSE_ALARM,
    Draw,
    compare_draws,
    draws_in,
    generators_kept,
    power_in_words,
    seed_all,
)
from .steps import (
    DRAW_RATE,
    Progress,
    check_finite,
    draws_alone,
    draws_together,
    own_state,
    parameter_names,
    restored,
    wide,
)
from .train import loss_of, train_step
from .verify_room import usual_batch
from .yardstick import LOSS, STATE, Deviation, deviations

LEARNING_RATE = 0.01
SEED = 1
# Training under a plan may differ from one process's by SPREAD times as much as two runs of one
# process differ. Above MOST_SPREAD times what the yardstick allows, or MOST_RELATIVE of a value, a
# difference is no rounding.
SPREAD, MOST_SPREAD, MOST_RELATIVE = 3.0, 300.0, 0.5
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "own": None}

DtypeName = Literal["float64", "float32", "own"]
"""What parameters and inputs are made into: ``own`` leaves them as the plan's precision has them.
Autocast does not touch float64, which therefore shows whether the mathematics are right."""


class Verification(Record, frozen=True, kw_only=True):
    """What was compared over which batches, what was changed for it, and how it came out. ``cause``
    says where no plan could have passed, as the model or its loss looks at a batch as a whole, or
    where one process differs from itself as much. ``random`` says what of the model is random where
    means over so many ``draws`` of one step were compared instead of steps; elsewhere it is empty,
    and there are none.
    """

    target: str
    world_size: Count
    dtype: DtypeName
    batches: tuple[Count, ...]
    notes: tuple[str, ...]
    deviations: tuple[Deviation, ...]
    passed: bool
    cause: str = ""
    draws: Count | None = None
    random: str = ""


class _Trained(NamedTuple):
    """Where a training ended: the losses of its steps, parameters and buffers by name."""

    losses: list[float]
    state: dict[str, Tensor]


class _Alone(NamedTuple):
    """The training in one process: where it ended (``trained``), the model ``before`` it, the
    ``precision`` in which it computes, with ``notes`` on that. ``cause`` says why no plan could
    equal it, where none can; ``kept`` names the buffers that none could equal, each with the
    reason, and ``used`` says why what is computed with them differs, where it does. Of a random
    model also what is ``random``, and its ``draws``."""

    trained: _Trained
    before: nn.Module
    precision: torch.dtype
    notes: list[str]
    cause: str
    kept: dict[str, str]
    used: str
    random: str
    draws: list[Draw]


@tf32_kept()
def verify_on_ranks(
    plan: Plan,
    workload: Workload,
    *,
    dtype: DtypeName = "float64",
    batch: int | None = None,
    device: torch.device | str = "cpu",
    timeout_s: float | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Verification:
    """Whether ``plan`` trains the workload's model as one process does; collective.

    The same workload, equally initialised, must be given on every rank; its model is not usable
    afterwards. ``batch`` in samples: the plan's, but at most four for each rank, unless given.
    """
    # Copies keep what is noted as compiled, and are eager, as is what a plan is compared with.
    workload = replace(workload, model=Uncompiled(workload.model).model)
    workload = in_precision(workload, plan.precision)
    plan, notes = _over_the_whole_batch(plan, workload.model)
    plan, exact = _sent_exactly(plan)
    notes += exact
    notes += _without_dropout(workload.model)
    size = batch or usual_batch(plan)
    sizes, told = rank_zero_decides(lambda: _sizes(workload, size, plan))
    notes += told
    computed, note = together(lambda: _computable(workload, dtype, device))
    dtype, notes = computed, [*notes, *note, *_in_full(dtype, torch.device(device))]
    batches = together(lambda: _draw(workload, sizes, dtype, device))
    _moved(workload.model, dtype, device).train()
    together(lambda: _run_first(workload.model, batches[0], plan))
    together(lambda: _run_share(workload, batches[0], plan))
    done, total = len(sizes), 2 * len(sizes)
    alone: _Alone | None = None

    def train_alone() -> tuple[list[str], str, int]:
        nonlocal alone
        alone = _alone(workload, batches, progress)
        return alone.notes, alone.random, len(alone.draws)

    def judge() -> tuple[tuple[Deviation, ...], list[str], str]:
        assert alone is not None
        return _judged(plan, workload, batches, ours, alone)

    def judge_draws() -> tuple[tuple[Deviation, ...], list[str], str]:
        assert alone is not None
        return _judged_draws(plan, workload, batches[1], drawn, alone)

    with generators_kept():
        # On rank 0 alone, whose error or answer all ranks get: elsewhere they would only wait.
        # Before the plan is applied, as that changes the model in place, which the loss may know.
        coarse, chance, draws = rank_zero_decides(train_alone)
        optimizer = _optimizer(workload.model)
        with warnings.catch_warnings():
            # It is ours, and no other than the plan's for its user.
            warnings.filterwarnings("ignore", message="this SGD keeps")
            apply(workload.model, optimizer, plan, timeout_s=timeout_s)
        start = own_state(workload.model) if chance else {}
        ours = _train_together(
            plan, workload, batches, optimizer, lambda n: progress(done + n, total, "ranks")
        )
        found, amplified, cause = rank_zero_decides(judge)
        passed = all(d.passed for d in found)
        if chance and passed:
            equal = f"{chance} is random: compared with equal random numbers in every step"
            amplified = [*amplified, equal]
        draws = 0 if passed else draws
        if draws:
            drawn = draws_together(
                plan, workload, batches[1], optimizer, start, SEED + 1, draws, progress
            )
            found, amplified, cause = rank_zero_decides(judge_draws)
            passed = all(d.passed for d in found)
    return Verification(
        target=plan.target,
        world_size=plan.world_size,
        dtype=dtype,
        batches=(sizes[1],) if draws else tuple(sizes),
        notes=(*notes, *coarse, *amplified),
        deviations=found,
        passed=passed,
        cause="" if passed else cause,
        draws=draws or None,
        random=chance if draws else "",
    )


def _alone(workload: Workload, batches: list[Batch], progress: Progress) -> _Alone:
    """Trains the workload's own model, which its loss may know, and puts it back as it was."""
    model = workload.model
    given = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    precision, notes = _precision(model, batches[0], given)
    before = copied(model)
    draws: list[Draw] = []
    with restored(model):
        chance = _chance(model, batches[0])
        # Of a random model a part's loss would differ by its draw.
        share = STATE[precision].share
        cause = "" if chance else mixing_cause(workload, batches[0], share)
        kept = {} if chance else batch_buffers(workload, batches[0], share)
        used = used_buffers(workload, batches[0], kept) if kept else ""
        began = time.perf_counter()
        trained = _train_alone(
            workload, batches, lambda n: progress(n, 2 * len(batches), "one process")
        )
        step_s = (time.perf_counter() - began) / len(batches)
    if chance:
        draws = draws_alone(workload, [batches[1]], SEED, draws_in(step_s), progress)
    return _Alone(trained, before, precision, notes, cause, kept, used, chance, draws)


def _in_full(dtype: DtypeName, device: torch.device) -> list[str]:
    """Lets nothing be computed in TF32, with a note where something would have been."""
    # It rounds products to ten bits, and differently where a unit is divided: a thousand times what
    # the yardstick of float32 allows.
    allowed = forbid_tf32()
    if not allowed or dtype == "float64" or device.type != "cuda":
        return []
    return ["compared in full float32, where training may use TF32"]


def _chance(model: nn.Module, batch: Batch) -> str:
    """What of the model is random, although dropout is off; empty where two forwards are equal."""
    name = restless_module(model, batch)
    return "" if name is None else f"module {name!r}" if name else "the model"


def _judged(
    plan: Plan, workload: Workload, batches: list[Batch], ours: _Trained, alone: _Alone
) -> tuple[tuple[Deviation, ...], list[str], str]:
    """How far the ranks' training is from one process's, with a note on what is allowed, and why no
    plan could have come nearer, if so."""
    parameters = {n for n, _ in alone.before.named_parameters(remove_duplicate=False)}

    def compared(found: _Trained, *, without: Collection[str] = ()) -> tuple[Deviation, ...]:
        def rest(trained: _Trained) -> _Trained:
            left = {n: value for n, value in trained.state.items() if n not in without}
            return trained._replace(state=left)

        return _compare(rest(found), rest(alone.trained), plan, alone.precision, parameters)

    found = compared(ours)
    worst = max(d.of_allowed for d in found)
    # What a random model differs by from itself is not rounding.
    if worst <= 1 or alone.cause or alone.random:
        return found, [], alone.cause
    if alone.kept and all(d.passed for d in compared(ours, without=alone.kept)):
        return found, [], next(iter(alone.kept.values()))
    if alone.used:
        return found, [], alone.used
    if worst > MOST_RELATIVE / STATE[alone.precision].relative:
        return found, [], ""
    spreads = {}
    for how, (model, other) in _other_ways(alone.before, batches, alone.precision).items():
        # What cannot be computed so (float64 has not every kernel) tells nothing.
        with suppress(RuntimeError, TypeError, NotImplementedError):
            own = _train_alone(replace(workload, model=model), other, lambda n: None)
            spreads[how] = max(d.of_allowed for d in compared(own))
    return _within_spread(found, spreads, _most_spread(alone.precision))


def _most_spread(precision: torch.dtype) -> float:
    return min(MOST_SPREAD, MOST_RELATIVE / STATE[precision].relative)


def _other_ways(
    model: nn.Module, batches: list[Batch], precision: torch.dtype
) -> dict[str, tuple[nn.Module, list[Batch]]]:
    """The same training in one process with other rounding, in words, each with a model of its
    own."""
    backwards = [b.take(torch.arange(b.size).flip(0)) for b in batches]
    ways = {"takes the samples in reverse order": (copied(model), backwards)}
    if torch.finfo(precision).bits < torch.finfo(torch.float32).bits:
        finer = to_type(copied(model), torch.float64), [b.to(dtype=torch.float64) for b in batches]
        ways["computes in float64"] = finer
    return ways


def _sizes(workload: Workload, size: int, plan: Plan) -> tuple[list[int], list[str]]:
    """The batches to compare over. The second is one larger, so that the ranks' shares are uneven,
    unless the model refuses such shares: then with a note."""

    def part_of(batch: int) -> int:
        """What the rank that gets most is given in a micro-batch."""
        return -(-max(plan.local_batches(batch)) // plan.micro_batches)

    with trial(workload) as run:
        fix_statistics(run.model)  # which are of all ranks' samples: none has too few by itself
        for part in sorted({part_of(size), size}):
            loss_of(run, run.make_batch(part))  # or nothing can be compared
        try:
            for part in sorted({part_of(size + 1), size + 1}):
                loss_of(run, run.make_batch(part))
        except Exception as error:  # make_batch's own too
            note = f"uneven shares are not compared, as they are refused: {error}"
            return [size] * 3, [note]
    return [size, size + 1, size], []


def _over_the_whole_batch(plan: Plan, model: nn.Module) -> tuple[Plan, list[str]]:
    if plan.goal.batch_statistics == "global" or not any(
        isinstance(m, _BatchNorm) for m in model.modules()
    ):
        return plan, []
    goal = msgspec.structs.replace(plan.goal, batch_statistics="global")
    note = (
        "the plan normalises by each rank's own statistics, as DistributedDataParallel does, which "
        "no single process equals: compared with statistics of the whole batch"
    )
    return msgspec.structs.replace(plan, goal=goal), [note]


def _sent_exactly(plan: Plan) -> tuple[Plan, list[str]]:
    rounded = [unit for unit in plan.units if unit.rounded]
    if not rounded:
        return plan, []
    note = (
        f"the plan rounds the gradients of {len(rounded)} units to {rounded[0].wire} to travel, "
        "which no single process does: compared with gradients that travel as they are"
    )
    return with_wire(plan, "exact"), [note]


def _without_dropout(model: nn.Module) -> list[str]:
    """Turns dropout off: modules, and the rates that modules of any kind keep as attributes."""
    off = list(_dropout_rates(model))  # a list, as what is zero is found no more
    for module, name in off:
        setattr(module, name, 0.0)
    for _, holder, name in list(layer_drop_rates(model)):
        setattr(holder, name, 0.0)
    what = "1 module" if len(off) == 1 else f"{len(off)} modules"
    return [f"dropout is off in {what}"] if off else []


def _dropout_rates(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    # By names: besides torch's modules many keep a rate and call torch's function with it, and
    # torchvision leaves out whole branches by chance (``StochasticDepth``).
    for module in model.modules():
        kind = type(module).__name__.lower()
        is_dropout = "dropout" in kind or "stochastic" in kind
        for name, value in vars(module).items():
            named = "drop" in name.lower() or (is_dropout and name == "p")
            if named and isinstance(value, float) and 0 < value <= 1:
                yield module, name


def _precision(model: nn.Module, batch: Batch, given: torch.dtype) -> tuple[torch.dtype, list[str]]:
    """The coarsest precision in which a model of ``given`` precision computes, with a note on where
    if that is another."""
    coarse = coarse_modules(record(model, batch), given)
    if not coarse:
        return given, []
    worst = min(coarse.values(), key=lambda dtype: torch.finfo(dtype).bits)
    first = next(name for name, dtype in coarse.items() if dtype == worst)
    what = f"module {first!r}" if first else "the model"
    more = f" (and {len(coarse) - 1} more)" if len(coarse) > 1 else ""
    name = str(worst).removeprefix("torch.")
    return worst, [
        f"{what}{more} computes in {name} whatever it is given: differences of {name}'s rounding "
        "are allowed"
    ]


def _computable(
    workload: Workload, asked: DtypeName, device: torch.device | str
) -> tuple[DtypeName, list[str]]:
    """The precision asked for, or float32 where torch has no double precision of what the model
    does; with a note on that."""
    if asked != "float64":
        return asked, []
    size = try_out(workload)
    batch, model = _draw(workload, [size], asked, device)[0], copied(workload.model)
    try:
        with torch.enable_grad(), torch.random.fork_rng():
            made = _moved(model, asked, device)(*batch.args, **batch.kwargs)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
    else:
        # Some write float64's smallest number into a float32 mask: minus infinity, and 0 times it.
        if not any(bool(t.isnan().any()) for t in tensors_in(made)):
            return asked, []
        why = "its outputs are no numbers there"
    return "float32", [f"the model does not compute in {asked} ({why}): compared in float32"]


def _moved(model: nn.Module, dtype: DtypeName, device: torch.device | str) -> nn.Module:
    """The model, which is on the device in that precision from now on."""
    wanted = _DTYPES[dtype]
    model.to(device=device)
    return model if wanted is None else to_type(model, wanted)


# Some models cast parameters in their first forward. On rank 0, which trains alone before, they
# would be of another type than elsewhere: so every rank runs one. Of the whole batch only rank 0
# does, as it will when it trains alone: all ranks of a host at once could lack the memory.
def _run_first(model: nn.Module, batch: Batch, plan: Plan) -> None:
    """One forward of the whole batch, on rank 0 and on ranks that run none of a share."""
    if dist.get_rank() == 0 or _share_to_run(plan, batch.size) is None:
        _run_once(model, batch)


def _run_once(model: nn.Module, batch: Batch) -> None:
    with torch.enable_grad(), preserved(model):
        model(*batch.args, **batch.kwargs)


def _share_to_run(plan: Plan, size: int) -> int | None:
    """The samples that this rank will get; None where they are not to be run by themselves."""
    share = plan.local_batch_size(dist.get_rank(), size) // plan.micro_batches
    # Statistics of the whole batch may be there for one sample.
    return share if 1 < share < size else None


def _run_share(workload: Workload, batch: Batch, plan: Plan) -> None:
    """One forward on as many samples as this rank will get. Raises ``InputError`` where only that
    fails: of what is no tensor nobody gets a share."""
    size, share = batch.size, _share_to_run(plan, batch.size)
    if share is None:
        return
    try:
        _run_once(workload.model, batch.slice(0, share))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"the model of {workload.name!r} takes its batch of {size} and fails on {share} samples"
            f" of it, as a rank gets them{in_module(workload.model, error)}, with "
            f"{type(error).__name__}: {error}; a batch is cut at its tensors, so make what it has "
            "of each sample (a list of lengths, say) a tensor"
        ) from error


def _draw(
    workload: Workload, sizes: list[int], dtype: DtypeName, device: torch.device | str
) -> list[Batch]:
    """The same batches on every rank."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return [workload.make_batch(size).to(device, _DTYPES[dtype]) for size in sizes]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Linear in the gradient, so that the state differs as little as gradients do.
    return optimizer_for("momentum", model.parameters(), LEARNING_RATE)


def _train_together(
    plan: Plan,
    workload: Workload,
    batches: list[Batch],
    optimizer: torch.optim.Optimizer,
    progress: Callable[[int], None],
) -> _Trained:
    losses = []
    for number, batch in enumerate(batches, 1):
        seed_all(SEED + number)
        losses.append(train_step(workload, plan, batch, optimizer))
        progress(number)
    return _Trained(losses, full_state_dict(workload.model))


def _train_alone(
    workload: Workload, batches: list[Batch], progress: Callable[[int], None]
) -> _Trained:
    model = workload.model
    optimizer = _optimizer(model)
    losses = []
    for number, batch in enumerate(batches, 1):
        seed_all(SEED + number)
        loss = loss_of(workload, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        check_finite(losses[-1], f"step {number}")
        progress(number)
    return _Trained(losses, {n: t.detach().clone() for n, t in model.state_dict().items()})


def _judged_draws(
    plan: Plan, workload: Workload, batch: Batch, drawn: list[Draw], alone: _Alone
) -> tuple[tuple[Deviation, ...], list[str], str]:
    """How far the ranks' steps are in the mean from one process's, with a note on what could be
    seen, and why no plan could be equal, if none can."""
    parameters = parameter_names(alone.before)
    rounding = _rounding(alone, alone.draws, parameters)
    apart = compare_draws(drawn, alone.draws, rounding)
    kinds, by_kind = _kinds(plan), dict[str, list[str]]()
    for name in apart:
        kind = kinds(name) if name in parameters else "loss" if name == "loss" else "buffers"
        by_kind.setdefault(kind, []).append(name)
    found = tuple(
        Deviation(
            what=kind,
            tensors=len(names),
            largest=max(apart[name].away for name in names),
            of_allowed=max(apart[name].of_allowed for name in names),
            worst=max(names, key=lambda name: apart[name].of_allowed),
        )
        for kind, names in by_kind.items()
    )
    told = (
        f"{alone.random} is random, so means over {len(drawn)} steps of other random numbers are "
        f"compared: of right plans {FALSE_ALARM:.1%} would differ"
    )
    power = power_in_words(apart)
    notes = [told, *([power] if power else [])]
    passed = all(d.passed for d in found)
    return found, notes, "" if passed else _mixing_in_the_mean(workload, batch, alone)


def _rounding(alone: _Alone, draws: list[Draw], parameters: set[str]) -> dict[str, float]:
    """What rounding may do to the mean of each tensor of a draw (L2)."""
    loss, state = LOSS[alone.precision], STATE[alone.precision]
    means = {n: float(torch.stack([d[n] for d in draws]).mean(0).norm()) for n in draws[0]}
    allowed = {"loss": loss.relative * means["loss"] + loss.absolute}
    for name, tensor in alone.before.state_dict().items():
        rate = DRAW_RATE if name in parameters else 1.0
        value = float(tensor.detach().to(wide(tensor.dtype)).norm()) / rate
        each = state.absolute * tensor.numel() ** 0.5
        allowed[name] = state.relative * (means[name] + value) + each
    return allowed


def _mixing_in_the_mean(workload: Workload, batch: Batch, alone: _Alone) -> str:
    """As ``mixing_cause``, for a random model: one process on halves of the batch is held to one
    process on all of it."""
    model, cut = copied(alone.before), batch.size // 2
    parts = [batch.slice(0, cut), batch.slice(cut, batch.size)]
    fix_statistics(model)
    whole, halves = (
        draws_alone(replace(workload, model=model), some, seed, len(alone.draws), lambda *_: None)
        for seed, some in ((SEED, [batch]), (SEED + 1, parts))
    )
    rounding = _rounding(alone, whole, parameter_names(model))
    if all(a.of_allowed <= 1 for a in compare_draws(halves, whole, rounding).values()):
        return ""
    return (
        f"the mean over random numbers of a step on {batch.size} samples is not that of steps on "
        "their parts (the model or its loss computes over the batch as a whole), so no training on "
        "shares of a batch equals that of the whole"
    )


def _compare(
    ours: _Trained, theirs: _Trained, plan: Plan, precision: torch.dtype, parameters: set[str]
) -> tuple[Deviation, ...]:
    losses = [
        {f"step {i + 1}": torch.tensor(x, dtype=torch.float64) for i, x in enumerate(t.losses)}
        for t in (ours, theirs)
    ]
    loss = deviations(losses[0], losses[1], LOSS[precision], lambda name: "loss")
    kinds = _kinds(plan)

    def kind(name: str) -> str:
        return kinds(name) if name in parameters else "buffers"

    found, reference = _real(ours.state), _real(theirs.state)
    return loss + deviations(found, reference, STATE[precision], kind)


def _real(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state with complex numbers as pairs of real ones, by which they are compared."""
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in state.items()}


def _within_spread(
    found: tuple[Deviation, ...], spreads: Mapping[str, float], most: float
) -> tuple[tuple[Deviation, ...], list[str], str]:
    """The deviations in parts of what a model is allowed that amplifies rounding: a few times what
    one process differs from itself when it only rounds in another way. Where that is more than
    ``most``, so that a fault could hide in it, nothing is allowed, and a sentence explains what is
    no further off."""
    how = max(spreads, key=lambda way: spreads[way], default="")
    spread = spreads.get(how, 0.0)
    allowed = SPREAD * spread
    if allowed <= 1:
        return found, [], ""
    told = (
        f"the model amplifies rounding: one process that {how} is {spread:.2g} times what is "
        "allowed from itself"
    )
    if allowed > most:
        within = all(d.of_allowed <= allowed for d in found)
        more = ", and the plan no further, so no comparison tells rounding from a fault here"
        return found, [], told + more if within else ""
    scaled = (msgspec.structs.replace(d, of_allowed=d.of_allowed / allowed) for d in found)
    return tuple(scaled), [f"{told}, so a plan may be {SPREAD:g} times that"], ""


def _kinds(plan: Plan) -> Callable[[str], str]:
    """The class of a parameter: how the unit that it belongs to is divided, and how its gradients
    are exchanged."""
    by_module = {}
    for unit in plan.units:
        divided = "data parallel" if unit.style == "none" else f"{unit.style} {unit.layout}"
        words = ", ".join(["parameters", divided, *policy_words(unit)])
        by_module.update(dict.fromkeys(unit.modules, words))

    def kind(name: str) -> str:
        parts = name.split(".")
        # The longest first: a module inside another may belong to a unit of its own.
        prefixes = (".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1))
        return next((by_module[p] for p in prefixes if p in by_module), "parameters, data parallel")

    return kind
