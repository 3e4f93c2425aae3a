"""PyTorch's model averaging: PeriodicModelAverager, HierarchicalModelAverager and PostLocalSGDOptimizer.

With `gradient_steps` they begin with averaged gradients, by PyTorch's post-local SGD hook.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
from lab.race.jobs import Job
from lab.race.rivals import Ready
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job, variant: str) -> Ready:
    gradient_steps = job.settings.get("gradient_steps", 0)
    trained: torch.nn.Module = model
    if variant == "post_local" or gradient_steps:
        trained = DistributedDataParallel(model)
        alone, _ = dist.new_subgroups(group_size=1)
        state = PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=gradient_steps)
        trained.register_comm_hook(state, post_localSGD_hook)
    if variant == "hierarchical":
        groups = OrderedDict([(job.settings["inner_period"], 2), (job.period, dist.get_world_size())])
        averager = HierarchicalModelAverager(groups, warmup_steps=gradient_steps)
    else:
        averager = PeriodicModelAverager(job.period, warmup_steps=gradient_steps)
    if variant == "post_local":
        return Ready(trained, PostLocalSGDOptimizer(optimizer, averager))
    return Ready(trained, optimizer, after_step=lambda: averager.average_parameters(model.parameters()))
