"""A model of one's own as a TARGET: a factory that returns a Workload.

meshwright profile examples/own_model.py:tagger
meshwright probe -o cluster.json
meshwright plan examples/own_model.py:tagger --cluster cluster.json --batch 64 -o plan.json
meshwright verify plan.json
meshwright launch plan.json
"""

import torch
from meshwright import Batch, Workload
from torch import Tensor, nn

WORDS, TAGS, LENGTH = 2000, 16, 24


class Tagger(nn.Module):
    """Tags every word of a sentence from the word and the mean of those before it."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.tag = nn.Linear(width, TAGS)

    def forward(self, words: Tensor) -> Tensor:
        """``words`` [sample, position] numbers; gives [sample, position, tag] logits."""
        x = self.embed(words)
        x = x + self.mix(x).cumsum(1) / LENGTH  # what came before
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.tag(x)


def make_batch(size: int) -> Batch:
    """Sentences of random words; a word's tag is its number modulo ``TAGS``."""
    words = torch.randint(WORDS, (size, LENGTH))
    return Batch((words,), words % TAGS)


def loss(logits: Tensor, tags: Tensor) -> Tensor:
    """Mean over all words. Every sentence has as many, so shares combine by their samples."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tags.flatten())


def tagger() -> Workload:
    """The factory: what ``file.py:tagger`` names."""
    return Workload("tagger", Tagger(), make_batch, loss)
