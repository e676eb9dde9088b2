"""Every option that takes a number, an amount or a list, given what it cannot take: one sentence
with the option, the value and the remedy, whatever typer's own words are."""

from __future__ import annotations

from inspect import signature
from typing import get_args

import pytest
from meshwright.cli import app as cli
from typer.models import OptionInfo

REQUIRED = {
    "profile": ("mlp",),
    "probe": (),
    "cluster": ("--device", "a100-sxm-40gb"),
    "advise": ("profile.json", "--cluster", "cluster.json", "--batch", "8"),
    "plan": ("profile.json", "--cluster", "cluster.json", "--batch", "8"),
    "explain": ("plan.json",),
    "report": ("plan.json",),
    "multiplex": ("plan.json",),
    "verify": ("plan.json",),
    "launch": ("plan.json",),
}
"""The rest of a command of each verb; its files are never read, as the options come first."""
WHOLE, ABOVE_0, FROM_0 = ("abc", "1.5", "0", "-1"), ("abc", "0", "-1", "nan"), ("abc", "-1", "inf")
SHARE, SIZE, TIME = ("abc", "1.5", "-1"), ("abc", "0", "-1", "1.5"), ("abc", "0", "-1", "1h")
COUNTS = ("abc", "1,x", "0", "4,-1", "")
WRONG = {
    ("profile", "--ranks"): WHOLE,
    ("profile", "--batches"): COUNTS,
    ("probe", "--ranks"): WHOLE,
    ("cluster", "--nodes"): WHOLE,
    ("cluster", "--devices-per-node"): WHOLE,
    ("cluster", "--inter-gbit-s"): ABOVE_0,
    ("cluster", "--intra-gbyte-s"): ABOVE_0,
    ("cluster", "--inter-latency-us"): FROM_0,
    ("cluster", "--intra-latency-us"): FROM_0,
    ("cluster", "--memory"): SIZE,
    ("cluster", "--reserve"): SIZE,
    ("cluster", "--host-gbyte-s"): ABOVE_0,
    ("cluster", "--host-memory"): SIZE,
    ("advise", "--batch"): WHOLE,
    ("advise", "--memory-limit"): SIZE,
    ("advise", "--micro-batches"): COUNTS,
    ("advise", "--time-limit"): ABOVE_0,
    ("plan", "--batch"): WHOLE,
    ("plan", "--memory-limit"): SIZE,
    ("plan", "--micro-batches"): COUNTS,
    ("plan", "--step-limit"): TIME,
    ("plan", "--amplification-limit"): ABOVE_0,
    ("plan", "--unit-amplification-limit"): ABOVE_0,
    ("plan", "--min-fidelity"): SHARE,
    ("plan", "--inner-steps"): WHOLE,
    ("plan", "--fragments"): WHOLE,
    ("plan", "--outer-lr"): ABOVE_0,
    ("plan", "--outer-momentum"): SHARE,
    ("plan", "--slices"): ("abc", "1MiB,", "0", "1MiB,1.5"),
    ("plan", "--time-limit"): ABOVE_0,
    ("plan", "--ranks"): COUNTS,
    ("explain", "--best"): WHOLE,
    ("explain", "--time-limit"): ABOVE_0,
    ("report", "--time-limit"): ABOVE_0,
    ("verify", "--steps"): WHOLE,
    ("verify", "--seeds"): WHOLE,
    ("multiplex", "--devices"): WHOLE,
    ("multiplex", "--horizon"): TIME,
    ("multiplex", "--slowdown"): ("abc", "0.9", "0", "-1"),
    ("multiplex", "--piece"): TIME,
    ("multiplex", "--switch"): TIME,
    ("multiplex", "--speed"): SHARE,
    ("multiplex", "--communicating-speed"): SHARE,
    ("verify", "--batch"): WHOLE,
    ("verify", "--timeout"): ABOVE_0,
    ("launch", "--steps"): WHOLE,
    ("launch", "--nproc"): COUNTS,
    ("launch", "--gpus"): WHOLE,
    ("launch", "--nnodes"): WHOLE,
    ("launch", "--node-rank"): ("abc", "0.5", "-1"),
    ("launch", "--timeout"): ABOVE_0,
    ("launch", "--background-limit"): ("abc", "1", "0", "-1"),
    ("plan", "--background-limit"): ("abc", "1", "0", "-1"),
    ("launch", "--checkpoint-every"): WHOLE,
    ("launch", "--min-nodes"): WHOLE,
    ("launch", "--max-restarts"): ("abc", "0.5", "-1"),
    ("launch", "--background-memory"): SIZE,
    ("launch", "--background-gpu-memory"): SIZE,
    ("launch", "--background-grace"): FROM_0,
}
CASES = [(*option, value) for option, values in WRONG.items() for value in values]


def test_every_option_that_takes_a_number_is_tried():
    """Of the verbs as they are registered: an option whose annotation names int or float."""
    numbers = set()
    for command in cli.app.registered_commands:
        assert command.callback is not None
        for name, parameter in signature(command.callback, eval_str=True).parameters.items():
            kind, *told = get_args(parameter.annotation) or ("",)
            names_number = "int" in str(kind) or "float" in str(kind)
            if names_number and told and isinstance(told[0], OptionInfo):
                numbers.add((command.name, "--" + name.replace("_", "-")))
    assert numbers == set(WRONG)


@pytest.mark.parametrize(("verb", "option", "value"), CASES)
def test_a_wrong_value_is_one_sentence(meshwright, verb, option, value):
    done = meshwright(verb, *REQUIRED[verb], option, value)
    assert done.code == 2
    assert done.out == ""
    said = done.sentence.removeprefix("meshwright: ")
    assert said.startswith(f"{option} ")
    assert value in said
    assert ": give " in said or ": write " in said
    for foreign in ("Value error", "Invalid", "valid integer", "Input should", "Usage"):
        assert foreign not in said
