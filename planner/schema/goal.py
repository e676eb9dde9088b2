"""Goal: what the user asks of a plan."""

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from .errors import InputError
from .layout import Layout, Style
from .local_steps import OUTER_LR, OUTER_MOMENTUM
from .record import MOST, Bytes, Count, Positive, Record, Share, Slowdown
from .text import option

OptimizerName = Literal["sgd", "momentum", "adam", "adamw"]


# Values that optimizers of torch keep for each of a parameter's, by the name of their class and
# without the options that keep more. Read from torch.optim (2.13), which the planner never imports.
STATE_COPIES = {
    "SGD": 0,
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "RMSprop": 1,
}
STATE_OPTIONS = ("momentum", "amsgrad", "centered")
"""Options of theirs that keep one value more."""


class Optimizer(NamedTuple):
    """What an optimizer needs, as multiples of the bytes that it updates.

    ``torch_class`` is its class in ``torch.optim``, ``state_copies`` what it keeps. Its step copies
    ``update_copies`` times one parameter after the other (CPU), ``update_copies_together`` times
    all of them at once (``foreach``, CUDA). ``linear``: its update is linear in the gradient.
    ``momentum`` is what is passed to it as such; all else has torch's defaults.
    """

    torch_class: str
    state_copies: int
    update_copies: int = 0
    update_copies_together: int = 0
    linear: bool = False
    momentum: float = 0.0


# The optimizers that plans are made for. Adam's step holds the root of the second moments and its
# quotient at once, parameter by parameter (``_single_tensor_adam`` in torch 2.13); with ``foreach``
# the roots of all, which it divides in place (``_multi_tensor_adam``).
OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "sgd": Optimizer("SGD", STATE_COPIES["SGD"], linear=True),
    "momentum": Optimizer("SGD", STATE_COPIES["SGD"] + 1, linear=True, momentum=0.9),
    "adam": Optimizer("Adam", STATE_COPIES["Adam"], 2, 1),
    "adamw": Optimizer("AdamW", STATE_COPIES["AdamW"], 2, 1),
}

OBJECTIVES = {"step": "time", "gpu-seconds": "gpu_seconds"}
"""What users call what shall be least, and what ``Goal`` calls it."""

BACKGROUND_LIMIT = 1.1
"""Default of what a background job may slow a step by."""

MOST_MICRO_BATCHES = 8
"""More are not proposed: a unit's samples get few and its kernels slow."""

ROUNDED_FIDELITY = 0.9999
"""The share of a gradient's energy that is kept at least where nothing but rounding is allowed."""

BatchStatistics = Literal["local", "global"]


class Pin(Record, frozen=True, kw_only=True):
    """What the user decides of a unit: ``only`` these layouts and ``styles`` (any if empty),
    ``never`` those and ``never_styles``."""

    unit: str
    only: tuple[Layout, ...] = ()
    never: tuple[Layout, ...] = ()
    styles: tuple[Style, ...] = ()
    never_styles: tuple[Style, ...] = ()

    def permits(self, layout: Layout, style: Style | None = None) -> bool:
        """Whether the unit may have that layout, in that style if one is asked about."""
        good = layout not in self.never and (not self.only or layout in self.only)
        if style is None:
            return good
        return good and style not in self.never_styles and (not self.styles or style in self.styles)

    @property
    def wish(self) -> str:
        """What is asked of the unit, in words."""
        parts = (
            " or ".join(str(layout) for layout in self.only),
            " or ".join(self.styles),
            " ".join(f"not {layout}" for layout in self.never),
            " ".join(f"not {style}" for style in self.never_styles),
        )
        return " ".join(filter(None, parts))


