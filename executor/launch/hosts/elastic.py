"""A run over ssh that outlives its ranks and hosts: started again on the hosts that answer, under a
plan for as many."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ....planner.schema.errors import (
    InfeasibleError,
    InputError,
    MeshwrightError,
    NoRoomError,
    RunError,
)
from ....planner.schema.plan import Plan
from ....planner.schema.record import save
from ....planner.schema.recorded import RecordedSteps
from ....planner.schema.report import RunReport
from ..replan import Replanner, RoomForPlan, what_changed
from ..restarts import RestartCount, Restarts
from .over_ssh import (
    StoppedAtCheckpoint,
    StoppedBySignal,
    launch_over_ssh,
    signals_raised,
)
from .protocol import HostWork
from .reach import AwayHosts, unreached
from .settings import Hosts

# Where too few hosts answer, they have so long to come back until the run is given up.
RETURN_S = 60.0
_ASK_AGAIN_S = 2.0


def launch_elastic(
    work: HostWork,
    hosts: Hosts,
    restarts: Restarts,
    at_end: Callable[[RunReport | None], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None,
    recorded: Callable[[Plan, list[RecordedSteps]], None] | None = None,
) -> RunReport | None:
    """``launch_over_ssh``, again where a rank or a host was lost, from the latest checkpoint.

    Of ``restarts`` with ``min_nodes`` it goes on with the hosts that answer, and stops at a
    checkpoint when others are back, to go on with them too. Raises the error of the last attempt,
    ``RunError`` where too few hosts are left and ``InfeasibleError`` where no plan fits on them.
    """
    attempt = partial(launch_over_ssh, at_end=at_end, say=say, recorded=recorded)
    run = _ElasticRun(work, hosts, restarts, attempt, say)
    with signals_raised():
        try:
            return run.conduct()
        except StoppedBySignal as stopped:  # between two attempts
            raise SystemExit(128 + stopped.number) from None


class _ElasticRun:
    """The attempts of one run."""

    def __init__(
        self,
        work: HostWork,
        hosts: Hosts,
        restarts: Restarts,
        attempt: Callable[..., RunReport | None],
        say: Callable[[str], None],
    ) -> None:
        self._work, self._hosts, self._attempt, self._say = work, hosts, attempt, say
        steps = None if work.script else work.steps
        self._count = RestartCount(restarts.most, work.timeout_s, steps)
        self._all = range(len(hosts.names))
        self._fewest = restarts.min_nodes or len(hosts.names)
        self._replanner: Replanner | None = None
        if self._fewest < len(self._all):
            self._replanner = Replanner.for_run(work.plan, work.per_host, restarts)
        # Hosts that came back and cannot take part: they are not asked any more.
        self._refused: set[int] = set()
        # Those of the latest attempt that ran.
        self._ran: tuple[int, ...] = ()
        # The latest checkpoint as the attempt began.
        self._begun_at: int | None = None
        # With the plan of the latest attempt.
        self._room = RoomForPlan(
            work.plan, lambda: self._replanner or Replanner.for_plan(work.plan, restarts), say
        )
        # The latest checkpoint that host 0 told of; None: it has told of none, 0: there is none.
        self._step: int | None = None

    def conduct(self) -> RunReport | None:
        """From the first attempt to the one that comes to its end."""
        numbers = self._first() if self._replanner is not None else tuple(self._all)
        while True:
            work, hosts = self._part(numbers)
            self._begun_at = self._step
            away = AwayHosts(set(self._all) - set(numbers) - self._refused, self._hosts)
            try:
                return self._attempt(work, hosts, stops=self._stops(away))
            except StoppedAtCheckpoint:
                back = self._named(sorted(away.back))
                self._say(
                    f"{back} {'answers' if len(away.back) == 1 else 'answer'} again: stopped at "
                    f"the checkpoint of step {self._step}, to go on with more hosts"
                )
                self._ran = numbers
            except MeshwrightError as error:
                if self._has_room_by(error, numbers):
                    continue
                self._handle(error, numbers)
            finally:
                away.end()
            # Before any host has begun, whose training is in the folder is still to be found out.
            if self._ran:
                self._work = msgspec.structs.replace(self._work, resume=True, restarted=True)
            numbers = self._answering()

    def _handle(self, error: MeshwrightError, numbers: tuple[int, ...]) -> None:
        """Raises the error, unless the run can go on after it."""
        broken = {numbers[i] for i in error.broken}
        back = set(numbers) - set(self._ran)
        if not broken and isinstance(error, InputError):
            broken = back
        # Or with its ranks, before the run has come any further with it.
        failed = None if error.host is None or error.of_peer else numbers[error.host]
        if not broken and failed in back and (self._step or 0) == (self._begun_at or 0):
            broken = back & {failed}
        enough = len(set(self._all) - self._refused - broken) >= self._fewest
        if broken and enough and self._ran and not error.lost:
            # A training that runs must not end for a host that has come back without its disk.
            self._refused |= broken
            self._say(f"{error}; goes on without {self._named(sorted(broken))}")
            return
        self._say(self._count.after(error, self._step))
        if not error.broken:
            self._ran = numbers

    def _has_room_by(self, error: MeshwrightError, numbers: tuple[int, ...]) -> bool:
        """Whether another plan was made for the same hosts, within what they have free. Raises the
        error where that is what it wants and cannot be."""
        # A training that runs goes on without hosts that have come back with too little.
        if not isinstance(error, NoRoomError) or (self._ran and set(numbers) - set(self._ran)):
            return False
        # Without a replanner it is not known which of the cluster's devices go with a host.
        elastic = self._replanner is not None
        replanner = self._room.plan_after(error, numbers if elastic else ())
        if elastic:
            self._replanner = replanner
        return True

    def _stops(self, away: AwayHosts) -> Callable[[int | None], bool]:
        """Whether to stop here, told the step of a checkpoint that was found."""

        def stops(step: int | None) -> bool:
            away.look()
            if step is None:
                return False
            # What is first told of was there before.
            is_new = self._step is not None and step > self._step
            self._step = step
            over = not self._work.script and step >= self._work.steps
            return is_new and not over and bool(away.back)

        return stops

    # -- which hosts -------------------------------------------------------------------------------

    def _first(self) -> tuple[int, ...]:
        """The hosts to begin with. Raises ``InputError`` where they are too few."""
        away = unreached(self._all, self._hosts)
        here = tuple(number for number in self._all if number not in away)
        if len(here) < self._fewest:
            raise InputError(self._too_few(here, away))
        for why in away.values():
            self._say(f"{why}; the run begins without it")
        return here

    def _answering(self) -> tuple[int, ...]:
        """The hosts to go on with. Raises ``RunError`` where too few are back in time."""
        until = time.monotonic() + RETURN_S
        while True:
            away = unreached([n for n in self._all if n not in self._refused], self._hosts)
            here = tuple(n for n in self._all if n not in away and n not in self._refused)
            if len(here) >= self._fewest:
                return here
            if time.monotonic() >= until:
                raise RunError(
                    f"{self._too_few(here, away)}; the same command goes on from the latest whole "
                    f"checkpoint in {self._work.checkpoint}"
                )
            time.sleep(_ASK_AGAIN_S)

    def _too_few(self, here: Sequence[int], away: dict[int, MeshwrightError]) -> str:
        why = next(iter(away.values()), "others cannot take part")
        if self._replanner is None:
            return (
                f"{len(here)} of {len(self._all)} hosts answer, and the plan needs all of them "
                f"({why}): with --min-nodes N it would go on with N"
            )
        return (
            f"{len(here)} of {len(self._all)} hosts answer, and --min-nodes asks for "
            f"{self._fewest} ({why})"
        )

    def _named(self, numbers: Sequence[int]) -> str:
        labels = [self._hosts.labels[number] for number in numbers]
        return ", ".join(f"host {label}" for label in labels)

    # -- what they run -----------------------------------------------------------------------------

    def _part(self, numbers: tuple[int, ...]) -> tuple[HostWork, Hosts]:
        """The work for those hosts, under a plan for them."""
        plan = self._plan_for(numbers)
        counts = tuple(self._work.per_host[number] for number in numbers)
        work = msgspec.structs.replace(
            self._work, plan=plan, per_host=counts, timeout_s=self._count.left_s
        )
        return work, self._hosts.only(numbers)

    def _plan_for(self, numbers: tuple[int, ...]) -> Plan:
        if self._replanner is None:
            return self._room.plan
        try:
            plan = self._replanner.plan_for(numbers)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"{len(numbers)} of {len(self._all)} hosts are left ({self._named(numbers)}) and "
                f"no plan fits there: {error}; when more are back, the same command goes on from "
                f"the latest whole checkpoint in {self._work.checkpoint}"
            ) from None
        if plan != self._room.plan:
            kept = self._keep(plan, len(numbers))
            changed = what_changed(self._room.plan, plan)
            self._say(
                f"planned again for {len(numbers)} of {len(self._all)} hosts: {changed}{kept}"
            )
            self._room.plan = plan
        return plan

    def _keep(self, plan: Plan, hosts: int) -> str:
        """Writes the plan beside the folder of checkpoints, where that is on this machine too;
        every checkpoint under it has it in any case."""
        folder = Path(self._hosts.where) / str(self._work.checkpoint)
        path = folder.with_name(f"{folder.name}-plan-of-{hosts}-hosts.json")
        if not path.parent.is_dir():
            return ""
        try:
            save(plan, path)
        except (OSError, InputError):
            return ""
        return f"; written to {path}"
