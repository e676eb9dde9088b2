"""Trains a small network on scikit-learn's digits with Hugging Face's Accelerate, under a plan.

    pip install -e ".[data]" accelerate -c constraints.txt
    torchrun --nproc-per-node 2 examples/with_accelerate.py
    meshwright launch plan.json examples/with_accelerate.py   # with a plan made before

The loop is that of Accelerate alone but for two lines: ``mw.adapt``, and the plan.
"""

import argparse
from typing import Any

import meshwright as mw
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_digits import digits, network

BATCH = 64
"""Samples of a step, on all ranks together."""


class Training:
    """Model, optimizer and data, as Accelerate has prepared them."""

    def __init__(self, **settings: Any) -> None:
        # Each rank gets its part of every batch.
        parts = DataLoaderConfiguration(split_batches=True)
        self.accelerator = mw.adapt(
            Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=parts, **settings)
        )
        torch.manual_seed(0)
        images, labels = digits()
        data = TensorDataset(images[:1280], labels[:1280])
        model = network().to(self.accelerator.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        mw.auto_parallelize(
            model,
            optimizer,
            example_inputs=images[: BATCH // self.accelerator.num_processes],
            global_batch_size=BATCH,
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
        self.model, self.optimizer, self.schedule, self.train, self.test = self.accelerator.prepare(
            model,
            optimizer,
            schedule,
            DataLoader(data, BATCH, shuffle=True),
            DataLoader(TensorDataset(images[1280:], labels[1280:]), BATCH),
        )

    def epoch(self) -> None:
        self.model.train()
        for images, labels in self.train:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(images), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def accuracy(self) -> float:
        self.model.eval()
        right = []
        for images, labels in self.test:
            with torch.no_grad():
                found = self.model(images).argmax(-1)
            right.append(self.accelerator.gather_for_metrics(found == labels))
        return torch.cat(right).float().mean().item()


def main(epochs: int) -> None:
    training = Training()
    for _ in range(epochs):
        training.epoch()
    accuracy = training.accuracy()
    training.accelerator.print(
        f"{training.accelerator.num_processes} ranks, test accuracy {accuracy:.1%}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
