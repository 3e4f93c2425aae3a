"""The model in a checkpoint, without the program that trained it: one worker's, or the mean of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from cadenza.checkpoint.files import read_manifest, read_state, verify
from cadenza.checkpoint.layout import manifests, number_of_shards, worker_file, workers_of
from cadenza.checkpoint.loop import read_model
from cadenza.errors import CheckpointError

__all__ = ["load_model"]


def load_model(folder: str | Path, *, worker: int | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in a checkpoint, by name: the mean of all workers, or one worker's.

    Numbers are averaged in double precision, and come back in their own; whole numbers, such as those that BatchNorm
    counts, are the largest that a worker has. Files are verified first.

    >>> import tempfile, torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> sync = cadenza.attach(model, optimizer, cadenza.diloco(period=4))
    >>> folder = tempfile.mkdtemp()
    >>> cadenza.checkpoint.save(folder, model=model, optimizer=optimizer, sync=sync)
    >>> model.load_state_dict(load_model(folder))
    <All keys matched successfully>
    >>> dist.destroy_process_group()
    """
    folder = Path(folder)
    if number_of_shards(folder) > 1:
        raise CheckpointError(
            f"{folder} holds a model in {number_of_shards(folder)} shards, which only the program that sharded it can "
            "put together: load it there with cadenza.checkpoint.load(), and save the whole from there."
        )
    if worker is not None:
        if worker not in workers_of(folder):
            raise CheckpointError(f"{folder} has no worker {worker}; it has {', '.join(map(str, workers_of(folder)))}.")
        path = folder / worker_file(worker)
        verify(path, read_manifest(path))
        return _tensors(folder, worker)
    files = manifests(folder)
    for name, manifest in files.items():
        verify(folder / name, manifest)
    every = [_tensors(folder, number) for number in workers_of(folder) if worker_file(number) in files]
    return {name: _mean([values[name] for values in every]) for name in every[0]}


def _mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first = values[0]
    if not first.is_floating_point():
        return torch.stack([*values]).amax(0)
    total = torch.zeros_like(first, dtype=torch.float64)
    for value in values:
        total += value
    return total.div_(len(values)).to(first.dtype)


def _tensors(folder: Path, worker: int) -> dict[str, torch.Tensor]:
    """Return a worker's tensors, each with memory of its own; other things in a state dict are left out."""
    state = read_state(folder / worker_file(worker), leave=lambda key: key.split("/")[2] != "model")
    return {name: value.clone() for name, value in read_model(state, worker).items() if isinstance(value, torch.Tensor)}
