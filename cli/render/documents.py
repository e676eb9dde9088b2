"""Tables of the documents: a plan's decisions and prediction, a profile's units, a cluster."""

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from ...planner.cost.collectives import Fabric
from ...planner.cost.compute import batch_counts, busiest_samples
from ...planner.explain.compare import policy_words, segment_words
from ...planner.explain.what_if import FewerDevices
from ...planner.explain.why import HostCopies, HostsWait, StepBottleneck
from ...planner.schema.cluster import LINK_NAMES, Cluster, Node
from ...planner.schema.local_steps import MOST_INNER_STEPS
from ...planner.schema.plan import Plan, Prediction, UnitPlan
from ...planner.schema.profile import ModelProfile, UnitProfile
from ...planner.schema.text import expected, gap_text, rate, samples, seconds, size
from ...planner.solve.local_steps import HIDDEN
from .comparisons import LAYOUTS, QUANTITIES
from .folding import fold_short as folded
from .folding import unfolded
from .table import empty_table, names_of


def gain(plan: Plan) -> str:
    """What the plan is beside plain data parallelism, in words: how many times as fast, or what it
    costs to fit where that does not."""
    by = plan.speedup
    counts = f", in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    # A factor that would be shown as 1.00.
    same = abs(by - 1) < SEEN
    if plan.baseline_fits:
        text = "the same as" if same else f"{by:.2f} times as fast as"
        return f"Predicted to be {text} plain data parallelism{counts}"
    text = f"is predicted to be {by:.2f} times as fast as that would be"
    if same or by < 1:
        times = "as long" if same else f"{1 / by:.2f} times as long"
        text = f"is predicted to take {times} as that would"
    needs = size(max(plan.baseline.peak_bytes, default=0))
    return (
        f"Plain data parallelism does not fit in memory (it needs {needs} of a rank); this plan "
        f"does{counts}, and {text}"
    )


def verdict(plan: Plan) -> str:
    """The gain; and what its solver proved, status, bound and gap, of which figure."""
    return f"{gain(plan)}; {_proof(plan)}."


def ddp_sentences(plan: Plan, ddp_s: float) -> list[str]:
    """That DistributedDataParallel would take longer than the data parallelism beside a plan by
    priority, which has the plan's schedule; ``ddp_s`` is its step."""
    if ddp_s < plan.baseline.step_s * (1 + TOLD):
        return []
    times = ddp_s / plan.prediction.step_s
    return [
        "Data parallelism is predicted by the same schedule here, which sends first what forward "
        f"needs first. As DistributedDataParallel sends gradients a step would take "
        f"{seconds(ddp_s)}, {times:.2f} times this plan's."
    ]


def training_sentences(plan: Plan, cluster: Cluster) -> list[str]:
    """What a plan does to the training, wherever it is shown."""
    return [
        *local_sentences(plan),
        *lossy_sentences(plan),
        *local_batch_sentences(plan, cluster),
    ]


def local_sentences(plan: Plan) -> list[str]:
    """How hosts train apart, where they do."""
    local = plan.local_steps
    if local is None:
        return []
    many = len(local.fragments)
    parts = "the model whole" if many == 1 else f"each of {many} fragments of the model"
    # A round's averages must have come, or nothing of them is seen.
    enough = max(50, 2 * local.steps_to_begin)
    late = f", applied {local.delay} steps after it was sent" if local.delay else ""
    return [
        f"The {local.hosts} hosts train apart (local steps, DiLoCo): {parts} is averaged once in "
        f"{local.inner_steps} steps{late} (outer learning rate {local.outer_lr:g}, momentum "
        f"{local.outer_momentum:g}). That changes the training: compare with meshwright verify "
        f"PLAN --steps {enough}. The units' times are those of a host by itself."
    ]


