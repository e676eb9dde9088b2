"""Every combination of options, evaluated: what the solvers are held against.

Written from the definitions in ``cost.step_time`` and ``memory.unit_memory`` for whole arrays of
combinations at once, independently of the rows and constraints that the solvers use.
"""

import itertools
from typing import NamedTuple

import msgspec
import numpy as np
from meshwright.planner.cost.budget import energy_budget, gpu_seconds_limit, idle_s, lost_energy
from meshwright.planner.cost.ownership import group_samples
from meshwright.planner.memory.timeline import FIELD
from meshwright.planner.memory.unit_memory import MemoryModel
from meshwright.planner.schema.options import ties_agree
from meshwright.planner.solve.evaluate import limits_bytes
from meshwright.planner.solve.unit_options import unit_options

CHUNK = 40_000
WHOLE = dict.fromkeys(("column", "pair"), "whole")
"""What units of these styles need of their input; others have needs of their own."""


class Best(NamedTuple):
    """The least objective (infinite if nothing is feasible), the least without limits, how many
    combinations there were, where the best was found, the least peak bytes and device-seconds."""

    objective_s: float
    unlimited_s: float
    combinations: int
    micro_batches: int
    message_bytes: int
    decisions: tuple
    least_bytes: float = np.inf
    least_gpu_seconds: float = np.inf


def combinations(problem):
    """How many there are, over all models."""
    problem = problem.placed()
    total = 0
    for model in problem.cost_models():
        sizes = [len(o) for o in options_of(model, problem)]
        total += int(np.prod([float(s) for s in sizes]))
    return total


def options_of(model, problem):
    units = range(len(model.profile.units))
    return [unit_options(model, k, problem.capability) for k in units]


def best(problem):
    """The best of all combinations."""
    problem = problem.placed()
    found = Best(np.inf, np.inf, 0, 0, 0, ())
    for model in problem.cost_models():
        table = _Table(model, options_of(model, problem), problem.schedule)
        for chosen in table.chunks():
            objective, fits, peaks, gpu = table.judge(chosen)
            low = int(np.where(fits, objective, np.inf).argmin())
            found = found._replace(
                unlimited_s=min(found.unlimited_s, objective.min()),
                combinations=found.combinations + len(chosen),
                least_bytes=min(found.least_bytes, peaks.min()),
                least_gpu_seconds=min(found.least_gpu_seconds, gpu.min()),
            )
            if fits[low] and objective[low] < found.objective_s:
                decisions = tuple(o[n] for o, n in zip(table.options, chosen[low], strict=True))
                found = found._replace(
                    objective_s=float(objective[low]),
                    micro_batches=model.micro_batches,
                    message_bytes=model.message_bytes,
                    decisions=decisions,
                )
    return found


