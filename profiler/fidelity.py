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
# Of a larger matrix it is not measured what its products of thin ones keep. They are made of whole
# matrices: what a part of one keeps at a rank is much more than the whole does.
LARGEST_MATRIX = 2**27
# Seconds for each element, of one core (measured: 1.2 to 1.4e-8).
THIN_S = 1.5e-8
# How often directions are turned by the first gradient before anything counts, as they are turned
# by the steps of a training before.
TURNS = 4


class Fidelity:
    """Sums over backwards: the energy of all parameters' gradients, and what exchanges send."""

    def __init__(self, model: nn.Module, *, thin: bool = True) -> None:
        self._measures_thin = thin
        # Some models keep empty ones, of which nothing can be sent.
        named = model.named_parameters()
        self._parameters = {n: p for n, p in named if p.requires_grad and p.numel()}
        self._left: dict[tuple[str, str, float], Tensor] = {}
        self._sent: dict[tuple[str, str, float], float] = {}
        self._whole: dict[tuple[str, str, float], float] = {}
        self._energy: dict[str, float] = dict.fromkeys(self._parameters, 0.0)
        self._places: dict[str, Tensor] = {}
        self._matrices: dict[str, _Matrix] = {}
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
            if self._measures_thin and whole.ndim > 1 and whole.numel() <= LARGEST_MATRIX:
                self._send_thin(name, whole.reshape(matrix_sides(whole.shape)).float())

    def _sampled(self, name: str, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).float()
        if flat.numel() <= SAMPLED:
            return flat
        # The same places every time: what is left behind is added to the gradient there.
        if name not in self._places:
            self._places[name] = torch.randint(flat.numel(), (SAMPLED,), device=flat.device)
        return flat[self._places[name]]

    def _send_thin(self, name: str, matrix: Tensor) -> None:
        """Counts what thin matrices have of a gradient and of what was left so far."""
        if name not in self._matrices:
            self._matrices[name] = _Matrix(name, matrix)
        for rank, (energy, sent) in self._matrices[name].send(matrix).items():
            self._count(("low_rank", name, float(rank)), energy, sent)

    def _exchange(self, exchange: ByElement, name: str, ratio: float, gradient: Tensor) -> None:
        """Counts what the exchange sends of a gradient and of what it left behind so far."""
        key = exchange, name, ratio
        whole = gradient + self._left[key] if key in self._left else gradient.clone()
        if exchange == "int8":
            left = whole - dequantize(quantize(whole), whole.dtype)
            energy = _energy(whole)
            self._left[key] = left
            self._count(key, energy, energy - _energy(left))
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
        self._left[key] = whole
        self._count(key, energy, sent_energy)

    def _count(self, key: tuple[str, str, float], energy: float, sent_energy: float) -> None:
        self._whole[key] = self._whole.get(key, 0.0) + energy
        self._sent[key] = self._sent.get(key, 0.0) + sent_energy

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
        matrices = [n for n in names if self._parameters[n].ndim > 1]
        if not all(n in self._matrices for n in matrices):
            return
        sides = [matrix_sides(self._parameters[n].shape) for n in matrices]
        found: dict[float, float] = {}
        for rank in RANKS:
            if (ratio := thin_share(sides, rank)) <= LARGEST_RATIO:
                found.setdefault(ratio, self._kept("low_rank", float(rank), names))
        if found:
            yield FidelityProfile(
                exchange="low_rank", ratios=tuple(found), kept=tuple(found.values())
            )

    def _kept(self, exchange: str, ratio: float, names: Sequence[str]) -> float:
        sent = 0.0
        for name in names:
            key = (exchange, name, ratio)
            if self._parameters[name].ndim <= 1:  # always sent whole
                sent += self._energy[name]
            elif whole := self._whole[key]:  # else no element that was looked at says anything
                sent += self._energy[name] * self._sent[key] / whole
        return min(sent / sum(self._energy[name] for name in names), 1.0)


class _Matrix:
    """One parameter's gradients as a matrix, added up over backwards, and what thin matrices of
    each rank have sent of that."""

    def __init__(self, name: str, first: Tensor) -> None:
        rows, columns = first.shape
        self._total = torch.zeros_like(first)
        self._ways = [
            Directions(rows, columns, min(rank, rows, columns), first.dtype, first.device, name)
            for rank in RANKS
        ]
        for _ in range(TURNS):
            for way, thin in zip(self._ways, self._thin(first, []), strict=True):
                way.turn(thin)
        none = first.new_empty(rows, 0), first.new_empty(columns, 0)
        self._sent: list[tuple[Tensor, Tensor]] = [none for _ in RANKS]

    def _thin(self, matrix: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The thin matrices of a whole one for each rank, and its products with ``others``: all by
        looking through it once."""
        by_rows = self._ways[0].by_rows  # all ranks take turns alike
        bases = [way.right if by_rows else way.left for way in self._ways]
        columns = [*bases, *others]
        found = (matrix if by_rows else matrix.T) @ torch.cat(columns, 1)
        return torch.split(found, [each.shape[1] for each in columns], dim=1)

    def send(self, gradient: Tensor) -> dict[int, tuple[float, float]]:
        """By rank the energy of a gradient with what was left so far, and of what was sent of
        that."""
        self._total += gradient
        # What is left is the total without the products that were sent, which nobody makes.
        by_rows = self._ways[0].by_rows
        made = [(left, right) if by_rows else (right, left) for left, right in self._sent]
        products = self._thin(self._total, [along for _, along in made])
        # Summed up in 64 bits it would take as long as all the rest.
        total_energy, found = float(torch.linalg.vector_norm(self._total)) ** 2, {}
        for i, (rank, way) in enumerate(zip(RANKS, self._ways, strict=True)):
            across, along = made[i]
            basis = way.right if by_rows else way.left
            thin = products[i] - across @ (along.T @ basis)
            crossed = float((products[len(RANKS) + i] * across).double().sum())
            squared = float(((across.T @ across) * (along.T @ along)).double().sum())
            # Directions are orthonormal: what the thin matrix has is what its product has.
            sent = _energy(thin)
            found[rank] = max(total_energy - 2 * crossed + squared, sent), sent
            pair = torch.cat([across, thin], 1), torch.cat([along, basis], 1)
            self._sent[i] = pair if by_rows else (pair[1], pair[0])
            way.turn(thin)
        return found


def thin_takes(model: nn.Module) -> tuple[float, float]:
    """(bytes, seconds on a CPU) that measuring thin matrices takes beside backwards: a gradient of
    32 bits of every matrix that is added up, and looking through it."""
    sizes = [p.numel() for p in model.parameters() if p.requires_grad and p.ndim > 1]
    elements = sum(size for size in sizes if size <= LARGEST_MATRIX)
    return 4.0 * elements, THIN_S * elements


def measure_fidelity(
    workload: Workload, batches: Sequence[Batch], *, thin: bool = True
) -> Fidelity:
    """Runs a backward for each batch. Gradients are cleared afterwards. Where there is no room or
    time for it, it is not measured what ``thin`` matrices keep."""
    model = workload.model
    found = Fidelity(model, thin=thin)
    for batch in batches:
        model.zero_grad()
        output = model(*batch.args, **batch.kwargs)
        workload.loss(output, batch.target).backward()  # type: ignore[no-untyped-call]
        found.add()
    model.zero_grad()
    return found


def _real(values: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have the same energy."""
    return torch.view_as_real(values) if values.is_complex() else values


def _energy(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
