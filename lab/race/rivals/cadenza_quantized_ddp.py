"""DDP with Cadenza's quantised hook."""

from __future__ import annotations

import torch
from lab.race.jobs import Job
from lab.race.rivals import Ready
from lab.race.rivals.cadenza_strategies import CODECS
from torch.nn.parallel import DistributedDataParallel

from cadenza.ddp_comm_hooks.quantized_hook import QuantizedState, quantized_hook


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(QuantizedState(codec=CODECS[job.settings["codec"]]()), quantized_hook)
    return Ready(wrapped, optimizer)
