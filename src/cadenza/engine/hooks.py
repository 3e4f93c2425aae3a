"""Calling `step()` by itself, for loops that a framework owns: after an optimizer step, or a scaler's update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cadenza.errors import CadenzaError

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
    if average_gradients is not None:
        hook = partial(_average_its_gradients, average_gradients)
        undo += [optimizer.register_step_pre_hook(hook).remove for optimizer in optimizers]
    return undo


def _average_its_gradients(
    average: Callable[[list[torch.Tensor]], None],
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Average before the update: now, or after the closure, in which gradients are only made."""

    def now() -> None:
        average([parameter for group in optimizer.param_groups for parameter in group["params"]])

    given = len(args) > 1  # the first is the optimizer itself
    closure = args[1] if given else options.get("closure")
    if closure is None:
        now()
        return None
    averaging = _then(closure, now)
    return ((args[0], averaging, *args[2:]), options) if given else (args, {**options, "closure": averaging})


def _then(closure: Callable[[], Any], average: Callable[[], None]) -> Callable[[], Any]:
    """Return a closure whose gradients are averaged, in the one call of it that a step may make."""
    calls = 0

    def averaging() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise CadenzaError(
                "The optimizer evaluates its closure more than once in a step, as LBFGS does, and each rank decides by "
                "its own loss how often, so ranks would wait for each other for ever in a warm-up. Use warmup_steps=0, "
                "an optimizer that evaluates it once, or DistributedDataParallel and auto=False."
            )
        loss = closure()
        average()
        return loss

    return averaging


def hook_scaler(scaler: torch.amp.GradScaler, tick: Callable[[], None]) -> Callable[[], None]:
    """Call `tick` after every update of a GradScaler, which may skip optimizer steps; return what undoes it."""
    update = scaler.update

    def update_and_tick(*args: Any, **options: Any) -> None:
        update(*args, **options)
        tick()

    scaler.update = update_and_tick  # type: ignore[method-assign]
    return lambda: setattr(scaler, "update", update)
