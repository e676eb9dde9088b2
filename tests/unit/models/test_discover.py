"""Discovery: which units a model has, what flows between them, and that nothing is left changed."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from meshwright.models import zoo as models
from meshwright.models.units.discover import Discovery, discover
from meshwright.models.units.discover import discovered as discovered_on
from meshwright.models.workload import Batch
from meshwright.planner.schema.errors import InputError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

SMALL = (
    "mlp",
    "cnn-digits",
    "vgg11-32",
    "resnet50-32",
    "seq2seq-tiny",
    "gpt-tiny",
    "gpt2-tiny",
    "bert-tiny",
    "vit-tiny",
)

TIES = {
    "gpt-tiny": [["wte", "lm_head"]],
    "gpt2-tiny": [["transformer.wte", "lm_head"]],
    "bert-tiny": [["bert.embeddings.word_embeddings", "cls.predictions.decoder"]],
}


OUTSIDE = {"vit-tiny": ("vit.embeddings.cls_token", "vit.embeddings.position_embeddings")}
"""Parameters that a module with children uses itself, between units."""


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def discovered(name: str) -> tuple[nn.Module, Discovery]:
    workload = models.build(name)
    return workload.model, discover(workload.model, workload.make_batch(3))


def names(found: Discovery) -> list[str]:
    return [u.name for u in found.units if not u.name.startswith("@")]


def edges(found: Discovery) -> set[tuple[str, str]]:
    return {(e.source, e.target) for e in found.edges}


def styles(found: Discovery, unit: str) -> list[str]:
    return [s.style for s in found.unit(unit).splits]


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_belongs_to_one_unit_and_ties_to_all_their_users(name: str) -> None:
    model, found = discovered(name)
    owners: dict[str, list[str]] = {n: [] for n, _ in model.named_parameters()}
    first_name = {id(p): n for n, p in model.named_parameters()}
    for unit in found.units:
        for module in unit.modules:
            for parameter in model.get_submodule(module).parameters():
                owners[first_name[id(parameter)]].append(unit.name)
    ties = {n: users for n, users in owners.items() if len(users) > 1}
    assert list(ties.values()) == TIES.get(name, [])
    assert tuple(n for n, users in owners.items() if not users) == found.outside
    assert found.outside == OUTSIDE.get(name, ())


@pytest.mark.parametrize("name", SMALL)
def test_edges_go_forward_and_join_input_to_output(name: str) -> None:
    _, found = discovered(name)
    place = {u.name: i for i, u in enumerate(found.units)}
    assert (found.units[0].kind, found.units[-1].kind) == ("input", "output")
    assert all(place[e.source] < place[e.target] for e in found.edges)
    reached = {"@input"}
    for edge in sorted(found.edges, key=lambda e: place[e.source]):
        if edge.source in reached:
            reached.add(edge.target)
    assert "@output" in reached
    assert all(0 <= e.gradient_bytes_per_sample <= e.bytes_per_sample for e in found.edges)
    assert all(e.bytes_per_sample > 0 for e in found.edges)


def test_vgg_is_a_chain_of_convolutions_and_linear_layers() -> None:
    _, found = discovered("vgg11-32")
    kinds = Counter(u.kind for u in found.units)
    assert kinds == {"input": 1, "conv": 8, "glue": 1, "linear": 3, "output": 1}
    order = [u.name for u in found.units]
    assert [(e.source, e.target) for e in found.edges] == list(pairwise(order))
    first, last = found.unit("features.0"), found.unit("features.18")
    assert first.modules == ("features.0", "features.1", "features.2")
    assert last.modules == ("features.18", "features.19", "features.20", "avgpool")
    assert found.unit("classifier.0").modules == ("classifier.0", "classifier.1", "classifier.2")
    image, logits = found.edges[0], found.edges[-1]
    assert (image.bytes_per_sample, image.gradient_bytes_per_sample) == (3 * 32 * 32 * 4, 0)
    assert (logits.bytes_per_sample, logits.gradient_bytes_per_sample) == (40, 40)


def test_resnet_joins_its_shortcuts() -> None:
    _, found = discovered("resnet50-32")
    sources = {e.source for e in found.edges if e.target == "@glue.0"}
    assert sources == {"layer1.0.conv3", "layer1.0.downsample.0"}
    sources = {e.source for e in found.edges if e.target == "@glue.1"}
    assert sources == {"layer1.1.conv3", "@glue.0"}
    unit = found.unit("layer1.0.conv1")
    assert unit.modules == ("layer1.0.conv1", "layer1.0.bn1", "layer1.0.relu1")
    assert unit.batch_statistics
    cuts = unit.splits[0].cuts
    assert {c.name.rsplit(".", 2)[1] + "." + c.name.rsplit(".", 1)[1] for c in cuts} == {
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
        "bn1.running_mean",
        "bn1.running_var",
    }
    assert not found.unit("fc").batch_statistics


def test_gpt_has_an_attention_and_an_mlp_for_each_block() -> None:
    _, found = discovered("gpt-tiny")
    block = ["ln_1", "attn", "ln_2", "mlp"]
    blocks = [f"h.{i}.{part}" for i in range(2) for part in block]
    assert names(found) == ["wte", "wpe", *blocks, "ln_f", "lm_head"]
    assert found.unit("h.0.attn").kind == "attention"
    assert styles(found, "h.0.attn") == styles(found, "h.0.mlp") == ["pair"]
    assert found.unit("h.0.attn").splits[0].parts == 4
    before, after = {("@glue.1", "@glue.2"), ("h.0.attn", "@glue.2")}, ("@glue.2", "h.0.ln_2")
    assert before <= edges(found)
    assert after in edges(found)


def test_gpt2_of_transformers_is_cut_like_ours() -> None:
    _, found = discovered("gpt2-tiny")
    block = ["ln_1", "attn", "ln_2", "mlp"]
    blocks = [f"transformer.h.{i}.{part}" for i in range(2) for part in block]
    ends = ["transformer.ln_f", "lm_head"]
    assert names(found) == ["transformer.wte", "transformer.wpe", *blocks, *ends]
    assert styles(found, "transformer.h.1.attn") == ["pair"]
    assert styles(found, "transformer.h.1.mlp") == ["pair"]
    # One table of positions for all samples: there is no batch to divide.
    assert found.unit("transformer.wpe").batched_inputs == ()
    assert styles(found, "transformer.wpe") == []


def test_bert_divides_heads_by_columns() -> None:
    _, found = discovered("bert-tiny")
    layer = "bert.encoder.layer.0"
    assert found.unit(f"{layer}.attention.self").kind == "attention"
    assert styles(found, f"{layer}.attention.self") == ["column"]
    assert styles(found, f"{layer}.attention.output.dense") == ["column", "row"]
    assert found.unit(f"{layer}.intermediate.dense").modules[1:] == (
        f"{layer}.intermediate.intermediate_act_fn",
    )
    assert (f"{layer}.attention.self", f"{layer}.attention.output.dense") in edges(found)
    assert (f"{layer}.intermediate.dense", f"{layer}.output.dense") in edges(found)


def test_vit_has_its_tokens_between_units() -> None:
    _, found = discovered("vit-tiny")
    projection = found.unit("vit.embeddings.patch_embeddings.projection")
    assert (projection.kind, styles(found, projection.name)) == ("conv", ["column", "row"])
    assert styles(found, "vit.layers.0.attention") == styles(found, "vit.layers.0.mlp") == ["pair"]


def test_lstm_states_count_although_their_batch_is_not_in_front() -> None:
    _, found = discovered("seq2seq-tiny")
    between = {(e.source, e.target): e for e in found.edges}
    states = between["encoder.lstm", "@glue.0"]
    assert states.bytes_per_sample == 2 * 2 * 32 * 4  # hidden and cell, 2 layers, 32 wide
    lstm = found.unit("decoder.lstm")  # [sample, time], and states with layers in front
    assert (lstm.batched_inputs, lstm.batch_dims) == ((0, 1, 2), (0, 1, 1))
    assert found.unit("output").kind == "linear"  # not to be mixed up with the model's output


@pytest.mark.parametrize("name", ["resnet50-32", "gpt2-tiny", "bert-tiny", "cnn-digits"])
@pytest.mark.parametrize("training", [True, False])
def test_discovery_changes_nothing(name: str, training: bool) -> None:
    workload = models.build(name)
    model, batch = workload.model.train(training), workload.make_batch(3)
    next(model.children()).eval()
    workload.loss(model(*batch.args, **batch.kwargs), batch.target).backward()
    state = copy.deepcopy(model.state_dict())
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: None if g is None else g.clone() for n, g in gradients.items()}
    objects = {n: id(p) for n, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    random = torch.get_rng_state()
    discover(model, batch)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    for n, parameter in model.named_parameters():
        assert id(parameter) == objects[n]
        assert parameter.grad is gradients[n]
        assert parameter.grad is None or torch.equal(parameter.grad, values[n])
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("name", ["gpt-tiny", "resnet50-32"])
def test_units_do_not_depend_on_batch_size_mode_or_memory(name: str) -> None:
    workload = models.build(name)
    usual = discover(workload.model, workload.make_batch(4))
    assert discover(workload.model, workload.make_batch(2)) == usual
    assert discover(workload.model, workload.make_batch(5), workload.make_batch(2)) == usual
    assert discover(workload.model.eval(), workload.make_batch(3)) == usual
    with torch.device("meta"):
        other = models.build(name)
        assert discover(other.model, other.make_batch(4)) == usual


def test_one_sample_is_enough() -> None:
    workload = models.build("gpt-tiny")
    one = discover(workload.model, workload.make_batch(1))
    assert one == discover(workload.model, workload.make_batch(4))


def test_a_failing_model_is_named_with_its_own_error() -> None:
    with pytest.raises(InputError, match=r"batch of 3: RuntimeError: mat1 and mat2"):
        discover(nn.Linear(5, 2), Batch((torch.randn(3, 4),), None))


def test_a_fingerprint_follows_the_structure_and_not_the_values() -> None:
    def made(width: int) -> str:
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
        return discover(model, Batch((torch.randn(3, 4),), None)).fingerprint

    assert made(8) == made(8)
    assert made(8) != made(9)


class Custom(nn.Module):
    """A model with the given modules and forward."""

    def __init__(self, forward: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self._run = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor) -> Tensor:
        return self._run(self, *args)


def found_in(forward: Callable[..., Tensor], *shape: int, **modules: nn.Module) -> Discovery:
    return discover(Custom(forward, **modules), Batch((torch.randn(3, *shape),), None))


def test_a_module_that_is_called_twice_makes_its_parent_one_unit() -> None:
    found = found_in(lambda m, x: m.a(m.a(x)), 4, a=nn.Linear(4, 4))
    assert [(u.name, u.modules, u.splits) for u in found.units[1:-1]] == [("model", ("",), ())]
    assert edges(found) == {("@input", "model"), ("model", "@output")}


def test_branches_and_what_is_not_used() -> None:
    found = found_in(
        lambda m, x: torch.cat((m.a(x), m.b(x)), 1),
        4,
        a=nn.Linear(4, 2),
        b=nn.Linear(4, 3),
        spare=nn.Linear(4, 4),
    )
    assert names(found) == ["a", "b"]
    assert edges(found) == {
        ("@input", "a"),
        ("@input", "b"),
        ("a", "@glue.0"),
        ("b", "@glue.0"),
        ("@glue.0", "@output"),
    }
    assert found.outside == ("spare.weight", "spare.bias")


class Scaled(nn.Module):
    """Linear layers whose sum is scaled by a parameter of this module's own."""

    def __init__(self, width: int, scales: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.rand(scales, width))
        self.layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) * self.scales.mean(0)


