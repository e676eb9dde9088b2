"""Trains a small Llama on text of Python's own library by transformers' Trainer, under a plan.

    pip install -e ".[hf]" accelerate -c constraints.txt
    torchrun --nproc-per-node 2 examples/with_trainer.py
    meshwright launch plan.json examples/with_trainer.py      # with a plan made before

The script is that of the Trainer alone but for two lines: the plan, and ``mw.adapt``.
"""

import argparse
from pathlib import Path
from typing import Any

import meshwright as mw
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

LENGTH = 32


class Text(Dataset[dict[str, torch.Tensor]]):
    """Pieces of a file, a symbol for each byte; what comes next is to be told of each."""

    def __init__(self, path: str, most: int) -> None:
        symbols = torch.tensor(list(Path(path).read_bytes()[: most * LENGTH]))
        self.pieces = symbols.view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def texts() -> tuple[Text, Text]:
    """To train on, and to test with."""
    return Text(argparse.__file__, 1024), Text(torch.__file__, 64)


def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def settings(folder: str, **more: Any) -> TrainingArguments:
    given = {
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-3,
        "logging_steps": 10,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
    }
    return TrainingArguments(output_dir=folder, **{**given, **more})


def planned_trainer(args: TrainingArguments) -> Trainer:
    """The Trainer, with a plan for its model and its optimizer."""
    train, test = texts()
    trainer = Trainer(network(), args, train_dataset=train, eval_dataset=test)
    batch = next(iter(trainer.get_train_dataloader()))
    mw.auto_parallelize(
        trainer.model,
        trainer.create_optimizer(),
        example_inputs=batch,
        global_batch_size=args.train_batch_size * args.world_size,
    )
    return mw.adapt(trainer)


def main(folder: str, steps: int) -> None:
    trainer = planned_trainer(settings(folder, max_steps=steps, save_steps=steps))
    trainer.train()
    figures = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{trainer.args.world_size} ranks, test loss {figures['eval_loss']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/trainer")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    main(given.folder, given.steps)
