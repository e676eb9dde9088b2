"""Exchange of low rank: a gradient leaves as the product of two thin matrices; what that leaves out
is added to the next gradient.

PowerSGD (Vogels et al., arXiv 1905.13727) sends one of them, waits, and sends the other. Here a
step sends one and the next step the other (ACP-SGD, Zhang et al., ICDCS 2023): one all-reduce
a step, of half the bytes.
"""

# [Note: One thin matrix a step]
# T_i = g_i + e_i is what rank i has to send of a parameter: its gradient, as a matrix of rows and
# columns as it lies in memory, and what was left before. All peers have the same orthonormal
# columns V, and rank i sends P_i = T_i·V, of as many columns as the rank is. The mean of these, P,
# stands for the gradient P·Vᵀ, which is the mean of the T_i in the directions V; T_i - P_i·Vᵀ is
# left. In the next step the directions are those of P: U, its columns made orthonormal, and rank i
# sends Q_i = T_iᵀ·U, of which the mean Q stands for U·Qᵀ; and so on with V made of Q. As gradients
# change slowly that is a power iteration, half of it in each step: directions turn to those in
# which gradients are largest.
#
# All peers make directions and gradients of the same sums by the same operations, so they have the
# same bits where processors, libraries and numbers of threads are the same. Products of matrices
# and decompositions may round in another way elsewhere: the planner offers this among equal devices
# only.

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.cost.exchange import matrix_sides
from ...planner.simulate.slicing import SliceSpec
from ..comm.buffers import alias_for_comm
from ..comm.watchdog import Watchdog
from .buckets import GradParam
from .feedback import LossyGradGroup
from .flat_shard import flat
from .slices import Slice