def lossy_sentences(plan: Plan) -> list[str]:
    """That units keep a part of their gradients for later steps, where some do."""
    lossy = [unit for unit in plan.units if unit.lossy]
    if not lossy:
        return []
    several = len(lossy) > 1
    ways = ", ".join(sorted({unit.exchange for unit in lossy}))
    # Of eight bits every element is sent, rounded.
    if any(unit.exchange != "int8" for unit in lossy):
        ways += "; a number behind it is the share that is sent"
    return [
        f"{len(lossy)} {'units keep' if several else 'unit keeps'} a part of "
        f"{'their gradients' if several else 'its gradient'} for later steps ({ways}). That "
        "changes the training: compare with meshwright verify PLAN --steps 50."
    ]


def bound_sentence(found: StepBottleneck) -> str:
    """What bounds the step, and what its user could do about it."""
    step, hosts, copies = seconds(found.step_s), found.hosts, found.copies
    if hosts is not None and found.part == "averages":
        less = _less_waiting(found, hosts)
        return f"Bound by waiting for other hosts ({seconds(found.part_s)} of {step}): {less}."
    if found.host_s > STARVED * found.step_s:
        return (
            f"Bound by the hosts, which GPUs wait for to issue work ({seconds(found.host_s)} of "
            f"{step}): a larger --batch or torch.compile gives each operator more to do; what is "
            "recomputed or offloaded is issued again."
        )
    copied = found.part == "copies"
    words = _bound_by_copies(found, copies) if copied and copies else _bound_by_part(found)
    if hosts is not None and hosts.waited_s > HIDDEN * found.step_s:
        waited, less = seconds(hosts.waited_s), _less_waiting(found, hosts)
        words += f" Waiting for other hosts takes {waited} of the step: {less}."
    if copies is not None and not copied and copies.copies_s > RECOMPUTED * found.step_s:
        taken, less = seconds(copies.copies_s), _fewer_copies(found, copies)
        words += f" Copies to the host and back take {taken} of the step: {less}."
    return words


def _bound_by_copies(found: StepBottleneck, copies: HostCopies) -> str:
    taken, less = seconds(copies.copies_s), _fewer_copies(found, copies)
    return f"Bound by copies to the host and back ({taken} of {seconds(found.step_s)}): {less}."


def _bound_by_part(found: StepBottleneck) -> str:
    """The largest part of a step of ranks that train together, and what would shorten it."""
    where = "" if found.link is None else LINK_NAMES[found.link]
    saves = _saves(found, found.step_s if found.faster_s is None else found.faster_s)
    advice = [f"twice the bandwidth {where} {saves}"] if where else []
    of_which = ""
    if found.part == "compute":
        what = "computing"
        if found.recompute_s > RECOMPUTED * found.step_s:
            again = seconds(found.recompute_s)
            advice.insert(0, f"{again} of it recomputes what memory has no room for")
        advice.append("more or faster devices shorten it")
    elif found.part == "communication":
        what, exchange_s = "communication", found.part_s - found.blocking_s
        of_which = f", {seconds(found.blocking_s)} blocking and {seconds(exchange_s)} of gradients"
        advice += [_less_exchange(found)] if exchange_s > found.blocking_s else []
    else:
        blocking = found.part == "blocking"
        what = f"{'blocking communication' if blocking else 'gradient exchange'} {where}"
        advice = [f"twice the bandwidth {saves}"]
        advice += [] if blocking else [_less_exchange(found)]
    slowest = " on the slowest rank, for which the others wait" * found.on_slowest
    part = f"{seconds(found.part_s)} of {seconds(found.step_s)}{of_which}{slowest}"
    return f"Bound by {what} ({part}): {', '.join(advice)}."


def _less_exchange(found: StepBottleneck) -> str:
    """What makes the exchange of gradients a smaller part of training."""
    if found.may_round:
        return "or try --allow-lossy"
    # Micro-batches hold no more feature maps at a time, however many there are.
    more = ", in more --micro-batches as memory is full" * found.full
    return f"or raise --batch{more}"


def _saves(found: StepBottleneck, then_s: float) -> str:
    """What a step of ``then_s`` saves."""
    saved_s = found.step_s - then_s
    return f"saves {seconds(saved_s)}" if saved_s > 0 else "saves nothing"


