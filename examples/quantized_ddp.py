"""Quantised DDP: gradients are averaged in every step, as DDP does, in a quarter or a seventh of its bytes.

    torchrun --standalone --nproc-per-node 4 examples/quantized_ddp.py --codec e3m0

Two lines are added to a DDP script: a state, and `register_comm_hook`. The state is saved on every rank.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cadenza.codecs import e3m0, error_feedback, int8
from cadenza.ddp_comm_hooks.quantized_hook import QuantizedState, quantized_hook

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=320)
parser.add_argument("--codec", choices=["int8", "e3m0"], default="int8")
options = parser.parse_args()

torch.set_num_threads(1)  # the workers share this machine's cores
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# ---- data: a fifth is held out, of the rest every worker has its own part ----
digits, labels = map(torch.tensor, load_digits(return_X_y=True))
digits = digits.float() / 16
shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
held_out, mine = shuffled[:360], shuffled[360:][rank::world]

torch.manual_seed(rank)  # other batches on every worker; DDP gives all of them the first one's parameters
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

state = QuantizedState(codec=error_feedback(int8() if options.codec == "int8" else e3m0()))
model.register_comm_hook(state, quantized_hook)

for step in range(1, options.steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()  # buckets are averaged in the background meanwhile
    optimizer.step()
    if rank == 0 and step % 64 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}, {state.bytes_sent / 1e6:.2f} MB sent")

# Every rank has residuals of its own, so every rank saves them.
torch.save({"model": model.module.state_dict(), "hook": state.state_dict()}, f"quantized_ddp_rank{rank}.pt")

if rank == 0:
    with torch.no_grad():
        logits = model.module(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    gradients = options.steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(f"{world} workers, {options.steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {state.bytes_sent / 1e6:.2f} MB; DDP without the hook sends {gradients / 1e6:.2f} MB")
dist.destroy_process_group()
