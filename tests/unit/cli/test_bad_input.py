"""What a wrong input gets: one sentence with the value and the remedy, an exit code, no file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from meshwright.cli.output import deliver
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.record import decode, save
from meshwright.planner.schema.report import Figures, RunReport

from tests.strategies import chain_profile, linear

from .conftest import cluster_of

FACTORIES = """
import torch
from torch import nn
from meshwright import Batch, Workload


def number():
    return 7


def wrong_width():
    model = nn.Linear(5, 2)
    make = lambda size: Batch((torch.randn(size, 3),), torch.zeros(size, 2))
    return Workload("wrong", model, make, nn.functional.mse_loss)


def no_mean():
    model = nn.Linear(3, 2)
    make = lambda size: Batch((torch.randn(size, 3),), torch.zeros(size, 2))
    return Workload("long", model, make, lambda output, target: output - target)


def fed(make):
    return Workload("fed", nn.Linear(3, 2), make, nn.functional.mse_loss)


def pairs():
    return fed(lambda size: (torch.randn(size, 3), torch.zeros(size, 2)))


def bare():
    return fed(lambda size: Batch(torch.randn(size, 3), torch.zeros(size, 2)))


def always_eight():
    return fed(lambda size: Batch((torch.randn(8, 3),), torch.zeros(8, 2)))


def no_tensor():
    return fed(lambda size: Batch((), None))


def no_batches():
    return fed(lambda size: {}[size])


def needy(argument):
    return None


def misnamed():
    return Workload("w", nn.Linear(2, 2), make_batches=None, loss=None)


def broken():
    raise KeyError("no such layer")
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FACTORIES)
    return path


def refused(done, code: int, *words: str) -> None:
    """Exit code, nothing on stdout, and a sentence that holds all the words."""
    assert done.code == code, done
    assert done.out == ""
    for word in words:
        assert word in done.sentence


# -- targets ----------------------------------------------------------------------------------


def test_unknown_model_names_the_nearest(meshwright, tmp_path):
    done = meshwright("profile", "vgg61", "-o", "p.json")
    refused(done, 2, "'vgg61'", "vgg16")
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("mine.py:number", ("mine.py:number", "int", "Workload")),
        ("mine.py:wrong_width", ("mat1 and mat2 shapes cannot be multiplied",)),
        ("mine.py:no_mean", ("shape (2, 2)", "expected one number")),
        ("mine.py:pairs", ("make_batch(2)", "a tuple", "Batch((x,), target) with 2 samples")),
        ("mine.py:bare", ("arguments as a Tensor", "expected a tuple", "Batch((x,), target)")),
        ("mine.py:always_eight", ("make_batch(2)", "8 samples", "with 2 samples")),
        ("mine.py:no_tensor", ("a batch needs a tensor", "with 2 samples")),
        ("mine.py:no_batches", ("make_batch(2)", "KeyError")),
        ("mine.py:needy", ("missing 1 required positional argument", "without arguments")),
        ("mine.py:misnamed", ("'make_batches'", "Workload(name, model, make_batch, loss)")),
        ("mine.py:broken", ("KeyError", "no such layer")),
        ("mine.py:absent", ("'absent'", "factory")),
        ("mine.py", ("mine.py:factory",)),
        ("not_here.py:make", ("not_here.py", "factory")),
        ("no.such.module:make", ("'no'", "module")),
    ],
)
def test_targets_that_are_none(meshwright, factories, tmp_path, target, words):
    done = meshwright("profile", target, "-o", "p.json")
    refused(done, 2, *words)
    assert not (tmp_path / "p.json").exists()


def test_an_estimate_says_what_is_wrong_with_batches(meshwright, factories):
    """It runs the model on batches of its own, without trying it out before."""
    done = meshwright("profile", "mine.py:pairs", "--device", "a100-sxm-40gb")
    refused(done, 2, "make_batch(2)", "a tuple", "Batch((x,), target) with 2 samples")
    done = meshwright("profile", "mine.py:always_eight", "--device", "a100-sxm-40gb")
    refused(done, 2, "make_batch(2)", "8 samples", "with 2 samples")


