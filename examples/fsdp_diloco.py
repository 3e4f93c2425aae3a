"""FSDP2 inside a node, DiLoCo between nodes: parameters are sharded over one mesh dimension, and meet over the other.

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29400 examples/fsdp_diloco.py    # 2 nodes of 8 GPUs
    torchrun --standalone --nproc-per-node 4 examples/fsdp_diloco.py                             # here, on the CPU

Each GPU keeps an eighth of the model, of its anchor and of its momentum, and meets the one GPU that has the same.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cadenza

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=320)
steps = parser.parse_args().steps

# ---- a node is a replica: with one node, half of the ranks stand for one ----
kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    torch.set_num_threads(1)  # the workers share this machine's cores
dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
shards = local if local < world else max(1, world // 2)
mesh = init_device_mesh(kind, (world // shards, shards), mesh_dim_names=("replicate", "shard"))
replica, replicas = mesh["replicate"].get_local_rank(), mesh["replicate"].size()

# ---- data: a fifth is held out; the ranks of a replica see other digits in each step ----
digits, labels = (torch.tensor(part).to(kind) for part in load_digits(return_X_y=True))
digits = digits.float() / 16
shuffled = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
held_out, mine = shuffled[:360], shuffled[360:][replica::replicas]
torch.manual_seed(rank)

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(kind)
for layer in (model[0], model[2]):  # of a transformer: each block
    fully_shard(layer, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

reports = []
sync = cadenza.attach(
    model,
    optimizer,
    cadenza.diloco(period=32, outer_lr=0.5, codec=cadenza.codecs.int8()),
    topology=cadenza.Topology.from_mesh(mesh, ["replicate"]),
    observers=[reports.append],
)
for step in range(1, steps + 1):
    batch = mine[torch.randint(len(mine), (32,))]
    loss = F.cross_entropy(model(digits[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()  # FSDP2 takes the mean of gradients inside the replica
    optimizer.step()
    sync.step()  # every 32 steps, shards meet their counterparts of the other replicas
    if rank == 0 and step % 64 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}, {len(reports)} rounds so far")
sync.finish()

with torch.no_grad():
    logits = model(digits[held_out])  # all ranks of a replica call it: parameters are gathered layer by layer
if rank == 0:
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    if reports:
        sent = sum(report.bytes_sent for report in reports)
        print(f"{replicas} replicas of {shards} shards: {len(reports)} rounds, each worker sent {sent / 1e6:.2f} MB")
dist.destroy_process_group()