class Directions:
    """The directions in which one matrix of gradients is sent: orthonormal columns for its rows
    (``left``) and for its columns (``right``), alike on all peers. ``by_rows`` says that the next
    thin matrix has the matrix's rows, and so the directions ``right``."""

    def __init__(
        self,
        rows: int,
        columns: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> None:
        # On the host and from the name: the same on all peers, and no random state is touched.
        generator = torch.Generator("cpu").manual_seed(crc32(name.encode()))

        def drawn(size: int) -> Tensor:
            values = torch.randn(size, rank, generator=generator, dtype=torch.float64, device="cpu")
            return _orthonormal(values).to(device, dtype)

        self.left, self.right = drawn(rows), drawn(columns)
        self.by_rows = True

    @property
    def numel(self) -> int:
        """Elements of the next thin matrix."""
        return (self.left if self.by_rows else self.right).numel()

    def thin(self, values: Tensor, residual: Tensor, *, on_stream: bool = False) -> Tensor:
        """The thin matrix of ``values`` and the ``residual`` of those before, in which what it
        leaves out is put. Values are not needed after that, and changed. Where it is not finite the
        residual stays: that shows on all ranks, and must not stay for later steps. With
        ``on_stream`` the host does not wait for what it launches."""
        with _as_given(values):
            # The values themselves, where they have as many bits as directions.
            total = values.to(self.left.dtype).add_(residual)
            made = self.of(total)
            finite = torch.isfinite(made).all()
            if not on_stream and not finite:
                return made
            left_out = total.addmm_(*self._product(made), alpha=-1)
            if on_stream:
                torch.where(finite, left_out.to(residual.dtype), residual, out=residual)
            else:
                residual.copy_(left_out)
        return made

    def of(self, total: Tensor) -> Tensor:
        """The thin matrix of a whole one: that in the present directions."""
        return total @ self.right if self.by_rows else total.T @ self.left

    def _product(self, thin: Tensor) -> tuple[Tensor, Tensor]:
        """The two matrices whose product is what a thin one stands for."""
        return (thin, self.right.T) if self.by_rows else (self.left, thin.T)

    def take(self, mean: Tensor, into: Tensor) -> None:
        """Writes the gradient that a ``mean`` of thin matrices stands for, and turns the directions
        to it."""
        with _as_given(into):
            if into.dtype == mean.dtype:
                torch.mm(*self._product(mean), out=into)
            else:
                into.copy_(torch.mm(*self._product(mean)))
        self.turn(mean)

    def turn(self, mean: Tensor) -> None:
        """Turns the directions of the other side to a thin matrix."""
        # Of nothing, and of what is not finite, no directions can be made.
        tells = torch.isfinite(mean).all() & mean.any()
        turned = _orthonormal(torch.nan_to_num(mean, nan=0.0, posinf=0.0, neginf=0.0))
        if self.by_rows:
            self.left = torch.where(tells, turned, self.left)
        else:
            self.right = torch.where(tells, turned, self.right)
        self.by_rows = not self.by_rows

    def state(self) -> dict[str, Any]:
        """Copies of all of it."""
        return {"left": self.left.clone(), "right": self.right.clone(), "by_rows": self.by_rows}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a ``state``; what has other sizes was of another plan, and says nothing."""
        if (state["left"].shape, state["right"].shape) != (self.left.shape, self.right.shape):
            return
        self.left = torch.empty_like(self.left).copy_(state["left"])
        self.right = torch.empty_like(self.right).copy_(state["right"])
        self.by_rows = bool(state["by_rows"])


def _as_given(values: Tensor) -> torch.autocast:
    """Products in the type of what is multiplied, in a forward under autocast too."""
    return torch.autocast(values.device.type, enabled=False)


def _orthonormal(columns: Tensor) -> Tensor:
    made: Tensor = torch.linalg.qr(columns).Q
    return made


def _directions_of(param: GradParam) -> Directions:
    """Those of a parameter's gradient, before anything was sent."""
    rows, columns = matrix_sides(param.parameter.shape)
    dtype = torch.promote_types(param.parameter.dtype, torch.float32)
    rank = min(param.rank, rows, columns)
    return Directions(rows, columns, rank, dtype, param.parameter.device, param.name)


class LowRankSlice(Slice):
    """The thin matrices of several gradients, one after another in one message."""

    def __init__(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> None:
        super().__init__(params, slice_spec)
        # A member of a group may have nothing of a parameter: nor have its peers then.
        some = [param for param in params if param.parameter.numel()]
        self.directions = {param: _directions_of(param) for param in some}

    @property
    def bytes(self) -> int:
        return sum(d.numel * d.left.element_size() for d in self.directions.values())

    @property
    def shared_bytes(self) -> int:
        # In the mean of two steps, and as if the members of a divided parameter had equally much.
        return ceil(sum(p.ratio * p.shared_bytes for p in self.params))

    def send_thin(self, thin: Sequence[Tensor]) -> None:
        """Starts the sum of thin matrices. Collective, in the order of all slices."""
        if not thin:
            return
        group = self.params[0].group
        self._wire = torch.cat([each.reshape(-1) for each in thin])
        self._arrived = False
        if group.handle is not None:
            self._comm_tensors = [alias_for_comm(self._wire)]
            self.work = dist.all_reduce(self._comm_tensors[0], group=group.handle, async_op=True)

    def wait_and_average(
        self, gradients: dict[GradParam, Tensor], watch: Watchdog, doing: str
    ) -> float:
        if self._arrived:
            return 0.0
        assert self._wire is not None
        group = self.params[0].group
        waited = watch.wait(self.work, group, doing)
        self._wire.div_(group.size)
        means = torch.split(self._wire, [d.numel for d in self.directions.values()])
        for (param, directions), mean in zip(self.directions.items(), means, strict=True):
            thin = mean.view(-1, directions.left.shape[1])
            directions.take(thin, as_matrix(gradients[param]))
        self._finish()
        return waited


def as_matrix(gradient: Tensor) -> Tensor:
    """A gradient as the matrix that is sent, in its own memory."""
    return flat(gradient).view(matrix_sides(gradient.shape))


class LowRankGradGroup(LossyGradGroup):
    """Gradients that are sent as products of thin matrices; what these leave out is held."""

    def _slice(self, params: Sequence[GradParam], slice_spec: SliceSpec) -> Slice:
        if params[0].whole:
            return Slice(params, slice_spec)
        return LowRankSlice(params, slice_spec)

    def start(self, one: Slice) -> None:
        if not isinstance(one, LowRankSlice):
            super().start(one)
            return
        one.send_thin([
            directions.thin(
                as_matrix(self.gradients[param]), as_matrix(self.held(param)),
                on_stream=param.group.on_stream,
            )
            for param, directions in one.directions.items()
        ])  # fmt: skip


class LowRankState:
    """What the groups of low rank share: the directions of all their parameters."""

    name = "low_rank"

    def __init__(self, grad_groups: Sequence[LowRankGradGroup]) -> None:
        slices = (one for group in grad_groups for one in group.slices)
        self._directions = {
            param.name: directions
            for one in slices
            if isinstance(one, LowRankSlice)
            for param, directions in one.directions.items()
        }

    def begin(self) -> None:
        """Directions turn as averages come: nothing is to do before a backward."""

    def end(self) -> None:
        """Nor after one."""

    def state(self) -> dict[str, Any]:
        return {"directions": {name: each.state() for name, each in self._directions.items()}}

    def load(self, state: dict[str, Any]) -> None:
        for name, saved in state["directions"].items():
            if name in self._directions:
                self._directions[name].load(saved)
