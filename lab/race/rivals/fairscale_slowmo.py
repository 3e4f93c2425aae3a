"""fairscale's SlowMoDistributedDataParallel on local SGD, with its own recommendation of the momentum: 0.2 on 4 nodes.

It waits for a GPU in every round, whether there is one or not; without one that wait is left out, and nothing else.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from lab.race.jobs import Job
from lab.race.rivals import Ready

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel

if not torch.cuda.is_available():
    torch.cuda.synchronize = lambda device=None: None


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    wrapped = SlowMoDistributedDataParallel(
        model,
        nprocs_per_node=1,
        broadcast_buffers=False,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum=job.settings.get("momentum", 0.2),
        slowmo_frequency=job.period,
        localsgd_frequency=job.period,
        comm_device=torch.device("cpu"),
        global_group=dist.new_group(),
    )
    return Ready(wrapped, optimizer, after_step=lambda: wrapped.perform_slowmo(optimizer))