@pytest.mark.parametrize(("scales", "fine"), [(1, True), (4, True), (40, False)])
def test_a_module_with_few_parameters_of_its_own_is_entered(scales: int, fine: bool) -> None:
    """144 parameters are the layers'; of 8 a scale, few are less than a fifth of all."""
    found = discover(nn.Sequential(Scaled(8, scales)), Batch((torch.randn(3, 8),), None))
    assert names(found) == (["0.layers.0", "0.layers.1"] if fine else ["0"])
    assert found.outside == (("0.scales",) if fine else ())
    assert bool(found.units[1].splits) is fine


def test_a_unit_that_is_given_a_parameter_is_not_divided() -> None:
    class Biased(nn.Linear):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + bias

    def given(m: nn.Module, x: Tensor) -> Tensor:
        return m.b(F.linear(x, m.a.weight), m.a.bias)

    found = found_in(given, 4, a=nn.Linear(4, 4), b=Biased(4, 4))
    assert found.outside == ("a.weight", "a.bias") or names(found) == ["model"]
    assert not any(unit.splits for unit in found.units)


def hooked(kind: str) -> Callable[[nn.Module], object]:
    return lambda layer: getattr(layer, f"register_{kind}")(lambda *_: None)


def replaced(layer: nn.Module) -> None:
    before = layer.forward
    layer.forward = lambda x: 2 * before(x)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "alter",
    [
        hooked("forward_hook"),
        hooked("forward_pre_hook"),
        hooked("full_backward_hook"),
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        nn.utils.parametrizations.weight_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        replaced,
    ],
    ids=[
        "forward hook",
        "forward pre-hook",
        "backward hook",
        "old weight norm",
        "old spectral norm",
        "weight norm",
        "pruning",
        "replaced forward",
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_layer_that_does_more_than_its_class_says_stays_whole(alter) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    alter(model[0])
    found = discover(model, Batch((torch.randn(3, 4),), None))
    assert [u for u in names(found) if not u.startswith("@")] == ["0", "2"]
    assert styles(found, "0") == []
    assert styles(found, "2") == ["column", "row"]


class Rolled(nn.ReLU):
    """An activation that mixes features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, -1)


class Renamed(nn.ReLU):
    """One that does not."""


class Mixing(nn.BatchNorm2d):
    """Normalisation that mixes channels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flip(1)


class Worded(nn.Linear):
    """A product in other words, as Falcon's."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class FewBits(nn.Linear):
    """By a figure of the whole weight, as in layers of few bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.detach().abs().mean()


class Padded(nn.Conv2d):
    """Its outputs are divided; its inputs are not, as it does more than a convolution to them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, (1, 0, 0, 0)))


class ScaledVectors(nn.Embedding):
    """Vectors times a number, as Gemma's; ``among`` features, each by the sum of all too."""

    def __init__(self, among: str) -> None:
        super().__init__(9, 4, padding_idx=2)
        self.among = among
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x) * self.scale
        if self.among == "features":
            return found * found.sum(-1, True)
        return found * found.sum(1, True) if self.among == "positions" else found


