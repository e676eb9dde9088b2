"""How much of a gradient lossy exchanges send: the share of its energy (squared L2 norm).

A few backwards of different batches, with what an exchange leaves behind added to the next, as it
does in training. Weights stay as they are meanwhile, so successive gradients are more alike than in
training.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

import torch
from torch import Tensor, nn

from ..executor.gradients.int8 import dequantize, quantize
from ..models.workload import Batch, Workload
from ..planner.schema.profile import FidelityProfile, LossyExchange

STEPS = 4
# Ratios at which each lossy exchange is measured.
RATIOS: dict[LossyExchange, tuple[float, ...]] = {
    # A parameter is sent every fourth or second step.
    "dropped": (0.25, 0.5),
    "topk": (0.01, 0.05, 0.1, 0.25),
    # All of its elements, rounded.
    "int8": (1.0,),
}
# So many elements of a parameter are looked at; a share of 1% of them is 655.
SAMPLED = 65_536


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

    def _sampled(self, name: str, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1).float()
        if flat.numel() <= SAMPLED:
            return flat
        # The same places every time: what is left behind is added to the gradient there.
        if name not in self._places:
            self._places[name] = torch.randint(flat.numel(), (SAMPLED,), device=flat.device)
        return flat[self._places[name]]

    def _exchange(self, exchange: LossyExchange, name: str, ratio: float, gradient: Tensor) -> None:
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
        return tuple(
            FidelityProfile(
                exchange=exchange,
                ratios=ratios,
                kept=tuple(self._kept(exchange, ratio, own) for ratio in ratios),
            )
            for exchange, ratios in RATIOS.items()
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


def _real(values: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, which have the same energy."""
    return torch.view_as_real(values) if values.is_complex() else values


def _energy(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