def _fewer_copies(found: StepBottleneck, copies: HostCopies) -> str:
    """What would shorten the waiting for copies to the host's memory and back."""
    others = {
        "offload": "--forbid offload recomputes or shards instead, where that fits",
        "host_mirror": "--forbid host_mirror keeps mirrors on the device, where they fit",
    }
    room = "a higher --memory-limit" if copies.limited else "more memory on devices"
    return ", ".join(
        [
            f"twice the bandwidth to the host's memory {_saves(found, copies.faster_s)}",
            *(others[policy] for policy in copies.policies),
            f"{room} needs fewer copies",
        ]
    )


def _less_waiting(found: StepBottleneck, hosts: HostsWait) -> str:
    """What would shorten the waiting for other hosts."""
    steps = 2 * hosts.inner_steps
    longer = f"--inner-steps {steps} {_saves(found, hosts.longer_s)}"
    if steps > MOST_INNER_STEPS:
        longer += f" (published as training about as well: up to {MOST_INNER_STEPS})"
    return f"{longer}, twice the bandwidth between nodes {_saves(found, hosts.faster_s)}"


def speed_sentences(profile: ModelProfile) -> list[str]:
    """How much quicker other nodes are than the profile's own device, where it has their times."""
    words = []
    batch = profile.batches[-1]
    for times in profile.node_times:
        own, there = profile.step, times.step
        faster = "" if own is None or there is None or not there(batch) else (
            f" of {samples(batch)} takes {seconds(there(batch))}, not {seconds(own(batch))}"
        )  # fmt: skip
        words.append(f"On {', '.join(times.nodes)} ({times.device}) a step{faster or ' differs'}.")
    return words


def local_batch_sentences(plan: Plan, cluster: Cluster) -> list[str]:
    """How many samples the ranks of each node get, where shares of the batch are planned."""
    if not plan.local_batch_sizes:
        return []
    each: dict[int, list[int]] = {}
    for rank, node in enumerate(cluster.node_of_rank):
        each.setdefault(node, []).append(plan.local_batch_size(rank))
    # Nodes whose ranks get the same share a phrase.
    alike: dict[tuple[int, ...], list[int]] = {}
    for node, sizes in each.items():
        alike.setdefault(tuple(sizes), []).append(node)
    parts = [
        f"{', '.join(map(str, dict.fromkeys(sizes)))} on {_nodes_in_words(nodes, cluster)}"
        for sizes, nodes in alike.items()
    ]
    return [
        f"Devices are unequal, and so are their shares of the {plan.goal.batch} samples: of each "
        f"rank {'; '.join(parts)}."
    ]


def _nodes_in_words(nodes: Sequence[int], cluster: Cluster) -> str:
    """Their names, those that follow one another together."""
    runs = groupby(enumerate(nodes), lambda at: at[1] - at[0])
    return ", ".join(names_of([cluster.nodes[n].name for _, n in run]) for _, run in runs)


def fewer_sentence(plan: Plan, fewer: FewerDevices) -> str:
    """That a part of the devices is quicker by itself."""
    one = fewer.devices == 1
    who = "One device by itself" if one else f"The {fewer.devices} devices of one node"
    # Pinned layouts are of the plan's own number of ranks.
    compared = f": --ranks {fewer.devices},{plan.world_size} compares sizes"
    return (
        f"{who} would take {seconds(fewer.step_s)} for the whole batch, less than this plan, and "
        f"{'fits in its' if one else 'fit in their'} memory{'' if plan.goal.pins else compared}."
    )


