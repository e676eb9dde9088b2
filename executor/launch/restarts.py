"""Starting a run again that has lost a rank or a host: whether, how often, and in which words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ...planner.schema.cluster import Cluster
from ...planner.schema.errors import InputError, MemoryRunError, MeshwrightError, RunError
from ...planner.schema.profile import ModelProfile

if TYPE_CHECKING:  # the command line reads its options without torch
    from .processes import Ranks
    from .tasks import CheckpointSettings

Made = TypeVar("Made")
DEFAULT_RESTARTS = 3
"""What the command line allows where hosts may be lost."""
AGAIN_VARIABLE = "MESHWRIGHT_MAY_BE_AGAIN"
"""Set in jobs that a scheduler may start again without telling them."""

# [Note: What starts ranks again]
# Each attempt is one group of workers of torchrun's agent, which starts them, watches them and ends
# the others when one is lost. That it is started again is decided here and not by the agent
# (``max_restarts`` of its configuration), since
# - the agent repeats every failure, also one that is sure to come again (a script that does not
#   take its arguments, a plan that does not fit into memory), each after the seconds of a start;
# - on other hosts than before the ranks need another plan, which is made before they start;
# - the rendezvous by which agents of several hosts agree on who is there (c10d) numbers hosts as
#   they come, and a plan places ranks by the order of hosts; its store ends with the host that
#   keeps it, so that no run would outlive that host, while a launcher over ssh is on none of them.
# A script under plain torchrun has all of the agent's own (``--nnodes 1:2 --max-restarts 3``):
# ``auto_parallelize`` plans anew for the ranks that it finds, and ``mw.checkpoint`` goes on.


def may_be_again() -> bool:
    """Whether a scheduler may have started this run again after it had been lost."""
    return AGAIN_VARIABLE in os.environ or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


@dataclass(frozen=True)
class Restarts:
    """A run is started again after it has lost a rank or a host, at most ``most`` times.

    Over ssh it waits for its hosts to answer again. With ``min_nodes`` it goes on with as few as so
    many of them, and with more again when they are back, each time under a new plan for the same
    goal, made from the ``profile`` and the ``cluster`` of the plan (default: found by their
    fingerprints). Raises ``InputError``.
    """

    most: int = 0
    min_nodes: int | None = None
    profile: ModelProfile | None = None
    cluster: Cluster | None = None

    def __post_init__(self) -> None:
        if self.most < 0:
            raise InputError(
                f"{self.most} restarts (--max-restarts) cannot be: give 0 for none, or how many"
            )
        if self.min_nodes is not None and self.min_nodes < 1:
            raise InputError(f"--min-nodes {self.min_nodes} would leave no host: give at least 1")

    @property
    def wanted(self) -> bool:
        """Whether anything is asked for."""
        return self.most > 0 or self.min_nodes is not None

    def check(self, checkpoint: str | Path | None, hosts: int, launchers: int) -> None:
        """Raises ``InputError`` for a run that cannot be started again: one without checkpoints,
        and one with a launcher on each of several hosts. ``hosts`` are those over ssh, 0 for
        none."""
        if not self.wanted:
            return
        if checkpoint is None:
            raise InputError(
                "what is started again goes on from checkpoints, and none are kept: add "
                "--checkpoint FOLDER (checkpoint), or leave --max-restarts and --min-nodes "
                "(restarts) out"
            )
        if launchers > 1:
            raise InputError(
                "--max-restarts is for ranks that one launcher starts, and with --nnodes there is "
                "one on each host: use --hosts (hosts), or let what starts the launchers do it "
                "(Slurm: --slurm-option requeue)"
            )
        if self.min_nodes is not None and self.min_nodes > max(hosts, 0):
            raise InputError(
                f"--min-nodes {self.min_nodes} is more than the {hosts} hosts of --hosts: name as "
                "many, or ask for fewer"
            )


class RestartCount:
    """How often a run has been started again, and whether it is once more. ``steps`` are those of
    the whole training, where they are known."""

    def __init__(self, most: int, timeout_s: float | None = None, steps: int | None = None) -> None:
        self._most, self._made, self._steps = most, 0, steps
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._last: tuple[str, int | None] | None = None

    @property
    def left_s(self) -> float | None:
        """What is left of the run's time limit, where it has one."""
        if self._deadline is None:
            return None
        return max(self._deadline - time.monotonic(), 0.001)

    def after(self, error: MeshwrightError, step: int | None) -> str:
        """Says that the run is started again after ``error``, with the checkpoint of ``step`` as
        its latest (0: there is none; None: not known). Raises the error where it is not."""
        # What was wrong before anything ran, or does not fit into memory, is so the next time.
        repeats = not error.lost and (
            not isinstance(error, RunError) or isinstance(error, MemoryRunError)
        )
        late = self._deadline is not None and time.monotonic() >= self._deadline
        # All steps were made: what is wrong was found in what they came to.
        steps = self._steps
        ended = not error.lost and step is not None and steps is not None and step >= steps
        if not self._most or repeats or late or ended:
            raise error
        sentence = error.sentence if isinstance(error, MemoryRunError) else str(error)
        if not error.lost and self._last == (sentence, step):
            raise _with_more(
                error, "and so it was after a restart from the same step: it is not started again"
            )
        if self._made == self._most:
            raise _with_more(
                error,
                f"it has been started again {_times(self._most)}, as often as --max-restarts "
                f"allows: the same command {_from(step)}",
            )
        self._made += 1
        self._last = sentence, step
        anew = "; there is no checkpoint yet, so it begins anew" if step == 0 else ""
        return f"{sentence}; started again (restart {self._made} of {self._most}){anew}"


def _from(step: int | None) -> str:
    """Where a run goes on whose latest checkpoint is of ``step``, as in ``RestartCount.after``."""
    if step == 0:
        return "begins anew, as there is no checkpoint yet"
    return f"goes on from the latest whole checkpoint{f', of step {step}' if step else ''}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _with_more(error: MeshwrightError, more: str) -> MeshwrightError:
    """The error with more behind its sentence."""
    found: MeshwrightError
    if isinstance(error, MemoryRunError):
        found = MemoryRunError(f"{error.sentence}; {more}", error.details, error.limit_bytes)
    else:
        found = type(error)(f"{error}; {more}")
    return found.standing_for(error)


def run_with_restarts(
    attempt: Callable[[Ranks, CheckpointSettings | None], Made],
    ranks: Ranks,
    keeping: CheckpointSettings | None,
    restarts: Restarts,
    say: Callable[[str], None],
    steps: int | None = None,
) -> Made:
    """``attempt(ranks, keeping)``, again where it has lost one of this host's ranks; ``say`` is
    told why. Raises the error of the last. ``steps`` as in ``RestartCount``."""
    from ..checkpoint.latest import latest_whole

    count = RestartCount(restarts.most, ranks.timeout_s, steps)
    ranks = replace(ranks, limit_s=ranks.timeout_s)
    while True:
        try:
            return attempt(ranks, keeping)
        except MeshwrightError as error:
            step = None
            if keeping is not None:
                step = latest_whole(Path(keeping.folder), by_size=True).step
            say(count.after(error, step))
        ranks = replace(ranks, timeout_s=count.left_s)
        if keeping is not None:
            keeping = msgspec.structs.replace(keeping, restarted=True)
