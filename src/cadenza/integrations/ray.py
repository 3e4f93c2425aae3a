"""Ray Train: every worker's part of a checkpoint in one, and every worker's own state back after a failure.

The loop is the usual one, with `cadenza.attach` after the model and the optimizer are made; `prepare_model` is not
needed. Ray merges what all workers report into one folder. For Ray Core nothing is needed but `cadenza.join`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch

try:
    import ray.train
except ImportError as error:
    raise ImportError("cadenza.integrations.ray needs Ray Train: pip install 'cadenza[ray]'.") from error

from cadenza import checkpoint
from cadenza.engine.synchronizer import Synchronizer
from cadenza.integrations.versions import warn_if_untested

__all__ = ["report", "resume"]

_TESTED = ["2.60"]


def report(
    metrics: Mapping[str, Any],
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Report metrics with a checkpoint of all workers; in place of `ray.train.report`, and on all of them, as that is.

    Each writes its own part; saving does not change what comes after, also in the middle of a period.

    Args:
        metrics: Those of the first worker are kept, as Ray does.
        model: The model that was given to `attach`.
        optimizer: The optimizer or optimizers that were given to `attach`.
        sync: The synchronizer.
        extra: What else this worker shall find again, such as the position in its data.

    In a `train_loop_per_worker`:

    >>> def train(config):
    ...     model, optimizer, strategy = config["build"]()
    ...     sync = cadenza.attach(model, optimizer, strategy)
    ...     parts = {"model": model, "optimizer": optimizer, "sync": sync}
    ...     resume(**parts)
    ...     while sync.clock < 1000:
    ...         loss = train_one_step(model, optimizer)
    ...         sync.step()
    ...         if sync.clock % 100 == 0:
    ...             report({"loss": loss}, **parts)
    ...     sync.finish()
    """
    with TemporaryDirectory() as folder:
        checkpoint.save(folder, model=model, optimizer=optimizer, sync=sync, extra=extra)
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(folder))


def resume(
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    sync: Synchronizer,
) -> dict[str, Any] | None:
    """Go on from the checkpoint that Ray Train has for this attempt, if there is one; call it after `attach`.

    As many workers as reported it go on bit for bit, each from its own part; another number does as
    `cadenza.checkpoint.load` says. There is an example at `report`.

    Returns:
        The `extra` that this worker reported, or None if there is no checkpoint: this is the beginning.
    """
    warn_if_untested("ray", _TESTED)
    found = ray.train.get_checkpoint()
    if found is None:
        return None
    with found.as_directory() as folder:
        return checkpoint.load(folder, model=model, optimizer=optimizer, sync=sync) or {}
