"""A job of Slurm: a script for ``sbatch``, in which ``srun`` starts one launcher on each node.

Options and variables are those of Slurm's manual pages, sbatch(1) and srun(1), of 20.11 and later.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ....planner.schema.errors import InputError, RunError
from .command import HostCommand
from .settings import check_environment

# An option as sbatch reads it from a line of the script: its own quotes are not the shell's, so a
# value has none, nor what would begin a comment.
_OPTION = re.compile(r"(?:--)?([a-z][a-z0-9-]*)(?:=([A-Za-z0-9_.,:%@+*/=&|()\[\]-]+))?", re.ASCII)
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)


@dataclass(frozen=True)
class SlurmJob:
    """``command`` on as many nodes as it has hosts, in ``folder``, with ``environment`` besides the
    variables of the shell that submits it. ``options`` are sbatch's, such as ``partition=gpu``;
    ``gpus`` is how many to ask for on each node."""

    command: HostCommand
    folder: str
    name: str = "meshwright"
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None

    def __post_init__(self) -> None:
        check_environment(self.environment)
        if not JOB_NAME.fullmatch(self.name):
            raise InputError(
                f"{self.name!r} is no name of a job: take letters, digits, '-', '_' and '.'"
            )

    def script(self) -> str:
        """The script's text. Raises ``InputError`` for an option that it cannot hold."""
        nodes = len(self.command.per_host)
        # On each node: its number is known only there, so a shell there puts it in.
        line = " ".join(self.command.words('"$SLURM_NODEID"', '"$1"', shlex.quote))
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH {option}" for option in self._options(nodes)),
                "set -euo pipefail",
                *(f"export {n}={shlex.quote(v)}" for n, v in self.environment.items()),
                f"cd {shlex.quote(self.folder)}",
                "# Node 0 of the step is the first of the list; ports differ from job to job.",
                'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
                "first=${nodes%%$'\\n'*}",
                "port=$((20000 + SLURM_JOB_ID % 10000))",
                "# One task on each node, which has all of the node's processors for its ranks.",
                f"exec srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 "
                '--cpus-per-task="$SLURM_CPUS_ON_NODE" --kill-on-bad-exit=1 '
                f'bash -c {shlex.quote(f"exec {line}")} meshwright "$first:$port"',
                "",
            ]
        )

    def _options(self, nodes: int) -> list[str]:
        ours = {
            "job-name": self.name,
            "nodes": str(nodes),
            "ntasks-per-node": "1",
            "cpus-per-task": str(max(self.command.per_host)),
        }
        if self.gpus is not None:
            ours["gpus-per-node"] = str(self.gpus)
        theirs: dict[str, str | None] = {}
        for option in self.options:
            found = _OPTION.fullmatch(option)
            if not found:
                raise InputError(
                    f"--slurm-option {option!r} cannot stand in a script: write it like "
                    "partition=gpu, without spaces or quotes"
                )
            if found[1] in ("nodes", "ntasks-per-node"):
                raise InputError(
                    f"--slurm-option {option!r} is decided by the launch: say --nnodes, and "
                    "--nproc for the ranks of each node"
                )
            theirs[found[1]] = found[2]
        merged = {**ours, **theirs}
        return [f"--{name}" + (f"={value}" if value else "") for name, value in merged.items()]


def submit(script: Path) -> str:
    """Gives a script to ``sbatch``; what that says. Raises ``RunError`` where it refuses."""
    try:
        done = subprocess.run(
            ["sbatch", str(script.absolute())], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise RunError(
            f"there is no sbatch on this machine: run 'sbatch {shlex.quote(str(script))}' where "
            "there is"
        ) from None
    if done.returncode:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise RunError(f"sbatch refused {script}: {said}")
    return done.stdout.strip()
