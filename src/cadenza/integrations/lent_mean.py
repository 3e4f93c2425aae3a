"""The mean of all workers' models, put into the model and taken out of it as often as needed; it is sent once."""

from __future__ import annotations

import torch

from cadenza.engine.synchronizer import Synchronizer

__all__ = ["LentMean"]


class LentMean:
    """The mean of all workers' models; all ranks make it together.

    For frameworks in which an evaluation and a checkpoint lie within each other: `sync.averaged()` is one block.

    >>> import torch.distributed as dist, cadenza
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.Linear(2, 1)
    >>> sync = cadenza.attach(model, torch.optim.SGD(model.parameters()), cadenza.local_sgd(period=4))
    >>> mean = LentMean(sync)
    >>> mean.put_in()
    >>> mean.take_out()
    >>> dist.destroy_process_group()
    """

    def __init__(self, sync: Synchronizer) -> None:
        with sync.averaged() as model:
            self._model = model
            self._mean = self._values()
        self._own: dict[str, torch.Tensor] | None = None

    def put_in(self) -> None:
        """Give the model the mean, and keep its own values."""
        self._own = self._values()
        self._write(self._mean)

    def take_out(self) -> None:
        """Give the model its own values back."""
        if self._own is not None:
            self._write(self._own)
        self._own = None

    def _values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    @torch.no_grad()
    def _write(self, values: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(values[name])