def test_file_that_does_not_run(meshwright, tmp_path):
    (tmp_path / "mine.py").write_text("def make(:\n")
    refused(meshwright("profile", "mine.py:make"), 2, "SyntaxError", "mine.py")


# -- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch", "0"), ("--batch 0", "at least 1")),
        (("--batch", "-8"), ("--batch -8",)),
        (("--batch", "many"), ("--batch 'many'", "whole number", "at least 1")),
        (("--batch", "8", "--memory-limit", "lots"), ("'lots'", "8GiB")),
        (("--batch", "8", "--memory-limit", "-3GB"), ("-3GB",)),
        (("--batch", "8", "--micro-batches", "1,x"), ("'1,x'", "1,2,4")),
        (("--batch", "8", "--micro-batches", "0"), ("--micro-batches '0'", "at least 1")),
        (("--batch", "8", "--micro-batches", "64"), ("micro-batches", "at most 1")),
        (("--batch", "8", "--optimizer", "lion"), ("'lion'", "adamw")),
        (("--batch", "8", "--batch-statistics", "mine"), ("'mine'", "global")),
        (("--batch", "8", "--solver", "magic"), ("'magic'", "heuristic")),
        (("--batch", "8", "--time-limit", "0"), ("--time-limit 0", "more than 0")),
        (("--batch", "8", "--time-limit", "nan"), ("nan",)),
        (("--batch", "8", "--objective", "money"), ("'money'", "gpu-seconds")),
        (("--batch", "8", "--step-limit", "soon"), ("'soon'", "250ms")),
        (("--batch", "8", "--step-limit", "0"), ("'0'", "above 0")),
        (("--batch", "8", "--amplification-limit", "0"), ("-limit 0", "more than 0")),
        (("--batch", "8", "--unit-amplification-limit", "nan"), ("-limit nan", "more than 0")),
        (("--batch", "8", "--min-fidelity", "0.9"), ("0.9", "--allow-lossy")),
        (("--batch", "8", "--allow-lossy", "--min-fidelity", "1.5"), ("1.5", "0 to 1")),
        (("--batch", "8", "--allow-lossy", "--min-fidelity", "0.9"), ("vgg16", "(fidelity)")),
        (("--batch", "8", "--slices", "1MiB", "--schedule", "barrier"), ("--slices", "'barrier'")),
        (("--batch", "8", "--schedule", "fifo"), ("'fifo'", "auto, barrier, priority")),
        (("--batch", "8", "--pin", "32.linear"), ("'32.linear'", "UNIT=LAYOUT")),
        (("--batch", "8", "--pin", "32.linear=big"), ("'32.linear=big'", "4x2")),
        (("--batch", "8", "--pin", "32.linear=0x8"), ("'32.linear=0x8'", "4x2")),
        (("--batch", "8", "--pin", "32.liner=4x2"), ("'32.liner'", "32.linear")),
        (("--batch", "8", "--pin", "32.linear=3x2"), ("(3,2) on 8 ranks", "(4,2) row")),
        (("--batch", "8", "--pin", "input=4x2"), ("'input'", "(8,1)")),
        (("--batch", "8", "--forbid", "dense"), ("'dense'", "forbid another")),
        (("--batch", "8", "--forbid", "32.linear=4x2:row"), ("'32.linear=4x2:row'", "one of")),
        (
            ("--batch", "8", "--pin", "32.linear=8x1", "--forbid", "32.linear=8x1"),
            ("(8,1) and not (8,1)", "choose from"),
        ),
        (("--batch", "8", "--ranks", "8,16", "--front"), ("--ranks", "--front")),
        (("--batch", "8", "--ranks", "0"), ("--ranks '0'", "at least 1")),
        (("--batch", "8", "--ranks", "few"), ("'few'", "1,2,4")),
        (("--batch", "8", "-o", "no/such/folder/p.json"), ("no/such/folder",)),
        (("--batch", "8", "--wrong"), ("--wrong",)),
        ((), ("--batch",)),
    ],
)
def test_options_of_plan(meshwright, profile_file, cluster_file, options, words):
    refused(meshwright("plan", profile_file, "-c", cluster_file, *options), 2, *words)


