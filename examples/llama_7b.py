"""A language model with seven billion parameters, made from its configuration: Llama's sizes
(Touvron et al., arXiv 2302.13971, table 2), random weights, sequences of 2,048 symbols.

To plan it for 64 devices without any of them, or memory for its parameters:

    meshwright profile examples/llama_7b.py:llama_7b --device a100-sxm-80gb -o llama.json
    meshwright cluster --device a100-sxm-80gb --nodes 8 --devices-per-node 8 \\
        --inter-gbit-s 200 --intra-gbyte-s 250 -o cluster.json
    meshwright plan llama.json --cluster cluster.json --batch 128 --optimizer adamw \\
        --micro-batches 1,2 --time-limit 30 -o plan.json
    meshwright explain plan.json --memory --profile llama.json --cluster cluster.json
"""

from typing import Any

import torch
from meshwright import Batch, InputError, Workload
from torch import Tensor
from torch.nn import functional as F

LENGTH = 2048
VOCABULARY = 32000


def llama_7b() -> Workload:
    """Llama with 6.7 billion parameters. Needs the extra ``hf``."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise InputError("llama_7b needs transformers: pip install 'meshwright[hf]'") from None

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )

    def make_batch(size: int) -> Batch:
        symbols = torch.randint(VOCABULARY, (size, LENGTH + 1))
        # The mask that the model would make, which it does after looking at values.
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        given = {"input_ids": symbols[:, :-1].contiguous(), "attention_mask": mask}
        return Batch((), symbols[:, 1:].contiguous(), given)

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    return Workload("llama-7b", LlamaForCausalLM(config), make_batch, loss)
