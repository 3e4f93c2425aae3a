"""A usual DDP script; torchrun --standalone --nproc-per-node 2 before.py starts it."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()

digits, labels = map(torch.tensor, load_digits(return_X_y=True))
data = TensorDataset(digits.float() / 16, labels)
held_out, training = torch.utils.data.random_split(data, [360, len(data) - 360], torch.Generator().manual_seed(0))
sampler = DistributedSampler(training)
loader = DataLoader(training, batch_size=16, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
steps = args.epochs * len(loader) // args.accumulate
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

first = 0
if (args.folder / "last.pt").exists():
    saved = torch.load(args.folder / "last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    first = saved["epoch"] + 1

for epoch in range(first, args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for number, (x, y) in enumerate(loader, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        (loss / args.accumulate).backward()
        if number % args.accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    model.eval()
    if rank == 0:
        x, y = held_out[:]
        with torch.no_grad():
            accuracy = (model.module(x).argmax(1) == y).float().mean()
        print(f"epoch {epoch}: accuracy {accuracy:.1%}")

    if rank == 0:
        args.folder.mkdir(exist_ok=True)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({**saved, "epoch": epoch}, args.folder / "last.pt")

dist.destroy_process_group()