@pytest.mark.parametrize(("option", "given"), [("--solver", "magic"), ("--schedule", "fifo")])
def test_how_to_search_is_refused_before_the_target_is_measured(
    meshwright, factories, cluster_file, option, given
):
    """The target itself is wrong, which is noticed when it is tried."""
    asked = "plan", "mine.py:number", "-c", cluster_file, "--batch", "8", option, given
    refused(meshwright(*asked), 2, f"'{given}'", "choose from")


@pytest.mark.parametrize("device", ["a100-sxm-40gb", "cuda:1"])
def test_ranks_measure_on_this_machine(meshwright, tmp_path, device):
    asked = "profile", "gpt-tiny", "--device", device, "--ranks", "2", "-o", "p.json"
    refused(meshwright(*asked), 2, "2 ranks", device, "--ranks")
    assert not (tmp_path / "p.json").exists()


def test_unknown_verb(meshwright):
    refused(meshwright("plam"), 2, "'plam'", "'meshwright --help' lists commands")


def test_wrong_usage_points_to_the_help_of_the_verb(meshwright, profile_file, cluster_file):
    done = meshwright("plan", profile_file, "-c", cluster_file)
    refused(done, 2, "--batch", "'meshwright plan --help' lists its options")
    refused(meshwright("compare", "a.json"), 2, "'meshwright compare --help'")


def test_an_option_that_is_the_name_of_a_verb_points_to_the_verb(meshwright, profile_file):
    done = meshwright("plan", profile_file, "--batch", "8", "--explain")
    refused(done, 2, "No such option: --explain", "meshwright explain PLAN")
    assert "Possible options" not in done.err
    # One that is close to an option is told so as before.
    assert "--batch" in meshwright("plan", profile_file, "--batc", "8").err


def test_a_device_that_is_not_catalogued_is_told_before_missing_links(meshwright):
    done = meshwright("cluster", "--device", "a100", "--nodes", "2")
    refused(done, 2, "'a100' is not catalogued", "a100-sxm-40gb")


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": [', '{"a"'])
def test_a_file_that_is_cut_off_is_told_so_whatever_its_fields(meshwright, tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    done = meshwright("explain", path)
    refused(done, 2, "plan.json", "ends in the middle of a Plan")
    assert "unknown field" not in done.err


def test_what_is_no_json_is_told_so(meshwright, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"a": 1; "b": 2}')
    refused(meshwright("explain", path), 2, "plan.json", "malformed")


def test_choices_are_listed_in_plain_words(meshwright, profile_file, cluster_file):
    base = ("plan", profile_file, "-c", cluster_file, "--batch", "8")
    for wrong in (("--solver", "magic"), ("--pin", "32.liner=4x2"), ("--micro-batches", "2,4")):
        sentence = meshwright(*base, *wrong).sentence
        assert "[" not in sentence.replace("[8,1]", ""), sentence
    assert "choose from auto, heuristic" in meshwright(*base, "--solver", "magic").sentence


def test_a_gpu_that_is_not_here(meshwright, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = meshwright("profile", "mlp", "--device", "cuda")
    refused(done, 2, "'cuda'", "built for CUDA", "'cpu'", "'h100-sxm'")


# -- documents --------------------------------------------------------------------------------


def changed(path: Path, **fields: object) -> None:
    """Sets fields of a JSON file by dotted path."""
    document = json.loads(path.read_text())
    for dotted, value in fields.items():
        *steps, last = dotted.split("__")
        at = document
        for step in steps:
            at = at[int(step) if step.isdigit() else step]
        at[last] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schema_version": 99}, ("schema version 99", "reads 1")),
        ({"nodes__0__devices__0__memory_bytes": -1}, ("$.nodes[0].devices[0].memory_bytes",)),
        ({"levels__0__bytes_per_s": "fast"}, ("$.levels[0].bytes_per_s",)),
        ({"levels__0__latency_s": -0.5}, ("$.levels[0].latency_s", ">= 0")),
        ({"levels__0__bytes_per_s": 0}, ("$.levels[0].bytes_per_s", "> 0")),
        ({"levels__0__bytes_per_s": float("nan")}, ("cluster.json",)),
        ({"levels__0__bytes_per_s": float("inf")}, ("cluster.json",)),
        ({"levels": []}, ("no links", "bandwidth")),
        ({"nodes": []}, ("at least one node",)),
        ({"colour": "red"}, ("`colour`",)),
        ({"document": "Plan"}, ("Plan",)),
    ],
)
def test_damaged_cluster(meshwright, profile_file, cluster_file, tmp_path, fields, words):
    changed(cluster_file, **fields)
    out = tmp_path / "p.json"
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", out)
    refused(done, 2, "cluster.json", *words)
    assert not out.exists()


