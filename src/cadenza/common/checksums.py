"""Numbers that tell tensors and states apart, at the speed of memory; no protection against forgery."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from cadenza.common.later import torch
from cadenza.common.streams import made_once

__all__ = ["ROWS", "checksum", "checksum_of_rows", "fingerprint"]

_ROW = 64  # words of 8 bytes that are added up, at the speed of memory
ROWS = 512  # sums; each has a factor of its own, so that differences in two rows do not cancel out


def checksum(*tensors: torch.Tensor, after: int = 0) -> int:
    """Return a number below 2**64 that tells tensors apart, and is the same for the same bits on every machine.

    It is made of sums of whole numbers, which no order of adding changes. `after` is the checksum of earlier tensors.

    >>> checksum(torch.ones(3)) == checksum(torch.ones(3)), checksum(torch.ones(3)) == checksum(torch.ones(4))
    (True, False)
    """
    total = after
    for tensor in tensors:
        data = _bytes_of(tensor)
        rows, rest = data.split([(whole := _in_whole_rows(data)), data.numel() - whole])
        total = _joined(_added_up(rows.view(torch.int64).view(-1, _ROW).sum(1)), rest, data.numel(), after=total)
    return total


def checksum_of_rows(rows: torch.Tensor, tensor: torch.Tensor, *, after: int = 0) -> int:
    """Return the checksum of a tensor whose row sums are known, and of those before it, whose checksum is `after`.

    The words of each row of 512 bytes are added up, and every `ROWS`th of these sums; what is less than a row is left.
    """
    data = tensor.detach().reshape(-1).view(torch.uint8)
    return _joined(rows, data[_in_whole_rows(data) :], data.numel(), after=after)


def _joined(rows: torch.Tensor, rest: torch.Tensor, size: int, *, after: int) -> int:
    factors = _factors(rows.device)
    total = int((rows * factors).sum()) + 31 * int((_added_up(rest.to(torch.int64)) * factors).sum()) + size
    return (after * 31 + total % 2**64) % 2**64


def _in_whole_rows(data: torch.Tensor) -> int:
    return data.numel() // (8 * _ROW) * 8 * _ROW


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().reshape(-1).view(torch.uint8)
    return data.clone() if data.storage_offset() % 8 else data


def _added_up(numbers: torch.Tensor) -> torch.Tensor:
    """Return `ROWS` sums of whole numbers, of every `ROWS`th each."""
    return torch.nn.functional.pad(numbers, (0, -numbers.numel() % ROWS)).view(-1, ROWS).sum(0)


@made_once
def _factors(device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern."""
    data = b"".join(hashlib.blake2b(bytes([i])).digest() for i in range(ROWS // 8))
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
