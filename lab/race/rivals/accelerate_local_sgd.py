"""Hugging Face Accelerate's LocalSGD."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from lab.race.jobs import Job
from lab.race.rivals import Ready


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    accelerator = Accelerator(cpu=True)
    wrapped, stepped = accelerator.prepare(model, optimizer)
    local = LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=job.period)
    local.__enter__()
    if not local.enabled:
        raise RuntimeError(f"Accelerate sees no other worker: {accelerator.state}")
    return Ready(wrapped, stepped, after_step=local.step, close=lambda: local.__exit__(None, None, None))