class _Table:
    def __init__(self, model, options, schedule):
        self.model, self.options, self.schedule = model, options, schedule
        self.memory = MemoryModel(model)
        self.count = len(options)
        self.costs = [[model.unit(k, o) for o in row] for k, row in enumerate(options)]
        self.edges = [
            [[model.edge(e, s, t) for t in options[b]] for s in options[a]]
            for e, (a, b) in enumerate(model.ends)
        ]

    def chunks(self):
        sizes = [len(o) for o in self.options]
        total = int(np.prod(sizes, dtype=np.int64))
        for begin in range(0, total, CHUNK):
            flat = np.arange(begin, min(begin + CHUNK, total))
            chosen = np.stack(np.unravel_index(flat, sizes), axis=1)
            keep = np.ones(len(chosen), dtype=bool)
            for k, units in enumerate(self.model.ties):
                for other in units:
                    if k < other:
                        agree = self._agree(k, other)
                        keep &= agree[chosen[:, k], chosen[:, other]]
            if keep.any():
                yield chosen[keep]

    def _agree(self, a, b):
        return np.array(
            [
                [
                    ties_agree((self.model.profile.units[a], self.model.profile.units[b]), (x, y))
                    for y in self.options[b]
                ]
                for x in self.options[a]
            ]
        )

    def unit(self, chosen, figure):
        """[combination, unit] of a figure of a unit's cost."""
        columns = [
            np.array([figure(k, o, c) for o, c in zip(row, costs, strict=True)])[chosen[:, k]]
            for k, (row, costs) in enumerate(zip(self.options, self.costs, strict=True))
        ]
        return np.stack(columns, axis=1).astype(float)

    def entry(self, chosen, figure, largest=False, at_source=False):
        """[combination, unit] of a figure of the edges into a unit, summed or the largest, or of
        those out of it."""
        found = np.zeros(chosen.shape)
        for e, ((a, b), costs) in enumerate(zip(self.model.ends, self.edges, strict=True)):
            values = np.array([[figure(c) for c in row] for row in costs], dtype=float)
            mine = np.where(self._there(chosen, e), 0.0, values[chosen[:, a], chosen[:, b]])
            k = a if at_source else b
            found[:, k] = np.maximum(found[:, k], mine) if largest else found[:, k] + mine
        return found

    def _there(self, chosen, e):
        """For each combination whether an earlier unit needed what edge ``e`` brings alike (where
        all edges have the same features)."""
        edges, ends = self.model.profile.edges, self.model.ends
        b, there = ends[e][1], np.zeros(len(chosen), dtype=bool)
        for other, (a, first) in enumerate(ends):
            same = msgspec.structs.replace(edges[other], target=edges[e].target) == edges[e]
            if same and a == ends[e][0] and (first, other) < (b, e):
                needs = [[(o.layout, WHOLE.get(o.style, o.style)) for o in self.options[k]]
                         for k in (first, b)]  # fmt: skip
                alike = np.array([[x == y for y in needs[1]] for x in needs[0]])
                there |= alike[chosen[:, first], chosen[:, b]]
        return there

    def judge(self, chosen):
        """(objective, whether all limits are kept, peak bytes of the fullest position,
        device-seconds) of each combination."""
        model, goal = self.model, self.model.goal
        step = self.steps(chosen)
        idle = self.unit(chosen, lambda k, o, c: idle_s(model, k, o)).sum(axis=1)
        gpu = model.world_size * step - idle
        lost = self.unit(chosen, lambda k, o, c: lost_energy(model, k, o)).sum(axis=1)
        peaks, fits = self.fits(chosen)
        fits &= gpu <= gpu_seconds_limit(model) * (1 + 1e-9)
        fits &= lost <= energy_budget(model) + 1e-12
        if goal.time_limit_s is not None:
            fits &= step <= goal.time_limit_s * (1 + 1e-9)
        return (step if goal.objective == "time" else gpu), fits, peaks, gpu

    def steps(self, chosen):
        """Seconds of a step, by the formulas as docs/planner.md states them."""
        issued = self.unit(chosen, lambda k, o, c: c.host_s).sum(axis=1)
        issued += self.entry(chosen, lambda c: c.host_s).sum(axis=1)
        return np.maximum(self._device_steps(chosen), issued)

    def _device_steps(self, chosen):

        def on(link, name):
            def figure(k, o, c):
                each = getattr(c, name)
                return each.seconds if each.link == link else 0.0

            return self.unit(chosen, figure)

        def moved(link, name):
            def figure(c):
                each = getattr(c, name)
                return each.seconds if each.link == link else 0.0

            return self.entry(chosen, figure)

        f = self.unit(chosen, lambda k, o, c: c.forward_s)
        b = self.unit(chosen, lambda k, o, c: c.backward_s)
        u = self.unit(chosen, lambda k, o, c: c.update_s)
        links = range(2)
        inner_f = [on(x, "inner_forward") for x in links]
        inner_b = [on(x, "inner_backward") + on(x, "released") for x in links]
        entry_f = [moved(x, "forward") for x in links]
        entry_b = [moved(x, "backward") for x in links]
        sent = [on(x, "exchange") for x in links]
        blocking_f, blocking_b = sum(inner_f) + sum(entry_f), sum(inner_b) + sum(entry_b)
        whole = (f + b + blocking_f + blocking_b).sum(axis=1)
        first = (self.model.micro_batches - 1) * whole
        if self.schedule == "barrier":
            end = (b + blocking_b).sum(axis=1)
            for x in links:
                late = self._late(b, inner_b, entry_b, sent, x)
                end = np.maximum(end, late.max(axis=1))
            return first + (f + u + blocking_f).sum(axis=1) + end
        end = whole + u.sum(axis=1)
        inner = [inner_f[x] + inner_b[x] for x in links]
        entry = [entry_f[x] + entry_b[x] for x in links]
        for x in links:
            slices = self.unit(
                chosen, lambda k, o, c, x=x: c.slice_s if c.exchange.link == x else 0.0
            )
            late = self._late(f + b + u, inner, entry, sent, x)
            for j in range(self.count - 1):
                waits = np.where(sent[x][:, j] > 0, slices[:, j + 1 :].max(axis=1), 0.0)
                late[:, j] += waits
            end = np.maximum(end, late.max(axis=1))
        return first + end

    def _late(self, own, inner, entry, sent, link):
        other, late = 1 - link, np.zeros(own.shape)
        for j in range(self.count):
            late[:, j] = (
                (inner[link] + entry[link]).sum(axis=1)
                + (own + inner[other])[:, j:].sum(axis=1)
                + entry[other][:, j + 1 :].sum(axis=1)
                + sent[link][:, : j + 1].sum(axis=1)
            )
        return late

    def fits(self, chosen):
        """(peak of the fullest position, whether every position keeps its limit at every point of
        the timeline)."""
        model = self.model
        limits = limits_bytes(model)
        keep, most = np.ones(len(chosen), dtype=bool), np.zeros(len(chosen))
        moved = (
            self.entry(chosen, lambda c: c.received_bytes, largest=True),
            self.entry(chosen, lambda c: c.returning_bytes, largest=True, at_source=True),
            self.entry(chosen, lambda c: c.kept_bytes),
        )
        seen = set()
        layouts = sorted({o.layout for row in self.options for o in row})
        for position, limit in enumerate(limits):
            there = {y: group_samples(model.counts, y)[position] for y in layouts}
            key = (limit, tuple(there.values()))
            if key not in seen:
                seen.add(key)
                peak = np.ceil(self._peak(chosen, there, moved) - 1e-6)
                most = np.maximum(most, peak)
                keep &= peak <= limit
        return most, keep

    def _peak(self, chosen, samples, moved):
        def held(i):
            return self.unit(
                chosen, lambda k, o, c: self.memory.unit(k, o, samples[o.layout]).column[FIELD[i]]
            )

        weights = held("weights") + held("optimizer") + held("residual")
        gradients, saved, comm_buffers = held("gradients"), held("saved"), held("comm_buffers")
        maps = held("map_gradients") + held("new_grad") - held("never_together")
        workspace, exchanged, renewed = held("workspace"), held("bucketed"), held("update_temp")
        leaving = held("exchange_temp")
        part = self.unit(chosen, lambda k, o, c: samples[o.layout] is not None)
        received, returning, kept = (each * part for each in moved)
        saved = saved + kept
        neighbours = {
            f"neighbours_{n}": np.zeros(chosen.shape) for n in ("forward", "backward", "update")
        }
        for one in self.memory.overlaps:
            figures, found = held(one.field), np.zeros(chosen.shape)
            for at, of in zip(one.at, one.of, strict=True):
                found[:, at] += figures[:, of]
            neighbours[one.point] = neighbours[one.point] + found
        always = weights.sum(axis=1)
        open_ = self._kinds(chosen) * self.model.message_bytes * (not self.model.sliced)
        closed = self.unit(chosen, self._closes) * self.model.message_bytes
        to_come = exchanged.cumsum(axis=1) - exchanged
        own = gradients.sum(axis=1)
        every = own + comm_buffers.sum(axis=1)
        many = self.model.micro_batches > 1
        peak = always + every
        behind = np.zeros(len(chosen))
        for k in range(self.count):
            behind = behind + saved[:, k]
            work = behind + workspace[:, k]
            later = gradients[:, k:].sum(axis=1)
            past = comm_buffers[:, k + 1 :].sum(axis=1)
            alive = (own if many else later) + past
            before = own if many else 0.0
            if self.model.sliced and not many:
                before = later - gradients[:, k] + past
            there = work + received[:, k] + neighbours["neighbours_forward"][:, k]
            peak = np.maximum(peak, always + before + there)
            there = behind + neighbours["neighbours_backward"][:, k]
            filling = np.minimum(to_come[:, k], open_ - closed[:, k])
            if k > self.model.last_trained:
                filling = np.zeros(len(chosen))  # no bucket before the first gradient
            busy = np.maximum(workspace[:, k] + maps[:, k], returning[:, k])
            peak = np.maximum(peak, always + alive + filling + there + busy)
            left = alive + behind - saved[:, k] + comm_buffers[:, k] + leaving[:, k]
            peak = np.maximum(peak, always + left + neighbours["neighbours_backward"][:, k])
            if self.model.sliced:
                every = later + past + comm_buffers[:, k] + behind - saved[:, k]
                every = every + neighbours["neighbours_update"][:, k]
            peak = np.maximum(peak, always + every + renewed[:, k])
        return peak

    def _closes(self, k, option, _):
        """Whether a parameter's gradient is too large for a bucket with others."""
        if self.model.sliced or option.layout.groups == 1:
            return False
        owned = self.model.owned[k]
        return any(p.trainable and p.bytes > self.model.message_bytes for p in owned)

    def _kinds(self, chosen):
        """How many layouts exchange gradients."""
        layouts = sorted({o.layout for row in self.options for o in row if o.layout.groups > 1})
        return sum(
            self.unit(chosen, lambda k, o, c, y=y: o.layout == y).max(axis=1) for y in layouts
        )


def every_decision(problem):
    """All decisions of a very small problem, one by one (to check this module with)."""
    problem = problem.placed()
    for model in problem.cost_models():
        for decisions in itertools.product(*options_of(model, problem)):
            agree = all(
                ties_agree(
                    (model.profile.units[k], model.profile.units[u]), (decisions[k], decisions[u])
                )
                for k, units in enumerate(model.ties)
                for u in units
                if k < u
            )
            if agree:
                yield model, decisions
