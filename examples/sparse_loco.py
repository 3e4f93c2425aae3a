"""SparseLoCo: of every 4096 differences the 82 largest, in 2 bits each; the rest is kept and sent later.

    torchrun --standalone --nproc-per-node 4 examples/sparse_loco.py

The paper is arXiv 2508.15706. What was not sent stays on the worker as a residual and is added to the next difference,
a little faded (error feedback).
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import cadenza

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
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
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

reports = []
sync = cadenza.attach(model, optimizer, cadenza.sparse_loco(period=30, density=0.02), observers=[reports.append])

for step in range(1, steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sync.step()
    if rank == 0 and step % 60 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}, {sum(r.bytes_sent for r in reports) / 1e3:.1f} kB sent")
sync.finish()

if rank == 0:
    with torch.no_grad():
        logits = model(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    sent = sum(report.bytes_sent for report in reports)
    gradients = steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
    print(f"a difference of {reports[-1].raw_bytes} bytes was written as {reports[-1].encoded_bytes}")
dist.destroy_process_group()
