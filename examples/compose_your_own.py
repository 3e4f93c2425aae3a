"""A strategy of your own: exact means inside a site every 4 steps; int8 and Nesterov across the ocean every 32.

    torchrun --standalone --nproc-per-node 4 examples/compose_your_own.py

Every level has a schedule, groups, a codec and an outer update of its own. No preset is needed: they are written the
same way, in src/cadenza/presets.py.
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

site = cadenza.LevelPlan(
    cadenza.every(4),  # when
    groups=max(1, world // 2),  # with whom: on a cluster, "host"
    name="site",
)  # the rest is the default: exact values, and all go on from the mean
ocean = cadenza.LevelPlan(
    cadenza.every(32),
    groups="all",
    codec=cadenza.codecs.error_feedback(cadenza.codecs.int8()),  # how it is written on the wire
    outer=cadenza.nesterov(lr=0.7, momentum=0.5),  # what becomes of the mean
    name="ocean",
)
strategy = cadenza.Strategy(levels=(site, ocean), fragments=cadenza.whole())

reports = []


def tell(report):
    reports.append(report)
    if rank == 0 and report.level_name == "ocean":
        print(
            f"step {report.step:3}: {report.bytes_sent / 1e6:.2f} MB sent, drift {report.drift:.2%}, "
            f"{report.codec} lost {report.codec_error:.2%}"
        )


with cadenza.attach(model, optimizer, strategy, observers=[tell]) as sync:  # finishes at the end of the block
    for _ in range(steps):
        batch = mine[torch.randint(len(mine), (32,))]
        loss = F.cross_entropy(model(digits[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sync.step()

if rank == 0:
    with torch.no_grad():
        logits = model(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    for name in ("site", "ocean"):
        rounds = [report for report in reports if report.level_name == name]
        if rounds:
            last, sent = rounds[-1], sum(report.bytes_sent for report in rounds)
            print(
                f"{name}: {len(rounds)} rounds of ranks {last.participants} with {last.codec}, "
                f"{sent / 1e6:.2f} MB sent by each worker"
            )
dist.destroy_process_group()
