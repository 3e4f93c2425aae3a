"""How far apart long vectors of several workers are, told by short ones that are cheap to send.

A sketch is a random projection (the count sketch): every value is added to one of at most `BUCKETS` sums, with a sign
of its own. Squared distances come out right on average, with a standard error of √(2 / `BUCKETS`) for two vectors and
less for more of them. That holds for all vectors: a sample of their values would be far off where few of them are large
or move at all. Vectors that are the same are at distance 0, and short vectors are at their own distances.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

from cadenza.common.later import torch
from cadenza.common.streams import made_once

__all__ = ["BUCKETS", "Sketch", "spread_of"]

# 8 KiB in fp32. Measured on 300,000 values of four kinds, the root of the spread has a standard error of 1.6 % for two
# workers and 0.9 % for four; with half the bytes 2.2 % and 1.2 %, with twice the bytes 1.2 % and 0.6 %.
BUCKETS = 2048
_PIECE = 1 << 16  # values; they and their signs stay in the cache


class Sketch:
    """A short vector that stands for a long one of `numel` values, which is given in parts.

    >>> one, other = Sketch(2), Sketch(2)
    >>> one.add(torch.tensor([1.0, 5.0])); other.add(torch.tensor([3.0, 5.0]))
    >>> spread_of([one.pack(), other.pack()], [0.5, 0.5])  # each is 1 away from the mean
    1.0
    """

    def __init__(self, numel: int) -> None:
        self._buckets = min(BUCKETS, 1 << (numel - 1).bit_length())
        self._sums: dict[torch.device, torch.Tensor] = {}
        self._pieces = 0

    def add(self, flat: torch.Tensor) -> None:
        """Count the next values in; all workers give parts of the same sizes, in one order."""
        signs, starts, sums = self.begin_part(flat)
        for part, start in zip(flat.split(_PIECE), starts.tolist(), strict=True) if flat.numel() else ():
            sums[: part.numel()].addcmul_(part.to(torch.float32), signs[start : start + part.numel()])

    def begin_part(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return signs, where in them those of each piece start, and sums, for whoever reads the values anyway.

        Value i of a piece times its sign is to be added to sum i.
        """
        if flat.device not in self._sums:
            self._sums[flat.device] = torch.zeros(_PIECE, device=flat.device)
        pieces = -(-flat.numel() // _PIECE)
        starts = _starts(self._pieces, pieces)
        self._pieces += pieces
        return _signs(flat.device), starts, self._sums[flat.device]

    def pack(self) -> bytes:
        """Return the short vector, as it is sent."""
        total = torch.zeros(self._buckets)
        for sums in self._sums.values():
            total += sums.view(-1, self._buckets).sum(0).cpu()
        return total.numpy().tobytes()


def spread_of(sketches: Sequence[bytes], weights: Sequence[float]) -> float:
    """Return the weighted mean squared distance of the vectors from their mean; the weights add up to 1.

    The same number on every machine that has the same sketches.
    """
    rows = [torch.frombuffer(bytearray(data), dtype=torch.float32).to(torch.float64) for data in sketches]
    mean, square = torch.zeros(2, len(rows[0]), dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        apart = row - rows[0]  # so that vectors which are the same have a spread of 0, not of a rounding
        mean += apart * weight
        square += apart * apart * weight
    return max(0.0, math.fsum((square - mean * mean).tolist()))


@lru_cache(maxsize=64)
def _starts(first: int, pieces: int) -> torch.Tensor:
    """Return where in the signs those of each piece start: far from those of others, without a pattern."""
    digests = (hashlib.blake2b(i.to_bytes(8, "little"), digest_size=2).digest() for i in range(first, first + pieces))
    return torch.tensor([int.from_bytes(digest, "little") for digest in digests], dtype=torch.int64)


@made_once
def _signs(device: torch.device) -> torch.Tensor:
    data = b"".join(hashlib.blake2b(i.to_bytes(4, "little")).digest() for i in range(2 * _PIECE // 512))
    bits = torch.frombuffer(bytearray(data), dtype=torch.uint8).unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits.reshape(-1).to(torch.float32) * 2 - 1).to(device)
