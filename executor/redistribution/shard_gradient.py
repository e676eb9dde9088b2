"""The gradient of a divided parameter: a shard that answers with the norm of the whole.

``torch.nn.utils.clip_grad_norm_`` asks every gradient for its norm. A shard that answered with its
own would clip by too little, and differently on each rank. With the norm over all members of its
group unmodified clipping and logging are right under every plan.
"""

# ruff: noqa: A002, N803 - arguments are named as torch names them

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.groups import Group
from ..comm.watchdog import Watchdog


class Members:
    """Those who hold the other shards of a parameter, and how to combine figures with them. Of
    several in the ``group`` that hold the same shard one is ``counted``."""

    def __init__(self, group: Group, watch: Watchdog, *, counted: bool = True) -> None:
        self.group, self.watch, self.counted = group, watch, counted

    def reduce(self, values: Tensor, op: Any) -> Tensor:
        """All members' ``values`` combined, in place. Collective over the group."""
        doing = "the norm of a divided parameter's gradient"
        self.watch.issued(doing, self.group)
        work = dist.all_reduce(values, op=op, group=self.group.handle, async_op=True)
        self.watch.wait(work, self.group, doing)
        return values


class ShardGradient(Tensor):
    """A member's shard of a gradient. Norms are the whole gradient's, and collective over the
    group's members; all else is done to the shard as to any tensor.
    """

    members: Members

    @staticmethod
    def of(shard: Tensor, members: Members) -> ShardGradient:
        """``shard`` (sharing its memory) as a member's part of a gradient."""
        gradient = shard.as_subclass(ShardGradient)
        gradient.members = members
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(getattr(kind, "answers_first", False) for kind in types):
            return NotImplemented
        answer = _ANSWERS.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            result = answer(*args, **(kwargs or {})) if answer else func(*args, **(kwargs or {}))
        if func in _KEEPING and type(result) is Tensor:
            return ShardGradient.of(result, args[0].members)
        return result


def full_norms(shards: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each gradient whose shard (or, as a plain tensor, whole) is given: scalars."""
    norms = [_own_norm(shard, order, dtype) for shard in shards]
    groups: dict[int, list[int]] = {}
    for i, shard in enumerate(shards):
        if isinstance(shard, ShardGradient):
            groups.setdefault(id(shard.members.group), []).append(i)
    # One all-reduce for each group, in the order of its first shard: parameters have one order on
    # every rank, so the groups' collectives do too.
    for indices in groups.values():
        members = shards[indices[0]].members  # type: ignore[attr-defined]
        own = torch.stack([norms[i] for i in indices])
        for i, norm in zip(indices, _combine(own, order, members), strict=True):
            norms[i] = norm
    return norms


def _own_norm(shard: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if shard.numel() == 0:  # the largest of nothing is an error in torch
        return torch.zeros((), dtype=dtype or shard.dtype, device=shard.device)
    norm: Tensor = torch.linalg.vector_norm(shard, order, dtype=dtype)
    # Of ranks that hold the same shard all but one add nothing, or it would count several times.
    counted = not isinstance(shard, ShardGradient) or shard.members.counted
    return norm if counted else torch.zeros_like(norm)


def _combine(own: Tensor, order: float, members: Members) -> Tensor:
    """Members' norms to those of the whole. In double precision, as powers overflow early."""
    wide = own.double()
    if order == math.inf:
        combined = members.reduce(wide, dist.ReduceOp.MAX)
    elif order == 0:
        combined = members.reduce(wide, dist.ReduceOp.SUM)
    else:
        combined = members.reduce(wide.pow(order), dist.ReduceOp.SUM).pow(1 / order)
    return combined.to(own.dtype)


def _vector_norm(
    x: Tensor,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **out: Any,
) -> Any:
    if dim is not None or keepdim or out or not _summable(ord):
        return torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype, **out)
    return full_norms([x], float(ord), dtype)[0]


def _norm(
    input: Tensor,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    order = 2 if p is None or p == "fro" else p
    if dim is not None or keepdim or out is not None or not _summable(order):
        return torch.norm(input, p, dim, keepdim, out=out, dtype=dtype)
    return full_norms([input], float(order), dtype)[0]


def _linalg_norm(
    A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    if ord is not None or dim is not None or keepdim or "out" in options:
        return torch.linalg.norm(A, ord, dim, keepdim, **options)
    return full_norms([A], 2.0, options.get("dtype"))[0]


def _foreach_norm(self: list[Tensor], ord: Any = 2, dtype: Any = None) -> Any:
    if not _summable(ord):
        return torch._foreach_norm(self, ord, dtype)
    plain = [i for i, t in enumerate(self) if not isinstance(t, ShardGradient)]
    norms: list[Any] = list(self)
    if plain:
        whole = torch._foreach_norm([self[i] for i in plain], ord, dtype)
        for i, norm in zip(plain, whole, strict=True):
            norms[i] = norm
    shards = [i for i, t in enumerate(self) if isinstance(t, ShardGradient)]
    for i, norm in zip(shards, full_norms([self[i] for i in shards], ord, dtype), strict=True):
        norms[i] = norm
    return norms


def _summable(order: Any) -> bool:
    """Whether norms of that order combine from the members' own."""
    return isinstance(order, int | float) and order >= 0


def _unscale(self: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A gradient scaler must skip a step on all members or on none."""
    torch._amp_foreach_non_finite_check_and_unscale_(self, found_inf, inv_scale)
    groups = {id(t.members.group): t.members for t in self if isinstance(t, ShardGradient)}
    for members in groups.values():
        members.reduce(found_inf, dist.ReduceOp.MAX)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}

# What gives a copy or an alias of the same shard, which keeps its knowledge. All else (a sum, say)
# is no gradient of this parameter any more, and a plain tensor.
_KEEPING = {
    Tensor.detach,
    Tensor.clone,
    torch.clone,
    torch.detach,
    Tensor.to,
    Tensor.float,
    Tensor.double,
    Tensor.half,
    Tensor.bfloat16,
    Tensor.data.__get__,  # type: ignore[attr-defined]
}
