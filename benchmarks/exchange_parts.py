"""Compute alone, unit by unit, for the bound of ``benchmarks/exchange.py``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from meshwright.models.spec import UnitSpec
from meshwright.models.workload import Batch
from torch import nn

TIMES = 5
"""A step alone is measured so often, after one that does not count."""


class Times(NamedTuple):
    """Seconds of forward and backward by unit, of the update, and of the whole step."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    update_s: float
    step_s: float


class Parts:
    """When each unit's forward began and its last gradient was there. Units without parameters
    count to the one before them. ``sizes`` are bytes of parameters, ``modules`` the units'."""

    def __init__(self, system: Any, units: Sequence[UnitSpec]) -> None:
        self.system = system
        model: nn.Module = system.model
        seen: set[nn.Parameter] = set()
        self.began: list[float] = []
        self.ready: list[float] = []
        self.sizes: list[int] = []
        self.modules: list[tuple[str, ...]] = []
        for unit in units:
            modules = [model.get_submodule(path) for path in unit.modules]
            mine = [p for m in modules for p in m.parameters() if p not in seen]
            if not mine:
                continue
            seen.update(mine)
            self._watch(len(self.sizes), modules[0], mine)
            self.sizes.append(sum(p.numel() * p.element_size() for p in mine))
            self.modules.append(unit.modules)
            self.began.append(0.0)
            self.ready.append(0.0)

    def _watch(self, k: int, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        def began(*_: object) -> None:
            self.began[k] = time.perf_counter()

        def ready(_: nn.Parameter) -> None:
            self.ready[k] = time.perf_counter()

        module.register_forward_pre_hook(began)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(ready)

    def times(self, batch: Batch, slowest: Callable[[float], float]) -> Times:
        """Medians of a few steps; the whole step is the slowest rank's, parts are scaled to it."""
        rows = [self._step(batch) for _ in range(TIMES + 1)][1:]
        step_s = slowest(median(row.step_s for row in rows))
        update_s = median(row.update_s for row in rows)
        forward = np.median([row.forward for row in rows], axis=0)
        backward = np.median([row.backward for row in rows], axis=0)
        scale = (step_s - update_s) / (forward.sum() + backward.sum())
        return Times(tuple(forward * scale), tuple(backward * scale), update_s, step_s)

    def _step(self, batch: Batch) -> Times:
        system = self.system
        start = time.perf_counter()
        value = system.workload.loss(system.model(*batch.args, **batch.kwargs), batch.target)
        middle = time.perf_counter()
        value.backward()
        back = time.perf_counter()
        system.optimizer.step()
        system.optimizer.zero_grad()
        end = time.perf_counter()
        # Where branches end in another order, a unit's time counts to the one that comes later.
        edges = np.maximum.accumulate([start, *self.began[1:], middle])
        downs = np.maximum.accumulate([middle, *self.ready[:0:-1], back])
        return Times(tuple(np.diff(edges)), tuple(np.diff(downs)[::-1]), end - back, end - start)
