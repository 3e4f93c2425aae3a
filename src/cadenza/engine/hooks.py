"""Calling `step()` by itself, for loops that a framework owns: after an optimizer step, or a scaler's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["hook_optimizer", "hook_scaler"]


def hook_optimizer(
    optimizers: Sequence[torch.optim.Optimizer],
    tick: Callable[[], None],
    average_gradients: Callable[[list[torch.Tensor]], None] | None,
) -> list[Callable[[], None]]:
    """Call `tick` after every step of the last optimizer, and average the gradients that each uses before its step.

    Returns what undoes it.
    """
    undo: list[Callable[[], None]] = [optimizers[-1].register_step_post_hook(lambda *_: tick()).remove]
    for optimizer in optimizers if average_gradients is not None else ():
        undo.append(optimizer.register_step_pre_hook(partial(_average_its_gradients, average_gradients)).remove)
    return undo


def _average_its_gradients(
    average: Callable[[list[torch.Tensor]], None] | None, optimizer: torch.optim.Optimizer, *_: object
) -> None:
    if average is not None:
        average([parameter for group in optimizer.param_groups for parameter in group["params"]])


def hook_scaler(scaler: torch.amp.GradScaler, tick: Callable[[], None]) -> Callable[[], None]:
    """Call `tick` after every update of a GradScaler, which may skip optimizer steps; return what undoes it."""
    update = scaler.update

    def update_and_tick(*args: Any, **options: Any) -> None:
        update(*args, **options)
        tick()

    scaler.update = update_and_tick  # type: ignore[method-assign]
    return lambda: setattr(scaler, "update", update)
