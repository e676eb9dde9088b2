"""What planner and executor must agree on is said once: both follow where that is changed."""

from types import SimpleNamespace

import pytest
import torch
from meshwright.executor import apply
from meshwright.executor.comm.groups import Group
from meshwright.executor.gradients import buckets, slices, topk
from meshwright.executor.gradients.buckets import Bucket, GradParam
from meshwright.executor.memory.offload import Offload
from meshwright.executor.memory.regions import Region
from meshwright.executor.redistribution import cache
from meshwright.executor.redistribution.redistribute import route
from meshwright.executor.redistribution.shards import Shard
from meshwright.models.spec import ParameterCut, SplitSpec
from meshwright.models.splits.recipe import slice_parameter
from meshwright.models.units import select
from meshwright.planner.cost import collectives, compute, exchange, redistribution
from meshwright.planner.cost.cost import CostModel
from meshwright.planner.cost.ownership import TensorPlacement, input_placement, output_placement
from meshwright.planner.memory import prefetch_overlap
from meshwright.planner.schema.cluster import Cluster, Device, Node
from meshwright.planner.schema.goal import Goal
from meshwright.planner.schema.layout import Layout, data_parallel
from meshwright.planner.schema.options import Option
from meshwright.planner.simulate.slicing import SliceSpec
from meshwright.planner.solve.evaluate import rank_memory
from meshwright.profiler import shares
from torch import nn

from tests.strategies import chain_profile, cluster, linear

DATA, COLUMN = Option(data_parallel(4)), Option(Layout(groups=1, degree=4), "column")


def model(batch=4):
    profile = chain_profile([linear("a", 8, 8, 0.0), linear("b", 8, 8, 0.0)], features=8)
    return CostModel(profile=profile, cluster=cluster(1, 4), goal=Goal(batch=batch))


def first_half(owned, needed):
    """Half of what moves: as if the first half of the samples would do."""
    lo, hi, left, right = true_overlap(owned, needed)
    return lo, lo + (hi - lo) // 2, left, right


true_overlap = redistribution.overlap


def test_cost_model_and_executor_move_the_same_overlap(monkeypatch):
    source, target = output_placement(*DATA[:2]), input_placement(*COLUMN[:2])
    counts = (2, 2, 2, 2)

    def moved():
        route.cache_clear()
        made = model(batch=sum(counts))
        # Two targets at once are counted node by node, as the solver for large problems asks.
        table = redistribution.traffic(made.fabric, counts, (source,), (target, source), 1)
        way = route(counts, source, target, 1, 1)
        received = sum(t.box.hi - t.box.lo for t in way.receive if t.peer != 1)
        return made.edge(1, DATA, COLUMN).received_bytes, table, received

    charged, table, received = moved()
    monkeypatch.setattr(redistribution, "overlap", first_half)
    half_charged, half_table, half_received = moved()
    route.cache_clear()
    assert (received, half_received) == (6, 3)
    assert half_charged == charged / 2
    assert half_table.received[0, 0] != table.received[0, 0]


@pytest.mark.parametrize("prefetch", [False, True])
def test_planner_and_executor_share_by_one_rule(monkeypatch, prefetch):
    """A rule by which nothing is the same makes both move everything."""
    layout = Layout(groups=1, degree=4)

    def moves():
        moved = []
        known = cache.RedistributionCache(4, prefetch=prefetch)
        known.begin()
        tensor = torch.empty(0)
        for name in "qk":
            need = cache.UnitInput(name, 0, TensorPlacement(layout, "replicate"), 1, None, "")
            known.get(tensor, need, lambda t, need: moved.append(need) or torch.empty(0))
        known.end(complete=True)
        return len(moved)

    def alike():
        edge = model().profile.edges[1]
        ends = output_placement(*DATA[:2]), input_placement(*COLUMN[:2])
        first, second = (redistribution.edge_redistribution(edge, *ends) for _ in range(2))
        return first == second

    assert (moves(), alike()) == (1, True)
    for module in (redistribution, cache):
        monkeypatch.setattr(module, "shared_redistribution", lambda *given: object())
    assert (moves(), alike()) == (2, False)


