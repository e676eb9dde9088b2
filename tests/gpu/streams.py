"""What a rank does before a test: its GPU, or groups that count as those of a device's streams; and
a record of the collectives that it issues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import networkx as nx
import torch
import torch.distributed as dist
from collectives import told
from meshwright.executor.comm import groups
from meshwright.executor.comm.groups import CONTROL_BACKEND, Group
from meshwright.executor.gradients import feedback
from meshwright.executor.gradients.buckets import GradParam
from meshwright.executor.gradients.feedback import ErrorFeedback, HostMirror
from meshwright.executor.memory import offload

from tests.copying_host import CopyingHost

Issued = list[tuple[tuple[int, ...], str, int]]
"""Collectives in the order in which a rank has issued them: the ranks, the name of the process
group, and how many were issued there before."""
# Of the two names the one that this torch does not warn of, and that is called.
GATHERS = [n for n in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, n)][:1]
SCATTERS = [n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n)][:1]
COLLECTIVES = ("all_reduce", "all_gather", *GATHERS, *SCATTERS, "all_to_all_single", "broadcast")


_streamed: set[str] = set()
"""The names of the process groups that are taken for groups on streams."""


def of_streams(group: dist.ProcessGroup) -> bool:
    """Whether a process group is taken for one on a device's streams."""
    return str(group.group_name) in _streamed


@contextmanager
def on_streams(*, on_cpu: bool = False) -> Iterator[torch.device]:
    """Where tensors of the test are: on a GPU if there is one, unless it is to be ``on_cpu``. There
    all groups but those for control are taken for groups on streams; their waits hold the host all
    the same, as there is no stream that would wait. What is offloaded is copied to where torch's
    own memory is not, and a mirror on the host to more of its memory."""
    if torch.cuda.is_available() and not on_cpu:
        torch.cuda.set_device(0)
        # Or convolutions round what they multiply to ten bits.
        torch.backends.cudnn.allow_tf32 = False
        yield torch.device("cuda", 0)
        return
    made, host = groups._make_group, CopyingHost()

    def on_stream(*args: Any, **options: Any) -> Group:
        found = made(*args, **options)
        backend = args[6] if len(args) > 6 else options.get("backend")
        if backend == CONTROL_BACKEND:
            return found
        if found.handle is not None:
            _streamed.add(str(found.handle.group_name))
        return replace(found, on_stream=True)

    with (
        patch.object(groups, "_make_group", on_stream),
        patch.object(offload, "host_of", lambda device: host),
        patch.object(feedback, "feedback_of", _with_mirrors(feedback.feedback_of)),
    ):
        yield torch.device("cpu")


def _with_mirrors(before: Callable[[GradParam], ErrorFeedback]) -> Callable[..., ErrorFeedback]:
    """Gives mirrors on the host to parameters that are there as well."""

    def feedback_of(param: GradParam) -> ErrorFeedback:
        if param.feedback == "host_mirror":
            return HostMirror(on_stream=param.group.on_stream)
        return before(param)

    return feedback_of


@contextmanager
def recorded() -> Iterator[Issued]:
    """The collectives that this rank issues meanwhile, those for control left out."""
    issued: Issued = []
    counts: dict[str, int] = {}

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = kwargs.get("group")
        if group is not None:
            key = str(group.group_name)
            counts[key] = counts.get(key, -1) + 1
            issued.append((tuple(dist.get_process_group_ranks(group)), key, counts[key]))

    with told(COLLECTIVES, note):
        yield issued


def check_one_order(rows: list[Issued]) -> None:
    """Fails unless one order of all collectives is that of every rank among its own."""
    graph = nx.DiGraph()
    for row in rows:
        nx.add_path(graph, row)
    in_one_order = nx.is_directed_acyclic_graph(graph)
    assert in_one_order, f"ranks issue these in different orders: {nx.find_cycle(graph)}"
