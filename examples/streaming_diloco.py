"""Streaming DiLoCo: a few layers at a time, in 4 bits, while training goes on.

    torchrun --standalone --nproc-per-node 4 examples/streaming_diloco.py

The paper is arXiv 2501.18512. Fragments take turns, so the link is used evenly and less at a time. A round lands some
steps after its launch, mixed half and half with what the worker has learned since.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import cadenza

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=320)
steps = parser.parse_args().steps

torch.set_num_threads(1)  # the workers share this machine's cores
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# ---- data: a fifth is held out, of the rest every worker has its own part ----
digits, labels = map(torch.tensor, load_digits(return_X_y=True))
digits = digits.float() / 16
shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
held_out, mine = shuffled[:360], shuffled[360:][rank::world]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(64, 96), *(Block(96) for _ in range(6)), nn.Linear(96, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

# Eight layers, two at a time: four fragments, of which each has its turn every 32 steps and lands 3 steps later.
strategy = cadenza.streaming_diloco(period=32, layers=2, delay=3)
reports = []
sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])

for step in range(1, steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    before = len(reports)
    sync.step()  # launches one fragment, lands another, and does not wait for the wire in between
    for report in reports[before:]:
        if rank == 0 and step <= 48:
            print(f"step {step:3}: fragment {report.fragment}, launched at {report.step}, landed")
sync.finish()

if rank == 0:
    with torch.no_grad():
        logits = model(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    sent, largest = sum(report.bytes_sent for report in reports), max(report.bytes_sent for report in reports)
    gradients = steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
    print(f"it sent {largest / 1e6:.2f} MB at most at a time")
dist.destroy_process_group()
