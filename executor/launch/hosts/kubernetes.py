"""A manifest for Kubernetes: a JobSet whose pods each run one launcher, and the plan.

Fields are those of jobset.x-k8s.io/v1alpha2 (kubernetes-sigs/jobset, api/jobset/v1alpha2) and of
Kubernetes' own batch/v1 and v1. A JobSet gives pods stable names and numbers, which is all that the
launcher needs. No shell reads anything of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....planner.schema.errors import InputError
from ....planner.schema.plan import Plan
from ....planner.schema.record import encode, fingerprint
from ..restarts import AGAIN_VARIABLE
from .command import PORT, HostCommand
from .settings import check_environment

# A label of DNS (RFC 1123), short enough for the longest of a pod's names: "-hosts-0-99999-abcde".
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)
# Of a ConfigMap's data (1 MiB), less what its names take.
MOST_BYTES = 2**20 - 2**12
PLAN_FOLDER = "/etc/meshwright"
_JOB, _FILE = "hosts", "plan.json"


@dataclass(frozen=True)
class KubernetesJob:
    """``command`` in as many pods of ``image`` as it has hosts, in ``folder``, with
    ``environment``; ``gpus`` is how many to ask for each pod. The plan travels with it. All pods
    are made anew after one has failed, ``max_restarts`` times at most."""

    command: HostCommand
    plan: Plan
    image: str
    folder: str
    name: str = "meshwright"
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None
    max_restarts: int = 0

    def __post_init__(self) -> None:
        check_environment(self.environment)
        if not _NAME.fullmatch(self.name):
            raise InputError(
                f"{self.name!r} is no name for Kubernetes: take up to 40 small letters, digits and "
                "'-', a letter first"
            )
        if not self.image or self.image.split() != [self.image]:
            raise InputError(f"{self.image!r} is no image: name one, as in registry/name:tag")

    def manifest(self) -> str:
        """The manifest as JSON, which is YAML too. Raises ``InputError`` where it cannot hold the
        plan."""
        plan = encode(self.plan).decode()
        if len(plan.encode()) > MOST_BYTES:
            raise InputError(
                f"the plan has {len(plan.encode())} bytes and a ConfigMap holds {MOST_BYTES}: put "
                "it into the image, and write your own manifest from that of a smaller plan"
            )
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self._plan_name},
            "data": {_FILE: plan},
        }
        items = [config, self._job_set()]
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"

    @property
    def _plan_name(self) -> str:
        # Another for each plan: a ConfigMap outlives its job, and a job of another plan, made under
        # the same name, would find the old one.
        return f"{self.name}-plan-{fingerprint(self.plan)[:8]}"

    @property
    def _variables(self) -> dict[str, str]:
        # Pods that are made anew are not told that they are.
        again = {AGAIN_VARIABLE: "1"} if self.max_restarts else {}
        return {**again, **self.environment}

    def _job_set(self) -> dict[str, Any]:
        hosts = len(self.command.per_host)
        job = {
            "parallelism": hosts,
            "completions": hosts,
            "completionMode": "Indexed",  # a pod's number is its node rank
            "backoffLimit": 0,  # a run whose peers have gone cannot go on
            "template": {"spec": self._pod()},
        }
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {
                # Pods find the first one before it is ready, at
                # <jobset>-<job>-<job's number>-<pod's number>.<subdomain>.
                "network": {
                    "enableDNSHostnames": True,
                    "subdomain": self.name,
                    "publishNotReadyAddresses": True,
                },
                "failurePolicy": {"maxRestarts": self.max_restarts},
                "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _pod(self) -> dict[str, Any]:
        command = replace(self.command, plan=f"{PLAN_FOLDER}/{_FILE}")
        container: dict[str, Any] = {
            "name": "launch",
            "image": self.image,
            "workingDir": self.folder,
            # Kubernetes sets the variable of an indexed job's pods, and puts it in itself.
            "command": command.words(
                "$(JOB_COMPLETION_INDEX)",
                f"{self.name}-{_JOB}-0-0.{self.name}:{PORT}",
                _literal,
            ),
            "env": [{"name": n, "value": _literal(v)} for n, v in self._variables.items()],
            "ports": [{"containerPort": PORT}],
            "volumeMounts": [
                {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
                {"name": "shared-memory", "mountPath": "/dev/shm"},
            ],
        }
        if self.gpus is not None:
            container["resources"] = {"limits": {"nvidia.com/gpu": str(self.gpus)}}
        return {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [
                {"name": "plan", "configMap": {"name": self._plan_name}},
                # Of 64 MiB else, which NCCL and loaders of data soon fill.
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        }


def _literal(text: str) -> str:
    """A word in which Kubernetes expands nothing: it reads ``$$`` as ``$``, and ``$(NAME)`` as a
    variable."""
    return text.replace("$", "$$")
