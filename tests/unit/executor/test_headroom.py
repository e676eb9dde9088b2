"""What is said when memory is short."""

import os
from math import ceil, inf
from types import SimpleNamespace

import msgspec
import pytest
import torch
from meshwright.executor import cgroups, headroom
from meshwright.executor.headroom import MemoryShortage, divided, free_bytes, overflowed, refusal
from meshwright.executor.launch.replan import planned_within
from meshwright.executor.launch.start import cores, memory_bytes
from meshwright.models.units.storages import OverBudgetError
from meshwright.planner.schema.errors import NoRoomError
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.local_steps import LocalSteps
from meshwright.planner.solve.evaluate import make_plan

from tests.strategies import chain_profile, cluster, linear

CPU, MIB = torch.device("cpu"), 2**20


@pytest.fixture
def plan():
    profile = chain_profile([linear(f"fc{i}", 512, 512, saved=2.0**20) for i in range(3)])
    return make_plan(profile, cluster(2), Goal(batch=16, optimizer="adam"))


def test_a_plan_knows_where_most_is_alive(plan):
    moment = plan.prediction.fullest
    assert moment.total == max(plan.prediction.peak_bytes)
    assert (moment.unit, moment.phase) == ("fc2", "backward")
    assert moment.largest == "feature maps"
    assert moment.weights == 3 * MIB
    assert moment.optimizer == 6 * MIB


def test_the_refusal_names_rank_unit_class_and_a_limit_that_fits(plan):
    needed = max(plan.prediction.peak_bytes)
    short = [
        MemoryShortage(1, needed, needed - 2 * MIB, needed),
        MemoryShortage(2, MIB, 0, needed - 3 * MIB),
    ]
    error = refusal(plan, short)
    assert error.sentence.startswith("rank 1 has ")
    assert "backward of unit 'fc2', above all feature maps" in str(error)
    assert error.limit_bytes == int(0.98 * (needed - 4 * MIB))  # rank 2 has least
    limit = error.limit_bytes // MIB
    assert f"--memory-limit {limit}MiB (memory_limit_bytes={limit} * 2**20)" in str(error)


