"""Where samples are is found: in batches of two sizes, in an example that the model is run on, and
in the tensors inside a model."""

from __future__ import annotations

import meshwright as mw
import msgspec
import pytest
import torch
from meshwright.executor.capability import CAPABILITY
from meshwright.executor.division import check_subset_units
from meshwright.executor.forward import input_dims, shapes_of
from meshwright.models.target import from_model, own_batch
from meshwright.models.target import workload as workload_of
from meshwright.models.units.batch_dims import located, sample_dim, with_dims
from meshwright.models.units.discover import Discovery, discover, discovered
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layout import Layout
from meshwright.planner.schema.options import Option, allowed
from meshwright.planner.schema.plan import UnitPlan
from torch import Tensor, nn

from tests.strategies import linear
from tests.time_first import DIMS, STEPS, Bags, bags, workload


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# -- batches of a workload ---------------------------------------------------------------------


@pytest.mark.parametrize("name", DIMS)
def test_a_workload_tells_where_its_samples_are(name: str) -> None:
    found = workload_of(workload(name))
    batch = own_batch(found, 3)
    assert (batch.batch_dims, batch.size) == (DIMS[name], 3)
    with torch.no_grad():
        whole, dim = found.model(*batch.args), DIMS[name][-1]
        parts = [batch.slice(0, 1), batch.slice(1, 3)]
        made = torch.cat([found.model(*part.args) for part in parts], dim)
    torch.testing.assert_close(made, whole)
    assert workload_of(found).make_batch is found.make_batch


def drawn(make_batch) -> mw.Batch:
    return located(
        mw.Workload("w", nn.Linear(1, 1), make_batch, nn.functional.mse_loss)
    ).make_batch(4)


def test_what_all_samples_share_may_be_as_long_as_the_batch() -> None:
    batch = drawn(lambda n: mw.Batch((torch.zeros(n, 3), torch.zeros(4, 2)), torch.zeros(n)))
    assert batch.batch_dims == (0, None, 0)
    assert batch.slice(0, 2).args[1].shape == (4, 2)


def test_sizes_may_be_refused() -> None:
    def even(size: int) -> mw.Batch:
        if size % 2:
            raise ValueError("pairs")
        return mw.Batch((torch.zeros(7, size),), None)

    assert drawn(even).batch_dims == (1,)

    def four(size: int) -> mw.Batch:
        if size != 4:
            raise ValueError("always four")
        return mw.Batch((torch.zeros(size, 7),), None)

    assert (drawn(four).batch_dims, drawn(four).size) == (None, 4)


def test_a_third_size_tells_a_length_by_chance() -> None:
    lengths = {2: 2, 3: 3, 5: 9, 4: 8}
    batch = drawn(lambda n: mw.Batch((torch.zeros(lengths[n], n),), None))
    assert batch.batch_dims == (1,)
    # All samples against all: the first, as there is nothing to tell.
    assert drawn(lambda n: mw.Batch((torch.zeros(n, n),), None)).batch_dims == (0,)


def test_looking_draws_nothing_from_the_callers_random_numbers() -> None:
    plain = workload("attending")
    torch.manual_seed(7)
    expected = [plain.make_batch(2).args[0] for _ in range(2)]
    torch.manual_seed(7)
    make_batch = located(plain).make_batch
    for tensor in expected:
        assert make_batch(2).args[0].equal(tensor)


def test_a_target_alone_does_not_follow_the_size() -> None:
    made = workload_of(
        mw.Workload(
            "eight", nn.Linear(3, 2), lambda n: mw.Batch((torch.zeros(8, 3),), torch.zeros(n, 2)),
            nn.functional.mse_loss,
        )
    )  # fmt: skip
    with pytest.raises(InputError, match="gave 8 samples"):
        own_batch(made, 2)


def test_data_is_cut_as_batches_are() -> None:
    plain = workload("recurrent")
    whole = plain.make_batch(6)
    held = mw.Workload("w", plain.model, plain.make_batch, plain.loss, data=lambda part: whole)
    data = located(held).data
    assert data is not None
    assert data("train").slice(0, 2).args[0].shape == (STEPS, 2)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ((0,), "2 tensors"),
        ((0, 2), "do not have"),
        ((1, 0), "do not agree"),
        ((None, None), "agree"),
    ],
)
def test_wrong_dims_are_refused(dims, words: str) -> None:
    with pytest.raises(InputError, match=words):
        mw.Batch((torch.zeros(4, 3),), torch.zeros(4), batch_dims=dims)


# -- one example ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, STEPS])
@pytest.mark.parametrize("name", DIMS)
def test_an_example_is_tried_on_its_model(name: str, size: int) -> None:
    given = workload(name)
    args = given.make_batch(size).args
    before = {k: v.clone() for k, v in given.model.state_dict().items()}
    made = from_model(given.model, args)
    batch = made.make_batch(size + 1)
    # A padding of as many steps as samples could be either way round.
    if not (name == "translator" and size == STEPS):
        assert batch.batch_dims == DIMS[name][:-1]
    assert batch.args[0].shape[DIMS[name][0]] == size + 1
    assert given.model.training
    assert all(before[k].equal(v) for k, v in given.model.state_dict().items())


