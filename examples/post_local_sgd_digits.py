"""One net, one data order, one number of steps, three ways to keep four workers together.

    torchrun --standalone --nproc-per-node 4 examples/post_local_sgd_digits.py

Each worker holds its own quarter of scikit-learn's digits. The ways are

    ddp            gradients are averaged in every step
    post-local     gradients during a warm-up, then parameters every PERIOD steps
    hierarchical   the same, but neighbours meet every PERIOD steps and everyone every 4 * PERIOD

and what they are compared by is the accuracy they reach on held-out digits and the bytes they send
for it.
"""

import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cadenza.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from cadenza.model_averaging.averagers import PeriodicModelAverager
from cadenza.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from cadenza.model_averaging.utils import average_parameters
from cadenza.optim import PostLocalSGDOptimizer

STEPS = 400
WARMUP = 40  # steps with averaged gradients before local steps begin
PERIOD = 8  # local steps between two rounds
BATCH = 32  # examples a worker
LR, MOMENTUM = 0.05, 0.9
SEED = 1

torch.set_num_threads(1)  # four workers share this machine's cores
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

# ---- data: a fifth is held out, of the rest each worker gets its own shard ----
images, labels = load_digits(return_X_y=True)
shuffled = np.random.default_rng(SEED).permutation(len(images))
held_out, mine = shuffled[: len(images) // 5], shuffled[len(images) // 5 :][rank::world]


def as_tensors(index):
    pixels = torch.tensor(images[index] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return pixels, torch.tensor(labels[index])


train_x, train_y = as_tensors(mine)
test_x, test_y = as_tensors(held_out)


def build():
    torch.manual_seed(SEED)  # every worker and every way begins with the same parameters
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


# ---- the three ways: a model, an optimizer, and how many workers met in each round ----
def local_after_warmup(averager):
    """Averages gradients for WARMUP steps, then lets `averager` average parameters instead."""
    model = DistributedDataParallel(build())
    state = PostLocalSGDState(
        process_group=None,
        subgroup=None,
        start_localSGD_iter=WARMUP,
        post_local_gradient_allreduce=False,
    )
    model.register_comm_hook(state, post_localSGD_hook)
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    return model, PostLocalSGDOptimizer(sgd, averager)


def ddp():
    model = DistributedDataParallel(build())
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM), None


def post_local():
    averager = PeriodicModelAverager(period=PERIOD, warmup_steps=WARMUP)
    # The periodic averager counts from the end of the warm-up.
    rounds = [world for step in range(WARMUP, STEPS) if (step - WARMUP) % PERIOD == 0]
    return *local_after_warmup(averager), rounds


def hierarchical():
    levels = {PERIOD: max(world // 2, 1), 4 * PERIOD: world}
    averager = HierarchicalModelAverager(period_group_size_dict=levels, warmup_steps=WARMUP)
    # The hierarchical averager counts from step 0, and only the largest level that is due meets.
    due = [[levels[p] for p in levels if step % p == 0] for step in range(WARMUP, STEPS)]
    return *local_after_warmup(averager), [sizes[-1] for sizes in due if sizes]


def bytes_sent(model, rounds):
    """Bytes that one worker sends, computed: all-reducing B bytes among n costs 2(n-1)/n * B."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    gradient_steps = STEPS if rounds is None else WARMUP
    members = [world] * gradient_steps + (rounds or [])
    if rounds is not None:
        members.append(world)  # the last averaging, before the test
    return sum(2 * (n - 1) / n * size for n in members)


# ---- train ----
def train(way):
    model, optimizer, rounds = way()
    order = torch.Generator().manual_seed(SEED + rank)  # the same batches in every way
    dist.barrier()
    started = time.perf_counter()
    for _ in range(STEPS):
        batch = torch.randint(len(train_x), (BATCH,), generator=order)
        loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rounds is not None:
        average_parameters(model.parameters(), dist.group.WORLD)  # all workers end equal
    dist.barrier()
    seconds = time.perf_counter() - started
    with torch.no_grad():
        logits = model.module(test_x)
    accuracy = (logits.argmax(dim=1) == test_y).float().mean().item()
    return accuracy, F.cross_entropy(logits, test_y).item(), seconds, bytes_sent(model, rounds)


if rank == 0:
    print(f"{world} workers, {STEPS} steps of {BATCH} digits each, {len(test_x)} digits held out")
    print(f"{'':14}{'accuracy':>9}{'loss':>8}{'seconds':>9}{'MB sent':>9}{'against ddp':>13}")
baseline = None
for way in (ddp, post_local, hierarchical):
    accuracy, loss, seconds, sent = train(way)
    baseline = baseline or sent
    if rank == 0:
        print(
            f"{way.__name__:14}{accuracy:9.2%}{loss:8.4f}{seconds:9.2f}{sent / 1e6:9.1f}"
            f"{f'1/{baseline / sent:.1f}' if sent else '-':>13}"
        )
if rank == 0:
    print(
        "MB sent: by one worker if the workers were machines, computed from the rounds held: an "
        "all-reduce among n\nsends 2(n-1)/n of the model's bytes. Seconds: here, on one machine, "
        "where Cadenza's rounds go through shared memory."
    )
dist.destroy_process_group()
