"""The options of the verbs: each with what it takes and its help. Defaults stand with the verb."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from .values import OptionInfo, amount, amounts, counts, duration, number, whole

# -- of several verbs -----------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout, for machines.")]
AllUnits = Annotated[bool, typer.Option("--all-units", help="Fold no rows.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="The plan's file.")]
Timeout = Annotated[
    float | None, number("End the run after so many seconds, whatever it does.", above=0)
]


PlansProfile = Annotated[
    Path | None, typer.Option(help="The profile it was made from (else found by fingerprint).")
]
PlansCluster = Annotated[
    Path | None, typer.Option(help="The cluster it was made for (else found by fingerprint).")
]


def out(what: str) -> OptionInfo:
    """The option that names the file which a result is written to."""
    option: OptionInfo = typer.Option("--out", "-o", help=f"Write the {what} here.")
    return option


PrecisionName = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="How the model computes: float32, tf32, bf16, bf16-mixed or fp16-mixed (default: as "
        "it was built).",
    ),
]

# -- plan -----------------------------------------------------------------------------------------

Target = Annotated[
    str,
    typer.Argument(
        help="A workload's name, file.py:factory, package.module:factory, or a profile.json.",
        metavar="TARGET",
    ),
]
ClusterFile = Annotated[Path, typer.Option("--cluster", "-c", help="The cluster's file.")]
Batch = Annotated[int, whole("Global batch size in samples.")]
ProfilesOf = Annotated[
    list[str] | None,
    typer.Option(
        "--profile-of",
        metavar="NODE=FILE",
        help="A profile measured on that node of the cluster, whose devices are faster or slower. "
        "May be given several times.",
    ),
]
RelativeSpeeds = Annotated[
    list[str] | None,
    typer.Option(
        "--relative-speed",
        metavar="NODE=SPEED",
        help="That node computes so many times as fast as the device of the profile, such as 0.5. "
        "May be given several times.",
    ),
]

# -- what fits, and what is least -----------------------------------------------------------------

MemoryLimit = Annotated[
    int | None, amount("Most memory of a rank, such as 8GiB (default: its own).")
]
Optimizer = Annotated[str, typer.Option(help="sgd, momentum, adam or adamw.")]
MicroBatches = Annotated[
    Sequence[int], counts("Counts of micro-batches to choose from, such as 1,2,4 (default: 1).")
]
BatchStatistics = Annotated[
    str, typer.Option(help="Normalise over each rank's share (local) or the whole batch (global).")
]
Objective = Annotated[str, typer.Option(help="What shall be least: step (time) or gpu-seconds.")]
StepLimit = Annotated[float | None, duration("Longest step allowed, such as 250ms or 1.5s.")]
AmplificationLimit = Annotated[
    float | None, number("Most device time of a step, as a multiple of one device's.", above=0)
]
UnitAmplificationLimit = Annotated[
    float | None, number("The same for every unit by itself.", above=0)
]
BackgroundLimit = Annotated[
    float | None,
    number(
        "A background job will run beside (launch --background): a step may take up to so many "
        "times as long, such as 1.1, and keeps --step-limit even then.",
        above=1,
    ),
]
AllowLossy = Annotated[
    bool,
    typer.Option(
        "--allow-lossy",
        help="Allow gradients rounded to bfloat16 to travel; with --min-fidelity also exchanges "
        "that leave part of them for later steps.",
    ),
]
MinFidelity = Annotated[
    float | None,
    number(
        "Least share of the gradients' energy that is sent at once, such as 0.9.", least=0, most=1
    ),
]

LocalSteps = Annotated[
    bool,
    typer.Option(
        "--allow-local-steps",
        help="Allow hosts to train apart and average what they have learnt now and then, where "
        "links are so slow that nothing else is as quick. Changes the training.",
    ),
]
InnerSteps = Annotated[
    int | None,
    whole("Steps between two averages (default: the fewest that hide the links between hosts)."),
]
Fragments = Annotated[
    int | None, whole("So many parts of the model are averaged in turn (default: 4).")
]
OuterLr = Annotated[
    float | None, number("Learning rate by which averages are applied (default: 0.7).", above=0)
]
OuterMomentum = Annotated[
    float | None, number("Nesterov momentum of the same (default: 0.9).", least=0, most=1)
]

# -- what may be decided --------------------------------------------------------------------------

Pins = Annotated[
    list[str] | None,
    typer.Option(
        help="UNIT=LAYOUT decides units beforehand: fc1=4x2, 'block*=1x8', fc1=4x2:row. "
        "May be given several times.",
        metavar="UNIT=LAYOUT",
    ),
]
Forbidden = Annotated[
    list[str] | None,
    typer.Option(
        help="UNIT=LAYOUT that it must not have; without UNIT= for all units, where a policy "
        "may stand too (recompute, topk). May be given several times.",
        metavar="[UNIT=]LAYOUT",
    ),
]
Slices = Annotated[Sequence[int] | None, amounts("Slice sizes to choose from, such as 1MiB,4MiB.")]
Schedule = Annotated[
    str,
    typer.Option(
        help="How gradients travel: barrier (buckets, all waited for), priority (slices, those "
        "first that forward needs first), or auto for the quicker."
    ),
]
Bursts = Annotated[
    bool, typer.Option("--bursts", help="Units may take a part of the ranks and leave others idle.")
]
Hypothetical = Annotated[
    bool, typer.Option("--hypothetical", help="Plan more than the executor can run.")
]
AllLayouts = Annotated[
    bool,
    typer.Option("--all-layouts", help="Any number of groups and members, not only round ones."),
]

# -- how it is searched, and what is shown --------------------------------------------------------

Solver = Annotated[str, typer.Option(help="auto, heuristic, integer or lagrangian.")]
TimeLimit = Annotated[float | None, number("Seconds for the search.", above=0)]
ClusterSizes = Annotated[
    Sequence[int] | None, counts("Plan for so many ranks; several, such as 8,16,32, are compared.")
]
AsFront = Annotated[
    bool, typer.Option("--front", help="Show the trade of step time for device time instead.")
]

# -- launch ---------------------------------------------------------------------------------------

Script = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SCRIPT ARGS…]", help="What every rank runs (default: training)."),
]
Steps = Annotated[
    int,
    whole(
        "Steps to measure where no script is given, after two that warm up; with --checkpoint, "
        "steps in all."
    ),
]
RanksHere = Annotated[
    Sequence[int] | None,
    counts("Ranks of each host, or such as 2,1 (default: the plan's over the hosts)."),
]
Hosts = Annotated[int, whole("Hosts.")]
HostNumber = Annotated[int, whole("Which of them this is, from 0.", least=0)]
Rendezvous = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of host 0, the same on all hosts (with --hosts :PORT will do, or nothing)."
    ),
]
Report = Annotated[Path | None, typer.Option(help="Write the figures here.")]
ShowProgress = Annotated[
    bool,
    typer.Option(
        "--progress/--no-progress",
        help="Show step, samples/s, the loss where it is told, and measured beside predicted while "
        "it trains, and say what is slower than predicted.",
    ),
]
RunTrace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Write the timelines of a few steps, predicted and measured, for Perfetto here.",
    ),
]
PlanTrace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the predicted step's timeline for Perfetto here, too."),
]

# -- launch on hosts elsewhere ---------------------------------------------------------------------

HostNames = Annotated[
    str | None,
    typer.Option("--hosts", help="Run on these hosts over ssh, in the plan's order: a,user@b."),
]
HostFile = Annotated[
    Path | None, typer.Option("--hostfile", help="The same from a file: 'a slots=2', one a line.")
]
SshConfig = Annotated[Path | None, typer.Option(help="A configuration for ssh (its -F).")]
SshOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--ssh-option", metavar="NAME=VALUE", help="For ssh (its -o). May be given several times."
    ),
]
RemotePython = Annotated[
    str,
    typer.Option(metavar="COMMAND", help="What starts Python there (default: this one's path)."),
]
Folder = Annotated[str, typer.Option(help="The working folder there (default: this one's path).")]
Variables = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        metavar="NAME[=VALUE]",
        help="A variable for the ranks there. May be given several times.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print what would run there, and run and write nothing.")
]
SlurmScript = Annotated[
    Path | None,
    typer.Option("--slurm", help="Write a job's script for sbatch, for --nnodes nodes."),
]
SlurmOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--slurm-option",
        metavar="NAME[=VALUE]",
        help="For sbatch, such as partition=gpu. May be given several times.",
    ),
]
Submit = Annotated[bool, typer.Option("--submit", help="Give the script to sbatch.")]
Kubernetes = Annotated[
    Path | None, typer.Option(help="Write a JobSet for Kubernetes, of --nnodes pods.")
]
Image = Annotated[str | None, typer.Option(help="The image of its pods.")]
GpusPerHost = Annotated[
    int | None, whole("GPUs to ask Slurm or Kubernetes for on each host (default: none).")
]
JobName = Annotated[str, typer.Option(help="The job's name for Slurm or Kubernetes.")]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        help="Save the training in this folder now and then, and go on from what is there.",
    ),
]
CheckpointEvery = Annotated[int, whole("Save after so many steps.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--no-resume",
        help="Go on from the latest whole checkpoint, if there is one; or refuse a folder that has "
        "some.",
    ),
]
Tensorboard = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard",
        help="Write loss, step time, samples per second and the predicted step of each step into "
        "this folder, for TensorBoard.",
    ),
]

MaxRestarts = Annotated[
    int | None,
    whole(
        "Start again from the latest checkpoint after a rank or host was lost, so many times at "
        "most (default: 0; 3 with --min-nodes).",
        least=0,
    ),
]
MinNodes = Annotated[
    int | None,
    whole(
        "Go on with as few as so many of --hosts, and with more when they are back, each time "
        "under a new plan."
    ),
]

# -- another job in what the run leaves idle ------------------------------------------------------

BackgroundJob = Annotated[
    str | None,
    typer.Option(
        help="Another training job for what this run leaves idle here: a command, or a plan "
        "for one device."
    ),
]
LaunchBackgroundLimit = Annotated[
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
BackgroundGpuMemory = Annotated[
    int | None, amount("Most of each GPU's memory that it may have, such as 8GiB.")
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