def test_files_of_an_older_schema(meshwright, profile_file, cluster_file, plan_file):
    for path, made_by in ((plan_file, "meshwright plan"), (profile_file, "meshwright profile")):
        changed(path, schema_version=1)
        words = (path.name, "schema version 1", "reads 2", f"make it anew with '{made_by} ")
        if path == plan_file:
            refused(meshwright("compare", path, path), 2, *words)
        else:
            refused(meshwright("plan", path, "-c", cluster_file, "--batch", 256), 2, *words)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000])
def test_truncated_profile(meshwright, profile_file, cluster_file, keep):
    profile_file.write_bytes(profile_file.read_bytes()[:keep])
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256)
    refused(done, 2, "profile.json", "ends in the middle of a ModelProfile")


def test_not_text_at_all(meshwright, profile_file, cluster_file):
    profile_file.write_bytes(bytes(range(256)))
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256)
    refused(done, 2, "profile.json")


def test_missing_files(meshwright, profile_file, cluster_file):
    done = meshwright("plan", "absent.json", "-c", cluster_file, "--batch", 256)
    refused(done, 2, "absent.json", "No such file", "meshwright profile")
    done = meshwright("plan", profile_file, "-c", "absent.json", "--batch", 256)
    refused(done, 2, "absent.json", "No such file", "meshwright probe")
    refused(meshwright("explain", "absent.json"), 2, "absent.json", "meshwright plan TARGET")


def test_a_folder_as_file(meshwright, profile_file, tmp_path):
    done = meshwright("plan", profile_file, "-c", tmp_path, "--batch", 256)
    refused(done, 2, str(tmp_path), "directory")


def test_another_kind_of_document_names_the_option_and_the_way_to_make_it(
    meshwright, plan_file, profile_file, cluster_file, tmp_path
):
    result = tmp_path / "result.json"
    took = Figures(step_s=1.0)
    save(
        RunReport(
            target="mlp", world_size=2, steps=3, predicted=took, measured=took, data_parallel=took
        ),
        result,
    )
    done = meshwright("explain", result)
    refused(done, 2, "PLAN", "result.json is a RunReport", "a Plan is needed")
    done = meshwright("report", plan_file, "--result", cluster_file)
    refused(done, 2, "cluster.json is a Cluster", "a RunReport is needed", "launch plan.json")
    done = meshwright("plan", profile_file, "-c", plan_file, "--batch", 256)
    refused(done, 2, "--cluster", "plan.json is a Plan", "a Cluster is needed", "meshwright probe")
    done = meshwright("plan", cluster_file, "-c", cluster_file, "--batch", 256)
    refused(done, 2, "TARGET", "cluster.json is a Cluster", "meshwright profile TARGET")
    done = meshwright("launch", profile_file)
    refused(done, 2, "PLAN", "profile.json is a ModelProfile", "meshwright plan TARGET")
    done = meshwright("explain", plan_file, "--profile", cluster_file)
    refused(done, 2, "--profile", "cluster.json is a Cluster", "a ModelProfile is needed")
    done = meshwright("compare", plan_file, cluster_file)
    refused(done, 2, "B", "cluster.json is a Cluster", "a Plan is needed")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("1e300", ("levels[0]", "bytes_per_s is 1e+300", "1e-60 to 1e+60")),
        ("1e-300", ("levels[0]", "bytes_per_s is 1e-300")),
        ("1" * 400, ("levels[0]",)),
    ],
)
def test_figures_that_nobody_has_measured(meshwright, profile_file, cluster_file, value, words):
    """What is computed from them would be infinite, or nothing."""
    text = cluster_file.read_text().replace('"bytes_per_s": 125000000.0', f'"bytes_per_s": {value}')
    cluster_file.write_text(text)
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256)
    refused(done, 2, "cluster.json", *words)


