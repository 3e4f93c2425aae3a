"""The same state for torch.distributed.checkpoint (DCP), for those whose storage or tools it is made for.

DCP keeps one tensor under a key, whichever rank it came from; here every worker's keys begin with `worker/ID`, so all
are kept. A synchronizer that has just been attached has no rounds in flight, so what to ask for is read from the
checkpoint itself: `dcp_template`.

>>> import tempfile, torch.distributed as dist, torch.distributed.checkpoint as dcp, cadenza
>>> from cadenza import checkpoint
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> sync = cadenza.attach(model, optimizer, cadenza.diloco(period=4))

Saving, and going on from what was saved:

>>> _ = dcp.save(checkpoint.dcp_state(sync, model, optimizer, extra={"epoch": 3}), checkpoint_id=folder)
>>> state = checkpoint.dcp_template(folder, sync)
>>> dcp.load(state, checkpoint_id=folder)
>>> checkpoint.load_dcp_state(state, sync, model, optimizer)
{'epoch': 3}
>>> dist.destroy_process_group()

DCP unpickles what it reads, and notices no flipped bits: **load only what you trust**. Unlike `save` and `load`, its
own are collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cadenza.checkpoint.loop import belongs_to_loop, collect_loop, prepare_loop
from cadenza.engine.optimizers import plain_optimizers
from cadenza.engine.place import Place
from cadenza.engine.saving import State, collect
from cadenza.engine.synchronizer import Synchronizer
from cadenza.errors import CheckpointError

__all__ = ["dcp_state", "dcp_template", "load_dcp_state"]


def dcp_state(
    sync: Synchronizer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    extra: Mapping[str, Any] | None = None,
) -> State:
    """Return everything that this worker needs to go on, for `torch.distributed.checkpoint.save`.

    The tensors are those in use, not copies: write them before training goes on. There is an example at the top of
    this module.
    """
    state = collect(sync.replica)
    return state | collect_loop(sync.replica.place().worker_root, model, plain_optimizers(optimizer), extra)


def dcp_template(folder: str | Path, sync: Synchronizer) -> State:
    """Return empty places for what this worker needs of a checkpoint, for `torch.distributed.checkpoint.load`.

    Reading a checkpoint's metadata unpickles it, as DCP always does: only for files that you trust.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    kinds = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = _wanted(list(kinds), sync.replica.place(), str(folder))
    return {
        key: torch.empty(kind.size, dtype=kind.properties.dtype) if isinstance(kind, TensorStorageMetadata) else ""
        for key, kind in kinds.items()
        if wanted(key)
    }


def _wanted(keys: Sequence[str], place: Place, folder: str) -> Callable[[str], bool]:
    """Return what says whether a worker needs a key: those that are shared, its own, and for a mean all residuals."""
    workers = sorted(int(key.split("/")[1]) for key in keys if key.startswith("worker/") and key.endswith("/loop"))
    if not workers:
        raise CheckpointError(f"{folder} holds nothing that checkpoint.dcp_state() gave.")
    same = len(workers) == len(place.workers) * place.shards
    if not same and place.shards > 1:
        raise CheckpointError(
            f"{folder} was saved by {len(workers)} ranks; {len(place.workers)} workers of {place.shards} shards can go "
            "on from it only as many as they were. checkpoint.save() and load() are for other numbers."
        )
    mine = place.worker if place.shards > 1 else workers[place.position % len(workers)]

    def wanted(key: str) -> bool:
        if key.startswith("shared/"):
            return key.startswith(f"{place.shared_root}/")
        return key.startswith(f"worker/{mine}/") or (not same and not belongs_to_loop(key))

    return wanted


def load_dcp_state(
    state: Mapping[str, torch.Tensor | str],
    sync: Synchronizer,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> dict[str, Any] | None:
    """Go on from what `torch.distributed.checkpoint.load` read; returns the `extra` that the worker had saved."""
    restoration = sync.prepare_to_load(state)
    loop = prepare_loop(state, restoration, model, plain_optimizers(optimizer))
    loop.apply()
    restoration.apply()
    return loop.extra