class Centring(nn.Linear):
    """A plain product, and all its outputs mixed under a condition."""

    def __init__(self, when: str) -> None:
        super().__init__(4, 6)
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        if self.when == "large":
            mixed = bool(x.abs().max() > 4)
        else:
            mixed = self.training if self.when == "training" else self.when == "always"
        return nn.functional.dropout(
            made - made.mean(-1, True) if mixed else made, 0.1, self.training
        )


@pytest.mark.parametrize("when", ["large", "training"])
def test_a_subclass_is_shown_right_in_other_ways_than_it_ran(when: str) -> None:
    found = discover(nn.Sequential(Centring(when)), Batch((torch.rand(3, 4),), None))
    assert styles(found, "0") == []


def test_settings_that_are_not_printed_tell_units_apart() -> None:
    model = nn.Sequential(Centring("never"), nn.Linear(6, 4), Centring("always"))
    found = discover(model, Batch((torch.rand(3, 4),), None))
    assert styles(found, "0") == ["column", "row"]
    assert styles(found, "2") == []


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (nn.Sequential(Worded(4, 6)), (4,), ["column", "row"]),
        (nn.Sequential(FewBits(4, 6)), (4,), []),
        (nn.Sequential(Padded(2, 4, 1)), (2, 3, 3), ["column"]),
        (nn.Sequential(nn.Linear(4, 6), Rolled()), (4,), ["row"]),
        (nn.Sequential(nn.Linear(4, 6), Renamed()), (4,), ["column", "row"]),
        (nn.Sequential(nn.Conv2d(2, 4, 1), Mixing(4)), (2, 3, 3), ["row"]),
        (nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)), (2, 3, 3), ["column", "row"]),
    ],
    ids=[
        "product",
        "scaled product",
        "convolution",
        "mixing activation",
        "activation",
        "mixing normalisation",
        "normalisation",
    ],
)
def test_a_subclass_is_divided_where_that_is_shown(model, shape, expected) -> None:
    found = discover(model, Batch((torch.randn(3, *shape),), None))
    assert styles(found, "0") == expected


