"""Trains a small network on scikit-learn's digits, on as many processes as torchrun starts.

    pip install -e ".[data]" -c constraints.txt    # scikit-learn; the constraints: torch for CPUs
    torchrun --nproc-per-node 2 examples/train_digits.py
    meshwright launch plan.json examples/train_digits.py      # with a plan made before

Without either it runs in one process. The loop is that of a single process: only the line with
``auto_parallelize`` and each rank's share of the data are new.
"""

import argparse

import meshwright as mw
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

BATCH = 128
"""Samples of a step, on all ranks together."""


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    shipped = load_digits()
    images = torch.tensor(shipped.images, dtype=torch.float32)[:, None] / 8 - 1
    return images, torch.tensor(shipped.target)


def main(epochs: int) -> None:
    torch.manual_seed(0)
    images, labels = digits()
    train, test = slice(0, 1437), slice(1437, None)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer, plan = mw.auto_parallelize(
        model, optimizer, example_inputs=(images[:64],), global_batch_size=BATCH
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    device = next(model.parameters()).device  # a GPU of this rank's own, if there is one
    images, labels = images.to(device), labels.to(device)

    for epoch in range(epochs):
        order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            # Even shares, unless hosts are of unequal speed or memory.
            sizes = [plan.local_batch_size(other, len(batch)) for other in range(world)]
            mine = batch.split(sizes)[rank]
            loss = nn.functional.cross_entropy(model(images[train][mine]), labels[train][mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model.eval()
    with torch.no_grad():  # every rank evaluates all of it: the same answer everywhere
        right = (model(images[test]).argmax(-1) == labels[test]).float().mean()
    if rank == 0:
        print(f"{plan.world_size} ranks, test accuracy {right:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    main(parser.parse_args().epochs)
