"""Calling `step()` by itself, for loops that a framework owns: after an optimizer step, or a scaler's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["hook_optimizer", "hook_scaler"]


def hook_optimizer(
    optimizers: Sequence[torch.optim.Optimizer],
    tick: Callable[[], None],
    average_gradients: Callable[[], None] | None,
) -> list[Callable[[], None]]:
    """Call `tick` after every step of the last optimizer, `average_gradients` before one of the first; return undos."""
    undo: list[Callable[[], None]] = [optimizers[-1].register_step_post_hook(lambda *_: tick()).remove]
    if average_gradients is not None:
        before = average_gradients
        undo.append(optimizers[0].register_step_pre_hook(lambda *_: before()).remove)
    return undo


def hook_scaler(scaler: torch.amp.GradScaler, tick: Callable[[], None]) -> Callable[[], None]:
    """Call `tick` after every update of a GradScaler, which may skip optimizer steps; return what undoes it."""
    update = scaler.update

    def update_and_tick(*args: Any, **options: Any) -> None:
        update(*args, **options)
        tick()

    scaler.update = update_and_tick  # type: ignore[method-assign]
    return lambda: setattr(scaler, "update", update)
