"""Gradient averaging for the warm-up of post-local SGD, as in `torch.distributed.algorithms.ddp_comm_hooks`."""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with the classes themselves.
import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as torch_hook
from torch.nn.parallel import DistributedDataParallel

from cadenza.common.process_groups import resolve
from cadenza.ddp_comm_hooks.first_pass import on_first_pass
from cadenza.engine.ddp import average_bucket
from cadenza.errors import UnsupportedModelError
from cadenza.topology import Topology

__all__ = ["PostLocalSGDState", "post_localSGD_hook"]

logger = logging.getLogger(__name__)


class PostLocalSGDState(torch_hook.PostLocalSGDState):
    """What the hook remembers: the groups to average gradients over, when to switch, and how far it has come.

    Gradients are averaged over `process_group` (None: the world) until iteration `start_localSGD_iter`, then over
    `subgroup` (None: the ranks of this host), or not at all if `post_local_gradient_allreduce` is False. `state_dict`
    keeps the iteration, so that a resumed run does not warm up again.

    >>> from cadenza.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
    >>> state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
    >>> state.load_state_dict({"iter": 40})
    >>> state.state_dict()
    {'iter': 40}
    """

    # Torch's own slots again, in torch's order, for programs that read a state's fields by `state.__slots__`.
    __slots__ = [  # noqa: RUF023
        "process_group",
        "subgroup",
        "start_localSGD_iter",
        "post_local_gradient_allreduce",
        "iter",
        "__weakref__",
    ]

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        subgroup: dist.ProcessGroup | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        if isinstance(start_localSGD_iter, bool) or not isinstance(start_localSGD_iter, int):
            raise TypeError(
                f"Arg ``start_localSGD_iter`` must be a whole number of iterations; got {start_localSGD_iter!r}."
            )
        if start_localSGD_iter < 0:
            raise ValueError(f"Arg ``start_localSGD_iter`` must be a non-negative number; got {start_localSGD_iter}.")
        logger.info("Local SGD will be started after %s iterations", start_localSGD_iter)
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        on_first_pass(self, _refuse_unsynced_first_pass)

    def maybe_increase_iter(self, bucket: dist.GradBucket) -> None:
        """Count an iteration at the last bucket of its backward pass."""
        if bucket.is_last():
            self.iter += 1
        if self.iter == self.start_localSGD_iter:
            logger.info("Start to apply local SGD after %s iterations.", self.iter)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs; the groups are made anew."""
        return {"iter": self.iter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting where the saved run stopped."""
        self.iter = int(state_dict["iter"])


def post_localSGD_hook(state: PostLocalSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over everyone, then over the host or nobody: `ddp.register_comm_hook(state, this)`.

    Average the model beside it, with the same warm-up: `PeriodicModelAverager(period,
    warmup_steps=start_localSGD_iter)`.

    >>> import torch, torch.distributed as dist
    >>> from cadenza.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    >>> state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=10)
    >>> model.register_comm_hook(state, post_localSGD_hook)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> state.iter
    1
    >>> dist.destroy_process_group()
    """
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return average_bucket(bucket, resolve(state.process_group))
    if not state.post_local_gradient_allreduce:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    if state.subgroup is None:
        whole = resolve(state.process_group)
        state.subgroup = Topology.from_hosts(within=whole).levels[0].process_group(whole)
    return average_bucket(bucket, state.subgroup)


def _refuse_unsynced_first_pass(_: object, ddp: DistributedDataParallel) -> None:
    """Explain what DDP would fail at with an internal assertion: a static graph whose first pass is under `no_sync`."""
    if ddp.static_graph and not ddp.require_backward_grad_sync:
        raise UnsupportedModelError(
            "With static_graph=True, DistributedDataParallel needs its first backward pass outside no_sync(): "
            "it records the graph there, and fails with an assertion otherwise. Run the first iteration "
            "without gradient accumulation, or build the model with static_graph=False."
        )
