"""``launch`` on hosts elsewhere: which options go together, and what is written rather than run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..executor.launch.hosts.settings import (
    Hosts,
    counts_of,
    listed_hosts,
    python_command,
    read_hostfile,
    variables,
)
from ..executor.notes import note
from ..planner.schema import cache
from ..planner.schema.cluster import Cluster
from ..planner.schema.errors import InputError
from ..planner.schema.plan import Plan
from ..planner.schema.text import option
from .output import check_out

if TYPE_CHECKING:
    from ..executor.launch.hosts.command import HostCommand

# Options of ``launch`` and the ways to start that each belongs to; those of no list go with all.
_SSH, _SLURM, _KUBERNETES = "--hosts or --hostfile", "--slurm", "--kubernetes"
_BELONGS = {
    "ssh_config": (_SSH,),
    "ssh_option": (_SSH,),
    "remote_python": (_SSH, _SLURM, _KUBERNETES),
    "folder": (_SSH, _SLURM, _KUBERNETES),
    "env": (_SSH, _SLURM, _KUBERNETES),
    "dry_run": (_SSH, _SLURM, _KUBERNETES),
    "slurm_option": (_SLURM,),
    "submit": (_SLURM,),
    "image": (_KUBERNETES,),
    "gpus": (_SLURM, _KUBERNETES),
    "job_name": (_SLURM, _KUBERNETES),
    "min_nodes": (_SSH,),
    "profile": (_SSH,),
    "cluster": (_SSH,),
}
# Options that every host is told as they were given here.
_PASSED_ON = (
    "steps", "timeout", "report", "background", "background_limit", "background_memory",
    "background_gpu_memory", "background_at_end", "background_grace", "background_log",
    "checkpoint", "checkpoint_every", "resume", "progress", "trace", "tensorboard", "json",
)  # fmt: skip


class Nodes(NamedTuple):
    """How many hosts of Slurm or Kubernetes, and the ranks of each; None: the plan's, divided."""

    number: int
    ranks: Sequence[int] | None


