"""What every small workload must be able to do, so that it can be measured and divided."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from meshwright.models.workload import Batch, Workload
from meshwright.models.zoo import build, names
from meshwright.models.zoo.gpt import Attention
from torch import nn
from torch.utils._pytree import tree_leaves

# Their attention asks ``view`` to infer the number of heads, which it cannot without samples.
FROM_TRANSFORMERS = ("bert-tiny", "gpt2-tiny", "vit-tiny")
OUTPUT_SHAPES = {
    "vgg11-32": (10,),
    "resnet50-32": (10,),
    "mlp": (10,),
    "cnn-digits": (10,),
    "seq2seq-tiny": (12, 256),
    "gpt-tiny": (32, 256),
    "bert-tiny": (32, 256),
    "gpt2-tiny": (32, 256),
    "vit-tiny": (10,),
}
SMALL = tuple(OUTPUT_SHAPES)


def seeded(name: str) -> Workload:
    if name not in names():
        pytest.skip("transformers is not installed")
    torch.manual_seed(7)
    return build(name)


def run(workload: Workload, batch: Batch) -> Any:
    return workload.model(*batch.args, **batch.kwargs)


def logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(name: str):
    workload = seeded(name)
    batch = workload.make_batch(2)
    assert batch.size == 2
    output = run(workload, batch)
    assert logits(output).shape == (2, *OUTPUT_SHAPES[name])
    workload.loss(output, batch.target).backward()
    for fqn, parameter in workload.model.named_parameters():
        assert parameter.grad is not None, fqn
        assert parameter.grad.isfinite().all(), fqn
    assert workload.accuracy is not None
    assert 0 <= workload.accuracy(output, batch.target) <= 1


@pytest.mark.parametrize("name", [name for name in SMALL if name not in FROM_TRANSFORMERS])
def test_an_empty_batch_adds_nothing(name: str):
    workload = seeded(name)
    batch = workload.make_batch(2).slice(1, 1)
    assert workload.make_batch(0).size == 0
    output = run(workload, batch)
    assert logits(output).shape == (0, *OUTPUT_SHAPES[name])
    loss = workload.loss(output, batch.target)
    loss.backward()
    assert loss.item() == 0
    assert all(
        parameter.grad is None or not parameter.grad.any()
        for parameter in workload.model.parameters()
    )


@pytest.mark.parametrize("name", SMALL)
def test_shares_of_a_batch_combine_by_their_sizes(name: str):
    workload = seeded(name)
    workload.model.eval().double()
    batch = workload.make_batch(5).to(dtype=torch.float64)
    with torch.no_grad():
        whole = workload.loss(run(workload, batch), batch.target)
        parts = [batch.slice(0, 3), batch.slice(3, 5)]
        mean = sum(
            part.size / 5 * workload.loss(run(workload, part), part.target) for part in parts
        )
    torch.testing.assert_close(mean, whole, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_the_seed_determines_model_and_batch(name: str):
    first, second = seeded(name), seeded(name)
    for (fqn, a), b in zip(
        first.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert a.equal(b), fqn
    batches = []
    for workload in (first, second):
        torch.manual_seed(8)
        batches.append(workload.make_batch(3))
    leaves = [batch.tensors() for batch in batches]
    assert all(a.equal(b) for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize("name", [name for name in SMALL if name not in FROM_TRANSFORMERS])
def test_each_module_is_called_once_and_answers_with_samples_in_dim_0(name: str):
    workload = seeded(name)
    calls: Counter[str] = Counter()

    def note(fqn: str, module: nn.Module, _: Any, output: Any) -> None:
        calls[fqn] += 1
        if not isinstance(module, nn.LSTM):  # its state has layers first
            leaves = tree_leaves(output)
            assert all(leaf.shape[0] == 3 for leaf in leaves), fqn

    for fqn, module in workload.model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(partial(note, fqn))
    run(workload, workload.make_batch(3))
    assert set(calls.values()) == {1}
    own = {fqn.rpartition(".")[0] for fqn, _ in workload.model.named_parameters()}
    assert own <= set(calls)


def test_gpt_shares_one_weight_between_input_and_output():
    model = seeded("gpt-tiny").model
    assert model.lm_head.weight is model.wte.weight


def test_gpt_looks_back_only():
    workload = seeded("gpt-tiny")
    symbols = workload.make_batch(1).args[0]
    changed = symbols.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    with torch.no_grad():
        before, after = workload.model(symbols), workload.model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not before[:, 20:].allclose(after[:, 20:])


def test_attention_cut_to_some_heads_computes_their_part_of_the_sum():
    torch.manual_seed(3)
    whole = Attention(width=16, heads=4).double()
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    parts = [cut(whole, slice(0, 1))(hidden), cut(whole, slice(1, 4))(hidden)]
    torch.testing.assert_close(sum(parts) + whole.c_proj.bias, whole(hidden))


def cut(whole: Attention, heads: slice) -> Attention:
    """The attention of ``heads`` only, without the output's bias."""
    part = Attention(width=16, heads=4).double()
    kept = 4 * (heads.stop - heads.start)
    part.c_attn, part.c_proj = nn.Linear(16, 3 * kept), nn.Linear(kept, 16, bias=False)
    columns = slice(4 * heads.start, 4 * heads.stop)
    weight = whole.c_attn.weight.unflatten(0, (3, 16))[:, columns].flatten(0, 1)
    part.c_attn.weight = nn.Parameter(weight)
    part.c_attn.bias = nn.Parameter(whole.c_attn.bias.unflatten(0, (3, 16))[:, columns].flatten())
    part.c_proj.weight = nn.Parameter(whole.c_proj.weight[:, columns])
    return part
