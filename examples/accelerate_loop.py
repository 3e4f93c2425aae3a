"""A loop of Hugging Face's Accelerate by DiLoCo: `Cadenza(…)` stands where `LocalSGD(…)` would.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cadenza
from cadenza.integrations.accelerate import Cadenza

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=320)
steps = parser.parse_args().steps

torch.set_num_threads(1)  # the workers share this machine's cores
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
digits, labels = map(torch.tensor, load_digits(return_X_y=True))
digits, shuffled = digits.float() / 16, torch.randperm(len(digits))
held_out, train = shuffled[:360], shuffled[360:]

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(TensorDataset(digits[train], labels[train]), batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # each process gets batches of its own

reports, done = [], 0
with Cadenza(accelerator, model, optimizer, cadenza.diloco(period=16), observers=[reports.append]) as loop:
    while done < steps:
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            loop.step()
            done += 1
            if done == steps:
                break

if accelerator.is_main_process:
    world = accelerator.num_processes
    with torch.no_grad():
        logits = accelerator.unwrap_model(model)(digits[held_out])
    loss, accuracy = F.cross_entropy(logits, labels[held_out]), (logits.argmax(1) == labels[held_out]).float().mean()
    sent = sum(report.bytes_sent for report in reports)
    gradients = steps * 2 * (world - 1) / world * sum(4 * p.numel() for p in model.parameters())
    print(f"{world} workers, {steps} steps: loss {loss:.3f}, accuracy {accuracy:.1%} on held-out digits")
    print(f"each worker sent {sent / 1e6:.2f} MB; averaging every step's gradients sends {gradients / 1e6:.2f} MB")
accelerator.end_training()
