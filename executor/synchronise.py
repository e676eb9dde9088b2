"""Drives the exchange of gradients through each backward (steps 1 to 4 of "From backward to the
next forward" in docs/executor.md).

What is averaged is all that has accumulated in ``grad``, as under DDP. An earlier average is equal
on all ranks, so averaging it again leaves it as it is: several backwards before one step, gradients
kept from ``no_sync``, and values that the user put there all come out right without bookkeeping.
For divided parameters the same holds because the share that one backward adds is divided by the
degree first; the average over the G peers is then the average over all G·degree ranks.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ..planner.schema.errors import InputError, RunError
from ..planner.schema.pins import forbidding
from ..planner.schema.plan import Plan
from .comm.control import Control, PendingGather
from .forward import Forward
from .gradients.buckets import Exchange, GradParam, Votes
from .gradients.pending import weakly


@dataclass
class Kernels:
    """Whether backward runs torch's own kernels, whose gradients are tensors of their own each."""

    eager: bool = True


class GradientSynchroniser:
    """Watches the gradients of ``params``.

    A backward begins with its first gradient at the model's output (or at a parameter) and ends
    with the engine's callback. ``latest()`` is the forward that ran last, whose ``no_sync`` counts
    where the loss did not come through the output. ``anchor`` is a leaf that gets a gradient on
    every rank, also where units leave this one idle and no parameter of its own gets any.
    ``exchanged(n)`` is told when the gradients of n backwards have been exchanged.
    """

    def __init__(
        self,
        params: Iterable[GradParam],
        exchange: Exchange,
        control: Control,
        latest: Callable[[], Forward | None],
        anchor: Tensor | None = None,
        exchanged: Callable[[int], None] | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.params = list(params)
        self.taken = False
        """Whether ``torch.autograd.grad`` has gone through the model and no backward has since."""
        self.voting_s = 0.0
        """Seconds until ranks had agreed on the parameters that have a gradient."""
        self._exchange, self._latest = exchange, latest
        self._control, self._watch = control, control.watch
        self._active = self._weighted = self._anchored = False
        self._told_not_called = False
        self._synchronise = True
        # Those that this backward has computed a gradient for, and those that any backward has,
        # since gradients were last exchanged.
        self._complete: set[GradParam] = set()
        self._changed: set[GradParam] = set()
        self._number = 0
        self._exchanged, self._backwards = exchanged, 0
        self._kernels = kernels or Kernels()
        self._hooks = [h for param in self.params for h in self._attach(param)]
        if anchor is not None:
            leaf: Any = anchor
            # Its gradient is nobody's: cleared, or it would be added to in every backward.
            self._hooks.append(leaf.register_post_accumulate_grad_hook(_clear_grad))
            reach = weakly(self._reach_anchor)
            self._hooks.append(leaf.register_post_accumulate_grad_hook(reach))

    def _attach(self, param: GradParam) -> list[Any]:
        parameter: Any = param.parameter  # torch has not typed its hooks
        ready = weakly(self._ready, param)
        hooks = [parameter.register_post_accumulate_grad_hook(ready)]
        if param.divisor != 1:  # before it is accumulated, as what is in ``grad`` may be averages
            divide = partial(_divide, param.divisor, param.degree > 1, self._kernels)
            hooks.append(parameter.register_hook(divide))
        return hooks

    def _reach_anchor(self) -> None:
        self._begin(self._latest())
        self._anchored = True

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank has waited for gradients, and for ``voting_s``."""
        return self.voting_s + self._exchange.waited_s

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def abandon(self) -> None:
        """Forgets a backward that failed halfway."""
        if self._active:
            self._exchange.abandon()
        self._active = False

    def began(self, forward: Forward) -> None:
        """A gradient has reached the output of ``forward``."""
        self._begin(forward)
        self._weighted = True

    def _begin(self, forward: Forward | None) -> None:
        if self._active:
            return
        self._active = True
        self._weighted = self._anchored = False
        self._synchronise = forward is None or forward.synchronise
        self._complete.clear()
        # What the last step has left pending uses ``grad``, which this backward adds to.
        self._exchange.reset()
        if self._synchronise:
            self._exchange.foresee()
        if forward is not None:
            self._watch.post(f"is in backward after forward {forward.announce().number}")
        Variable._execution_engine.queue_callback(self._finish)

    @property
    def averages_now(self) -> bool:
        """Whether a backward runs whose gradients ranks average."""
        return self._active and self._synchronise

    @property
    def unexchanged(self) -> bool:
        """Whether backwards were left unexchanged (``no_sync``), and none has exchanged since."""
        return self._backwards > 0

    def _ready(self, param: GradParam) -> None:
        if torch.is_grad_enabled() and not self._exchange.keeps_graphs:
            raise InputError(
                "backward(create_graph=True) asks for gradients that have gradients themselves, "
                "which those that travel in buckets have not: plan by priority (--schedule "
                "priority, schedule='priority'), or take by torch.autograd.grad what is to be "
                "derived again"
            )
        self._begin(self._latest())
        self._changed.add(param)
        if self._synchronise and param in self._complete and self._exchange.sent(param):
            raise RunError(
                f"parameter {param.name!r} got a gradient twice in one backward, the second after "
                "the first had been sent: use checkpoint(..., use_reentrant=False)"
            )
        self._complete.add(param)
        with torch.no_grad():
            if self._synchronise:
                self._exchange.ready(param)
            else:
                self._exchange.absorb(param)

    def _finish(self) -> None:
        """At the end of backward: sends the rest. Under the barrier also waits for all averages."""
        self._active = False
        if not (self._complete or self._anchored):
            self.taken = True  # torch.autograd.grad: no parameter has accumulated anything
            return
        self.taken = False
        self._check_weighted()
        self._backwards += 1
        if self._synchronise:
            with torch.no_grad():
                self._exchange_all()
            if self._exchanged is not None:
                self._exchanged(self._backwards)
            self._backwards = 0
        latest = self._latest()
        number = latest.announce().number if latest is not None else 0
        self._watch.post(f"has finished backward after forward {number} and not begun the next")

    def _exchange_all(self) -> None:
        self._number += 1
        # All of a parameter's ranks must agree on whether it is exchanged, and ranks may have used
        # different ones. A gradient that the user has taken away counts as none.
        used = [
            (p in self._changed and p.parameter.grad is not None) or self._exchange.holds(p)
            for p in self.params
        ]
        latest = self._latest()
        forward = latest.announce().number if latest is not None else 0
        order_digest = self._exchange.order_digest()
        # Reduced to the largest of all ranks: the largest x is minus the largest −x only where all
        # ranks have the same x.
        head = [self._number, -self._number, forward, -forward, order_digest, -order_digest]
        vector = torch.tensor(head + [int(u) for u in used], dtype=torch.int64, device="cpu")
        votes = self._control.all_reduce_max(vector, f"the end of backward after forward {forward}")
        # Not counted here: a rank that has all gradients itself need not wait for the votes.
        self._exchange.end(Votes(lambda: self._count(votes), votes.has_come))
        self._changed.clear()

    def _count(self, votes: PendingGather) -> set[GradParam]:
        """The parameters that some rank has a gradient for."""
        before = self._control.seconds
        (vector,) = votes.rows()
        self.voting_s += self._control.seconds - before
        if vector[0] != -vector[1] or vector[2] != -vector[3]:
            raise RunError(
                f"ranks end different backwards: one ends backward {-int(vector[1])} after forward "
                f"{-int(vector[3])}, another backward {int(vector[0])} after forward "
                f"{int(vector[2])}: every rank must call the model and backward equally often"
            )
        if vector[4] != -vector[5]:
            raise RunError(
                f"ranks have put parameters of different units together until backward "
                f"{int(vector[0])}: fully sharded units must be used in one order on every rank, "
                "and none skipped by what a rank's data are; MESHWRIGHT_DEBUG=1 names the first "
                f"that differs, {forbidding('fully_sharded')} plans without"
            )
        # ``strict``: all ranks have the same parameters, or they would not have begun.
        return {p for p, bit in zip(self.params, vector[6:], strict=True) if bit}

    def _check_weighted(self) -> None:
        latest = self._latest()
        if self._weighted:
            return
        if latest is None:
            self._tell_not_called()
            return
        counts = latest.counts()
        if len(set(counts)) > 1:
            raise RunError(
                f"ranks feed {', '.join(map(str, counts))} samples, and the loss was not computed "
                "from the model's output, where their weight enters: return what the loss needs "
                "from forward, in tensors, tuples, dicts or dataclasses"
            )

    def _tell_not_called(self) -> None:
        """Warns once of a model whose parameters are trained and which itself is never called."""
        if self._told_not_called or self._watch.rank != 0:
            return
        self._told_not_called = True
        warnings.warn(
            "the model's parameters got gradients and the model itself was not called, as where "
            "the loss comes from a method of its own, such as model.loss(x): nothing is known of "
            "the samples that ranks feed, so only equal shares train right, and buffers do not "
            "follow rank 0's: call model(x), whose forward may call that method",
            stacklevel=2,
        )


def _clear_grad(leaf: Tensor) -> None:
    leaf.grad = None


def _divide(
    divisor: float, exclusive: bool, kernels: Kernels, gradient: Tensor | None
) -> Tensor | None:
    """A hook on a gradient. ``exclusive`` says that nobody else has the tensor, as of a divided
    unit's kinds, whose ``kernels`` make it where they are eager."""
    # None where nothing of what the parameter was used for has gone on to the loss from this rank,
    # as where it has no samples and the next unit leaves it idle.
    if gradient is None:
        return None
    if (
        exclusive
        and kernels.eager
        and not gradient.requires_grad
        and gradient.layout is torch.strided
    ):
        dims = zip(gradient.shape, gradient.stride(), strict=True)
        # Elements of an expanded tensor lie in one place, and would be divided several times.
        if all(step or n < 2 for n, step in dims):
            gradient /= divisor  # in place, or a second one as large would be there for a moment
            return None  # which leaves it as it is now
    return gradient / divisor


class MicroBatchCheck:
    """Whether batches are cut as the plan asks for to keep its memory limit."""

    def __init__(self, plan: Plan) -> None:
        self._parts = plan.micro_batches if plan.goal.memory_limit_bytes is not None else 1

    def exchanged(self, backwards: int) -> None:
        """Gradients of so many backwards were exchanged together; warns once where they are fewer
        than planned. It trains right all the same."""
        if backwards >= self._parts:
            return
        parts, self._parts = self._parts, 1
        warnings.warn(
            f"the plan cuts each batch into {parts} micro-batches to keep its memory limit, and "
            f"{backwards} backward ran before gradients were exchanged: iterate over "
            f"meshwright.micro_batches(model, batch, {parts})",
            stacklevel=2,
        )


class LocalBatchCheck:
    """Whether this rank is fed as many samples as the plan has for it, where shares are planned."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._rank, self._planned = rank, 0
        if plan.local_batch_sizes:
            self._planned = plan.local_batch_size(rank)

    def satisfied(self) -> None:
        """Whoever feeds this rank knows the plan's shares, of batches of other sizes too."""
        self._planned = 0

    def fed(self, samples: int) -> None:
        """A forward in training got so many samples; warns once where they are more than planned.
        It trains right all the same. A last batch may be smaller."""
        if not self._planned or samples <= self._planned:
            return
        planned = self._planned
        self.satisfied()
        warnings.warn(
            f"rank {self._rank} was fed {samples} samples and the plan, made for ranks of unequal "
            f"speed, has {planned} for it, so that the others will wait: load "
            "plan.local_batch_size(rank) samples on each rank",
            stacklevel=2,
        )
