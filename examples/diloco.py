"""DiLoCo: AdamW on every worker, and every 32 steps a Nesterov step on the mean of how far they went.

    torchrun --standalone --nproc-per-node 4 examples/diloco.py

The paper is arXiv 2311.08105. Differences travel as 8-bit integers here. In mid-run, `sync.averaged()` lends the model
the mean of all workers' parameters.
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

torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# The paper's period is 500 and its outer momentum 0.9, which takes more than ten rounds to settle.
strategy = cadenza.diloco(period=32, outer_momentum=0.5, codec=cadenza.codecs.int8())
reports = []
sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])


def evaluate():
    with torch.no_grad():
        logits = model(digits[held_out])
    return F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()


for step in range(1, steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sync.step()
    if step % 80 == 0:
        with sync.averaged():  # the mean of all workers' models, on all of them, until the block ends
            loss, accuracy = evaluate()
        if rank == 0:
            print(f"step {step:3}: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
sync.finish()

if rank == 0:
    loss, accuracy = evaluate()
    sent = sum(report.bytes_sent for report in reports)
    gradients = steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
    print(f"int8 lost {reports[-1].codec_error:.2%} of the last difference")
dist.destroy_process_group()
