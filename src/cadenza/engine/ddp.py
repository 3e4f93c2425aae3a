"""What Cadenza asks of DistributedDataParallel: to average gradients during the warm-up, then to be silent.

And where it is, if it was not given.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
import gc
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cadenza.common.process_groups import comm_hooks_of
from cadenza.errors import UnsupportedModelError

__all__ = ["average_bucket", "covers", "fall_silent", "find_ddps_around", "speak", "widen"]


def covers(ddp: DistributedDataParallel, ranks: Collection[int]) -> bool:
    """Tell whether DDP averages over all the given ranks, or only inside a smaller group such as a host."""
    return set(dist.get_process_group_ranks(ddp.process_group)) >= set(ranks)


def fall_silent(ddp: DistributedDataParallel) -> None:
    """Stop DDP from averaging gradients and broadcasting buffers."""
    ddp.require_backward_grad_sync = False
    ddp.require_forward_param_sync = False  # DDP itself only looks again after the next forward pass


def speak(ddp: DistributedDataParallel) -> None:
    """Let DDP average gradients and broadcast buffers, should it have fallen silent in an earlier run."""
    ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True


def widen(ddp: DistributedDataParallel, group: dist.ProcessGroup, *, while_true: Callable[[], bool]) -> None:
    """Let a DDP of a smaller group average gradients over a larger one for as long as `while_true` says so."""
    if comm_hooks_of(ddp):
        raise UnsupportedModelError(
            "The model's DistributedDataParallel spans fewer ranks than the strategy and has a communication hook of "
            "its own, so its gradients cannot be averaged over all ranks during the warm-up. Register no hook, or use "
            "warmup_steps=0."
        )

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return average_bucket(bucket, group if while_true() else ddp.process_group)

    ddp.register_comm_hook(None, hook)


def average_bucket(bucket: dist.GradBucket, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in place over a group, asynchronously."""
    gradients = bucket.buffer().div_(group.size())
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
    return averaged


def _first(future: torch.futures.Future[Any]) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor


def find_ddps_around(module: torch.nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield each DistributedDataParallel of which a module is a part, at whatever distance."""
    if not dist.is_initialized():  # without a process group there is no DDP, and looking takes a while
        return
    seen, waiting = {id(module)}, [module]
    while waiting:
        for parent in _parents(waiting.pop()):
            if id(parent) not in seen:
                seen.add(id(parent))
                waiting.append(parent)
                if isinstance(parent, DistributedDataParallel):
                    yield parent


def _parents(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules of which this one is a part: a module does not know them, but the garbage collector does."""
    for held in gc.get_referrers(module):
        if type(held) is dict and any(value is module for value in held.values()):
            yield from (owner for owner in _owners(held) if isinstance(owner, torch.nn.Module))


def _owners(held: dict[str, object]) -> Iterator[object]:
    """Yield the objects of which a dict is an attribute, whether or not they have a dict of their own."""
    for referrer in gc.get_referrers(held):
        if type(referrer) is dict:
            yield from (owner for owner in gc.get_referrers(referrer) if getattr(owner, "__dict__", None) is referrer)
        else:
            yield referrer
