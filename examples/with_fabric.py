"""Trains a small network on scikit-learn's digits with Lightning Fabric, under a plan.

    pip install -e ".[data]" lightning-fabric -c constraints.txt
    torchrun --nproc-per-node 2 examples/with_fabric.py
    meshwright launch plan.json examples/with_fabric.py       # with a plan made before

The loop is that of Fabric alone. Its strategy for models that are parallelized by a function of
your own gets one that applies the plan, and ``mw.adapt`` makes that strategy know of it.
"""

import argparse
import os
from typing import Any

import meshwright as mw
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_digits import digits, network

BATCH = 64
"""Samples of a step, on all ranks together."""


class Training:
    """Model, optimizer and data, as Fabric has set them up."""

    def __init__(self, micro_batches: int = 1, **settings: Any) -> None:
        torch.manual_seed(0)
        images, labels = digits()
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
            mw.auto_parallelize(
                model, optimizer, example_inputs=images[:8], global_batch_size=BATCH
            )
            return model

        strategy = mw.adapt(ModelParallelStrategy(parallelize_fn=parallelize))
        self.fabric = Fabric(
            accelerator="cuda" if torch.cuda.is_available() else "cpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            strategy=strategy,
            **settings,
        )
        self.fabric.launch()
        self.micro_batches = micro_batches
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
        size = BATCH // self.fabric.world_size // micro_batches
        self.train, self.test = self.fabric.setup_dataloaders(
            DataLoader(TensorDataset(images[:1280], labels[:1280]), size, shuffle=True),
            DataLoader(TensorDataset(images[1280:], labels[1280:]), size),
        )

    def epoch(self) -> None:
        self.model.train()
        for number, (images, labels) in enumerate(self.train, start=1):
            more = number % self.micro_batches != 0
            with self.fabric.no_backward_sync(self.model, enabled=more):
                loss = nn.functional.cross_entropy(self.model(images), labels)
                self.fabric.backward(loss / self.micro_batches)
            if not more:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def accuracy(self) -> float:
        self.model.eval()
        right = torch.zeros(2)
        for images, labels in self.test:
            with torch.no_grad():
                found = self.model(images).argmax(-1)
            right += torch.tensor([(found == labels).sum(), len(labels)]).cpu()
        right = self.fabric.all_reduce(right, reduce_op="sum")
        return float(right[0] / right[1])


def main(epochs: int) -> None:
    training = Training()
    for _ in range(epochs):
        training.epoch()
    accuracy = training.accuracy()
    training.fabric.print(f"{training.fabric.world_size} ranks, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
