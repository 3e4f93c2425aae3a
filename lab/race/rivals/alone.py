"""No communication at all: what the others are measured against."""

from __future__ import annotations

import torch
from lab.race.jobs import Job
from lab.race.rivals import Ready


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    return Ready(model, optimizer)