def test_so_many_ranks_that_nothing_could_be_made_for_each(
    meshwright, profile_file, cluster_file, plan_file
):
    many = 10**12
    planned = ("plan", profile_file, "-c", cluster_file, "--batch", 256)
    described = ("cluster", "--device", "h100-sxm", "--inter-gbit-s", 10, "--nodes", many)
    for line in (
        (*planned, "--ranks", many),
        (*planned, "--ranks", f"8,{many}"),
        described,
        ("multiplex", plan_file, "--profile", profile_file, "--cluster", cluster_file,
         "--devices", many),
    ):  # fmt: skip
        refused(meshwright(*line), 2, str(many), "ask for at most 65536")
    words = f"{many} hosts were named", "use 8 of them at most"
    refused(meshwright("launch", plan_file, "--nnodes", many, "--nproc", 1), 2, *words)
    changed(plan_file, world_size=many)
    refused(meshwright("compare", plan_file, plan_file), 2, str(many), "ask for at most 65536")


def test_names_are_shown_as_they_are(meshwright, plan_file):
    """Brackets and colons in the name of a unit are no markup and no pictures."""
    for name in ("a[/b]", "[red]c", ":bug:"):
        changed(plan_file, units__1__name=name)
        done = meshwright("compare", plan_file, plan_file)
        assert done.code == 0, done.err
    other = plan_file.with_name("other.json")
    other.write_bytes(plan_file.read_bytes())
    changed(other, units__1__layout={"groups": 1, "degree": 8, "first": 0})
    assert ":bug:" in meshwright("compare", plan_file, other).out