@dataclass(frozen=True)
class Elsewhere:
    """What the command line says of other hosts; ``given`` are the names of its options."""

    given: frozenset[str]
    hosts: str | None
    hostfile: Path | None
    slurm: Path | None
    kubernetes: Path | None
    ssh_config: Path | None
    ssh_options: tuple[str, ...]
    python: str
    folder: str
    variables: tuple[str, ...]
    rendezvous: str | None
    dry_run: bool
    slurm_options: tuple[str, ...]
    submit: bool
    image: str | None
    gpus: int | None
    job_name: str
    max_restarts: int = 0
    resume: bool = True

    @property
    def way(self) -> str | None:
        """How hosts are started; None: by hand, on each."""
        if self.hosts is not None or self.hostfile is not None:
            return _SSH
        if self.slurm is not None:
            return _SLURM
        return _KUBERNETES if self.kubernetes is not None else None

    def check(self) -> None:
        """Raises ``InputError`` for options that do not go together."""
        ways = ("hosts", "hostfile", "slurm", "kubernetes")
        asked = [f"--{name}" for name in ways if getattr(self, name) is not None]
        if len(asked) > 1:
            raise InputError(f"{' and '.join(asked)} start hosts in different ways: give one")
        for name, belongs in _BELONGS.items():
            if name in self.given and self.way not in belongs:
                raise InputError(
                    f"{option(name)} says nothing without {' or '.join(belongs)}: add that, or "
                    "leave it out"
                )
        # ``--nnodes 1`` is no mistake: a script of a cluster passes on the number that it is told.
        if self.way is None and "rendezvous" in self.given and "nnodes" not in self.given:
            raise InputError(
                f"--rendezvous {self.rendezvous} says nothing of one host: say how many meet there "
                f"(--nnodes, or {_SSH}), or leave it out"
            )
        if self.way == _SSH and {"nnodes", "node_rank"} & self.given:
            raise InputError(
                f"{asked[0]} says how many hosts there are and their order: leave out --nnodes and "
                "--node-rank"
            )
        if self.way in (_SLURM, _KUBERNETES) and {"node_rank", "rendezvous"} & self.given:
            raise InputError(
                f"{asked[0]} numbers its hosts and lets them meet itself: leave out --node-rank "
                "and --rendezvous"
            )
        if self.way == _SLURM and "max_restarts" in self.given:
            raise InputError(
                "--max-restarts is for ranks that are started from here: let Slurm start the job "
                "again, with --slurm-option requeue"
            )
        if self.way == _KUBERNETES and self.image is None:
            raise InputError("--kubernetes needs the image of its pods: add --image NAME")
        if self.way == _KUBERNETES and self.max_restarts and not self.resume:
            raise InputError(
                "with --no-resume pods that are started again would refuse the checkpoints of "
                "those before: leave --no-resume out and name a new --checkpoint folder"
            )

    def notes(self, plan: Plan, params: Mapping[str, object]) -> Iterator[str]:
        """What is worth knowing of a job that is written, of which ``params`` are the options."""
        cluster = cache.get(Cluster, plan.provenance.cluster)
        if self.gpus and cluster is not None and not cluster.on_gpus:
            names = " and ".join(sorted({device.name for device in cluster.devices}))
            yield (
                f"the plan was made for {names}, and --gpus asks for GPUs, on which its ranks then "
                "run: what was predicted says little of them; plan for a cluster of these GPUs"
            )
        if self.way != _KUBERNETES:
            return
        if params.get("checkpoint") is not None:
            folder = params["checkpoint"]
            yield f"pods keep checkpoints in {folder}: mount a volume there that all share"
        job = params.get("background")
        if job is not None:
            yield f"each pod runs {job} beside its ranks: the image has to have it"
        written = [params.get(name) for name in ("report", "trace", "tensorboard")]
        written.append(params.get("background_log") if job is not None else None)
        files = [str(one) for one in written if one is not None]
        if files:
            yield f"pods write {', '.join(files)}, which end with them: mount a volume there"

    def found_hosts(self) -> Hosts | None:
        """The hosts to start over ssh; None where there are none."""
        if self.way != _SSH:
            return None
        slots: tuple[int | None, ...] = ()
        if self.hostfile is not None:
            names, slots = read_hostfile(self.hostfile)
        else:
            names = listed_hosts(self.hosts or "")
        return Hosts(
            names, slots, python=self.python, folder=self.folder,
            environment=variables(self.variables), rendezvous=self.rendezvous,
            ssh_config=str(self.ssh_config) if self.ssh_config else None,
            ssh_options=self.ssh_options,
        )  # fmt: skip

    def write(
        self, plan: Plan, file: Path, options: Sequence[str], script: Sequence[str], nodes: Nodes
    ) -> None:
        """Writes or prints what would start ``plan``, whose file is ``file``; ``options`` are what
        every host is told besides."""
        from ..executor.launch.hosts.command import HostCommand, lines_to_paste
        from ..executor.launch.launch import ranks_of_hosts
        from ..executor.launch.processes import check_plan

        hosts = self.found_hosts()
        if hosts is not None:
            nodes = Nodes(len(hosts.names), nodes.ranks or counts_of(hosts))
        counts = ranks_of_hosts(plan, nodes.ranks, nodes.number)
        check_plan(plan, sum(counts))
        python = python_command(self.python)
        command = HostCommand(python, str(file.absolute()), options, script, counts)
        if hosts is not None:
            print("\n".join(lines_to_paste(command, hosts)))
        elif self.slurm is not None:
            self._write_slurm(command, self.slurm)
        elif self.kubernetes is not None:
            self._write_kubernetes(command, plan, self.kubernetes)

    def _write_slurm(self, command: HostCommand, path: Path) -> None:
        from ..executor.launch.hosts.slurm import SlurmJob, submit

        job = SlurmJob(
            command, self._where, self.job_name, self.slurm_options, variables(self.variables),
            self.gpus,
        )  # fmt: skip
        if self._written(job.script(), path, "sbatch") and self.submit:
            note(submit(path))

    def _write_kubernetes(self, command: HostCommand, plan: Plan, path: Path) -> None:
        from ..executor.launch.hosts.kubernetes import KubernetesJob

        if not self.python:  # this machine's path says nothing of an image
            command = replace(command, python=("python",))
        job = KubernetesJob(
            command, plan, self.image or "", self._where, self.job_name,
            variables(self.variables), self.gpus, self.max_restarts,
        )  # fmt: skip
        self._written(job.manifest(), path, "kubectl create -f")

    @property
    def _where(self) -> str:
        return self.folder or str(Path.cwd())

    def _written(self, text: str, path: Path, start: str) -> bool:
        """Writes a file, or with --dry-run prints what it would hold; whether it is written."""
        from ..planner.schema.record import write_whole

        check_out(path)
        if self.dry_run:
            sys.stdout.write(text)
            return False
        write_whole(path, text.encode())
        if not self.submit:
            print(f"written to {path}; start it with: {start} {path}")
        return True


def own_words(params: Mapping[str, object], given: set[str]) -> list[str]:
    """The options of this command that every host is told, as ``--name=value``."""
    words = []
    for name in _PASSED_ON:
        value = params.get(name)
        if name not in given or value is None:
            continue
        if isinstance(value, bool):
            words.append(option(name) if value else option(f"no_{name}"))
        else:
            words.append(f"{option(name)}={value}")
    return words
