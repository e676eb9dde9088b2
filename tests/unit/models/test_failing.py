"""Models and batches that refuse a size, and where a model fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import meshwright as mw
import pytest
import torch
from meshwright.models.failing import failing_module, raised_outside
from meshwright.models.precision import set_precision
from meshwright.models.target import try_out, workload
from meshwright.models.units.discover import discover
from meshwright.models.units.trace import record
from meshwright.planner.schema.errors import InputError
from meshwright.profiler.model import profile
from meshwright.profiler.sessions import _cluster_key, _constant, _profile_key
from torch import nn
from torch.nn import functional as F

WIDTH = 6


class Fours(nn.Module):
    def forward(self, x):
        if len(x) % 4:
            raise ValueError(f"{len(x)} is no multiple of 4")
        return x


def make_batch(size: int) -> mw.Batch:
    return mw.Batch((torch.randn(size, WIDTH),), torch.zeros(size, dtype=torch.long))


def make_fours(size: int) -> mw.Batch:
    Fours()(range(size))
    return make_batch(size)


def loss_of_fours(output, target):
    return F.cross_entropy(Fours()(output), target)


def of(*layers: nn.Module, make=make_batch, loss=F.cross_entropy) -> mw.Workload:
    return mw.Workload("picky", nn.Sequential(nn.Linear(WIDTH, 8), *layers), make, loss)


PICKY = [
    pytest.param(lambda: of(Fours(), nn.Linear(8, 3)), id="model"),
    pytest.param(lambda: of(make=make_fours), id="make_batch"),
    pytest.param(lambda: of(loss=loss_of_fours), id="loss"),
]


@pytest.mark.parametrize("picky", PICKY)
def test_a_size_that_is_refused_is_not_the_end(picky):
    assert try_out(picky()) == 4
    # As planning asks: sizes that may not fit are tried on a few samples before.
    found = profile(picky(), batches=(4, 8), budget_s=2.0, room_bytes=1e12)
    assert found.batches == (4, 8)


@pytest.mark.parametrize("picky", PICKY)
def test_an_estimate_counts_sizes_that_the_model_takes(picky):
    assert mw.profile(picky(), device="a100-sxm-40gb", batches=(4, 8)).units


def test_a_profile_is_found_again_whatever_sizes_batches_have():
    key = _profile_key(of(make=make_fours), None, torch.device("cpu"))
    assert key == _profile_key(of(make=make_fours), None, torch.device("cpu"))


class Twice(nn.Module):
    def forward(self, x):
        return self.linear(x) if x.ndim in {1, 2} else x

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def test_a_profile_is_made_anew_where_the_code_was_edited(monkeypatch):
    cpu = torch.device("cpu")

    def key(loss=F.cross_entropy):
        return _profile_key(of(Twice(), nn.Linear(8, 3), loss=loss), None, cpu)

    before = key()
    assert key() == before
    assert key(lambda output, target: 2 * F.cross_entropy(output, target)) != before
    monkeypatch.setattr(Twice, "forward", lambda self, x: self.linear(self.linear(x)))
    assert key() != before


SCALE = 2.0


def helped(x):
    return SCALE * x


class Helped(Twice):
    def forward(self, x):
        return self.attend(x)

    def attend(self, x):
        return helped(self.linear(x))


@pytest.mark.parametrize(
    ("of_class", "name", "other"),
    [
        (True, "attend", lambda self, x: helped(self.linear(self.linear(x)))),
        (False, "helped", lambda x: SCALE * x.relu()),
        (False, "SCALE", 3.0),
    ],
)
def test_what_a_forward_calls_further_on_counts(monkeypatch, of_class, name, other):
    def key():
        return _profile_key(of(Helped(), nn.Linear(8, 3)), None, torch.device("cpu"))

    before = key()
    assert key() == before
    monkeypatch.setattr(Helped if of_class else sys.modules[__name__], name, other)
    assert key() != before


def doubled(module, given, made):
    return 2 * made


def tie(workload):
    workload.model[2].weight = workload.model[1].weight


def replace_forward(workload):
    # Not the last module of its class.
    workload.model[1].forward = lambda x: F.linear(x, workload.model[1].weight)


@pytest.mark.parametrize(
    "change",
    [
        tie,
        replace_forward,
        lambda workload: workload.model[1].register_forward_hook(doubled),
        lambda workload: workload.model[1].register_buffer("table", torch.ones(10)),
        lambda workload: workload.model.to(memory_format=torch.channels_last),
    ],
)
def test_a_profile_is_made_anew_where_one_module_does_something_else(change):
    def key(change=lambda workload: None):
        made = of(nn.Linear(8, 8), nn.Linear(8, 8), nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2))
        change(made)
        return _profile_key(made, None, torch.device("cpu"))

    before = key()
    assert key() == before
    assert key(change) == key(change) != before


def test_a_profile_is_made_anew_for_another_argument():
    def key(texts=("a", "b"), **kwargs):
        def make(size):
            batch = make_batch(size)
            return mw.Batch((*batch.args, list(texts)), batch.target, kwargs)

        return _profile_key(of(make=make), None, torch.device("cpu"))

    keys = [key(), key(flag=True), key(flag=False), key(flag=None), key(other=True)]
    assert len(set(keys)) == len(keys)
    assert key(flag=True) == key(flag=True)
    # Data, which are others in each batch.
    assert key(texts=("c", "d")) == key()


def test_hooks_of_a_precision_that_a_model_has_do_not_count():
    made = replace(of(), precision="bf16-mixed")
    before = _profile_key(made, None, torch.device("cpu"))
    set_precision(made.model, "bf16-mixed")
    assert _profile_key(made, None, torch.device("cpu")) == before


def test_a_cluster_is_probed_anew_over_another_interface(monkeypatch):
    def key():
        return _cluster_key([("host", "cpu")] * 2, torch.device("cpu"))

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = key()
    assert key() == before
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert key() != before


def test_the_order_of_a_set_in_the_code_does_not_matter():
    """It is another in each process, and a profile would never be found again."""

    def chosen(name):
        return name in {"alpha", "beta", "gamma", "delta"}

    def values(kind):
        (found,) = (c for c in chosen.__code__.co_consts if isinstance(c, frozenset))
        assert len(found) == 4
        return _constant(kind(found))

    assert values(frozenset) == values(lambda found: frozenset(sorted(found, reverse=True)))
    assert values(frozenset) == ["'alpha'", "'beta'", "'delta'", "'gamma'"]


def test_all_sizes_refused_is_told_with_the_first():
    with pytest.raises(mw.InputError, match=r"batch of 2 in module '1' with.*batches of 2, 4, 8"):
        try_out(of(nn.Linear(9, 2)))
    with pytest.raises(mw.InputError, match=r"^make_batch\(2\) of 'picky' failed with KeyError"):
        try_out(of(make=lambda size: {}[size]))


def deep() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(9, 2)))


def test_the_innermost_module_is_named():
    model = deep()
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, WIDTH))
    assert failing_module(model, caught.value) == "0.2"
    assert failing_module(nn.ReLU(), caught.value) is None
    assert raised_outside(caught.value, ("meshwright",))
    assert not raised_outside(caught.value, ("torch.nn",))
    with pytest.raises(mw.InputError, match=r"own batch of 2 in module '0\.2': RuntimeError"):
        record(model, make_batch(2))


def test_the_line_is_named_where_the_code_is_the_users():
    line = Fours.forward.__code__.co_firstlineno + 2
    where = rf"in module '1' \(test_failing\.py, line {line}\): ValueError: 2 is no multiple"
    with pytest.raises(mw.InputError, match=where):
        record(of(Fours()).model, make_batch(2))


class Activated(nn.Module):
    """A block whose activation, and how often it runs, are no modules."""

    def __init__(self, act, rounds=1):
        super().__init__()
        self.act, self.chosen = act, {"rounds": rounds}
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        for _ in range(self.chosen["rounds"]):
            x = self.down(self.act(self.up(x)))
        return x


def of_closure(slope):
    return lambda x: F.leaky_relu(x, slope)


class Refuses(dict):
    def items(self):
        raise LookupError("a value is missing")


def test_what_shows_no_settings_and_what_a_module_notes_are_no_settings():
    def key(noted):
        layer = Activated(F.relu)
        layer.odd, layer.history = Refuses(a=1), noted
        return _profile_key(of(layer), None, torch.device("cpu"))

    assert key([]) == key([0.25])


def test_a_profile_is_made_anew_for_another_function_or_a_setting_in_a_container():
    def key(act, rounds=1):
        return _profile_key(of(Activated(act, rounds)), None, torch.device("cpu"))

    keys = [
        key(F.relu),
        key(F.gelu),
        key(lambda x: F.normalize(x, dim=-1)),
        key(lambda x: F.normalize(x, dim=1)),
        key(partial(F.softmax, dim=-1)),
        key(partial(F.softmax, dim=1)),
        key(of_closure(0.1)),
        key(of_closure(0.2)),
        key(F.relu, 2),
    ]
    assert len(set(keys)) == len(keys)
    assert key(F.relu) == keys[0]


class Gated(nn.Module):
    """A block that is divided whole. It leaves a penalty in the list that it is called with."""

    def __init__(self, act=F.silu, *, penalty=False):
        super().__init__()
        self.act, self.penalty = act, penalty
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, penalties):
        hidden = self.act(self.gate(x)) * self.up(x)
        if self.penalty and isinstance(penalties, dict):
            penalties["sum"] = penalties["sum"] + hidden.square().mean()
        elif self.penalty:
            penalties.append(hidden.square().mean())
        return self.down(hidden)


class Collecting(nn.Module):
    def __init__(self, *blocks, into=list):
        super().__init__()
        self.blocks, self.into = nn.ModuleList(blocks), into

    def forward(self, x):
        penalties = self.into()
        for block in self.blocks:
            x = block(x, penalties)
        return x + sum(penalties.values() if isinstance(penalties, dict) else penalties)


def divided_blocks(*blocks, into=list):
    found = discover(Collecting(*blocks, into=into), mw.Batch((torch.randn(3, 8),), None))
    return [unit.name for unit in found.units if unit.kind == "mlp" and unit.splits]


def test_a_split_shown_for_one_activation_is_not_taken_for_another():
    """Normalised over half of the features, the second block's output would be another."""
    normalised = Gated(lambda x: F.normalize(x, dim=-1))
    assert divided_blocks(Gated(), normalised, Gated()) == ["blocks.0", "blocks.2"]


