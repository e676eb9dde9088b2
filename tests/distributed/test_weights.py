"""Weights as other tools have them, from and to a model that is divided over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import PLANS, Net, Trained
from meshwright.executor.apply import apply
from meshwright.executor.checkpoint.weights import export, load_model, save_model
from meshwright.executor.parallel import full_state_dict
from meshwright.planner.schema.errors import InputError
from plans import plan, unit


def writes_and_reads(rank: int, folder: str) -> None:
    trained = Trained(
        rank, PLANS["divided and fully sharded"](2), f"{folder}/kept", seed=1, every=2
    )
    trained.train(2)
    trained.ckpt.close()
    expected = full_state_dict(trained.model)
    for name in ("a.pt", "a.safetensors", "a"):
        save_model(trained.model, f"{folder}/{name}")
        if name == "a.pt":  # as any script reads it
            Net().load_state_dict(torch.load(f"{folder}/{name}"))
        for under in ("burst", "fully sharded"):
            torch.manual_seed(3)
            other = Net()
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            apply(other, optimizer, PLANS[under](2), timeout_s=20)
            load_model(other, f"{folder}/{name}")
            found = full_state_dict(other)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value) for key, value in expected.items())
    before = full_state_dict(other)
    for wrong, sentence in (
        ("b.pt", "there is no "),
        ("wrong.pt", "lacks 'conv.weight'"),
        ("shape.pt", r"has 'last.bias' of shape \[4\], this model \[3\]"),
        ("notes.pt", "is not a file of weights that can be read safely"),
        ("notes.safetensors", "is not a safetensors file"),
    ):
        if rank == 0 and wrong != "b.pt":
            path = Path(folder, wrong)
            if wrong.startswith("notes"):
                path.write_text("some notes")
            else:
                shaped = {**expected, "last.bias": torch.zeros(4)}
                torch.save({"x": torch.ones(1)} if wrong == "wrong.pt" else shaped, path)
        torch.distributed.barrier()
        with pytest.raises(InputError, match=sentence):
            load_model(other, f"{folder}/{wrong}")
    with pytest.raises(InputError, match=r"a\.txt does not say how weights are written"):
        save_model(other, f"{folder}/a.txt")
    with pytest.raises(InputError, match=r"cannot write .*nowhere/a\.pt: there is no folder"):
        save_model(other, f"{folder}/nowhere/a.pt")
    after = full_state_dict(other)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_weights_are_written_and_read(ranks, tmp_path: Path):
    ranks(2)(writes_and_reads, str(tmp_path))
    safetensors = pytest.importorskip("safetensors.torch")
    expected = torch.load(tmp_path / "a.pt")
    exported = tmp_path / "exported.safetensors"
    assert export(tmp_path / "kept", exported) == tmp_path / "kept" / "step-00000002"
    for path in (tmp_path / "a.safetensors", tmp_path / "a" / "model.safetensors", exported):
        found = safetensors.load_file(path)
        assert found.keys() <= expected.keys()
        assert found.keys() >= expected.keys() - {"again.weight"}  # which is tied
        assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())
    with pytest.raises(InputError, match="there is no checkpoint in"):
        export(tmp_path / "a", tmp_path / "b.pt")


def as_transformers_does(rank: int, folder: str) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8,
    )  # fmt: skip
    torch.manual_seed(rank)
    model = BertModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = [unit("embeddings.word_embeddings", 2, "column", 2), unit("pooler.dense", 1, "none", 2)]
    apply(model, optimizer, plan(2, units), timeout_s=20)
    expected = full_state_dict(model)
    save_model(model, f"{folder}/bert")
    plain = BertModel.from_pretrained(f"{folder}/bert")
    for key, value in plain.state_dict().items():
        assert torch.equal(value, expected[key]), key
    torch.manual_seed(9)
    if rank == 0:
        BertModel(config).save_pretrained(f"{folder}/other")
    torch.distributed.barrier()
    load_model(model, f"{folder}/other")
    found = full_state_dict(model)
    for key, value in BertModel.from_pretrained(f"{folder}/other").state_dict().items():
        assert torch.equal(value, found[key]), key


@pytest.mark.slow
def test_a_folder_of_transformers(ranks, tmp_path: Path):
    pytest.importorskip("transformers")
    ranks(2)(as_transformers_does, str(tmp_path), limit_s=100)
