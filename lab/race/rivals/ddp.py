"""PyTorch's DistributedDataParallel, plain or with one of its own communication hooks."""

from __future__ import annotations

import torch
from lab.race.jobs import Job
from lab.race.rivals import Ready
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    # With several buckets PowerSGD's collectives come in another order on every rank, which Gloo does not bear.
    size = {"bucket_cap_mb": 1024} if variant == "powersgd" else {}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **size)
    if variant == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if variant == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=job.settings.get("rank", 2),
            start_powerSGD_iter=job.settings.get("gradient_steps", 0) or 2,  # 2 is the least that its feedback allows
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Ready(wrapped, optimizer)
