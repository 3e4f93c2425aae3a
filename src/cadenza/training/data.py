"""A worker's batches without an end, and the place in them: the next batch after a resume is the one that was due.

>>> stream = BatchStream([10, 20, 30], source="batches")
>>> [next(stream) for _ in range(4)]
[10, 20, 30, 10]
>>> resumed = BatchStream([10, 20, 30], source="batches")
>>> resumed.load_state_dict(stream.state_dict())
>>> next(resumed)
20
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from cadenza.errors import UsageError
from cadenza.training.randomness import undisturbed

__all__ = ["BatchStream", "count_samples", "to_device"]


class BatchStream:
    """Takes batch after batch of an iterable, from its start again when it ends."""

    def __init__(self, batches: Iterable[Any], *, source: str) -> None:
        if not hasattr(batches, "__iter__"):
            raise UsageError(
                f"{source} must return batches to iterate over, such as a list or a DataLoader; it returned "
                f"{batches!r} ({type(batches).__name__})."
            )
        self.epoch = 0
        self.position = 0  # batches taken in this epoch
        self._batches: Any = batches
        self._source = source
        self._stateful = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
        self._iterator: Iterator[Any] | None = None
        self._random = torch.get_rng_state()  # as the epoch began: what a shuffle drew its order from

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._begin()
        try:
            batch = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            batch = self._first_of_next_epoch()
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, for a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "random": self._random,
            "batches": self._batches.state_dict() if self._stateful and self.position else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, own: bool = True) -> None:
        """Go on from a place; one of another worker's (`own=False`) says only how many batches to skip."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._random = state["random"]
        if not self.position:  # the epoch has not begun
            return
        with undisturbed():
            if self._stateful and own:
                self._batches.load_state_dict(state["batches"])
            torch.set_rng_state(self._random)
            self._begin()
            if not (self._stateful and own):
                self._skip(self.position)

    def _begin(self) -> None:
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(self.epoch)
        self._random = torch.get_rng_state()
        self._iterator = iter(self._batches)

    def _first_of_next_epoch(self) -> Any:
        taken, self.position = self.position, 0
        self.epoch += 1
        self._begin()
        try:
            return next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            how = f"ended after {taken} batches, and cannot be iterated a second time" if taken else "has no batches"
            raise UsageError(
                f"{self._source} returned something that {how}: a list, a DataLoader or an object whose __iter__ "
                "begins anew is required, with one batch at least."
            ) from None

    def _skip(self, count: int) -> None:
        assert self._iterator is not None
        for taken in range(count):
            try:
                next(self._iterator)
            except StopIteration:
                raise UsageError(
                    f"{self._source} returned {taken} batches, but {count} had been taken before the checkpoint: "
                    "resume with the same data."
                ) from None


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch, or 1.

    >>> count_samples({"text": "a", "pixels": (torch.zeros(8, 3), torch.zeros(8))})
    8
    """
    first = next(_tensors(batch), None)
    return len(first) if first is not None and first.ndim else 1


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with the tensors in its tuples, lists and dicts on a device.

    >>> to_device([torch.zeros(2), "name"], torch.device("cpu"))
    [tensor([0., 0.]), 'name']
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(item, device) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(item, device) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(item, device) for item in batch)
    return batch


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from _tensors(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from _tensors(item)