def same_at_each_step(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    first = torch.ones if dtype is torch.long else torch.randn
    return first(1, *shape[1:], dtype=dtype).expand(*shape)


@pytest.mark.parametrize("fill", [torch.zeros, torch.ones, same_at_each_step])
def test_equal_values_do_not_hide_what_time_mixes(fill) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    assert with_dims(layer, mw.Batch((fill(6, 4, 8),), None)).batch_dims == (1,)
    tokens = nn.Sequential(nn.Embedding(9, 8), layer)
    example = mw.Batch((fill(6, 4, dtype=torch.long),), None)
    found = with_dims(tokens, example)
    assert found.batch_dims == (1,)
    assert found.args[0] is example.args[0]


def test_an_example_is_tried_as_it_is_where_other_values_are_refused() -> None:
    class Zeros(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if x.any():
                raise ValueError("takes zeros")
            return super().forward(x.mT)

    example = mw.Batch((torch.zeros(3, 5),), None)
    assert with_dims(Zeros(3, 4), example).batch_dims == (1,)


class Summed(nn.Module):
    """Its output does not tell samples apart."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


def test_where_outputs_do_not_tell_the_first_dimension_is_taken() -> None:
    example = mw.Batch((torch.randn(4, 3),), None)
    assert with_dims(Summed(), example) is example
    # The model's own error is for who measures it.
    assert with_dims(nn.Linear(5, 5), example) is example
    assert with_dims(nn.Linear(3, 3, device="meta"), example) is example


def test_features_are_not_samples() -> None:
    mixing = nn.Sequential(
        nn.Linear(3, 3), nn.Flatten(0), nn.Linear(12, 12), nn.Unflatten(0, (4, 3))
    )
    example = mw.Batch((torch.randn(4, 3),), None)
    assert with_dims(mixing, example) is example


# -- inside a model ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "other", "expected"),
    [
        ((2, 5), (3, 5), (0, True)),
        ((5, 2, 4), (5, 3, 4), (1, True)),
        ((5, 4), (5, 4), (None, True)),
        # Lengths of a batch's own.
        ((2, 7), (3, 8), (0, True)),
        ((7, 2), (8, 3), (1, True)),
        ((2, 2), (3, 3), (None, False)),
        ((2, 4), (3, 6), (None, False)),
        ((10, 4), (15, 4), (None, False)),
        ((7,), (8,), (None, False)),
        ((2,), (3, 1), (None, False)),
    ],
)
def test_shapes_of_two_sizes_tell_the_dimension(shape, other, expected) -> None:
    assert sample_dim(shape, other, (2, 3)) == expected


def found(name: str) -> Discovery:
    given = workload_of(workload(name))
    return discovered(given.model, given.make_batch)[0]


def styles(unit) -> list[str]:
    return [split.style for split in unit.splits]


def test_layers_with_time_in_front_are_divided() -> None:
    units = found("recurrent")
    assert (units.unit("@input").batched_inputs, units.unit("@input").batch_dims) == ((0,), (1,))
    for name, expected in (
        ("symbols", ["column", "pair"]),
        ("lstm", []),
        ("inner", ["column", "row"]),
        ("head", ["column", "row"]),
    ):
        assert (units.unit(name).batch_dims, styles(units.unit(name))) == ((1,), expected)


def test_a_transformer_is_divided() -> None:
    units = found("translator")
    assert units.unit("@input").batch_dims == (1, 1, 0)
    attention = units.unit("transformer.encoder.layers.0.self_attn")
    # Query, key and value, and the padding, whose samples are in front.
    assert (attention.batch_dims, styles(attention)) == ((1, 1, 1, 0), ["pair"])
    for name in ("self_attn", "multihead_attn"):
        assert styles(units.unit(f"transformer.decoder.layers.0.{name}")) == ["pair"]
    assert styles(units.unit("transformer.encoder.layers.0.linear1")) == ["column", "row"]


def test_inside_and_outside_may_differ() -> None:
    units = found("turned")
    # Dim 0 of the first input, as anywhere: nothing is written down.
    assert (units.unit("@input").batched_inputs, units.unit("@input").batch_dims) == ((), None)
    assert [units.unit(n).batch_dims for n in ("up", "lstm", "down", "head")] == [
        (1,),
        (1,),
        (1,),
        None,
    ]
    assert styles(units.unit("down")) == ["column", "row"]


def test_what_leaves_samples_elsewhere_says_where_they_enter() -> None:
    class Recurrent(nn.Module):
        """Its layers take samples in dim 0; the first leaves a state with them in dim 1."""

        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    units = discover(Recurrent(), mw.Batch((torch.randn(3, 5, 4),), None))
    # Ranks without samples could not make up the state: it has to have all ranks.
    assert [units.unit(n).batch_dims for n in ("lstm", "head")] == [(0,), None]


def test_features_where_the_samples_are_stay_whole() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv1d(5, 6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.t()).t()

    # Without a batch a convolution has its channels in front, and the samples are positions to it.
    units = discover(Transposed(), mw.Batch((torch.randn(3, 5),), None))
    assert (units.unit("inner").batch_dims, units.unit("inner").splits) == ((1,), ())


def test_a_unit_that_stays_whole_says_why() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1)).view(x.shape)

    with pytest.warns(UserWarning, match="'inner' first: what enters them grows with the batch"):
        units, _ = discovered(Flat(), lambda n: mw.Batch((torch.randn(n, 5, 4),), None))
    assert (units.unit("inner").batched_inputs, units.unit("inner").splits) == ((), ())


@pytest.mark.parametrize("example", [False, True])
def test_bags_with_offsets_are_refused(example: bool) -> None:
    if example:
        given = from_model(Bags(), bags(4).args)
    else:
        given = workload_of(workload("bags"))
        assert own_batch(given, 4).size == 4
    with pytest.raises(InputError, match=r"'bag' is given an input .* padding_idx"):
        discovered(given.model, given.make_batch)


def test_bags_of_one_length_are_units() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 2))
    units = discover(model, mw.Batch((torch.randint(9, (3, 5)),), None))
    assert [unit.name for unit in units.units] == ["@input", "0", "1", "@output"]


# -- what a plan says of it ------------------------------------------------------------------------


class _Planned:
    """As much of a plan as is asked."""

    world_size = 2

    def __init__(self, *units: UnitPlan) -> None:
        self.units = units


def test_a_plan_tells_where_the_models_samples_are() -> None:
    layout = Layout(groups=2, degree=1)
    ends = UnitPlan(name="@input", kind="input", modules=(), layout=layout)
    assert input_dims(_Planned(ends)) == {}
    ends = UnitPlan(
        name="@input", kind="input", modules=(), layout=layout, batched_inputs=(0, 2),
        batch_dims=(1, 0),
    )  # fmt: skip
    assert input_dims(_Planned(ends)) == {0: 1, 2: 0}
    few, many = ((torch.zeros(5, n), None, torch.zeros(n, 4)) for n in (2, 3))
    assert shapes_of(few, {}, {0: 1, 2: 0}) == shapes_of(many, {}, {0: 1, 2: 0})
    assert shapes_of(few, {}, {}) != shapes_of(many, {}, {})


def test_units_with_samples_elsewhere_have_all_ranks() -> None:
    here = linear("a", 32, 32, 1e-3)
    there = msgspec.structs.replace(here, batch_dims=(1,))
    narrow = Option(Layout(groups=1, degree=1))
    goal = mw.Goal(batch=4, all_layouts=True)
    assert allowed(here, narrow, goal, CAPABILITY, 2)
    assert not allowed(there, narrow, goal, CAPABILITY, 2)
    unit = UnitPlan(
        name="a", kind="linear", modules=("a",), layout=narrow.layout, batched_inputs=(0,),
        batch_dims=(1,),
    )  # fmt: skip
    with pytest.raises(InputError, match="not all that it takes and leaves has"):
        check_subset_units(nn.ModuleDict({"a": nn.Linear(2, 2)}), _Planned(unit))


def test_dims_and_inputs_go_together() -> None:
    with pytest.raises(ValueError, match="2 batch_dims for 1 batched_inputs"):
        UnitPlan(
            name="a", kind="linear", modules=("a",), layout=Layout(groups=2, degree=1),
            batched_inputs=(0,), batch_dims=(1, 1),
        )  # fmt: skip


class Detector(nn.Module):
    """Takes images of different sizes, as a list."""

    def forward(self, images):
        grey = torch.tensor([0.3, 0.6, 0.1])
        return torch.stack([grey @ image.mean((1, 2)) for image in images])


def images(size: int) -> list:
    return [torch.randn(3, 8 + i, 8) for i in range(size)]


def test_a_list_of_samples_is_refused_with_the_remedy() -> None:
    made = mw.Workload("boxes", Detector(), lambda n: mw.Batch((images(n),), None), lambda o, t: o)
    with pytest.raises(InputError, match=r"make_batch\(2\).*a list of length 2.*stacked in one"):
        own_batch(made, 2)
    with pytest.raises(InputError, match="example_inputs of Detector hold a list of length 4"):
        from_model(Detector(), {"images": images(4)})


def test_a_list_of_features_is_none_of_samples() -> None:
    class Several(nn.Module):
        def forward(self, features):
            return sum(f.mean(1) for f in features)

    features = [torch.randn(4, 6), torch.randn(4, 9)]
    assert from_model(Several(), (features,)).make_batch(3).size == 3
