"""How long codecs take on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cadenza import codecs

__all__ = ["handling_s", "seconds_a_value"]

_SAMPLE = 1 << 18


def handling_s(codec: codecs.Codec, ranks: int) -> float:
    """Return the seconds a value takes to be packed, encoded and decoded in a round on this machine."""
    encode, add, decode = _times(codec)
    return encode * (1 + 1 / ranks) + add + decode


def seconds_a_value(device: torch.device | None = None) -> dict[str, float]:
    """Return the seconds a value takes to be encoded, or decoded, on a device (the CPU), by codec: the mean of both."""
    found = {}
    for name in ("bf16", "int8", "e3m0", "topk"):
        encode, _, decode = _times(getattr(codecs, name)(), device)
        found[name] = (encode + decode) / 2
    return {"fp32": 0.0, **found}


def _times(codec: codecs.Codec, device: torch.device | None = None) -> tuple[float, float, float]:
    """Return the seconds a value takes to be encoded, decoded and added, and decoded."""
    values, total = torch.randn(_SAMPLE, device=device), torch.zeros(_SAMPLE, device=device)
    data = torch.empty(codec.encoded_bytes(_SAMPLE), dtype=torch.uint8, device=device)
    encode = _timed(lambda: codec.encode(values, data), values.device)
    add = _timed(lambda: codec.decode_add(data, total, 1.0), values.device)
    return encode / _SAMPLE, add / _SAMPLE, _timed(lambda: codec.decode(data, total), values.device) / _SAMPLE


def _timed(action: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of a few times, or of as many as fit into a fifth of a second."""

    def done() -> None:
        action()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    done()  # warms up
    seconds: list[float] = []
    while len(seconds) < 8 and sum(seconds) < 0.2:
        start = time.perf_counter()
        done()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
