"""Parts of other systems that keep the model's values, or the ranks, to themselves: refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cadenza.errors import UnsupportedModelError

__all__ = ["refuse_deepspeed", "refuse_torchft"]

_MARKS_OF_ZERO = ("ds_id", "_hp_mapping")  # on every parameter that DeepSpeed shards, or of which it holds a master


def refuse_deepspeed(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if DeepSpeed trains the model: its optimizers write fp32 masters over the parameters in every step.

    Its plain optimizers (`deepspeed.ops`) hold no copies, and are like any other.
    """
    marked = (name for name, p in model.named_parameters() if any(hasattr(p, mark) for mark in _MARKS_OF_ZERO))
    owner = next((type(part).__name__ for part in (model, *optimizers) if _is_from(part, "deepspeed.runtime")), None)
    found = owner or next(marked, None)
    if found is not None:
        raise UnsupportedModelError(
            f"DeepSpeed trains this model ({found}): ZeRO keeps fp32 masters of its own and writes them over the "
            "parameters in every step, so what a round has averaged would be lost. Train without DeepSpeed; to shard "
            "a large model use FSDP2 (fully_shard) inside each replica."
        )


def refuse_torchft(process_group: object) -> None:
    """Raise if a process group is torchft's, whose ranks change behind the back of whoever uses it."""
    if _is_from(process_group, "torchft"):
        raise UnsupportedModelError(
            f"{type(process_group).__name__} is torchft's: it changes its members between steps and hides failed "
            "collectives, so ranks would hold different anchors without knowing it. Pass a group of torch's own, or "
            "use faults=cadenza.shrink(), where Cadenza itself lets workers come and go."
        )


def _is_from(thing: object, package: str) -> bool:
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(thing).__mro__)
