"""DeepPool's tables as profiles."""

import json

import pytest
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.layer_times import profile_of_table
from meshwright.profiler.estimate import load_table, tables


def test_vgg16_has_the_published_size():
    profile = load_table("vgg16")
    assert profile.parameter_bytes == 4 * 138_357_544
    assert profile.origin == "table"
    assert profile.device == "NVIDIA A100"
    assert dict(profile.software)["source"].endswith("MIT licence, (c) 2021 Seo Jin Park")
    kinds = [u.kind for u in profile.units]
    assert (kinds.count("conv"), kinds.count("linear")) == (13, 3)
    assert "relu" not in " ".join(u.name.lower() for u in profile.units)


def test_a_layer_has_its_relu_in_it():
    first = load_table("vgg16").units[1]
    assert first.whole.forward(1) == pytest.approx((43 + 14) * 1e-6)
    assert first.whole.backward(1) == pytest.approx((0 + 102) * 1e-6)
    assert first.whole.saved(1) == 4 * 3 * 224 * 224


def test_a_last_layer_without_a_relu_is_given_a_backward():
    last = load_table("vgg16").units[-2]
    assert last.whole.backward(1) == pytest.approx(2 * 21e-6)


def test_divided_shares():
    fc = load_table("vgg16").unit("32.linear")
    half = next(s for s in fc.shares if s.style == "row" and s.degree == 2)
    assert half.forward(1) == pytest.approx((301 + 7) / 2 * 1e-6)
    assert half.saved(1) == 4 * 25088 / 2
    tiny = next(s for s in fc.shares if s.style == "column" and s.degree == 64)
    assert tiny.forward(1) == pytest.approx(5e-6)


def test_wide_resnet_has_the_published_size_and_batch_statistics():
    profile = load_table("wide_resnet101_2")
    # convolution bias that torchvision's network does not have: 64 in the first layer
    assert profile.parameter_bytes == 4 * (126_886_696 + 64 - 128)
    blocks = [u for u in profile.units if "Bottleneck" in u.name]
    assert len(blocks) == 33
    assert all(u.batch_statistics and u.statistics_bytes for u in blocks)


def test_a_network_whose_branches_are_unknown_is_refused():
    with pytest.raises(InputError, match="branches"):
        load_table("inception_v3")


def test_an_unknown_table_is_refused():
    assert set(tables()) == {"inception_v3", "vgg16", "wide_resnet101_2"}
    with pytest.raises(InputError, match="choose from"):
        load_table("vgg17")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[1]", b"\xff", b'{"model": 1}', json.dumps({"layers": []}).encode()],
)
def test_damaged_tables_are_refused(data):
    with pytest.raises(InputError, match="my table"):
        profile_of_table(data, "my table")
