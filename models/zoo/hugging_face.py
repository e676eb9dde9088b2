"""Small models of the transformers package, to show that models not written here run as well.

They are made from configurations with random weights: nothing is downloaded. Unlike the other
workloads they return a structure with the logits inside, and drop out as their authors set it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..workload import Batch, Workload
from .data import (
    BYTES,
    IGNORED,
    NO_BYTE,
    Pictures,
    image_workload,
    mean_cross_entropy,
    next_symbol_workload,
    share_right,
    windows,
)

LENGTH = 32
# Symbols of each sample that BERT has to guess: 15% of ``LENGTH``, rounded up.
MASKED = 5


def gpt2_tiny(name: str) -> Workload:
    """GPT-2 on bytes: 2 layers, 64 wide."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=NO_BYTE,
        eos_token_id=NO_BYTE,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    return _reading_logits(next_symbol_workload(name, model, BYTES, LENGTH))


def vit_tiny(name: str) -> Workload:
    """Vision transformer on 32-pixel images in 16 patches: 2 layers, 64 wide."""
    from transformers import ViTConfig, ViTForImageClassification

    pictures = Pictures(channels=3, pixels=32, classes=10)
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=pictures.pixels,
        patch_size=8,
        num_labels=pictures.classes,
    )
    return _reading_logits(image_workload(name, ViTForImageClassification(config), pictures))


def bert_tiny(name: str) -> Workload:
    """BERT on bytes, guessing ``MASKED`` hidden ones of each sample: 2 layers, 64 wide."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=BYTES,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
        pad_token_id=None,  # the default would freeze the embedding of the mask symbol
    )

    def make_batch(size: int) -> Batch:
        symbols = torch.randint(1, BYTES, (size, LENGTH))
        return _masked(symbols, torch.rand(size, LENGTH))

    def data(split: str) -> Batch:
        symbols = windows(split, LENGTH)
        generator = torch.Generator().manual_seed(0)
        return _masked(symbols, torch.rand(symbols.shape, generator=generator, device="cpu"))

    model = BertForMaskedLM(config)
    return _reading_logits(Workload(name, model, make_batch, mean_cross_entropy, data, share_right))


BUILDERS: dict[str, Callable[[str], Workload]] = {
    "bert-tiny": bert_tiny,
    "gpt2-tiny": gpt2_tiny,
    "vit-tiny": vit_tiny,
}


def _masked(symbols: Tensor, luck: Tensor) -> Batch:
    """Hides the ``MASKED`` luckiest symbols of each sample; only they are scored."""
    hidden = torch.zeros_like(symbols, dtype=torch.bool)
    hidden.scatter_(1, luck.topk(MASKED, dim=1).indices, value=True)
    shown = symbols.masked_fill(hidden, NO_BYTE)
    return Batch((), symbols.masked_fill(~hidden, IGNORED), {"input_ids": shown})


def _reading_logits(workload: Workload) -> Workload:
    """The same workload, its model answering with a structure that has ``logits``."""

    def loss(output: Any, target: Tensor) -> Tensor:
        return mean_cross_entropy(output.logits, target)

    def accuracy(output: Any, target: Tensor) -> float:
        return share_right(output.logits, target)

    return replace(workload, loss=loss, accuracy=accuracy)