def test_micro_batches_come_before_a_limit_where_they_make_enough_room(plan):
    """Of the plan's maps half are gone in two micro-batches, seven eighths in eight."""
    maps = plan.prediction.fullest.feature_maps + plan.prediction.fullest.map_gradients
    needed = max(plan.prediction.peak_bytes)
    for missing, count in ((maps // 2, 2), (maps // 2 + 1, 4), (maps * 7 // 8, 8)):
        text = str(refusal(plan, [MemoryShortage(0, needed, needed - missing, needed)]))
        option = f"plan with --micro-batches {count} (micro_batches=({count},)) or, at more time, "
        assert option + "--memory-limit " in text
    # Of 8 samples on each rank there are no more than 8 micro-batches, and of more no more are
    # proposed.
    goal = msgspec.structs.replace(plan.goal, batch=8192)
    for asked in (plan, msgspec.structs.replace(plan, goal=goal)):
        text = str(refusal(asked, [MemoryShortage(0, needed, needed - maps * 7 // 8 - 1, needed)]))
        assert "free some, plan with --memory-limit " in text


def test_no_micro_batches_are_proposed_where_gradients_are_released_early(plan):
    units = (msgspec.structs.replace(plan.units[0], early_release=True), *plan.units[1:])
    early = msgspec.structs.replace(plan, units=units)
    needed = max(plan.prediction.peak_bytes)
    for asked, told in ((plan, True), (early, False)):
        text = str(refusal(asked, [MemoryShortage(0, needed, needed - MIB, needed)]))
        assert ("--micro-batches" in text) is told


def test_a_new_plan_says_that_its_limit_counts_what_is_held(plan):
    """More than is free, which the sentence before says."""
    text = planned_within(3 * 2**29, plan, plan)
    assert text.startswith(
        "planned again within 1.50 GiB on a rank, what it holds already among them, for 2 ranks"
    )


FIRST = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
SECOND = "memory.max", "memory.current", "inactive_file"


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """``groups(text, path, names, limit, used, reclaimable)`` puts this process in a group."""
    process, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    monkeypatch.setattr(cgroups, "PROCESS", process)
    monkeypatch.setattr(cgroups, "MOUNTED", mounted)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    def make(text, path, names, limit, used=100 * MIB, reclaimable=0):
        process.write_text(text)
        folder = mounted / path
        folder.mkdir(parents=True, exist_ok=True)
        contents = str(limit), str(used), f"total_rss 5\n{names[2]} {reclaimable}"
        for name, content in zip((*names[:2], "memory.stat"), contents, strict=True):
            (folder / name).write_text(f"{content}\n")

    return make


@pytest.mark.parametrize(
    ("text", "path", "names", "none"),
    [
        ("0::/\n", "", SECOND, "max"),
        ("0::/user.slice/job\n", "user.slice/job", SECOND, "max"),
        ("0::/of/another/view\n", "", SECOND, "max"),
        ("9:name=systemd:/\n4:memory:/job\n0::/\n", "memory/job", FIRST, 2**63 - 4096),
        ("4:cpu,memory:/outer/inner\n", "memory/outer", FIRST, 2**63 - 4096),
    ],
)
def test_a_control_group_s_limit_counts(groups, text, path, names, none):
    groups(text, path, names, 500 * MIB)
    assert free_bytes(CPU) == 100 * MIB
    assert memory_bytes(CPU, sharing=4) == 125 * MIB
    groups(text, path, names, 500 * MIB, reclaimable=40 * MIB)
    assert free_bytes(CPU) == 110 * MIB
    groups(text, path, names, none)
    assert cgroups.memory_groups() == []
    assert free_bytes(CPU) > 0


def test_ranks_that_share_a_gpu_divide_what_it_has_free():
    rows = [[30.0, 80.0], [10.0, 80.0], [70.0, 80.0], [0.0, 80.0], [5.0, -1.0], [9.0, 80.0]]
    gpus = ["a 1", "a 1", "a 2", "a 1", "a 1", ""]
    found = [has for _, has in divided(rows, gpus)]
    assert found == pytest.approx([80 * 30 / 45, 80 * 10 / 45, 80.0, 80.0, -1.0, 80.0])


@pytest.mark.parametrize(
    ("text", "path", "files", "allowed"),
    [
        ("0::/pod\n", "pod", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/pod\n", "pod", {"cpu.max": "max 100000"}, inf),
        ("3:cpu,cpuacct:/pod\n", "cpu/pod",
         {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpu,cpuacct:/pod\n", "cpu/pod",
         {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, inf),
        ("", "", {}, inf),
    ],
)  # fmt: skip
def test_ranks_divide_the_processors_that_a_container_may_use(
    monkeypatch, tmp_path, text, path, files, allowed
):
    process, mounted = tmp_path / "cgroup", tmp_path / "mounted"
    monkeypatch.setattr(cgroups, "PROCESS", process)
    monkeypatch.setattr(cgroups, "MOUNTED", mounted)
    process.write_text(text)
    (mounted / path).mkdir(parents=True)
    for name, content in files.items():
        (mounted / path / name).write_text(f"{content}\n")
    assert cgroups.allowed_cores() == allowed
    affine = len(os.sched_getaffinity(0))
    assert cores() == (min(affine, ceil(allowed)) if allowed < inf else affine)


def test_of_groups_inside_one_another_the_tightest_counts(groups):
    text = "4:memory:/outer/inner\n"
    groups(text, "memory/outer/inner", FIRST, 800 * MIB, used=0)
    groups(text, "memory/outer", FIRST, 600 * MIB, used=500 * MIB)
    assert free_bytes(CPU) == 25 * MIB
    assert memory_bytes(CPU) == 600 * MIB


class Everyone:
    """Three ranks on two hosts; the first is this one, and what it told is kept."""

    def __init__(self, others):
        self.others, self.told = others, None

    def gather(self, values, doing, *, whole=True):
        self.told = values
        return SimpleNamespace(rows=lambda: [list(map(float, values)), *self.others])

    def texts(self, text, doing):
        return ["one", "one", "other"] if text else [""] * (1 + len(self.others))


def hosts_of(plan, monkeypatch, free, others, pinned=(5 * MIB, 6 * MIB, 7 * MIB)):
    prediction = msgspec.structs.replace(plan.prediction, pinned_bytes=pinned)
    plan = msgspec.structs.replace(plan, prediction=prediction)
    everyone = Everyone(others)
    monkeypatch.setattr(headroom, "pins", lambda device: True)
    monkeypatch.setattr(headroom, "host_free_bytes", lambda: free)
    monkeypatch.setattr(headroom.torch.cuda, "host_memory_stats", dict)
    run = SimpleNamespace(plan=plan, world=SimpleNamespace(position=0), everyone=everyone)
    return headroom._hosts(run, torch.device("cuda", 0)), everyone


def test_what_ranks_of_one_host_pin_counts_together(plan, monkeypatch):
    others = [[6.0 * MIB, 9.0 * MIB], [7.0 * MIB, -1.0]]
    (one, other), everyone = hosts_of(plan, monkeypatch, 10 * MIB, others)
    assert everyone.told == [5 * MIB, 10 * MIB]
    # The least that some rank sees free: a container may have less than its host.
    assert one == ("one", (0, 1), 11 * MIB, 9 * MIB)
    assert other == ("other", (2,), 7 * MIB, None)  # nobody knows
    units = [msgspec.structs.replace(u, memory="offload") for u in plan.units]
    text = one.refusal(msgspec.structs.replace(plan, units=tuple(units)))
    assert text == (
        "host one has 9.0 MiB of memory free, and its ranks 0, 1 need up to 11.0 MiB of pinned "
        "memory there for feature maps that are offloaded: free some, plan with --forbid offload "
        "(plan=mw.plan(..., forbidden=['offload'])), or set MESHWRIGHT_CHECK_MEMORY=0"
    )
    mirrored = [msgspec.structs.replace(u, feedback="host_mirror") for u in units]
    text = one.refusal(msgspec.structs.replace(plan, units=tuple(mirrored)))
    assert "offloaded and mirrors on the host: free some" in text
    assert "--forbid offload --forbid host_mirror" in text


def test_a_plan_that_pins_nothing_compares_nothing(plan, monkeypatch):
    hosts, everyone = hosts_of(plan, monkeypatch, 0, [], pinned=())
    assert hosts == []
    assert everyone.told is None


def test_all_hosts_that_train_apart_refuse_when_one_rank_has_no_room(plan, monkeypatch):
    """The other host's rank is short, and this one, with enough, is refused with it."""
    peaks = 200 * MIB, 100 * MIB
    prediction = msgspec.structs.replace(plan.prediction, peak_bytes=peaks)
    whole = msgspec.structs.replace(
        plan, prediction=prediction, placement=(1, 0),
        local_steps=LocalSteps(hosts=2, inner_steps=3),
    )  # fmt: skip
    everyone, world = Everyone([[200.0 * MIB, 50.0 * MIB]]), SimpleNamespace(rank=0, position=0)
    run = SimpleNamespace(
        whole_plan=whole, plan=whole.inside_host, world=world, everyone=everyone,
        control=Everyone([]),
    )  # fmt: skip
    monkeypatch.setattr(headroom, "free_bytes", lambda device: 150 * MIB)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(NoRoomError, match=r"^rank 1 has 50\.0 MiB .* needs 200\.0 MiB"):
        headroom.check_headroom(run, model, None)
    assert everyone.told == [100 * MIB - 8, 150 * MIB]  # besides the model's two numbers


@pytest.mark.parametrize(
    "stats",
    [
        {"allocated_bytes.current": 9 * MIB, "active_bytes.current": 2 * MIB},
        {"reserved_bytes.current": 9 * MIB, "allocated_bytes.current": 2 * MIB},
    ],
)
def test_what_torch_keeps_pinned_is_free(plan, monkeypatch, stats):
    monkeypatch.setattr(headroom.torch.cuda, "host_memory_stats", lambda: stats)
    assert headroom.kept_pinned_bytes() == 7 * MIB
    monkeypatch.setattr(headroom.torch.cuda, "host_memory_stats", dict)  # CUDA has not begun
    assert headroom.kept_pinned_bytes() == 0


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OverBudgetError(2, 1, ""), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, short):
    assert overflowed(error) is short


def test_torch_s_own_error_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert overflowed(caught.value)


@pytest.mark.parametrize(
    ("target", "precision", "goal", "says"),
    [
        ("Net", None, {}, "auto_parallelize(..., memory_limit_bytes=64 * 2**20, micro_batches=(1"),
        ("vgg16", None, {}, "meshwright plan vgg16 --cluster CLUSTER --batch 32 "),
        ("own.py:net", "bf16", {"batch_statistics": "global"}, " --precision bf16 --batch-stat"),
        ("vgg16", None, {"allow_lossy": True}, "--memory-limit 64MiB --allow-lossy"),
    ],
)
def test_what_makes_a_plan_that_needs_less_is_for_the_same_training(target, precision, goal, says):
    made = make_plan(chain_profile([linear("a")]), cluster(2), Goal(batch=32, **goal))
    made = msgspec.structs.replace(made, target=target, precision=precision)
    assert says in headroom.command(made, 64 * 2**20)