def test_a_pipe_is_written_to_and_not_replaced(meshwright, profile_file, cluster_file, tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    done = meshwright("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", pipe)
    reader.join(10)
    assert done.code == 0, done.err
    assert pipe.is_fifo()
    assert json.loads(read[0])["document"] == "Plan"


def test_a_path_that_no_file_can_have(meshwright, plan_file):
    done = meshwright("launch", plan_file, "x" * 5000)
    refused(done, 2, "cannot use 'xxxx", "xxx…': File name too long; name another path")
    assert len(done.sentence) < 200


def test_plan_with_a_step_of_nan(meshwright, plan_file):
    changed(plan_file, prediction__step_s=float("nan"))
    refused(meshwright("compare", plan_file, plan_file), 2, "plan.json")


def test_plan_with_a_placement_of_other_ranks(meshwright, plan_file):
    changed(plan_file, placement=[0, 1, 2])
    refused(meshwright("compare", plan_file, plan_file), 2, "placement", "0 to 7")


# -- documents that do not belong together ----------------------------------------------------


def test_profile_of_another_model(meshwright, plan_file, profile_file, cluster_file):
    changed(profile_file, model="0123456789abcdef")
    done = meshwright("explain", plan_file, "--profile", profile_file, "--cluster", cluster_file)
    refused(done, 2, "0123456789abcdef", "plan again")


def test_cluster_of_another_size(meshwright, plan_file, profile_file, tmp_path):
    small = tmp_path / "small.json"
    save(cluster_of(4), small)
    done = meshwright("explain", plan_file, "--profile", profile_file, "--cluster", small)
    refused(done, 2, "8 ranks", "has 4")


def test_plan_for_eight_ranks_started_on_two(meshwright, plan_file):
    refused(meshwright("launch", plan_file, "--nproc", 2), 2, "8 ranks", "2 would be started")


def test_hosts_that_do_not_divide_the_ranks(meshwright, plan_file):
    done = meshwright("launch", plan_file, "--nnodes", 3, "--rendezvous", "127.0.0.1:29500")
    refused(done, 2, "8 ranks", "3 hosts")


@pytest.mark.parametrize("address", [None, "127.0.0.1", "host:port", ":29500", "host:99999"])
def test_rendezvous_that_is_none(meshwright, plan_file, address):
    given = ("--rendezvous", address) if address else ()
    done = meshwright("launch", plan_file, "--nnodes", 2, *given)
    refused(done, 2, "HOST:PORT")


def test_script_that_is_not_there(meshwright, plan_file):
    refused(meshwright("launch", plan_file, "absent.py", "--lr", "1"), 2, "absent.py")


def test_what_the_executor_cannot_run_is_refused_by_name(meshwright, plan_file, plan):
    conv = next(i for i, u in enumerate(plan.units) if u.kind == "conv")
    narrow = Layout(groups=1, degree=1)
    unit = msgspec.structs.replace(plan.units[conv], layout=narrow, early_release=True)
    units = (*plan.units[:conv], unit, *plan.units[conv + 1 :])
    save(msgspec.structs.replace(plan, units=units), plan_file)
    for verb in ("launch", "verify"):
        refused(meshwright(verb, plan_file), 2, repr(unit.name), "leaves ranks idle")


def test_options_of_verify_that_would_say_nothing(meshwright, plan_file):
    refused(meshwright("verify", plan_file, "--seeds", 5), 2, "--seeds", "without --steps")
    done = meshwright("verify", plan_file, "--steps", 9, "--dtype", "float32")
    refused(done, 2, "--dtype", "with --steps")


# -- memory -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_that_no_plan_fits(meshwright, profile_file, cluster_file, tmp_path):
    out = tmp_path / "p.json"
    done = meshwright(
        *("plan", profile_file, "-c", cluster_file, "--batch", 256, "-o", out),
        *("--memory-limit", "100MB"),
    )
    refused(done, 3, "rank", "unit '", "100,000,000 bytes", "are available", "allow")
    assert not out.exists()


# -- files ------------------------------------------------------------------------------------


def test_a_refused_plan_leaves_the_old_file_alone(meshwright, cluster_file, tmp_path):
    out, small = tmp_path / "p.json", tmp_path / "small.json"
    out.write_text("mine")
    save(chain_profile([linear("first"), linear("second")]), small)
    arguments = ("plan", small, "-c", cluster_file, "-o", out)
    assert meshwright(*arguments, "--batch", 256, "--memory-limit", "1kB").code == 3
    assert out.read_text() == "mine"
    assert [p.name for p in tmp_path.glob(".p.json*")] == []


def test_the_console_script_says_it_in_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", "compare", "a.json", "b.json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("meshwright: cannot read a.json")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_is_said_and_has_its_exit_code(meshwright, monkeypatch):
    def pressed(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshwright.api.describe_cluster", pressed)
    done = meshwright("cluster", "--device", "a100-sxm-40gb")
    assert (done.code, done.sentence) == (130, "meshwright: stopped")


def test_without_a_verb_the_help_is_the_answer(meshwright):
    done = meshwright()
    assert (done.code, done.err) == (2, "")
    assert "plan" in done.out


def test_a_plans_file_that_is_not_here_is_looked_for_where_it_was_planned(monkeypatch, tmp_path):
    from meshwright.models.target import planned
    from meshwright.planner.schema.errors import InputError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no file \.\./x\.py here.*folder where it was planned"):
        planned("../x.py:model")


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    path, figures = tmp_path / "report.json", Figures(step_s=1.0, peak_bytes=2**60)
    report = RunReport(
        target="mlp", world_size=1, steps=1, predicted=figures, measured=figures,
        data_parallel=figures,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"report.json is not written, .*peak_bytes"):
        save(report, path)
    assert not path.exists()


def test_what_cannot_be_written_is_shown(tmp_path, capsys):
    """The figures of a run of days are not lost for the folder that has gone."""
    figures = Figures(step_s=0.125)
    report = RunReport(
        target="mlp", world_size=1, steps=1, predicted=figures, measured=figures,
        data_parallel=figures,
    )  # fmt: skip
    with pytest.raises(InputError, match="report"):
        deliver(report, tmp_path / "gone" / "report.json", json=True)
    assert decode(RunReport, capsys.readouterr().out.encode()) == report


def test_a_full_disk_is_said_in_one_sentence(meshwright, monkeypatch, plan_file):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("meshwright.cli.plan.deliver", full)
    done = meshwright("compare", plan_file, plan_file)
    refused(done, 2, "cannot write: No space left on device; make room")
