"""A program in the place of ``ssh``: it does with each host what a test says, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

from meshwright.planner.schema.cluster import Cluster, Device, Level, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.solve.evaluate import make_plan
from meshwright.profiler.estimate import load_table

# What it does by default is what ssh does: it runs the command, here, as host "name".
PROGRAM = """#!{python}
import json, os, socket, subprocess, sys, time
from pathlib import Path

here = Path(__file__).parent
arguments = sys.argv[1:]
name, command = arguments[arguments.index("--") + 1:]
with (here / "asked").open("a") as asked:
    print(json.dumps(arguments), file=asked)
behaviour = here / name.rpartition("@")[2]
if behaviour.exists():
    exec(compile(behaviour.read_text(), str(behaviour), "exec"))
os.environ["SSH_CONNECTION"] = "127.0.0.1 9 127.0.0.1 22"
os.execvp("sh", ["sh", "-c", command])
"""
# A host that does what it is told, without torch: for ``tell`` and ``hear`` to be used after it.
HOST = """
def hear(word=None):
    for line in sys.stdin:
        found, _, data = line.rstrip("\\n").partition(" ")
        if found != "alive":
            assert word in (None, found), line
            return json.loads(data) if data else found
    sys.exit(0)

def tell(word, **record):
    print(token, word, json.dumps(record), flush=True)

token, version, order = hear(), hear(), hear("order")
SETUP = {"host": name, "software": [["torch", "2.0"]], "device": "cpu", "gpus": 0}
READY = {"setup": SETUP, "address": "10.0.0.1", "free_bytes": 1 << 40, "notes": []}
def begin(**other):
    tell("ready", **{**READY, **other})
    if order["node_rank"] == 0:
        asked = hear("meet")
        tell("met", address="10.0.0.1", port=asked["port"] or 4711)
    return hear("go")
"""


def cluster_of_hosts(count: int, memory_bytes: int = 40 * 2**30) -> Cluster:
    """Some hosts with a device each."""
    device = Device(name="a100", memory_bytes=memory_bytes)
    return Cluster(
        name="hosts",
        nodes=tuple(Node(name=f"host{i}", devices=(device,)) for i in range(count)),
        levels=(Level(name="inter", latency_s=1e-4, bytes_per_s=1e9),),
    )


def plan_for_hosts(count: int) -> Plan:
    """A plan of VGG-16 for a rank on each of some hosts."""
    return make_plan(load_table("vgg16"), cluster_of_hosts(count), Goal(batch=32))


def put_ssh(folder: Path) -> Path:
    """Writes the program into a folder, to be put on PATH."""
    folder.mkdir(exist_ok=True)
    path = folder / "ssh"
    path.write_text(PROGRAM.replace("{python}", sys.executable))
    path.chmod(0o755)
    return folder


def behave(folder: Path, host: str, code: str) -> None:
    """What the program does for a host, as Python, instead of running the command."""
    (folder / host).write_text(code)


def behave_as_host(folder: Path, host: str, code: str) -> None:
    """The same for a host that has told who it is and has got its order."""
    behave(folder, host, f"{HOST}{code}\nsys.exit(0)\n")