class Goal(Record, frozen=True, kw_only=True):
    """What a plan must reach.

    ``batch`` is the global batch size in samples. ``memory_limit_bytes`` is the limit of each
    rank; without it each device's own memory counts. ``micro_batches`` are the counts that may be
    chosen from. ``batch_statistics`` is what normalisation over the batch means: of each rank's
    own share (``local``, as under DDP) or of the whole batch (``global``).

    ``slice_bytes`` are the slice sizes that may be chosen from under priority (none given: the one
    asked for with the problem). ``objective`` is what shall be least: seconds of a step, or
    device-seconds (within ``time_limit_s`` seconds of a step, if given). ``amplification_limit``
    bounds the device-seconds of a step, ``unit_amplification_limit`` those of every unit by itself,
    as a multiple of what one device would take for the whole batch (DeepPool, arXiv 2112.10065).
    Gradients that are rounded to travel and lossy exchange need ``allow_lossy``, and keep at least
    ``min_fidelity`` of the gradient's energy over all units. With ``background`` another job may
    run in what the plan leaves idle, and a step may take up to ``background_limit`` times as long
    for it: ``time_limit_s`` holds for the step so slowed, while predictions are of the step without
    it. ``pins`` take layouts and styles of units out of the search, ``forbidden`` policies of all
    units (``pins.POLICIES``), ``all_layouts`` brings every number of groups and members in (else
    divisors of the number of ranks, and powers of two).

    With ``allow_local_steps`` hosts may train apart and average what they have learnt now and then,
    where that is predicted to be clearly quicker than any plan that exchanges gradients in every
    step: after ``inner_steps`` of the optimizer's steps (none given: the fewest that hide the link
    between hosts), in so many ``fragments`` (none given: a few), with the outer optimizer's
    ``outer_lr`` and ``outer_momentum``. See ``local_steps``.
    """

    batch: Count
    memory_limit_bytes: Bytes | None = None
    optimizer: OptimizerName = "sgd"
    micro_batches: tuple[Count, ...] = (1,)
    batch_statistics: BatchStatistics = "local"
    allow_lossy: bool = False
    min_fidelity: Share = 1.0
    amplification_limit: Positive | None = None
    unit_amplification_limit: Positive | None = None
    objective: Literal["time", "gpu_seconds"] = "time"
    time_limit_s: Positive | None = None
    slice_bytes: tuple[Count, ...] = ()
    background: bool = False
    background_limit: Slowdown = BACKGROUND_LIMIT
    pins: tuple[Pin, ...] = ()
    forbidden: tuple[str, ...] = ()
    all_layouts: bool = False
    allow_local_steps: bool = False
    inner_steps: Count | None = None
    fragments: Count | None = None
    outer_lr: Positive = OUTER_LR
    outer_momentum: Share = OUTER_MOMENTUM

    def __post_init__(self) -> None:
        super().__post_init__()
        # Types say this of what is read from files; what Python makes is not checked by them.
        _at_least_one("batch", self.batch)
        # Of none at all it is said that nothing fits; what asks without a limit gives far too much.
        if self.memory_limit_bytes is not None and self.memory_limit_bytes < 0:
            _at_least_one("memory limit", self.memory_limit_bytes)
        if not self.micro_batches:
            raise InputError("micro_batches is empty: name at least one count, such as 1")
        for count in self.micro_batches:
            _at_least_one("number of micro-batches", count)
        for size in self.slice_bytes:
            _at_least_one("slice size", size)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("batch statistics", self.batch_statistics, get_args(BatchStatistics))
        _one_of("objective", self.objective, OBJECTIVES.values())
        if not 0 <= self.min_fidelity <= 1:
            raise InputError(
                f"a least fidelity of {self.min_fidelity:g} is no share: give 0 to 1, such as 0.9"
            )

    @property
    def slowdown(self) -> float:
        """How many times as long as predicted a step may take for the sake of another job."""
        return self.background_limit if self.background else 1.0

    @property
    def undisturbed_limit_s(self) -> float | None:
        """The limit on a step's time without the background job that may slow it; None without
        one."""
        return None if self.time_limit_s is None else self.time_limit_s / self.slowdown

    @property
    def allows_parts(self) -> bool:
        """Whether part of a gradient may wait for a later step, and not only be rounded."""
        return self.allow_lossy and self.min_fidelity < ROUNDED_FIDELITY

    def permits(self, unit: str, layout: Layout, style: Style | None = None) -> bool:
        """Whether the pins leave that layout (in that style) to a unit."""
        return all(pin.permits(layout, style) for pin in self.pins if pin.unit == unit)

    def within(self, limit_bytes: int) -> "Goal":
        """The goal where ranks have no more than so much memory for it."""
        limit = min(self.memory_limit_bytes or limit_bytes, limit_bytes)
        return msgspec.structs.replace(self, memory_limit_bytes=limit)

    @property
    def state_copies(self) -> int:
        """Optimizer state as a multiple of the parameters' bytes."""
        return OPTIMIZERS[self.optimizer].state_copies