def test_what_adds_to_a_list_that_it_is_given_is_not_divided_whole():
    assert divided_blocks(Gated(), Gated()) == ["blocks.0", "blocks.1"]
    assert divided_blocks(Gated(penalty=True), Gated(penalty=True)) == []

    def in_dict():
        return {"sum": torch.zeros(())}

    assert divided_blocks(Gated(), into=in_dict) == ["blocks.0"]
    assert divided_blocks(Gated(penalty=True), into=in_dict) == []


class Counts(nn.Module):
    """Dropout and checkpointing go by the mode."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def forward(self, x):
        self.modes.append(self.training)
        return x


def test_a_model_in_evaluation_mode_is_measured_as_it_is_trained():
    picky = of(Counts(), nn.Linear(8, 3))
    picky.model.eval()
    profile(picky, batches=(2, 4), budget_s=2.0)
    assert all(picky.model[1].modes)
    assert not any(module.training for module in picky.model.modules())


def test_a_target_that_ends_the_process_is_said_in_a_sentence(tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("import argparse\nargparse.ArgumentParser().parse_args(['--no-such'])\n")
    with pytest.raises(InputError, match=r"ended the process: put what reads arguments"):
        workload(f"{file}:make")
    file.write_text("def make():\n    raise SystemExit(3)\n")
    with pytest.raises(InputError, match=r"factory .*ends.py:make' ended the process"):
        workload(f"{file}:make")


def test_what_a_target_makes_when_it_is_imported_has_values(tmp_path, monkeypatch):
    """Also where its model is built without memory; what was imported is there for the next."""
    (tmp_path / "has_a_mean.py").write_text(
        "import torch\nfrom torch import nn\nimport meshwright as mw\n"
        "MEAN = torch.tensor([1.0])\n"
        "def make():\n"
        "    batch = lambda n: mw.Batch((torch.randn(n, 4),), torch.zeros(n, 2))\n"
        "    loss = nn.functional.mse_loss\n"
        "    return mw.Workload('m', nn.Linear(4, 2), batch, loss)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with torch.device("meta"):
        assert workload("has_a_mean:make").model.weight.is_meta
    assert sys.modules["has_a_mean"].MEAN.item() == 1.0
