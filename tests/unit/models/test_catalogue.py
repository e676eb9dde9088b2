"""Names, errors, and the published parameter counts."""

import pytest
import torch
from meshwright.models.target import planned
from meshwright.models.zoo import build, catalogue, names
from meshwright.planner.schema.errors import InputError

PARAMETERS = {
    "vgg11": 132_863_336,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11-32": 28_144_010,
    "vgg16-32": 33_638_218,
    "vgg19-32": 38_947_914,
    "vgg16-32-narrow": 2_112_730,
    "resnet50": 25_557_032,
    "resnet50-32": 23_520_842,
    "wide_resnet101": 126_886_696,
    "alexnet": 61_100_840,
    "mlp": 563_722,
    "cnn-digits": 1_635_274,
    "seq2seq-tiny": 61_696,
    "seq2seq-mini": 2_498_816,
    "seq2seq": 25_894_941,
    "gpt-tiny": 118_528,
    "gpt-mini": 4_837_376,
    "gpt-small": 124_439_808,
}
FROM_TRANSFORMERS = ("bert-tiny", "gpt2-tiny", "vit-tiny")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name: str):
    with torch.device("meta"):
        model = build(name).model
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_every_name_is_listed_once():
    listed = [name for name in names() if name not in FROM_TRANSFORMERS]
    assert listed == list(PARAMETERS)


@pytest.mark.parametrize(
    ("name", "classes"), [("vgg16", 1000), ("alexnet", 1000), ("wide_resnet101", 1000)]
)
def test_full_size_models_answer_with_published_classes(name: str, classes: int):
    with torch.device("meta"):
        workload = build(name)
        batch = workload.make_batch(2)
        output = workload.model(*batch.args)
    assert output.shape == (2, classes)


@pytest.mark.parametrize(("wrong", "near"), [("vg16", "vgg16"), ("GPT-small", "gpt-small")])
def test_an_unknown_name_is_answered_with_near_ones(wrong: str, near: str):
    with pytest.raises(ValueError, match=f"unknown workload '{wrong}': did you mean .*{near}"):
        build(wrong)


def test_a_name_like_no_other_is_answered_with_all():
    with pytest.raises(ValueError, match=r"choose from vgg11, .*gpt-small"):
        build("???")


def test_without_transformers_its_models_are_neither_listed_nor_built(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(catalogue, "_has_transformers", lambda: False)
    assert not set(FROM_TRANSFORMERS) & set(names())
    with pytest.raises(ValueError, match=r"'bert-tiny' needs .*meshwright\[hf\]"):
        build("bert-tiny")


def test_with_transformers_its_models_are_listed():
    pytest.importorskip("transformers")
    assert set(FROM_TRANSFORMERS) <= set(names())


def test_a_plan_of_a_scripts_model_is_not_taken_for_a_workload() -> None:
    with pytest.raises(InputError, match=r"'Net' of a script.*launch PLAN SCRIPT"):
        planned("Net")
    assert planned("mlp").name == "mlp"
