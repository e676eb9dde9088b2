"""How much of a gradient lossy exchanges send: the share of its energy (squared L2 norm).

A few backwards of different batches, with what an exchange leaves behind added to the next, as it
does in training. Weights stay as they are meanwhile, so successive gradients are more alike than in
training.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

from ..executor.gradients.int8 import dequantize, quantize
from ..executor.gradients.low_rank import Directions
from ..models.workload import Batch, Workload
from ..planner.cost.exchange import matrix_sides, thin_share
from ..planner.schema.profile import FidelityProfile

STEPS = 4
ByElement = Literal["dropped", "topk", "int8"]
"""The lossy exchanges that look at elements one by one."""
# Ratios at which each of them is measured.
RATIOS: dict[ByElement, tuple[float, ...]] = {
    # A parameter is sent every fourth or second step.
    "dropped": (0.25, 0.5),
    "topk": (0.01, 0.05, 0.1, 0.25),
    # All of its elements, rounded.
    "int8": (1.0,),
}
# Ranks at which products of thin matrices are measured, which have another ratio for each unit.
RANKS = (1, 2, 4)
# Larger ratios save little: 16 bits are half, whatever the gradient.
LARGEST_RATIO = 0.25
# So many elements of a parameter are looked at; a share of 1% of them is 655.
SAMPLED = 65_536
# Of a matrix so many rows and columns: many more than the ranks.
SAMPLED_SIDE = 512
# How often directions are turned by the first gradient before anything counts, as they are turned
# by the steps of a training before.
TURNS = 4


class Fidelity:
    """Sums over backwards: the energy of all parameters' gradients, and what exchanges send."""

    def __init__(self, model: nn.Module) -> None:
        # Some models keep empty ones, of which nothing can be sent.
        named = model.named_parameters()
        self._parameters = {n: p for n, p in named if p.requires_grad and p.numel()}
        self._left: dict[tuple[str, str, float], Tensor] = {}
        self._sent: dict[tuple[str, str, float], float] = {}
        self._whole: dict[tuple[str, str, float], float] = {}
        self._energy: dict[str, float] = dict.fromkeys(self._parameters, 0.0)
        self._places: dict[str, Tensor] = {}
        self._sides: dict[str, tuple[Tensor, Tensor]] = {}
        self._directions: dict[tuple[str, int], Directions] = {}
        self._steps = 0

    def add(self) -> None:
        """Counts the gradients that the parameters have now."""
        self._steps += 1
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            whole = _real(parameter.grad.detach())
            gradient = self._sampled(name, whole)
            self._energy[name] += _energy(whole)
            for exchange, ratios in RATIOS.items():
                for ratio in ratios:
                    self._exchange(exchange, name, ratio, gradient)
            if whole.ndim > 1:
                matrix = self._sampled_matrix(name, whole)
                for rank in (r for r in RANKS if r <= min(matrix.shape)):
                    self._send_thin(name, rank, matrix)

    def _sampled(self, name: str, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).float()
        if flat.numel() <= SAMPLED:
            return flat
        # The same places every time: what is left behind is added to the gradient there.
        if name not in self._places:
            self._places[name] = torch.randint(flat.numel(), (SAMPLED,), device=flat.device)
        return flat[self._places[name]]

    def _sampled_matrix(self, name: str, gradient: Tensor) -> Tensor:
        matrix = gradient.reshape(matrix_sides(gradient.shape)).float()
        if name not in self._sides:
            self._sides[name] = _places(matrix, 0), _places(matrix, 1)
        rows, columns = self._sides[name]
        return matrix[rows][:, columns]

    def _send_thin(self, name: str, rank: int, matrix: Tensor) -> None:
        """Counts what a thin matrix has of a gradient and of what was left so far."""
        key, directions = ("low_rank", name, float(rank)), self._directions.get((name, rank))
        if directions is None:
            rows, columns = matrix.shape
            directions = Directions(rows, columns, rank, matrix.dtype, matrix.device, name)
            self._directions[name, rank] = directions
            for _ in range(TURNS):
                sent = directions.thin(matrix.clone(), torch.zeros_like(matrix))
                directions.take(sent, torch.empty_like(matrix))
        left = self._left.get(key, torch.zeros_like(matrix))
        energy = _energy(matrix + left)
        thin = directions.thin(matrix.clone(), left)
        directions.take(thin, torch.empty_like(matrix))
        # Directions are orthonormal: what the thin matrix has is what its product has.
        self._count(key, energy, _energy(thin), left)

    def _exchange(self, exchange: ByElement, name: str, ratio: float, gradient: Tensor) -> None:
        """Counts what the exchange sends of a gradient and of what it left behind so far."""
        key = exchange, name, ratio
        whole = gradient + self._left[key] if key in self._left else gradient.clone()
        if exchange == "int8":
            left = whole - dequantize(quantize(whole), whole.dtype)
            energy = _energy(whole)
            self._count(key, energy, energy - _energy(left), left)
            return
        if exchange == "topk":
            sent = whole.abs().topk(max(1, round(ratio * whole.numel()))).indices
        elif exchange == "dropped":
            leaves = self._steps % round(1 / ratio) == 0
            sent = torch.arange(whole.numel() if leaves else 0, device=whole.device)
        else:
            assert_never(exchange)
        energy, sent_energy = _energy(whole), _energy(whole[sent])
        whole[sent] = 0.0
        self._count(key, energy, sent_energy, whole)

    def _count(
        self, key: tuple[str, str, float], energy: float, sent_energy: float, left: Tensor
    ) -> None:
        self._whole[key] = self._whole.get(key, 0.0) + energy
        self._sent[key] = self._sent.get(key, 0.0) + sent_energy
        self._left[key] = left

    def energy(self, names: Iterable[str]) -> float:
        """The mean squared norm of those parameters' gradients."""
        return sum(self._energy.get(name, 0.0) for name in names) / max(self._steps, 1)

    def profiles(self, names: Sequence[str]) -> tuple[FidelityProfile, ...]:
        """What the exchanges keep of those parameters; none where all are always sent whole."""
        own = [n for n in names if n in self._parameters and self._energy[n] > 0]
        # The executor sends normalisation parameters and biases whole.
        if not any(self._parameters[n].ndim > 1 for n in own):
            return ()
        by_element = tuple(
            FidelityProfile(
                exchange=exchange,
                ratios=ratios,
                kept=tuple(self._kept(exchange, ratio, own) for ratio in ratios),
            )
            for exchange, ratios in RATIOS.items()
        )
        return (*by_element, *self._thin_profile(own))

    def _thin_profile(self, names: Sequence[str]) -> Iterator[FidelityProfile]:
        """What thin matrices of each rank keep, by the share of the elements that they have."""
        sides = [matrix_sides(p.shape) for n in names if (p := self._parameters[n]).ndim > 1]
        elements = sum(rows * columns for rows, columns in sides)
        found: dict[float, float] = {}
        for rank in RANKS:
            sent = (r * c * thin_share(r, c, min(rank, r, c)) for r, c in sides)
            if (ratio := sum(sent) / elements) <= LARGEST_RATIO:
                found.setdefault(ratio, self._kept("low_rank", float(rank), names))
        if found:
            yield FidelityProfile(
                exchange="low_rank", ratios=tuple(found), kept=tuple(found.values())
            )

    def _kept(self, exchange: str, ratio: float, names: Sequence[str]) -> float:
        sent = 0.0
        for name in names:
            key = (exchange, name, ratio)
            whole = self._parameters[name].ndim <= 1 or not self._whole.get(key)
            sent += self._energy[name] * (1.0 if whole else self._sent[key] / self._whole[key])
        return min(sent / sum(self._energy[name] for name in names), 1.0)


def measure_fidelity(workload: Workload, batches: Sequence[Batch]) -> Fidelity:
    """Runs a backward for each batch. Gradients are cleared afterwards."""
    model = workload.model
    found = Fidelity(model)
    for batch in batches:
        model.zero_grad()
        output = model(*batch.args, **batch.kwargs)
        workload.loss(output, batch.target).backward()  # type: ignore[no-untyped-call]
        found.add()
    model.zero_grad()
    return found


def _places(matrix: Tensor, dim: int) -> Tensor:
    """Which rows or columns of a matrix are looked at: the same every time."""
    size = matrix.shape[dim]
    count = min(size, SAMPLED_SIDE)
    return torch.arange(count, device=matrix.device) * size // count


def _real(values: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have the same energy."""
    return torch.view_as_real(values) if values.is_complex() else values


def _energy(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