def make_goal(
    batch: int,
    *,
    memory_limit_bytes: int | None = None,
    optimizer: str = "sgd",
    micro_batches: Sequence[int] = (1,),
    batch_statistics: str = "local",
    objective: str = "step",
    step_limit_s: float | None = None,
    amplification_limit: float | None = None,
    unit_amplification_limit: float | None = None,
    background_limit: float | None = None,
    min_fidelity: float | None = None,
    allow_lossy: bool = False,
    slice_bytes: Sequence[int] = (),
    pins: Sequence[Pin] = (),
    all_layouts: bool = False,
    allow_local_steps: bool = False,
    inner_steps: int | None = None,
    fragments: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
) -> Goal:
    """The goal of those values, each checked; raises ``InputError``. With a ``background_limit``
    another job may run beside the plan and slow it by so much."""
    _at_least_one("batch", batch)
    if memory_limit_bytes is not None:
        _at_least_one("memory limit", memory_limit_bytes)
    if not micro_batches:
        raise InputError("no counts of micro-batches: name at least one, such as 1")
    for count in micro_batches:
        _at_least_one("number of micro-batches", count)
    for size in slice_bytes:
        _at_least_one("slice size", size)
    _check_local_steps(
        allow_local_steps, inner_steps=inner_steps, fragments=fragments, outer_lr=outer_lr,
        outer_momentum=outer_momentum,
    )  # fmt: skip
    _one_of("optimizer", optimizer, OPTIMIZERS)
    _one_of("batch statistics", batch_statistics, get_args(BatchStatistics))
    _one_of("objective", objective, OBJECTIVES)
    _above_zero("step limit", step_limit_s)
    _above_zero("amplification limit", amplification_limit)
    _above_zero("unit amplification limit", unit_amplification_limit)
    if background_limit is not None and not 1 < background_limit < math.inf:
        raise InputError(
            f"a background limit of {background_limit:g} cannot be held: give more than 1, such as "
            f"{BACKGROUND_LIMIT:g} for a step that takes up to a tenth longer"
        )
    return Goal(
        batch=batch,
        memory_limit_bytes=memory_limit_bytes,
        optimizer=optimizer,  # type: ignore[arg-type]
        # Each once: a search looks at all of them.
        micro_batches=tuple(dict.fromkeys(micro_batches)),
        batch_statistics=batch_statistics,  # type: ignore[arg-type]
        objective=OBJECTIVES[objective],  # type: ignore[arg-type]
        time_limit_s=step_limit_s,
        amplification_limit=amplification_limit,
        unit_amplification_limit=unit_amplification_limit,
        background=background_limit is not None,
        background_limit=BACKGROUND_LIMIT if background_limit is None else background_limit,
        allow_lossy=allow_lossy,
        min_fidelity=_fidelity(min_fidelity, allow_lossy),
        slice_bytes=tuple(dict.fromkeys(slice_bytes)),
        pins=tuple(pins),
        all_layouts=all_layouts,
        allow_local_steps=allow_local_steps,
        inner_steps=inner_steps,
        fragments=fragments,
        outer_lr=OUTER_LR if outer_lr is None else outer_lr,
        outer_momentum=OUTER_MOMENTUM if outer_momentum is None else outer_momentum,
    )


def _check_local_steps(
    allowed: bool,
    *,
    inner_steps: int | None,
    fragments: int | None,
    outer_lr: float | None,
    outer_momentum: float | None,
) -> None:
    given = {
        "inner_steps": inner_steps,
        "fragments": fragments,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
    }
    for name, value in given.items():
        if value is not None and not allowed:
            raise InputError(
                f"{option(name)} {value:g} ({name}={value:g}) says nothing without "
                "--allow-local-steps (allow_local_steps=True): add that, or leave it out"
            )
    for what, count in (("number of inner steps", inner_steps), ("number of fragments", fragments)):
        if count is not None:
            _at_least_one(what, count)
    if inner_steps is not None and fragments is not None and fragments > inner_steps:
        raise InputError(
            f"{fragments} fragments cannot each have one of {inner_steps} inner steps: ask for at "
            f"most {inner_steps} (--fragments {inner_steps}, fragments={inner_steps})"
        )
    _above_zero("outer learning rate", outer_lr)
    if outer_momentum is not None and not 0 <= outer_momentum < 1:
        raise InputError(
            f"an outer momentum of {outer_momentum:g} cannot be: give 0 to below 1, such as "
            f"{OUTER_MOMENTUM:g}"
        )


def _fidelity(least: float | None, allow_lossy: bool) -> float:
    """The share of the gradient's energy that must be sent at once."""
    if not allow_lossy:
        if least is not None:
            raise InputError(
                f"a least fidelity of {least:g} bounds a lossy exchange, which is not allowed: "
                "add --allow-lossy (allow_lossy=True, lossy=True of auto_parallelize)"
            )
        return 1.0
    if least is None:
        return ROUNDED_FIDELITY
    if least == 1:
        raise InputError(
            "a lossy exchange that keeps the whole gradient saves nothing: leave --min-fidelity "
            "(min_fidelity) out for gradients that are rounded only, or say how much of their "
            "energy must be sent at once, such as 0.9"
        )
    if not 0 <= least < 1:
        raise InputError(f"a least fidelity of {least:g} is no share: give 0 to 1, such as 0.9")
    return least


def _above_zero(what: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise InputError(f"a {what} of {value:g} cannot be: give more than 0")


def _at_least_one(what: str, value: int) -> None:
    if not isinstance(value, int):
        raise InputError(f"a {what} of {value!r} cannot be: give a whole number")
    if value < 1:
        raise InputError(f"a {what} of {value} cannot be: give at least 1")
    if value > MOST:
        raise InputError(f"a {what} of {value} cannot be: give at most {MOST}")


def _one_of(what: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise InputError(f"unknown {what} {value!r}: choose from {', '.join(known)}")
