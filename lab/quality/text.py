"""The text in three parts: to train on, to tune on, to be judged by; and the windows of a step, whoever takes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from cadenza.training.standard_library_gpt import Corpus, library_files

__all__ = ["CONTEXT", "Batches", "Text", "repeated", "spread_windows"]

CONTEXT = 64


@dataclass(frozen=True)
class Text:
    """Bytes of different files of Python's standard library: what `cadenza train` holds out is cut into two parts."""

    training: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor

    @classmethod
    @cache
    def standard_library(cls) -> Text:
        held_out = [path.read_bytes() for path in library_files()[::10]]
        return cls(Corpus.standard_library().training, _joined(held_out[::2]), _joined(held_out[1::2]))


class Batches:
    """The windows of step after step; a step's windows are the same however many workers share them.

    >>> text = torch.arange(100, dtype=torch.uint8)
    >>> one, two = Batches(text, seed=1), Batches(text, seed=1)
    >>> bool((one.take(1, 4)[0].flatten() == two.take(2, 2)[0].flatten()).all())
    True
    """

    def __init__(self, text: torch.Tensor, *, seed: int, context: int = CONTEXT) -> None:
        self._text = text
        self._reach = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def take(self, workers: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (workers, batch, context) bytes, and those that follow each of them."""
        last = len(self._text) - len(self._reach) + 1
        starts = torch.randint(last, (workers, batch, 1), generator=self._generator)
        windows = self._text[starts + self._reach].long()
        return windows[..., :-1], windows[..., 1:]


def spread_windows(text: torch.Tensor, count: int, *, context: int = CONTEXT) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows spread evenly over a text, and what follows them."""
    starts = torch.linspace(0, len(text) - context - 1, count, dtype=torch.float64).long()[:, None]
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def repeated(text: torch.Tensor, training: torch.Tensor, *, length: int = CONTEXT) -> float:
    """Return the share of a text's windows of `length` bytes, a power of two, that stand in the training text as well.

    >>> one, other = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (b"abcdXefgh", b"..abcd..fgh"))
    >>> repeated(one, other, length=4)  # abcd, of six windows
    0.16666666666666666
    """
    return float(torch.isin(_hashed(text, length), _hashed(training, length)).float().mean(dtype=torch.float64))


def _hashed(text: torch.Tensor, length: int) -> torch.Tensor:
    """Return 64 bits for each window: of two halves, again and again."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(-(2**63), 2**63 - 1, (256,), generator=generator)[text.long()]
    half = 1
    while half < length:
        odd = 2 * int(torch.randint(2**61, (1,), generator=generator)) + 1
        found = found[:-half] * odd + found[half:]
        half *= 2
    assert half == length
    return found


def _joined(texts: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)
