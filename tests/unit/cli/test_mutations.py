"""Thousands of wrong files and command lines: each gets an exit code of ours, at most one sentence
in answer, in time, and leaves no file that is not whole.

Nothing is started: where a command would start ranks or measure, the case ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from meshwright import api
from meshwright.cli import app as cli
from meshwright.executor.checkpoint import folder as folders
from meshwright.executor.checkpoint import storage
from meshwright.executor.checkpoint.index import INDEX, _Sealed, _sha256
from meshwright.planner.schema.cluster import (
    Cluster,
    CollectiveCurve,
    Device,
    Interference,
    Level,
    Node,
    StepOverhead,
)
from meshwright.planner.schema.curve import Curve
from meshwright.planner.schema.errors import RunError
from meshwright.planner.schema.goal import make_goal
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import (
    CompressionRate,
    FidelityProfile,
    ModelProfile,
    PieceProfile,
)
from meshwright.planner.schema.record import encode, load
from meshwright.planner.schema.report import RunReport, predicted_figures

from tests import mutations
from tests.sampling import SEED, sampled
from tests.strategies import chain_profile, linear, norm
from tests.unit.executor.test_checkpoint_files import TENSORS, whole

from .conftest import cluster_of

LIMIT_S = 60.0
"""No answer may take longer, on a busy machine; most take a few hundredths of a second."""
FILES, LINES, PORTION = 10_000, 1_000, 250
"""How many cases there are, and how many of them are one test."""
ENDS = {0, 1, 2, 3}


class CutError(RunError):
    """A case has come to where processes would start, or measuring would begin."""


class LateError(Exception):
    """A case has outlasted its time."""


def cut(*_: Any, **__: Any) -> Any:
    raise CutError("the case ends here")


# -- good files ---------------------------------------------------------------------------------


def measured_profile() -> ModelProfile:
    """A few units, with all that a profile can have."""
    fidelity = FidelityProfile(exchange="topk", ratios=(0.01, 0.1), kept=(0.6, 0.95))
    units = [
        msgspec.structs.replace(
            linear(name, 512, 512, shared=shared), fidelity=(fidelity,), gradient_energy=2.0,
            input_saved=1024.0, input_kept=16.0, batch_dims=(0,),
        )
        for name, shared in (("a", "tied"), ("b", None), ("c", "tied"))
    ]  # fmt: skip
    chain = chain_profile([*units, norm("n")], updates=(("sgd", 1e-10), ("adamw", 1e-9)))
    pieces = [
        PieceProfile(modules=("a",), first="a", last="a"),
        PieceProfile(modules=("b",), first="b", last="b", follows=("a",)),
    ]
    return msgspec.structs.replace(
        chain,
        target="mlp",
        precision="float32",
        pieces=tuple(pieces),
        step=Curve(x=(1.0, 2.0), y=(1e-3, 2e-3)),
        spread=0.05,
        compression=(
            CompressionRate(exchange="bf16", seconds_per_byte=1e-10),
            CompressionRate(
                exchange="topk", seconds_per_byte=1e-9, received_seconds_per_byte=1e-10
            ),
        ),
        software=(("torch", "2.13.0"),),
    )


def measured_cluster() -> Cluster:
    """Two hosts of two devices, with all that a cluster can have."""
    device = Device(
        name="a100-sxm-40gb", memory_bytes=2**34, reserve_bytes=2**30, host_bytes_per_s=1e10
    )
    curve = Curve(x=(1e3, 1e6, 1e8), y=(1e-4, 1e-3, 1e-1))
    ring = CollectiveCurve(
        collective="all_reduce", ranks=4, seconds=curve, latency_s=1e-4, bytes_per_s=1e9
    )
    return Cluster(
        name="measured",
        nodes=tuple(
            Node(name=f"host{i}", devices=(device, device), host_memory_bytes=2**36)
            for i in range(2)
        ),
        levels=(
            Level(name="intra", latency_s=1e-5, bytes_per_s=1e10, spread=0.1),
            Level(name="inter", latency_s=5e-5, bytes_per_s=1e8, curves=(ring,)),
        ),
        interference=Interference(compute_slowdown=1.2, communication_slowdown=1.1),
        overhead=StepOverhead(
            step_s=1e-4, parameter_s=1e-6, byte_s=1e-12, move_s=1e-5, rerun_s=1e-5
        ),
        pair_bytes_per_s=tuple(
            tuple(0.0 if i == j else 1e8 + i for j in range(4)) for i in range(4)
        ),
        origin="measured",
    )


@dataclass(frozen=True)
class Good:
    """The good files of each kind, and where a checkpoint is."""

    folder: Path
    profiles: tuple[bytes, ...]
    clusters: tuple[bytes, ...]
    plans: tuple[bytes, ...]
    report: bytes
    index: bytes

    @property
    def all(self) -> tuple[bytes, ...]:
        return (*self.profiles, *self.clusters, *self.plans, self.report, self.index)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        return made_good(folder)


def made_good(folder: Path) -> Good:
    profiles = (chain_profile([linear("a"), norm("n"), linear("b")]), measured_profile())
    clusters = (cluster_of(4), measured_cluster())
    goal = make_goal(64, optimizer="adamw", micro_batches=(1, 2))
    plans = [
        api.plan(profile, cluster, goal, solver="heuristic")
        for profile in profiles
        for cluster in clusters
    ]
    apart = make_goal(64, allow_lossy=True, allow_local_steps=True)
    plans.append(api.plan(profiles[1], cluster_of(4, gbit_s=1e-3), apart, solver="heuristic"))
    predicted = predicted_figures(plans[0].prediction)
    slower = msgspec.structs.replace(predicted, step_s=1.5 * predicted.step_s, reserved_bytes=None)
    report = RunReport(
        target=plans[0].target, world_size=4, steps=30, predicted=predicted, measured=slower,
        data_parallel=predicted_figures(plans[0].baseline), loss=1.0,
    )  # fmt: skip
    kept = folder / "kept"
    folders.prepare(kept)
    stored = {name: whole(tensor) for name, tensor in TENSORS.items()}
    described = storage.Description(50, 1, "model", "plan", "decisions", encode(plans[0]))
    storage.save(kept, described, 0, stored, b"{}", None)
    return Good(
        folder,
        tuple(map(encode, profiles)),
        tuple(map(encode, clusters)),
        tuple(map(encode, plans)),
        encode(report),
        (kept / "step-00000050" / INDEX).read_bytes(),
    )


# -- one case -----------------------------------------------------------------------------------


@dataclass
class Finding:
    """What was wrong with an answer."""

    kind: str
    case: str
    detail: str


@dataclass
class Runner:
    """Runs cases and keeps what is wrong with their answers."""

    good: Good
    findings: list[Finding] = field(default_factory=list)
    codes: Counter[int | None] = field(default_factory=Counter)

    def run(self, case: str, arguments: list[str]) -> None:
        """One command in the working folder, which holds its files."""
        before = {p: p.stat().st_mtime_ns for p in files_here()}
        out, err = io.StringIO(), io.StringIO()
        code: int | None = None
        try:
            with (
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
                limited(),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("error", RuntimeWarning)
                code = cli.run(arguments)
        except LateError:
            self._found("late", case, f"no answer in {LIMIT_S:g} s")
        except SystemExit as error:
            self._found("exit", case, repr(error))
        except Exception:
            self._found("traceback", case, traceback.format_exc())
        self.codes[code] += 1
        if code is None:
            return
        if code not in ENDS:
            self._found("code", case, f"{code} {err.getvalue()}")
        self._check_words(case, code, out.getvalue(), err.getvalue())
        self._check_files(case, code, before)

    def _check_words(self, case: str, code: int, out: str, err: str) -> None:
        if "Traceback" in out + err:
            self._found("traceback", case, err)
        said = [line for line in err.splitlines() if line and not line.startswith("note: ")]
        if code == 0 and said:
            self._found("words", case, err)
        # Without arguments typer shows the help and there is no sentence.
        if code and said and not said[0].startswith("meshwright: "):
            self._found("words", case, err)
        if len([line for line in said if not line.startswith("  ")]) > 1:
            self._found("words", case, err)
        if code == 0 and NAN.search(out) and not NAN.search(case):
            self._found("nonsense", case, "\n".join(filter(NAN.search, out.splitlines())))

    def _check_files(self, case: str, code: int, before: dict[Path, int]) -> None:
        for path in files_here():
            if before.get(path) == path.stat().st_mtime_ns:
                continue
            # What a background job prints is appended as it comes: its log is there first.
            if path.parts[0] == "cache" or f"--background-log', '{path}'" in case:
                continue
            name = path.name
            if re.search(r"\.(partial|[a-z0-9_]{8})$", name) and name.startswith("."):
                self._found("half", case, str(path))
            elif code and path not in before:
                self._found("left", case, f"{path} after exit code {code}")
            elif path.suffix == ".json" and not readable(path):
                self._found("unreadable", case, str(path))

    def _found(self, kind: str, case: str, detail: str) -> None:
        self.findings.append(Finding(kind, case, detail))

    def check(self) -> None:
        """Fails with all that was found."""
        told = [f"{f.kind}: {f.case}\n{f.detail}" for f in self.findings]
        assert not told, f"{len(told)} findings\n" + "\n\n".join(told)


NAN = re.compile(r"\b(nan|inf)\b")


def files_here() -> Iterator[Path]:
    return (p for p in Path().rglob("*") if p.is_file())


def readable(path: Path) -> bool:
    """Whether a file is JSON to the end; a document is read as such."""
    try:
        head = json.loads(path.read_bytes())
    except ValueError:
        return False
    kinds = {"Plan": Plan, "ModelProfile": ModelProfile, "Cluster": Cluster}
    if isinstance(head, dict) and head.get("document") in kinds:
        load(kinds[head["document"]], path)
    return True


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def runner(good: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Nothing that is run starts a process, measures, or looks beyond its folder."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(good.folder / "cache"))
    for name in ("RANK", "WORLD_SIZE", "MESHWRIGHT_PLAN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("meshwright.executor.launch.processes.elastic_launch", cut)
    monkeypatch.setattr("meshwright.profiler.sessions.profile_model", cut)
    monkeypatch.setattr("meshwright.executor.launch.scalars._check_installed", lambda: None)
    monkeypatch.setattr("subprocess.Popen", cut)
    monkeypatch.setattr("subprocess.run", cut)
    return Runner(good)


def in_new_folder(runner: Runner, folder: Path) -> None:
    """The good files in a folder of their own, in which the next case runs."""
    folder.mkdir()
    os.chdir(folder)
    good = runner.good
    Path("plan.json").write_bytes(good.plans[0])
    Path("profile.json").write_bytes(good.profiles[0])
    Path("cluster.json").write_bytes(good.clusters[0])
    Path("apart.json").write_bytes(good.plans[-1])
    Path("measured.json").write_bytes(good.clusters[1])
    Path("result.json").write_bytes(good.report)
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    Path("train.py").write_text("print('trained')\n")
    Path("folder").mkdir()


# -- 10,000 files -------------------------------------------------------------------------------

PLANNED = "plan.json"
WITH_BOTH = ("--profile", "profile.json", "--cluster", "cluster.json")
SOLVERS = ("heuristic", "heuristic", "integer", "auto", "lagrangian")


def of_plan(chance: random.Random) -> list[str]:
    """A command that reads ``plan.json``."""
    ways: tuple[tuple[str, ...], ...] = (
        ("explain", PLANNED, "--no-what-if", *WITH_BOTH),
        ("explain", PLANNED, "--time-limit", "1", *WITH_BOTH),
        ("explain", PLANNED, "--memory", *WITH_BOTH),
        ("explain", PLANNED, "--no-what-if", "--json"),
        ("compare", PLANNED, "good.json"),
        ("compare", "good.json", PLANNED, "--json"),
        ("multiplex", PLANNED, *WITH_BOTH, "-o", "out.json"),
        ("multiplex", PLANNED, PLANNED, "--background", "profile.json", "--trace", "out.json"),
        ("verify", PLANNED),
        ("verify", PLANNED, "--steps", "2"),
        ("launch", PLANNED),
        ("launch", PLANNED, "--checkpoint", "kept"),
        ("launch", PLANNED, "--hosts", "a,b,c,d", "--dry-run", "train.py"),
        ("launch", PLANNED, "--nnodes", "2", "--slurm", "out.sh", "train.py"),
        ("launch", PLANNED, "--nnodes", "4", "--kubernetes", "out.json", "--image", "i:1"),
        ("calibrate", PLANNED, "result.json", *WITH_BOTH),
        ("launch", "good.json", "--background", PLANNED),
    )
    return list(chance.choice(ways))


def of_profile(chance: random.Random) -> list[str]:
    base = ("plan", "profile.json", "-c", "cluster.json", "--batch", "64", "-o", "out.json")
    ways: tuple[tuple[str, ...], ...] = (
        (*base, "--solver", chance.choice(SOLVERS), "--time-limit", "2"),
        (*base, "--solver", "heuristic", "--optimizer", "adamw", "--micro-batches", "1,2,4"),
        (*base, "--solver", "heuristic", "--memory-limit", chance.choice(("1MiB", "1GiB"))),
        (*base, "--solver", "heuristic", "--allow-lossy", "--min-fidelity", "0.9", "--bursts"),
        ("plan", "profile.json", "-c", "cluster.json", "--batch", "64", "--ranks", "1,2",
         "--solver", "heuristic"),
        ("advise", "profile.json", "-c", "cluster.json", "--batch", "64", "--time-limit", "1"),
        ("explain", PLANNED, "--no-what-if", *WITH_BOTH),
        ("multiplex", PLANNED, *WITH_BOTH, "--background", "profile.json"),
        ("calibrate", PLANNED, "result.json", *WITH_BOTH),
    )  # fmt: skip
    return list(chance.choice(ways))


def of_cluster(chance: random.Random) -> list[str]:
    base = ("plan", "profile.json", "-c", "cluster.json", "--batch", "64", "-o", "out.json")
    ways: tuple[tuple[str, ...], ...] = (
        (*base, "--solver", chance.choice(SOLVERS), "--time-limit", "2"),
        (*base, "--solver", "heuristic", "--allow-local-steps", "--allow-lossy"),
        (*base, "--solver", "heuristic", "--ranks", "8"),
        ("plan", "mlp", "-c", "cluster.json", "--batch", "64"),
        ("advise", "profile.json", "-c", "cluster.json", "--batch", "64", "--time-limit", "1"),
        ("explain", PLANNED, "--no-what-if", *WITH_BOTH),
        ("multiplex", PLANNED, *WITH_BOTH),
        ("calibrate", PLANNED, "result.json", *WITH_BOTH),
    )
    return list(chance.choice(ways))


def of_index(chance: random.Random) -> list[str]:
    ways: tuple[tuple[str, ...], ...] = (
        ("export", "kept", "-o", "out.safetensors"),
        ("export", "kept", "-o", "out.pt"),
        ("launch", PLANNED, "--checkpoint", "kept"),
    )
    return list(chance.choice(ways))


def bad_index(good: bytes, chance: random.Random) -> bytes:
    """A changed index: as it lies there, or with a hash that fits what was changed."""
    if chance.random() < 0.3:
        return mutations.bad_file([good], [b"{}"], chance)
    content = bytes(msgspec.json.decode(good, type=_Sealed).index)
    wrong = mutations.bad_document(content, chance)
    try:
        msgspec.json.decode(wrong)
        return msgspec.json.encode(_Sealed(sha256=_sha256(wrong), index=msgspec.Raw(wrong)))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return wrong


def one_file(runner: Runner, number: int, folder: Path) -> None:
    """Case ``number``: one file is wrong, and a command reads it."""
    chance = random.Random(f"{SEED}/file/{number}")
    good = runner.good
    in_new_folder(runner, folder)
    profile, cluster = chance.randrange(2), chance.randrange(2)
    Path("profile.json").write_bytes(good.profiles[profile])
    Path("cluster.json").write_bytes(good.clusters[cluster])
    whole_plan = good.plans[-1 if chance.random() < 0.1 else 2 * profile + cluster]
    Path("plan.json").write_bytes(whole_plan)
    Path("good.json").write_bytes(whole_plan)
    kind = number % 4
    name, kinds, line = (
        ("plan.json", (whole_plan,), of_plan),
        ("profile.json", (good.profiles[profile],), of_profile),
        ("cluster.json", (good.clusters[cluster],), of_cluster),
        ("kept/step-00000050/index.json", (), of_index),
    )[kind]
    arguments = line(chance)
    if kind == 3:
        kept = good.folder / "kept" / "step-00000050"
        Path("kept/step-00000050").mkdir(parents=True)
        for file in kept.iterdir():
            (Path("kept/step-00000050") / file.name).symlink_to(file)
        Path(name).unlink()
        wrong = bad_index(good.index, chance)
    else:
        if arguments[0] == "calibrate" and chance.random() < 0.3:
            name, kinds = "result.json", (good.report,)
        wrong = mutations.bad_file(kinds, good.all, chance)
    Path(name).write_bytes(wrong)
    runner.run(f"file {number}: {' '.join(arguments)} ({name})", arguments)


def portions(count: int) -> list[range]:
    return [range(start, start + PORTION) for start in range(0, count, PORTION)]


def run_all(
    runner: Runner, numbers: range, one: Callable[[Runner, int, Path], None], folder: Path
) -> None:
    start = Path.cwd()
    try:
        for number in numbers:
            one(runner, number, folder / str(number))
    finally:
        os.chdir(start)
    runner.check()


def test_wrong_files_first(runner: Runner, tmp_path: Path):
    run_all(runner, range(40), one_file, tmp_path)
    assert runner.codes[2] > 15  # most are refused
    assert sum(runner.codes.values()) == 40


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("numbers", sampled(portions(FILES), 1), ids=str)
def test_wrong_files(runner: Runner, tmp_path: Path, numbers: range):
    run_all(runner, numbers, one_file, tmp_path)


# -- 1,000 command lines ------------------------------------------------------------------------

GOOD_LINES: tuple[tuple[str, ...], ...] = (
    ("profile", "mlp", "--device", "a100-sxm-40gb", "--batches", "2,4", "-o", "out.json"),
    ("profile", "mlp", "--batches", "2", "--ranks", "2"),
    ("probe", "--ranks", "2", "-o", "out.json"),
    ("cluster", "--device", "a100-sxm-40gb", "--nodes", "2", "--devices-per-node", "2",
     "--inter-gbit-s", "10", "--intra-gbyte-s", "100", "-o", "out.json"),
    ("advise", "profile.json", "-c", "cluster.json", "--batch", "64", "--time-limit", "1"),
    ("plan", "profile.json", "-c", "cluster.json", "--batch", "64", "--solver", "heuristic",
     "-o", "out.json"),
    ("plan", "profile.json", "-c", "cluster.json", "--batch", "64", "--solver", "heuristic",
     "--memory-limit", "1GiB", "--optimizer", "adamw", "--micro-batches", "1,2", "--pin", "a=4x1",
     "--forbid", "recompute", "--step-limit", "10s", "--schedule", "priority", "--slices", "1MiB"),
    ("plan", "profile.json", "-c", "cluster.json", "--batch", "64", "--solver", "heuristic",
     "--allow-local-steps", "--inner-steps", "4", "--fragments", "2", "--ranks", "2,4"),
    ("plan", "mlp", "-c", "measured.json", "--batch", "64", "--precision", "bf16-mixed"),
    ("explain", "plan.json", "--no-what-if", "--best", "2", *WITH_BOTH),
    ("explain", "plan.json", "--memory", "--plot", "out.png", *WITH_BOTH),
    ("compare", "plan.json", "plan.json", "--json"),
    ("multiplex", "plan.json", "--background", "profile.json", "--devices", "8", "--horizon", "2s",
     "--piece", "2ms", "--switch", "1ms", "--speed", "0.5", "--trace", "out.json", "-o", "o.json"),
    ("verify", "plan.json", "--dtype", "float32", "--batch", "8", "--timeout", "60"),
    ("verify", "apart.json", "--steps", "5", "--seeds", "2"),
    ("launch", "plan.json", "--steps", "5", "--nproc", "4", "--timeout", "60", "--report",
     "r.json"),
    ("launch", "plan.json", "--nnodes", "2", "--node-rank", "1", "--rendezvous", "h:29500",
     "train.py", "--epochs", "3"),
    ("launch", "plan.json", "--hosts", "a,user@b", "--nproc", "2", "--ssh-option", "Port=22",
     "--env", "A=b", "--folder", "/x", "--dry-run", "train.py"),
    ("launch", "plan.json", "--hostfile", "hosts", "--ssh-config", "hosts", "--dry-run"),
    ("launch", "plan.json", "--nnodes", "2", "--slurm", "out.sh", "--slurm-option",
     "partition=gpu", "--gpus", "2", "--job-name", "j"),
    ("launch", "plan.json", "--nnodes", "2", "--kubernetes", "out.json", "--image", "r/i:1",
     "--env", "A=b"),
    ("launch", "plan.json", "--background", "sleep 9", "--background-limit", "1.1",
     "--background-memory", "1GiB", "--background-gpu-memory", "1GiB", "--background-grace", "3",
     "--background-log", "b.log"),
    ("launch", "plan.json", "--checkpoint", "new", "--checkpoint-every", "5", "--no-resume"),
    ("launch", "plan.json", "--checkpoint", "kept", "--tensorboard", "folder", "train.py"),
    ("export", "kept", "-o", "out.safetensors"),
    ("calibrate", "plan.json", "result.json", "--cluster-out", "c.json", "--profile-out", "p.json",
     *WITH_BOTH),
    ("demo", "-o", "demo"),
)  # fmt: skip


def options_of_all() -> list[str]:
    command: Any = typer.main.get_command(cli.app)
    found = {o for verb in command.commands.values() for p in verb.params for o in p.opts}
    return sorted(o for o in found if o.startswith("-"))


def one_line(runner: Runner, number: int, folder: Path) -> None:
    chance = random.Random(f"{SEED}/line/{number}")
    in_new_folder(runner, folder)
    Path("kept").symlink_to(runner.good.folder / "kept")
    line = chance.choice(GOOD_LINES)
    options = options_of_all()
    arguments = mutations.bad_line(line, options, chance)
    runner.run(f"line {number}: {arguments}", arguments)


STARTS = ("probe", "verify", "demo", "launch")
"""Verbs that start ranks, as ``profile --ranks`` does."""


def test_the_good_lines_are_good(runner: Runner, tmp_path: Path):
    """Else nothing would be learnt from what is wrong with them."""

    wrong = []

    def one(runner: Runner, number: int, folder: Path) -> None:
        line = GOOD_LINES[number]
        in_new_folder(runner, folder)
        Path("kept").symlink_to(runner.good.folder / "kept")
        runner.codes.clear()
        runner.run(f"line {line}", list(line))
        writes = {"--dry-run", "--slurm", "--kubernetes"} & set(line)
        starts = line[0] in STARTS or ("--ranks" in line and line[0] == "profile")
        if [*runner.codes] != [1 if starts and not writes else 0]:
            wrong.append((line, dict(runner.codes)))

    run_all(runner, range(len(GOOD_LINES)), one, tmp_path)
    assert not wrong, "\n".join(map(str, wrong))


def test_wrong_lines_first(runner: Runner, tmp_path: Path):
    run_all(runner, range(60), one_line, tmp_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("numbers", sampled(portions(LINES), 1), ids=str)
def test_wrong_lines(runner: Runner, tmp_path: Path, numbers: range):
    run_all(runner, numbers, one_line, tmp_path)
