"""The lab's texts: how much of what is judged stands in the training text word for word."""

from __future__ import annotations

import pytest
import torch
from lab.quality.text import repeated


def as_text(words: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)


def windows(words: bytes, length: int) -> list[bytes]:
    return [words[i : i + length] for i in range(len(words) - length + 1)]


@pytest.mark.parametrize("length", [1, 2, 8])
def test_repeated_windows_are_counted_as_by_hand(length: int) -> None:
    letters = torch.randint(97, 99, (2, 400), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    text, training = (bytes(row.tolist()) for row in letters)
    known = set(windows(training, length))
    wanted = [window in known for window in windows(text, length)]
    assert repeated(as_text(text), as_text(training), length=length) == sum(wanted) / len(wanted)
    assert length != 8 or 0 < sum(wanted) < len(wanted)


def test_the_order_of_bytes_counts() -> None:
    assert repeated(as_text(b"abcdefgh"), as_text(b"hgfedcba" * 4), length=8) == 0
    assert repeated(as_text(b"abcdefgh"), as_text(b"bacdefgh" * 4), length=8) == 0
    assert repeated(as_text(b"abcdefgh"), as_text(b"xxabcdefghxx"), length=8) == 1