@pytest.mark.parametrize(
    ("among", "expected"),
    [("none", ["column", "pair"]), ("features", ["pair"]), ("positions", ["column"])],
)
def test_an_embedding_of_a_class_of_its_own(among, expected) -> None:
    """Symbols are shared out where what is done with a vector needs no other symbol's."""
    model = nn.Sequential(ScaledVectors(among), nn.Linear(4, 2))
    found = discover(model, Batch((torch.randint(9, (3, 5)),), None))
    assert styles(found, "0") == expected


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(kind) -> None:
    model = nn.Sequential(kind(9, 4, sparse=True))
    with pytest.raises(InputError, match=r"'0' makes sparse gradients.*sparse=False"):
        discover(model, Batch((torch.zeros(3, 2, dtype=torch.long),), None))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_forward_that_changes_its_parameter_is_refused(kind) -> None:
    model = nn.Sequential(kind(9, 4, max_norm=1.5))
    with pytest.raises(InputError, match=r"'0' has max_norm=1.5.*build it without"):
        discover(model, Batch((torch.zeros(3, 2, dtype=torch.long),), None))


class Slopes(nn.Module):
    """Takes a derivative of a network in its forward, as physics-informed ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.func.vmap(torch.func.jacrev(lambda one: self.net(one)[0]))(x))


def test_modules_inside_a_transform_are_no_units() -> None:
    """They cannot be run by themselves with what they are given there."""
    found = discover(Slopes(), Batch((torch.randn(4, 2),), None))
    (whole,) = [unit for unit in found.units if unit.modules]
    assert whole.modules == ("",)
    assert "'net' in it is called inside a transform of torch.func" in whole.stays_whole
    outer = nn.Sequential(nn.Linear(2, 2), Slopes())
    found = discover(outer, Batch((torch.randn(4, 2),), None))
    assert [unit.name for unit in found.units if unit.modules] == ["0", "1"]


def test_batches_are_of_a_size_that_the_model_takes() -> None:
    sizes = []

    def make_batch(size: int) -> Batch:
        if size % 2:
            raise ValueError("pairs only")
        sizes.append(size)
        return Batch((torch.randn(size, 4),), None)

    _, batch = discovered_on(nn.Linear(4, 2), make_batch)
    assert batch.size == 2
    assert sizes[-2:] == [2, 4]

    def never(size: int) -> Batch:
        raise ValueError(f"not {size}")

    with pytest.raises(ValueError, match="not 2"):
        discovered_on(nn.Linear(4, 2), never)


def test_what_leads_nowhere_makes_no_edge() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        first = m.a(x)
        _ = x.square().sum(1), first.max()
        return m.b(first)

    found = found_in(forward, 4, a=nn.Linear(4, 4), b=nn.Linear(4, 2))
    assert edges(found) == {("@input", "a"), ("a", "b"), ("b", "@output")}


def test_writing_through_a_view_is_seen() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        both = torch.zeros(len(x), 2, 4)
        both[:, 0].copy_(m.a(x))
        both[:, 1] = m.b(x)
        return both

    found = found_in(forward, 4, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    assert {("a", "@glue.0"), ("@glue.0", "@glue.1"), ("b", "@glue.1")} <= edges(found)


def test_an_activation_in_place_joins_only_what_is_not_used_elsewhere() -> None:
    chain = found_in(lambda m, x: m.r(m.a(x)), 4, a=nn.Linear(4, 4), r=nn.ReLU(inplace=True))
    assert chain.unit("a").modules == ("a", "r")

    def residual(m: nn.Module, x: Tensor) -> Tensor:
        first = m.a(x)
        return first + m.r(first)

    kept = found_in(residual, 4, a=nn.Linear(4, 4), r=nn.ReLU())
    assert kept.unit("a").modules == ("a",)


def test_an_embedding_used_by_the_models_own_code_is_not_divided() -> None:
    model = Custom(
        lambda m, x: F.linear(m.f(m.e(x)), m.e.weight), e=nn.Embedding(9, 4), f=nn.Linear(4, 4)
    )
    found = discover(model, Batch((torch.randint(9, (3, 5)),), None))
    assert names(found) == ["e", "f"]
    assert (styles(found, "e"), styles(found, "f")) == ([], ["column", "row"])


def test_only_units_with_samples_in_a_dimension_of_their_own_are_divided() -> None:
    flat = found_in(lambda m, x: m.a(x.flatten(0, 1)).view(x.shape), 5, 4, a=nn.Linear(4, 4))
    assert (flat.unit("a").batched_inputs, flat.unit("a").splits) == ((), ())
    assert flat.unit("a").mixed
    assert [e.bytes_per_sample for e in flat.edges] == [80.0] * 4
    turned = found_in(lambda m, x: m.a(x.transpose(0, 1)), 5, 4, a=nn.Linear(4, 4))
    assert (turned.unit("a").batched_inputs, turned.unit("a").batch_dims) == ((0,), (1,))
    assert (styles(turned, "a"), turned.unit("a").mixed) == (["column", "row"], False)
    # Pairs of samples grow in two dimensions.
    pairs = found_in(lambda m, x: m.a(x[:, None] * x), 4, a=nn.Linear(4, 4))
    assert (pairs.unit("a").batched_inputs, pairs.unit("a").splits) == ((), ())
    assert pairs.unit("a").mixed


class LikeMLP(nn.Module):
    """Has the children of an MLP, but is none: softmax mixes the features in between."""

    def __init__(self, early_dropout: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout()
        self.early = early_dropout

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            return self.down(self.up(self.drop(x)).relu())
        return self.down(self.drop(self.up(x).softmax(-1)))


def test_a_lookalike_falls_apart_into_what_it_is_made_of() -> None:
    found = found_in(lambda m, x: m.block(x), 4, block=LikeMLP())
    assert names(found) == ["block.up", "block.down"]
    assert styles(found, "block.up") == ["column", "row"]


def test_dropout_on_what_all_members_hold_is_not_divided() -> None:
    found = found_in(lambda m, x: m.block(x), 4, block=LikeMLP(early_dropout=True))
    assert names(found) == ["block"]
    assert styles(found, "block") == []


def test_heads_that_are_asked_for_their_weights_stay_whole() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        mixed, weights = m.a(x, x, x)
        return mixed + weights.mean((1, 2))[:, None, None]

    found = found_in(forward, 5, 8, a=nn.MultiheadAttention(8, 2, batch_first=True))
    assert styles(found, "a") == []
    plain = found_in(
        lambda m, x: m.a(x, x, x)[0], 5, 8, a=nn.MultiheadAttention(8, 2, batch_first=True)
    )
    assert styles(plain, "a") == ["pair"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_module_is_refused_by_name() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    batch = Batch((torch.randn(3, 4),), None)
    with pytest.raises(InputError, match=r"module '1' is scripted.*script it afterwards"):
        discover(nn.Sequential(plain[0], torch.jit.script(plain[1])), batch)
    with pytest.raises(InputError, match="the model is scripted or traced"):
        discover(torch.jit.trace(plain, batch.args), batch)


@pytest.mark.parametrize("model", [nn.Linear(4, 2).requires_grad_(False), nn.ReLU()])
def test_where_nothing_is_trained_it_is_said(model) -> None:
    with pytest.raises(InputError, match=r"no parameter of this .* requires a gradient.*nothing"):
        discover(model, Batch((torch.randn(3, 4),), None))