def origin_sentences(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """What the times are based on, where that is not just measuring what the plan does."""
    words = device_sentences(profile, cluster)
    counts = batch_counts(
        plan.goal.batch, plan.world_size, plan.micro_batches, plan.local_batch_sizes
    )
    largest = max(busiest_samples(counts, unit.layout) for unit in plan.units)
    measured = profile.batches[-1]
    if profile.origin == "measured" and largest > EXTRAPOLATED * measured:
        words.append(
            f"The units' times were measured up to batches of {measured} and are extrapolated to "
            f"{largest}: profile at batches near that (meshwright profile --batches) and plan from "
            "that profile (its file as TARGET)."
        )
    return words + [f"Calibrated: {said}." for said in (*profile.calibrated, *cluster.calibrated)]


def device_sentences(profile: ModelProfile, cluster: Cluster) -> list[str]:
    """That the units were not measured, or on a device that the cluster has none of."""
    if profile.origin != "measured":
        source = {
            "estimated": f"estimated from what is known of the {profile.device}",
            "table": "those of a published table",
        }[profile.origin]
        return [f"The units' times are {source}, not measured."]
    names = {device.name for device in cluster.devices}
    if profile.device in names:
        return []
    return [
        f"The units' times were measured on {profile.device}, and the cluster has "
        f"{' and '.join(sorted(names))}: profile the model there, or estimate it (meshwright "
        "profile --device), for times of these."
    ]


def memory_sentences(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[str]:
    """What of a device's memory tensors were taken not to have; or that a plan leaves no room for
    what a GPU holds besides them, where no limit was asked and none is known; or that a limit lets
    it need more than a device has."""
    fullest = max(plan.prediction.peak_bytes)
    available = min(device.memory_bytes for device in cluster.devices)
    asked = plan.goal.memory_limit_bytes is not None
    if plan.reserve_bytes:
        known = "measured" if cluster.origin == "measured" else "assumed"
        return [
            f"Of a device's {size(available)}, {size(plan.reserve_bytes)} are left to CUDA, NCCL, "
            f"other libraries and fragments ({known})."
        ]
    if asked and fullest > available:
        return [
            f"The limit of {size(plan.goal.memory_limit_bytes or 0)} lets a rank need "
            f"{size(fullest)}, and a device of the cluster has {size(available)}: the plan is for "
            "devices with more memory."
        ]
    if asked or profile.device_type != "cuda" or fullest <= FULL * available:
        return []
    limit = int(FULL * available / 2**30 * 10) / 10
    return [
        f"Memory is filled to {fullest / available:.0%}, without what CUDA and its libraries take "
        f"for themselves: --memory-limit {limit}GiB leaves room for that."
    ]


# The share of a GPU's memory above which a plan is said to fill it.
FULL = 0.95
# Times of batches this many times as large as those measured are on the measured line still.
EXTRAPOLATED = 2
# Recomputing, and copying to the host, that takes less of the step is not mentioned.
RECOMPUTED = 0.02
# Nor is what GPUs wait for their hosts, where it takes less.
STARVED = 0.05


# How much longer than the baseline's the step of DistributedDataParallel must be to be told.
TOLD = 0.05
# A gap up to which a plan is said to be the best: what solvers take for none.
EXACT = 1e-4
# Of two figures that differ by less, both read the same.
SEEN = 0.005


def _proof(plan: Plan) -> str:
    by = plan.provenance
    within = "the pins and " if plan.goal.pins else ""
    within += "these shares of the batch and " if plan.local_batch_sizes else ""
    near = by.gap is not None and by.gap > EXACT
    best = f"proved within {gap_text(by.gap or 0.0)} of the best" if near else "proved best"
    words = {
        "optimal": f"{best} by the {by.solver} solver under {within}the schedule by "
        f"{plan.schedule}",
        "feasible": f"found by the {by.solver} solver, not proved best",
        "heuristic": f"found by the {by.solver} solver, not proved best",
        "manual": "decided by hand",
    }[by.status]
    # A bound of 0 says nothing.
    if not by.bound_s or by.gap is None:
        return words
    by_time = plan.goal.objective == "time"
    what = "step" if by_time else "device time"
    text = (
        f"{words} (no {what} by the formula is below {seconds(by.bound_s)}, gap "
        f"{gap_text(by.gap)}, {by.solve_s:.1f} s of search)"
    )
    formula_s = by.bound_s / (1 - by.gap) if by.gap < 1 else 0.0
    shown_s = plan.prediction.step_s if by_time else plan.prediction.gpu_seconds
    if not formula_s or abs(shown_s / formula_s - 1) < SEEN:
        return text
    return (
        f"{text}. The proof is about the formula, by which this plan takes {seconds(formula_s)}; "
        f"the predicted {seconds(shown_s)} are simulated, with gradients in the messages in which "
        "they travel and what computing and communicating cost each other"
    )


# What the last column of the decisions adds up.
COMMUNICATION = (
    "comm.: waiting for inputs and inside the unit, both ways, and the whole exchange of its "
    "gradients, of which computing may hide a part"
)


IN_BLOCKS = "rows inside a block are of one of its equal layers, on average"


def _communication(unit: UnitPlan) -> float:
    return unit.blocking_s + unit.exchange_s


def decision_table(plan: Plan, *, fold: bool = True) -> Table:
    """Each unit's decision; units that are decided alike are one row with their sums, and equal
    layers one block.

    Code between units that costs nothing is left out of a folded table.
    """
    headings = ("unit", "kind", "parameters", "layout", "style", "forward", "backward", "comm.")
    table = empty_table(f"Decisions: {LAYOUTS}", headings, left=2)
    # These have one layout whatever is planned. They matter where their inputs must be moved.
    free = ("input", "output", "glue")
    shown = [u for u in plan.units if not fold or u.kind not in free or _communication(u) > 0]
    rows = folded(shown, _name, _decision) if fold else unfolded(shown, _name)
    blocks = any(row.is_block for row in rows)
    table.caption = f"{COMMUNICATION}; {IN_BLOCKS}\n" if blocks else f"{COMMUNICATION}\n"
    table.caption_justify = "left"
    for row in rows:
        first = row.units[0]
        kinds = ", ".join(dict.fromkeys(u.kind for u in row.units))
        style = ", ".join(_decision(first)[1:])
        if row.module:
            style = style.replace(f"{row.module}.", "")
        table.add_row(
            row.indented,
            "" if row.is_block else kinds,
            size(row.mean(lambda u: u.parameter_bytes)),
            "" if row.is_block else str(first.layout),
            "" if row.is_block else style,
            seconds(row.mean(lambda u: u.forward_s)),
            seconds(row.mean(lambda u: u.backward_s)),
            seconds(row.mean(_communication)),
        )
    return table


def _name(unit: UnitPlan | UnitProfile) -> str:
    return unit.name


def _decision(unit: UnitPlan) -> tuple[str, ...]:
    style = "data parallel" if unit.style == "none" else unit.style
    return (str(unit.layout), style, *policy_words(unit), *segment_words(unit))


# The parts of a prediction that are printed, in this order.
PREDICTED = (
    "step_s", "compute_s", "copies_s", "blocking_s", "exposed_s", "samples_per_s", "wire_bytes",
    "peak_bytes",
)  # fmt: skip


def prediction_table(plan: Plan) -> Table:
    """The predicted step, part by part, beside plain data parallelism."""
    title = f"Predicted for one step of {samples(plan.goal.batch)} and {plan.goal.optimizer}"
    table = empty_table(title, ("", "this plan", "data parallel"))

    def shown(prediction: Prediction, name: str) -> str:
        value = getattr(prediction, name)
        if name == "step_s":
            return expected(value, prediction.low_s, prediction.high_s)
        # Of what differs by rank the largest: the fullest rank is the one that may fail.
        return QUANTITIES[name][1](max(value, default=0) if isinstance(value, tuple) else value)

    rows = [
        (QUANTITIES[name][0], *(shown(p, name) for p in (plan.prediction, plan.baseline)))
        for name in PREDICTED
        # Of few plans, and of plain data parallelism never.
        if name != "copies_s" or plan.prediction.copies_s
    ]
    if plan.goal.background:
        times = plan.goal.slowdown
        slowed, theirs = (seconds(p.step_s * times) for p in (plan.prediction, plan.baseline))
        rows.insert(1, (f"  at most, with a background job ({times:g} times)", slowed, theirs))
    for name, left, right in rows:
        table.add_row(name, left, right)
    return table


def units_table(profile: ModelProfile, *, fold: bool = True) -> Table:
    """What was measured of each unit, at the largest batch measured."""
    batch = profile.batches[-1]
    title = f"{profile.target} on {profile.device}, {profile.dtype}, {samples(batch)}"
    headings = ("unit", "kind", "divisible", "parameters", "forward", "backward", "saved")
    table = empty_table(title, headings, left=3)

    rows = folded(profile.units, _name, _kind) if fold else unfolded(profile.units, _name)
    if any(row.is_block for row in rows):
        table.caption, table.caption_justify = IN_BLOCKS.capitalize(), "left"
    for row in rows:
        kind, *styles = _kind(row.units[0])
        table.add_row(
            row.indented,
            "" if row.is_block else kind,
            "" if row.is_block else ", ".join(styles) or "no",
            size(row.mean(lambda u: u.parameter_bytes)),
            seconds(row.mean(lambda u: u.whole.forward(batch))),
            seconds(row.mean(lambda u: u.whole.backward(batch))),
            size(row.mean(lambda u: u.whole.saved(batch))),
        )
    return table


def _kind(unit: UnitProfile) -> tuple[str, ...]:
    return (unit.kind, *(split.style for split in unit.splits))


def _devices(node: Node) -> str:
    """A node's devices, equal ones counted."""
    shown = groupby(f"{device.name}, {size(device.memory_bytes)}" for device in node.devices)
    return "; ".join(f"{len(list(equal))} x {text}" for text, equal in shown)


def _shown(node: Node) -> tuple[str, str, str]:
    """A node's devices; what of their memory is kept back and what the host has; the rate of their
    link to the host's memory."""
    reserved = max(device.reserve_bytes for device in node.devices)
    parts = [f"{size(reserved)} of each kept back"] if reserved else []
    speeds = sorted({d.relative_speed for d in node.devices if d.relative_speed != 1})
    parts += [f"{speed:g} times as fast as profiled" for speed in speeds]
    if node.host_memory_bytes is not None:
        parts.append(f"{size(node.host_memory_bytes)} in the host")
    rates = [d.host_bytes_per_s for d in node.devices if d.host_bytes_per_s is not None]
    return _devices(node), ", ".join(parts), rate(min(rates)) if rates else ""


# Hosts of unequal links that a table lists, the slowest first.
LISTED_HOSTS = 8


def cluster_table(cluster: Cluster) -> Table:
    """Nodes, devices and links; neighbouring nodes that are equal share a row. Where hosts' links
    differ, what each one sends and receives at most."""
    hosts = "one node" if len(cluster.nodes) == 1 else f"{len(cluster.nodes)} nodes"
    count = "one device" if cluster.world_size == 1 else f"{cluster.world_size} devices"
    title = f"{cluster.name}: {count} on {hosts}"
    table = empty_table(title, ("", "", "latency", "bandwidth"), left=2)
    for (devices, memory, link), equal in groupby(cluster.nodes, _shown):
        table.add_row(names_of([node.name for node in equal]), devices, "", "")
        if memory:
            table.add_row("", memory, "", "")
        if link:
            table.add_row("", "between a device and the host's memory", "", link)
    for level in cluster.levels:
        where = "between nodes" if level.name == "inter" else "inside a node"
        if level.name == "inter" and cluster.pair_bytes_per_s:
            where = "slowest between nodes"
        curves = f"{len(level.curves)} curves measured" if level.curves else "by formula"
        table.add_row(where, curves, seconds(level.latency_s), rate(level.bytes_per_s))
    if cluster.pair_bytes_per_s and len(cluster.nodes) > 1:
        sent, received = Fabric(cluster, tuple(range(cluster.world_size))).interfaces
        by_rate = sorted(range(len(cluster.nodes)), key=lambda i: min(sent[i], received[i]))
        for i in by_rate[:LISTED_HOSTS]:
            both = rate(sent[i]), rate(received[i])
            text = both[0] if both[0] == both[1] else f"{both[0]} out, {both[1]} in"
            table.add_row(cluster.nodes[i].name, "its fastest link", "", text)
        if len(by_rate) > LISTED_HOSTS:
            table.add_row(f"{len(by_rate) - LISTED_HOSTS} more hosts", "faster ones", "", "")
    return table
