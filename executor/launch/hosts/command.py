"""The command that each host runs where no ssh of ours starts it: as lines to paste, under Slurm,
under Kubernetes."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .settings import Hosts, python_path

# Where hosts meet, in lines that are only shown: torchrun's own default.
PORT = 29500


@dataclass(frozen=True)
class HostCommand:
    """``meshwright launch`` as every host runs it, but for its number and where hosts meet.

    ``python`` are the words that start Python, ``plan`` is the plan's file on the hosts,
    ``options`` are written ``--name=value``, ``per_host`` are the numbers of ranks of the hosts.
    """

    python: Sequence[str]
    plan: str
    options: Sequence[str]
    script: Sequence[str]
    per_host: Sequence[int]

    def words(self, node_rank: str, rendezvous: str, quote: Callable[[str], str]) -> list[str]:
        """The command's words, ``quote`` applied to all but the two that may stand for values."""
        counts = self.per_host
        each = counts[:1] if len(set(counts)) == 1 else counts
        before = [
            *(*self.python, "-m", "meshwright", "launch", self.plan),
            *(f"--nnodes={len(counts)}", f"--nproc={','.join(map(str, each))}", *self.options),
        ]
        return [
            *map(quote, before),
            f"--node-rank={node_rank}",
            f"--rendezvous={rendezvous}",
            *map(quote, self.script),
        ]


def lines_to_paste(command: HostCommand, hosts: Hosts) -> list[str]:
    """What would run on each host, as lines of a POSIX shell there."""
    host, port = hosts.meeting
    place = shlex.quote(f"{host or hosts.labels[0]}:{port or PORT}")
    variables = {**python_path(), **hosts.told}
    told = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    lines: list[str] = []
    for number, name in enumerate(hosts.names):
        words = command.words(str(number), place, shlex.quote)
        lines.append(f"# on {name}")
        lines.append(f"cd {shlex.quote(hosts.where)} && {' '.join(['env', *told, *words])}")
    return lines
