"""DiLoCo in a loop with Lightning Fabric: `attach` takes what `fabric.setup()` returns.

    torchrun --standalone --nproc-per-node 2 examples/fabric_loop.py

Fabric wraps the model in DistributedDataParallel, which falls silent. `sync.step()` follows `optimizer.step()`.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

torch.set_num_threads(1)  # the workers share this machine's cores
fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
fabric.launch()

digits, labels = map(torch.tensor, load_digits(return_X_y=True))
shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
held_out, train = (TensorDataset(digits[part].float() / 16, labels[part]) for part in (shuffled[:360], shuffled[360:]))
loader = fabric.setup_dataloaders(DataLoader(train, 32, shuffle=True, drop_last=True))

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
reports = []
sync = cadenza.attach(model, optimizer, cadenza.diloco(period=20, outer_momentum=0.5), observers=[reports.append])

while sync.clock < steps:
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        sync.step()
        if sync.clock == steps:
            break
sync.finish()

if fabric.is_global_zero:
    with torch.no_grad():
        inputs, targets = held_out.tensors
        logits = model.module(inputs)
    loss, accuracy = F.cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()
    sent = sum(report.bytes_sent for report in reports)
    gradients = steps * 2 * (1 - 1 / fabric.world_size) * sum(4 * p.numel() for p in model.parameters())
    print(f"{fabric.world_size} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
