"""DiLoCo under Lightning's Trainer: one argument is another than with DDP.

    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py

Validation sees the mean of all workers' models; so do checkpoints, from which `fit(ckpt_path=…)` gives every worker its
own state back.
"""

import argparse
import os

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza
from cadenza.integrations.lightning import CadenzaStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

torch.set_num_threads(1)  # the workers share this machine's cores
digits, labels = map(torch.tensor, load_digits(return_X_y=True))
shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
held_out, train = (TensorDataset(digits[part].float() / 16, labels[part]) for part in (shuffled[:360], shuffled[360:]))


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.log("loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


reports = []
strategy = CadenzaStrategy(cadenza.diloco(period=20, outer_momentum=0.5), observers=[reports.append])
trainer = pl.Trainer(
    strategy=strategy,  # in place of "ddp"
    accelerator="cpu",
    devices=world,
    max_steps=steps,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
loaders = DataLoader(train, 32, shuffle=True), DataLoader(held_out, 180)
model = Classifier()
trainer.fit(model, loaders[0])
[metrics] = trainer.validate(model, loaders[1], verbose=False)

if rank == 0:
    sent = sum(report.bytes_sent for report in reports)
    gradients = steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(
        f"{world} workers, {steps} steps: loss {metrics['loss']:.3f}, accuracy {metrics['accuracy']:.1%} on held-out "
        "digits"
    )
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
