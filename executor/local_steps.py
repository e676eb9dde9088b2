"""Local steps: hosts train by themselves, and average what they have learnt now and then."""

# [Note: Local steps]
# Each host is a world by itself (comm/groups.py): headers, votes, gradients and statistics stay
# inside it, and its ranks train by the part of the plan that concerns a host
# (``Plan.inside_host``). What hosts exchange hangs on the end of each optimizer step, as that is
# where every loop comes by equally often on every rank. Which fragment leaves or arrives there
# follows from the number of the step alone (``LocalSteps.leaving``), so that all ranks issue the
# same collectives in one order.
#
# Those parameters of a fragment that the same ranks of a host hold alike are one flat tensor, of
# which each of these ranks has a part: it keeps the agreed copy and the outer momentum of that part
# only, sends that part only over the link between hosts, and what comes of it is gathered inside
# the host. So the link carries each parameter once, however many ranks a host has, and all ranks of
# a host go on from the same bits. Hosts have the same agreed copies, as an all-reduce leaves the
# same bits on all.
#
# All of it is issued by the thread that trains, on groups of its own.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..planner.cost.collectives import ring_bytes
from ..planner.schema.errors import InputError
from ..planner.schema.local_steps import LocalSteps
from .comm.broadcast import BufferPlace, tensors_at
from .comm.groups import Group, World
from .comm.two_way import gather_rows
from .comm.watchdog import Watchdog
from .gradients.buckets import GradParam
from .gradients.pending import bare

Issued = Callable[[str, int, Group], None]


