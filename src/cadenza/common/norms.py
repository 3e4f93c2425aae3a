"""Squared norms in short pieces: accurate in any precision, and without temporaries of a tensor's size.

Several operations in turn on a large tensor on a CPU take the time of its way from memory, each. `in_cache` cuts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from cadenza.common.later import torch

__all__ = ["distance_squared", "exact_square", "in_cache", "norm_squared", "told"]

_PIECE = 1 << 20  # values; temporaries stay at some MiB
_SHORT = 1 << 16  # values; a sum of so many squares is accurate in fp32
_LONG = 1 << 22  # values that a device gets at once


def norm_squared(*tensors: torch.Tensor) -> float:
    """Return the sum of all squares: infinite or not a number exactly if one of the values is, or is huge.

    Short dot products, in fp32 or better, are added up in fp64. The host waits once for a device, which sums in fp64.

    >>> norm_squared(torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.bfloat16))
    25.0
    """
    total = _sum(_square(part) for part in _parts(tensors))
    if math.isfinite(total):
        return total
    return _sum(map(exact_square, _parts(tensors)))


def distance_squared(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the squared distance of two flat tensors.

    >>> distance_squared(torch.tensor([1.0, 1.0]), torch.tensor([4.0, 5.0]))
    25.0
    """
    if one.device.type != "cpu":
        apart = (a - b for a, b in zip(one.split(_LONG), other.split(_LONG), strict=True))
        return _sum(map(exact_square, apart))
    parts = zip(one.split(_PIECE), other.split(_PIECE), strict=True)
    return sum(norm_squared(a - b) for a, b in parts)


def in_cache(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a flat tensor on a CPU into parts on which several operations in turn find their values in the cache.

    >>> [part.numel() for part in in_cache(torch.empty(100_000))]
    [65536, 34464]
    """
    return flat.split(_SHORT) if flat.device.type == "cpu" and flat.numel() else (flat,)


def _parts(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for tensor in tensors:
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        most = _SHORT if flat.device.type == "cpu" else _LONG
        for part in (flat,) if flat.numel() <= most else flat.split(most):
            yield part.to(torch.float32) if part.dtype.itemsize <= 2 else part


def _square(part: torch.Tensor) -> torch.Tensor:
    return torch.dot(part, part) if part.device.type == "cpu" else exact_square(part)


def exact_square(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, summed in fp64: a square may overflow fp32 where the norm does not.

    >>> exact_square(torch.tensor([3e30, 4e30]))
    tensor(2.5000e+61, dtype=torch.float64)
    """
    norm: torch.Tensor = torch.linalg.vector_norm(part, dtype=torch.float64)
    return norm.square()


def told(numbers: Sequence[torch.Tensor]) -> list[float]:
    """Return what some tensors of one number each hold, in their order; the host waits once for each device.

    >>> told([torch.tensor(1.5), torch.tensor(2.5)])
    [1.5, 2.5]
    """
    found: dict[int, float] = {}
    for device in dict.fromkeys(number.device for number in numbers):
        here = [i for i, number in enumerate(numbers) if number.device == device]
        found.update(zip(here, torch.stack([numbers[i] for i in here]).tolist(), strict=True))
    return [found[i] for i in range(len(numbers))]


def _sum(numbers: Iterator[torch.Tensor]) -> float:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for number in numbers:
        by_kind.setdefault((number.device, number.dtype), []).append(number)
    return sum(float(torch.stack(found).sum(dtype=torch.float64)) for found in by_kind.values())
