"""Post-local SGD: gradients are averaged while the loss falls steeply, and parameters every 16 steps from then on.

    torchrun --standalone --nproc-per-node 4 examples/post_local_sgd.py

The paper is arXiv 1808.07217. The model is in DistributedDataParallel here, which does the warm-up; without it, call
`sync.average_gradients()` between `backward()` and `optimizer.step()`.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

WARMUP = 64
reports = []
strategy = cadenza.post_local_sgd(period=16, warmup_steps=WARMUP)
sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])

for step in range(1, steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()  # DDP averages gradients in here during the warm-up, and falls silent after it
    optimizer.step()
    sync.step()
    if rank == 0 and step % 64 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}, {len(reports)} rounds so far")
sync.finish()

if rank == 0:
    with torch.no_grad():
        logits = model.module(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    one_step = 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    warmup, rounds = min(WARMUP, steps) * one_step, sum(report.bytes_sent for report in reports)
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {warmup / 1e6:.2f} MB in the warm-up, then {rounds / 1e6:.2f} MB in {len(reports)} rounds")
    print(f"DDP sends {steps * one_step / 1e6:.2f} MB")
dist.destroy_process_group()