class AgreedPart:
    """This rank's part of parameters that all ranks of ``inside`` hold alike: the copy that hosts
    agree on, and the momentum of the outer optimizer."""

    def __init__(self, params: Sequence[GradParam], inside: Group) -> None:
        self.inside = inside
        self._params = params
        tensors = [_real(param) for param in params]
        numel = sum(t.numel() for t in tensors)
        # Equal parts, as what is gathered from; the last may go beyond the end.
        self.size = -(-numel // inside.size)
        self._begin = self.size * inside.member
        dtype = tensors[0].dtype
        # In 16 bits the small steps of an average would be lost.
        self.dtype = dtype if dtype.itemsize >= 4 else torch.float32
        self.agreed = _real(self._params[0]).new_zeros(self.size, dtype=self.dtype)
        self.agree()
        self.momentum = torch.zeros_like(self.agreed)
        # What is sent, and what is made of what has come: pages of new memory each time would take
        # longer than what is computed in them.
        self._message = torch.zeros_like(self.agreed)

    def agree(self) -> None:
        """Makes what the parameters are now the agreed copy."""
        for own, part in self._overlaps():
            self.agreed[own].copy_(part)

    def moved(self) -> Tensor:
        """How far this rank's part of the parameters is from the agreed copy now, until the next
        call."""
        for own, part in self._overlaps():
            torch.sub(self.agreed[own], part, out=self._message[own])
        return self._message

    def kept(self) -> tuple[Tensor, ...]:
        """All that this holds beside the parameters."""
        return self.agreed, self.momentum, self._message

    def _overlaps(self) -> Iterator[tuple[slice, Tensor]]:
        """Where in this rank's part a tensor's elements lie, and these."""
        for own, param, first in self._places():
            yield own, _real(param).reshape(-1)[own.start - first : own.stop - first]

    def _places(self) -> Iterator[tuple[slice, GradParam, int]]:
        """Where in this rank's part elements of a parameter lie, and where its first one would."""
        start = -self._begin
        for param in self._params:
            first, start = start, start + _real(param).numel()
            own = slice(max(first, 0), min(start, self.size))
            if own.start < own.stop:
                yield own, param, first

    def write(self, part: Tensor, watch: Watchdog, issued: Issued, doing: str) -> None:
        """Makes the parameters what the ranks of the host have as their parts. Collective among
        them."""
        whole = part
        if self.inside.handle is not None:
            rows = part.new_empty(self.inside.size, self.size)
            issued(doing, ring_bytes("all_gather", self.inside.size, rows.nbytes), self.inside)
            work, _ = gather_rows(rows, part, self.inside)
            watch.wait(work, self.inside, doing)
            whole = rows.view(-1)
            if not self.inside.ascending:
                # torch gathers in the order of its own numbers. Parts are by member, as hosts may
                # number theirs in different orders.
                whole = torch.cat([rows[number] for number in self.inside.group_ranks])
        start = 0
        for param in self._params:
            tensor = _real(param)
            tensor.copy_(whole[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()
            # What autograd has saved of it is not what it saved any more.
            torch.autograd.graph.increment_version(param.parameter)

    def step(self, moved: Tensor, local: LocalSteps) -> Tensor:
        """The outer optimizer's step: SGD with Nesterov momentum, by how far hosts have ``moved``
        from the agreed copy in the mean, which is overwritten. This rank's part of the parameters
        after it."""
        # Of what is frozen by now hosts agree once more, and then it stays.
        for own, param, _ in self._places():
            if not param.parameter.requires_grad:
                self.momentum[own].zero_()
        self.momentum.mul_(local.outer_momentum).add_(moved)
        # As torch's SGD computes it.
        moved.add_(self.momentum, alpha=local.outer_momentum)
        self.agreed.sub_(moved, alpha=local.outer_lr)
        if local.mixing == 1:  # the agreed copy itself: the same bits on all hosts
            return self.agreed
        for own, part in self._overlaps():
            torch.lerp(part.to(self.dtype), self.agreed[own], local.mixing, out=moved[own])
        return moved


@dataclass
class _FragmentMessage:
    """What hosts add up, on its way; ``work`` is None when it has come."""

    tensor: Tensor
    work: dist.Work | None


class HostsApart:
    """What hosts average: the parameters, fragment by fragment, and at a round's end the buffers
    that training changes. ``waited_s`` are seconds that this rank has waited for other hosts."""

    def __init__(
        self,
        local: LocalSteps,
        world: World,
        watch: Watchdog,
        params: Sequence[GradParam],
        buffers: Sequence[BufferPlace],
        issued: Issued,
    ) -> None:
        assert world.apart is not None, "made where hosts train apart"
        self.local, self._world, self._watch, self._issued = local, world, watch, issued
        self._apart = world.apart
        self._params = [p for p in params if p.parameter.requires_grad]
        self._frozen = [p for p in params if not p.parameter.requires_grad]
        self.fragments = [self._parts_of(n) for n in range(len(local.fragments))]
        self._buffers = buffers
        self._in_flight: dict[int, list[_FragmentMessage]] = {}
        self.step_number = 0
        self.waited_s = 0.0

    def _parts_of(self, fragment: int) -> list[AgreedPart]:
        """What of a fragment can be one flat tensor."""
        kinds: dict[tuple[object, ...], list[GradParam]] = {}
        for param in self._params:
            if self.local.fragment_of(param.unit) == fragment:
                tensor = param.parameter
                kinds.setdefault((param.degree, tensor.dtype, tensor.device), []).append(param)
        return [AgreedPart(alike, self._world.agreed[alike[0].degree]) for alike in kinds.values()]

    def lasting(self) -> Iterator[Tensor]:
        """What is kept from step to step, one by one."""
        for part in chain.from_iterable(self.fragments):
            yield from part.kept()

    @torch.no_grad()
    def agree_before_first_step(self) -> None:
        """Until the first step hosts agree on the parameters as they are: weights may have been
        loaded since the plan was applied. All hosts load the same, as under any plan."""
        if self.step_number == 0:
            for part in chain.from_iterable(self.fragments):
                part.agree()

    @torch.no_grad()
    def stepped(self, finish_steps: Callable[[], None]) -> None:
        """The optimizer has made a step: what leaves now is sent, what is due is applied.
        ``finish_steps`` applies what a step has left for later."""
        self.step_number += 1
        leaving = self.local.leaving(self.step_number)
        arriving = self.local.arriving(self.step_number)
        if leaving is None and arriving is None:
            return
        finish_steps()
        if leaving is not None:
            self._send(leaving)
        if arriving is not None:
            self._apply(arriving)

    def _send(self, fragment: int) -> None:
        thawed = next((p for p in self._frozen if p.parameter.requires_grad), None)
        if thawed is not None:
            raise InputError(
                f"parameter {thawed.name!r} is trained since the plan with local steps was "
                "applied, and hosts would not average it: let it require a gradient before"
            )
        doing = self._doing(fragment)
        tensors = [part.moved() for part in self.fragments[fragment]]
        if self._ends_round(fragment):
            tensors += self._flat_buffers()
        self._in_flight[fragment] = [self._start(tensor, doing) for tensor in tensors]

    def _alike(self) -> list[list[Tensor]]:
        """The buffers that are averaged, those of one type together: one message for all of them,
        of which a network has a hundred."""
        found: dict[tuple[object, ...], list[Tensor]] = {}
        for buffer in tensors_at(self._buffers):
            if buffer.is_floating_point():
                found.setdefault((buffer.dtype, buffer.device), []).append(buffer)
        return list(found.values())

    def _flat_buffers(self) -> list[Tensor]:
        """Copies of them, each of one type flat."""
        return [torch.cat([b.reshape(-1) for b in alike]) for alike in self._alike()]

    def _set_buffers(self, sums: Iterable[Tensor]) -> None:
        """Makes them the means of what all hosts have added up; none where that has no buffers, as
        within a round."""
        for alike, total in zip(self._alike(), sums, strict=False):
            total.div_(self.local.hosts)
            means = torch.split(total, [buffer.numel() for buffer in alike])
            for buffer, mean in zip(alike, means, strict=True):
                buffer.copy_(mean.view_as(buffer))

    def _start(self, tensor: Tensor, doing: str) -> _FragmentMessage:
        sent = ring_bytes("all_reduce", self._apart.size, tensor.nbytes)
        self._issued(doing, sent, self._apart)
        work = dist.all_reduce(tensor, group=self._apart.handle, async_op=True)
        assert work is not None, "it was asked for"
        self._watch.follow(work, doing)
        return _FragmentMessage(tensor, work)

    def _apply(self, fragment: int) -> None:
        doing, parts = self._doing(fragment), self.fragments[fragment]
        sums = self._arrived(fragment)
        for part, total in zip(parts, sums, strict=False):
            new = part.step(total.div_(self.local.hosts), self.local)
            part.write(new, self._watch, self._issued, f"{doing} inside the host")
        self._set_buffers(sums[len(parts) :])
        del self._in_flight[fragment]

    def _arrived(self, fragment: int) -> list[Tensor]:
        """What hosts have added up of a fragment. Waits for it."""
        for message in self._in_flight[fragment]:
            if message.work is not None:
                self.waited_s += self._watch.wait(message.work, self._apart, self._doing(fragment))
                message.work = None
        return [message.tensor for message in self._in_flight[fragment]]

    def _ends_round(self, fragment: int) -> bool:
        return fragment == len(self.fragments) - 1

    def _doing(self, fragment: int) -> str:
        return f"the average over hosts of fragment {fragment}"

    # -- what is agreed on, and what is saved ------------------------------------------------------

    @contextmanager
    def agreed_values(self) -> Iterator[None]:
        """While inside, parameters are the copies that hosts agree on, and buffers that training
        changes the means of all hosts'. Collective over all ranks."""
        self.agree_before_first_step()
        own = [*map(_real, self._params), *chain.from_iterable(self._alike())]
        before = [tensor.clone() for tensor in own]
        with torch.no_grad():
            for part in (part for parts in self.fragments for part in parts):
                part.write(part.agreed, self._watch, self._issued, "the agreed parameters")
            self._average_buffers()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(own, before, strict=True):
                    tensor.copy_(value)

    def _average_buffers(self) -> None:
        doing = "the buffers of all hosts"
        sums = [self._start(tensor, doing) for tensor in self._flat_buffers()]
        for message in sums:
            assert message.work is not None
            self._watch.wait(message.work, self._apart, doing)
        self._set_buffers(message.tensor for message in sums)

    def state(self) -> dict[str, Any]:
        """What is needed to go on from here, besides the states of model and optimizer. Waits for
        what is on its way."""
        self.agree_before_first_step()
        parts = [part for parts in self.fragments for part in parts]
        return {
            "step": self.step_number,
            "round": self._round,
            "agreed": [part.agreed.clone() for part in parts],
            "momentum": [part.momentum.clone() for part in parts],
            "in_flight": {
                fragment: [tensor.clone() for tensor in self._arrived(fragment)]
                for fragment in self._in_flight
            },
        }

    def check(self, state: Any) -> str | None:
        """What does not fit in a state that was saved, or None."""
        parts = [part for parts in self.fragments for part in parts]
        if not isinstance(state, dict) or {"step", "agreed", "momentum", "in_flight"} - {*state}:
            return "says nothing of local steps"
        saved = [tuple(tensor.shape) for tensor in state["agreed"]]
        if saved != [tuple(part.agreed.shape) for part in parts]:
            return "holds agreed copies of other sizes"
        # What is on its way arrives at a step that follows from the round.
        if state["in_flight"] and state.get("round", self._round) != self._round:
            return "was saved in a round of other steps, with averages on their way"
        return None

    @property
    def _round(self) -> list[int]:
        """What the steps at which fragments leave and arrive follow from."""
        return [self.local.inner_steps, self.local.delay, *self.local.fragments]

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from what ``state`` gave."""
        parts = [part for parts in self.fragments for part in parts]
        for part, agreed, momentum in zip(parts, state["agreed"], state["momentum"], strict=True):
            part.agreed.copy_(agreed)
            part.momentum.copy_(momentum)
        for fragment in list(self._in_flight):
            self._arrived(fragment)  # what it was for is gone
        self.step_number = state["step"]
        # A state may have been loaded onto the host.
        self._in_flight = {
            fragment: [
                _FragmentMessage(tensor.to(self._apart.device, copy=True), None)
                for tensor in tensors
            ]
            for fragment, tensors in state["in_flight"].items()
        }


def _real(param: GradParam) -> Tensor:
    """A parameter's memory, of a complex one as pairs of real numbers."""
    tensor = bare(param.parameter).detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