@pytest.mark.parametrize(("rows", "degree", "most"), [(10, 4, 3), (8, 4, 2), (3, 2, 2), (7, 8, 1)])
def test_all_sides_share_out_a_parameter_alike(monkeypatch, rows, degree, most):
    """Also where it does not divide: the largest member counts, which the first is."""
    width = 6
    module, unit = nn.Sequential(nn.Linear(width, rows, bias=False)), linear("0", rows, width)
    cut = ParameterCut("0.weight", 0)
    split = SplitSpec("column", rows, True, rows, 1, (cut,))
    weight = nn.Parameter(slice_parameter(module[0].weight.detach(), cut, degree, 0))
    group = Group((0,), 0, None, "exchange")
    shard = Shard(("0.weight",), cut, degree, group, module[0].weight.shape, (width, 1))
    held = nn.Linear(1, 1, bias=False)
    held.weight = weight
    world = SimpleNamespace(size=degree, gradients={degree: group})
    run = SimpleNamespace(world=world, plan=SimpleNamespace(units=()), watch=None)
    (param,) = apply._grad_params(held, run, SimpleNamespace(parameters={weight: shard}))
    spec = SimpleNamespace(modules=("0",))

    def sides():
        return (
            compute.shard_bytes(unit, "column", degree, unit.parameters),
            shares.shard_bytes(module, spec, split, degree),
            param.shared_bytes,
        )

    assert sides() == (weight.nbytes,) * 3 == (most * width * 4,) * 3
    for module_of_it in (compute, shares, buckets):
        monkeypatch.setattr(module_of_it, "largest_share", lambda size, parts, degree: size // 2)
    # The executor counts elements.
    assert sides() == (rows * width * 2,) * 3


def test_both_sides_say_alike_what_may_share_a_message(monkeypatch):
    def kinds():
        profile = chain_profile([linear("a", 8, 8), linear("b", 8, 8)])
        made = CostModel(profile=profile, cluster=cluster(1, 4), goal=Goal(batch=4))
        options = (DATA, DATA._replace(exchange="dropped", ratio=0.5))
        planned = {g.kind for k in (1, 2) for g in made.gradients(k, options[k - 1])}
        weight, group = nn.Parameter(torch.zeros(8, 8)), Group((0,), 0, None, "exchange")
        run = {
            GradParam("", weight, group, 1, 64, exchange=o.exchange, ratio=o.ratio).kind
            for o in options
        }
        return len(planned), len(run)

    assert kinds() == (2, 2)
    for side in (exchange, buckets):
        same = Option(data_parallel(4))
        monkeypatch.setattr(side, "message_kind", lambda *given, same=same, **named: same)
    assert kinds() == (1, 1)


def test_both_sides_have_as_many_copies_under_way(monkeypatch):
    """The plan counts feature maps on their way to the host at so many later units' forwards, and
    the executor frees them when as many have been left."""
    names = "abcd"
    profile = chain_profile([linear(name, 8, 8, 0.0, saved=1024.0) for name in names], features=8)
    device = Device(name="gpu", memory_bytes=2**30, host_bytes_per_s=1e9)
    links = Cluster(name="one", nodes=(Node(name="n", devices=(device,)),), levels=())

    def planned():
        made = CostModel(profile=profile, cluster=links, goal=Goal(batch=1))
        away = Option(data_parallel(1), memory="offload")
        (memory,) = rank_memory(made, (away,) * len(profile.units))
        there = memory.memory.field("neighbours_forward")
        return [round(float(each) / 1024) for each in there[1:5]]

    def run():
        host = SimpleNamespace(device=torch.device("cpu"), send=Copy)
        offload, views, staying = Offload(host, lambda: 0), [], []
        regions = [Region(name, [nn.Linear(1, 1)]) for name in names]
        savers = []
        for region in regions:
            savers.append(offload.start(region, (), {}, whole=True))
            staying.append(sum(not view.copy.gone for view in views))
            views.append(savers[-1].pack(torch.zeros(1024)))
            offload.unit_left()
        return staying

    assert planned() == run() == [0, 1, 1, 1]
    monkeypatch.setattr(prefetch_overlap, "COPIES_AHEAD", 2)
    assert planned() == run() == [0, 1, 2, 2]


class Copy:
    """Of bytes on the host: whether they have gone from the device."""

    def __init__(self, flat):
        self.gone = False

    def leave(self):
        self.gone = True


class Rmsnorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 2))


def test_both_sides_know_a_normalisation_by_one_rule(monkeypatch):
    model = nn.Sequential(Rmsnorm(), nn.Linear(2, 2, bias=False))
    world = SimpleNamespace(size=1, gradients={1: Group((0,), 0, None, "exchange")})
    run = SimpleNamespace(world=world, plan=SimpleNamespace(units=()))

    def whole():
        params = apply._grad_params(model, run, SimpleNamespace(parameters={}))
        return [p.name for p in params if p.whole], select.kind_of(model[0])

    assert whole() == (["0.weight"], "norm")
    for side in (apply, select):
        monkeypatch.setattr(side, "is_norm", lambda module: False)
    assert whole() == ([], "other")


class Handle:
    """Stands for a process group."""


def test_both_sides_count_what_a_ring_sends_alike(monkeypatch):
    """Of messages of all kinds, and also of three ranks, who share no power of two."""
    ranks, weight = 3, nn.Parameter(torch.zeros(8, 8))
    param = GradParam("", weight, Group((0, 1, 2), 0, Handle(), "exchange"), 1, 64)
    one, picked = slices.Slice([param], SliceSpec((0,))), topk.TopkSlice(param)
    picked.expect(0.25)

    def run():
        whole = Bucket([param]).sent_bytes, one.sent_bytes
        return (*whole, picked.sent_bytes)

    def planned():
        made = CostModel(
            profile=chain_profile([linear("a", 8, 8)]), cluster=cluster(3), goal=Goal(batch=3)
        )
        option = Option(data_parallel(ranks))
        sparse = option._replace(exchange="topk", ratio=0.25)
        # Of the third a quarter of the elements, values and numbers, of all three ranks.
        sizes = (option, weight.nbytes), (option, weight.nbytes), (sparse, 3 * 16 * 8)
        return tuple(int(made.exchange(o, size).sent_bytes) for o, size in sizes)

    assert run() == (341, 341, 256)
    assert planned() == run()
    monkeypatch.setattr(collectives, "ring_steps", lambda collective, ranks: 6)
    monkeypatch.setattr(exchange, "ring_steps", lambda collective, ranks: 6)
    assert planned() == run() == (512, 512, 768)
