"""The options of ``launch``: each with what it takes and its help. Defaults stand with the verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .values import amount, number, whole

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan's file.")]
Timeout = Annotated[
    float | None, number("End the run after so many seconds, whatever it does.", above=0)
]
Script = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SCRIPT ARGS…]", help="What every rank runs (default: training)."),
]
Steps = Annotated[int, whole("Steps to train, where no script is given.")]
RanksHere = Annotated[
    int | None, whole("Ranks to start here (default: the plan's over the hosts).")
]
Hosts = Annotated[int, whole("Hosts.")]
HostNumber = Annotated[int, whole("Which of them this is, from 0.", least=0)]
Rendezvous = Annotated[str | None, typer.Option(help="HOST:PORT of host 0, the same on all hosts.")]
Report = Annotated[Path | None, typer.Option(help="Write the figures here.")]

# -- another job in what the run leaves idle ------------------------------------------------------

BackgroundJob = Annotated[
    str | None,
    typer.Option(
        help="Another training job for what this run leaves idle here: a command, or a plan "
        "for one device."
    ),
]
BackgroundLimit = Annotated[
    float | None,
    number(
        "The run's steps may take so many times as long for it (default: what the plan was made "
        "for, else 1.1).",
        above=1,
    ),
]
BackgroundMemory = Annotated[
    int | None, amount("Most data of each of its processes, such as 4GiB.")
]
BackgroundAtEnd = Annotated[
    str | None,
    typer.Option(
        help="When the run has ended it may finish (default of a command), or is told to stop "
        "(of a plan)."
    ),
]
BackgroundGrace = Annotated[
    float, number("Seconds between SIGTERM, for its checkpoint, and SIGKILL.", least=0)
]
BackgroundLog = Annotated[Path, typer.Option(help="Where its output is appended.")]
