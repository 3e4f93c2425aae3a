"""Who races: each method's own library, called the way its documentation says, behind one small face.

A rival's module has `prepare(model, optimizer, job) -> Ready`; the worker does the rest, the same for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lab.race.jobs import Job

__all__ = ["METHODS", "Ready", "Rival", "prepare"]


def nothing() -> None:
    pass


@dataclass
class Ready:
    """A method at work on a model.

    Attributes:
        model: What the loop calls.
        optimizer: What the loop steps; its learning rate is set on the one that `prepare` was given.
        after_backward: Called before gradients are clipped.
        after_step: Called after every step of the optimizer.
        close: Ends what the method has started; the parameters need not be equal before it.
        keep: What must live as long as the method.
    """

    model: torch.nn.Module
    optimizer: Any
    after_backward: Callable[[], None] = nothing
    after_step: Callable[[], None] = nothing
    close: Callable[[], None] = nothing
    keep: Any = None


@dataclass(frozen=True)
class Rival:
    """Where a method comes from: a module of this package, and the environment that it runs in."""

    module: str
    environment: str = "torch"
    variant: str = ""
    sends_gradients: bool = False


METHODS = {
    "compute alone": Rival("alone"),
    "DDP": Rival("ddp", sends_gradients=True),
    "DDP, fp16 hook": Rival("ddp", variant="fp16", sends_gradients=True),
    "DDP, PowerSGD hook": Rival("ddp", variant="powersgd", sends_gradients=True),
    "torch PeriodicModelAverager": Rival("torch_averagers", variant="periodic"),
    "torch HierarchicalModelAverager": Rival("torch_averagers", variant="hierarchical"),
    "torch PostLocalSGDOptimizer": Rival("torch_averagers", variant="post_local"),
    "Accelerate LocalSGD": Rival("accelerate_local_sgd", "accelerate"),
    "torchft LocalSGD": Rival("torchft", "torchft", "local_sgd"),
    "torchft DiLoCo": Rival("torchft", "torchft", "diloco"),
    "torchft Streaming DiLoCo": Rival("torchft", "torchft", "streaming"),
    "fairscale SlowMo": Rival("fairscale_slowmo", "fairscale"),
    "hivemind": Rival("hivemind_local", "hivemind"),
    "DDP, Cadenza hook": Rival("cadenza_quantized_ddp", sends_gradients=True),
    "Cadenza local_sgd": Rival("cadenza_strategies", variant="local_sgd"),
    "Cadenza diloco": Rival("cadenza_strategies", variant="diloco"),
    "Cadenza streaming_diloco": Rival("cadenza_strategies", variant="streaming_diloco"),
    "Cadenza hierarchical": Rival("cadenza_strategies", variant="hierarchical"),
    "Cadenza slowmo": Rival("cadenza_strategies", variant="slowmo"),
    "Cadenza sparse_loco": Rival("cadenza_strategies", variant="sparse_loco"),
}


def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> Ready:
    rival = METHODS[job.method]
    return importlib.import_module(f"lab.race.rivals.{rival.module}").prepare(model, optimizer, job, rival.variant)
