"""The real data sets, and that the demo's network learns one of them."""

import sys

import pytest
import torch
from meshwright.models.workload import Batch, Workload
from meshwright.models.zoo import build, data
from meshwright.models.zoo.data import BYTES, NO_BYTE, Pictures, digits, windows


@pytest.mark.parametrize(("split", "count"), [("train", 1437), ("test", 360)])
def test_digits_come_in_the_size_that_a_model_takes(split: str, count: int):
    pytest.importorskip("sklearn")
    small = digits(split, Pictures(channels=1, pixels=8, classes=10))
    assert small.args[0].shape == (count, 1, 8, 8)
    assert small.target.unique().tolist() == list(range(10))
    large = digits(split, Pictures(channels=3, pixels=32, classes=10))
    assert large.args[0].shape == (count, 3, 32, 32)
    assert large.args[0][:, 0].equal(large.args[0][:, 2])
    assert large.target.equal(small.target)


@pytest.mark.parametrize("place", [data.DIGITS, ("elsewhere",)])
def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, place: tuple[str, ...]):
    monkeypatch.setattr(data, "DIGITS", place)
    shipped = pytest.importorskip("sklearn.datasets").load_digits()
    images, labels = data._shipped_digits()
    assert images.dtype == torch.float32
    assert images.equal(torch.as_tensor(shipped.images, dtype=torch.float32))
    assert labels.equal(torch.as_tensor(shipped.target))


def test_digits_are_standardised_and_split_without_overlap():
    pytest.importorskip("sklearn")
    pictures = Pictures(channels=1, pixels=8, classes=10)
    train, test = (digits(split, pictures).args[0].flatten(1) for split in ("train", "test"))
    assert abs(train.mean().item()) < 1e-5
    assert abs(train.std().item() - 1) < 1e-5
    assert torch.cdist(test, train).min() > 0.1


def test_the_split_ignores_the_seed_and_leaves_it_alone():
    pytest.importorskip("sklearn")
    pictures = Pictures(channels=1, pixels=8, classes=10)
    torch.manual_seed(1)
    first = digits("test", pictures).target
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1).equal(drawn)
    assert digits("test", pictures).target.equal(first)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match=r"needs scikit-learn: .*meshwright\[data\]"):
        data_of(build("mlp"), "train")


@pytest.mark.parametrize("name", ["mlp", "gpt-tiny", "seq2seq-tiny"])
def test_an_unknown_split_is_refused(name: str):
    pytest.importorskip("sklearn")
    with pytest.raises(ValueError, match="unknown split 'val': choose 'train' or 'test'"):
        data_of(build(name), "val")


def test_text_is_cut_into_whole_windows_without_the_reserved_symbol():
    train, test = windows("train", 50), windows("test", 50)
    assert train.shape[1] == test.shape[1] == 50
    assert len(train) > 5000
    assert abs(len(train) - 9 * len(test)) < 10
    assert train.min() > NO_BYTE
    assert train.max() < BYTES


def test_gpt_is_asked_for_the_symbol_that_follows():
    batch = data_of(build("gpt-tiny"), "test")
    assert batch.args[0].shape == batch.target.shape
    assert batch.args[0].shape[1] == 32
    assert batch.args[0][:, 1:].equal(batch.target[:, :-1])


def test_seq2seq_is_asked_for_its_source_backwards():
    batch = data_of(build("seq2seq-tiny"), "test")
    source, preceding = batch.args
    assert batch.target.equal(source.flip(1))
    assert preceding[:, 1:].equal(batch.target[:, :-1])
    assert not preceding[:, 0].any()


def test_bert_is_asked_for_the_same_count_of_symbols_in_each_sample():
    pytest.importorskip("transformers")
    workload = build("bert-tiny")
    for batch in (workload.make_batch(4), data_of(workload, "test")):
        assert ((batch.target >= 0).sum(1) == 5).all()
        assert ((batch.kwargs["input_ids"] == NO_BYTE) == (batch.target >= 0)).all()


def test_data_feeds_the_model():
    pytest.importorskip("sklearn")
    for name in ("vgg11-32", "cnn-digits", "seq2seq-tiny", "gpt-tiny"):
        workload = build(name)
        batch = data_of(workload, "test").slice(0, 2)
        assert workload.loss(workload.model(*batch.args), batch.target).isfinite()


def test_the_demo_network_learns_digits():
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    workload = build("cnn-digits")
    train, test = data_of(workload, "train"), data_of(workload, "test")
    optimizer = torch.optim.AdamW(workload.model.parameters(), lr=1e-3)
    for _ in range(4):
        for index in torch.randperm(train.size).split(64):
            batch = train.take(index)
            optimizer.zero_grad()
            workload.loss(workload.model(*batch.args), batch.target).backward()
            optimizer.step()
    assert workload.accuracy is not None
    with torch.no_grad():
        assert workload.accuracy(workload.model(*test.args), test.target) > 0.95


def data_of(workload: Workload, split: str) -> Batch:
    assert workload.data is not None
    return workload.data(split)
