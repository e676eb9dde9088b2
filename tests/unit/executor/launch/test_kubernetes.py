"""The manifest for Kubernetes, held to the fields that its resources have."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from meshwright import InputError
from meshwright.executor.launch.hosts import kubernetes
from meshwright.executor.launch.hosts.command import HostCommand
from meshwright.executor.launch.hosts.kubernetes import KubernetesJob
from meshwright.executor.launch.restarts import AGAIN_VARIABLE
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.record import decode

from tests.ssh import plan_for_hosts

PLAN = plan_for_hosts(2)

ODD = "a b\"c'd;$(HOME)$$(X)$\n"


def thing(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object with these fields and no other: a misspelt one would be dropped by the server."""
    return {
        "type": "object", "properties": {**required, **optional}, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


def several(what: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": what, "minItems": 1}


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
# Names of objects and of containers and ports' names (RFC 1123).
NAME = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
META = thing({"name": NAME}, labels={"type": "object"}, annotations={"type": "object"})
# Kubernetes' own: k8s.io/api, core/v1 types.go (Container, PodSpec, Volume) and batch/v1 types.go
# (JobSpec), as far as the manifest uses them.
CONTAINER = thing(
    {"name": NAME, "image": TEXT},
    command=several(TEXT),
    args=several(TEXT),
    workingDir=TEXT,
    env={"type": "array", "items": thing({"name": TEXT}, value=TEXT)},
    ports=several(thing({"containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}})),
    resources=thing({}, limits={"type": "object", "additionalProperties": TEXT}),
    volumeMounts=several(thing({"name": NAME, "mountPath": TEXT}, readOnly={"type": "boolean"})),
)
VOLUME = thing(
    {"name": NAME},
    configMap=thing({"name": NAME}),
    emptyDir=thing({}, medium={"enum": ["", "Memory"]}),
)
POD = thing(
    {"containers": several(CONTAINER), "restartPolicy": {"enum": ["Never", "OnFailure"]}},
    volumes=several(VOLUME),
)
JOB = thing(
    {"template": thing({"spec": POD}, metadata=META)},
    parallelism=NUMBER,
    completions=NUMBER,
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    backoffLimit=NUMBER,
)
# kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go: JobSetSpec, ReplicatedJob, Network,
# FailurePolicy.
JOB_SET = thing(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": META,
        "spec": thing(
            {
                "replicatedJobs": several(
                    thing({"name": NAME, "template": thing({"spec": JOB})}, replicas=NUMBER)
                )
            },
            network=thing(
                {},
                enableDNSHostnames={"type": "boolean"},
                subdomain=NAME,
                publishNotReadyAddresses={"type": "boolean"},
            ),
            failurePolicy=thing({}, maxRestarts=NUMBER),
        ),
    }
)
CONFIG_MAP = thing(
    {"apiVersion": {"const": "v1"}, "kind": {"const": "ConfigMap"}, "metadata": META},
    data={"type": "object", "additionalProperties": TEXT},
)
LIST = thing(
    {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "List"},
        "items": several({"oneOf": [CONFIG_MAP, JOB_SET]}),
    }
)


def job(**more: Any) -> KubernetesJob:
    command = HostCommand(("python", ODD), "plan", (f"--x={ODD}",), ("s.py", ODD), (2, 2))
    return KubernetesJob(command, PLAN, "registry/name:tag", "/work", **more)


def parts(made: KubernetesJob) -> tuple[dict[str, Any], dict[str, Any]]:
    """The two resources, valid."""
    found = json.loads(made.manifest())
    Draft202012Validator(LIST).validate(found)
    config, job_set = found["items"]
    return config, job_set


def expanded(text: str, variables: dict[str, str]) -> str:
    """As Kubernetes does (k8s.io/kubernetes, third_party/forked/golang/expansion): ``$$`` is ``$``,
    ``$(NAME)`` the variable where there is one."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


def container(job_set: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = job_set["spec"]["replicatedJobs"]
    (found,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    return found


def test_pods_run_the_launch_with_their_number():
    config, job_set = parts(job(name="mine", environment={"ODD": ODD}, gpus=2))
    spec = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (2, 2)
    found = container(job_set)
    variables = {"JOB_COMPLETION_INDEX": "1", "HOME": "/root", "X": "x"}
    assert [expanded(word, variables) for word in found["command"]] == [
        *("python", ODD, "-m", "meshwright", "launch", "/etc/meshwright/plan.json"),
        *("--nnodes=2", "--nproc=2", f"--x={ODD}", "--node-rank=1"),
        *("--rendezvous=mine-hosts-0-0.mine:29500", "s.py", ODD),
    ]
    assert job_set["spec"]["network"]["subdomain"] == "mine"
    assert expanded(found["env"][0]["value"], variables) == ODD
    assert found["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    assert decode(Plan, config["data"]["plan.json"].encode()) == PLAN
    pod = spec["template"]["spec"]
    assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]


def test_a_job_of_another_plan_does_not_find_the_plan_before():
    config, _ = parts(job())
    other = msgspec.structs.replace(PLAN, target="another")
    changed, _ = parts(dataclasses.replace(job(), plan=other))
    assert config["metadata"]["name"] != changed["metadata"]["name"]


def test_pods_that_may_be_made_again_are_told():
    assert container(parts(job())[1])["env"] == []
    again = container(parts(job(max_restarts=2))[1])["env"]
    assert again == [{"name": AGAIN_VARIABLE, "value": "1"}]


def test_no_gpus_are_asked_for_by_themselves():
    assert "resources" not in container(parts(job())[1])


@pytest.mark.parametrize("name", ["Mine", "a b", "-a", "1a", "a" * 41, "", "a\n"])
def test_a_name_that_kubernetes_refuses(name):
    with pytest.raises(InputError, match="is no name for Kubernetes"):
        job(name=name)


def test_what_else_is_refused(monkeypatch):
    for image in ("", "a b", "a\n"):
        with pytest.raises(InputError, match="is no image"):
            KubernetesJob(job().command, PLAN, image, "/")
    with pytest.raises(InputError, match="is no name of an environment variable"):
        job(environment={"A=B": "1"})
    monkeypatch.setattr(kubernetes, "MOST_BYTES", 100)
    with pytest.raises(InputError, match="a ConfigMap holds 100"):
        job().manifest()
