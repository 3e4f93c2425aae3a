"""Numbers that tell tensors and states apart, at the speed of memory; no protection against forgery."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache

from cadenza.common.later import torch

__all__ = ["checksum", "fingerprint"]

_ROW = 64  # words of 8 bytes that are added up, at the speed of memory
_ROWS = 512  # sums; each has a factor of its own, so that differences in two rows do not cancel out


def checksum(*tensors: torch.Tensor) -> int:
    """Return a number below 2**64 that tells tensors apart, and is the same for the same bits on every machine.

    It is made of sums of whole numbers, which no order of adding changes.

    >>> checksum(torch.ones(3)) == checksum(torch.ones(3)), checksum(torch.ones(3)) == checksum(torch.ones(4))
    (True, False)
    """
    total = 0
    for tensor in tensors:
        total = (total * 31 + _checksum(tensor)) % 2**64
    return total


def _checksum(tensor: torch.Tensor) -> int:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // (8 * _ROW) * 8 * _ROW
    rows = data[:whole].view(torch.int64).view(-1, _ROW).sum(1)
    total = int(_weighed(rows)) + 31 * int(_weighed(data[whole:].to(torch.int64)))
    return (total + data.numel()) % 2**64


def _weighed(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of whole numbers times factors that come again after `_ROWS` of them."""
    rest = torch.nn.functional.pad(numbers, (0, -numbers.numel() % _ROWS))
    return (rest.view(-1, _ROWS).sum(0) * _factors(numbers.device)).sum()


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern."""
    data = b"".join(hashlib.blake2b(bytes([i])).digest() for i in range(_ROWS // 8))
    return (torch.frombuffer(bytearray(data), dtype=torch.int64) | 1).to(device)


def fingerprint(state: Mapping[str, torch.Tensor | str], root: str) -> str:
    """Return a few characters that are the same on all workers that saved together: a digest of what they share.

    It tells states of different steps or runs apart by its texts. These have a digest of the rounds that have made the
    tensors, which is the same on all workers even where the last bits of tensors are not, as they may be between two
    rounds if an optimizer of torch makes the outer step on unlike machines.

    >>> one = {"shared/step": "8", "worker/0/step": "8"}
    >>> fingerprint(one, "shared") == fingerprint({"shared/step": "8"}, "shared")
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(key for key in state if key.startswith(f"{root}/")):
        if isinstance(text := state[key], str):
            digest.update(f"{key} {text}\n".encode())
    return digest.hexdigest()
