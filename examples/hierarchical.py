"""Hierarchical SGD: neighbours take the mean of their parameters every 4 steps, everyone every 32.

    torchrun --standalone --nproc-per-node 4 examples/hierarchical.py

The paper is arXiv 2010.12998. Steps in which only neighbours meet cost nothing on the slow links between the groups.
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
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

# {period: with whom}. On a cluster, {4: "host", 32: "all"}; here neighbours stand for the ranks of a host.
strategy = cadenza.hierarchical({4: max(1, world // 2), 32: "all"})
reports = []
sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append])

for step in range(1, steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sync.step()  # where several levels are due, only the largest of them comes together
    if rank == 0 and step % 64 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}, {len(reports)} rounds so far")
sync.finish()

if rank == 0:
    with torch.no_grad():
        logits = model(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    for level in (0, 1):
        rounds = [report for report in reports if report.level == level]
        if rounds:
            sent, met = sum(report.bytes_sent for report in rounds), rounds[0].participants
            print(f"level {level}: {len(rounds)} rounds of ranks {met}, each worker sent {sent / 1e6:.2f} MB")
dist.destroy_process_group()
