"""A task of one's own: a small convolutional net on scikit-learn's digits.

    cadenza train examples.tasks.digits_convnet:build --steps 300

`build(config)` returns a Task: a model, its optimizer, the batches of each worker, a loss, and here an evaluation and a
schedule as well. Everything under [options] of the configuration arrives as `config.options`.
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza.training import Config, Settings, Task


class Options(Settings):
    """What can be set, by `--set options.lr=0.01` or in the file; anything else is an error that names the key."""

    batch: int = Field(default=32, ge=1, description="Digits in a worker's step.")
    lr: float = Field(default=0.05, gt=0, description="SGD's largest learning rate.")
    channels: int = Field(default=16, ge=1, description="Channels of the first convolution.")


def build(config: Config) -> Task:
    options = config.options_as(Options)
    training, held_out = digits()
    width = options.channels
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * width, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)

    def batches(worker, workers):
        """Give each worker a part of its own; the order depends on the seed, the worker and the epoch alone."""
        part = TensorDataset(*(tensor[worker::workers] for tensor in training))
        return DataLoader(part, batch_size=options.batch, shuffle=True, drop_last=len(part) >= options.batch)

    def loss(model, batch):
        pixels, labels = batch
        return F.cross_entropy(model(pixels), labels)

    def evaluate(model, worker, workers):
        """Return sums over this worker's share of the held-out digits, each with how many digits they are of."""
        device = next(model.parameters()).device
        pixels, labels = (tensor[worker::workers].to(device) for tensor in held_out)
        guesses = model(pixels)
        return {
            "loss": (F.cross_entropy(guesses, labels, reduction="sum"), len(labels)),
            "accuracy": ((guesses.argmax(1) == labels).sum(), len(labels)),
        }

    return Task(
        model=model,
        optimizer=optimizer,
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        higher_is_better=["accuracy"],
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps),
        unit="digits",
    )


def digits():
    """Return (pixels, labels) to train on, and a fifth to be judged by."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    pixels = pixels.float().reshape(-1, 1, 8, 8) / 16
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    held_out, kept = order[: len(order) // 5], order[len(order) // 5 :]
    return (pixels[kept], labels[kept]), (pixels[held_out], labels[held_out])
