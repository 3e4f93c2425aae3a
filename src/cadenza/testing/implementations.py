"""The implementations of the codecs against each other: the same bytes, and the same values from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from cadenza import codecs
from cadenza.codecs import Codec
from cadenza.codecs.kernels import Implementation, implementations, using

__all__ = ["CODECS", "compare_implementations"]

CODECS: tuple[Codec, ...] = (
    codecs.int8(),
    codecs.int8(block=100),
    codecs.e3m0(),
    codecs.e3m0(block=48),
    codecs.topk(),
    codecs.topk(0.3, chunk=50, bits=4),
    codecs.topk(1.0, chunk=128, bits=8),
)
_CPU = torch.device("cpu")


def compare_implementations(
    device: torch.device, ways: Sequence[Implementation] | None = None, *, of: Sequence[Codec] = CODECS
) -> tuple[str, str]:
    """Return what was compared, and a name for all bytes; the reference is torch on the CPU.

    Args:
        device: Where the values are.
        ways: The implementations; all that there are for the device, if None.
        of: The codecs.

    >>> compare_implementations(_CPU, ["torch"], of=CODECS[:1])
    ('torch agrees on 9 cases', '...')

    Raises:
        AssertionError: Some bits differ.
    """
    found, count, wrong = hashlib.blake2b(digest_size=8), 0, []
    ways = ways or implementations(device)
    for codec in of:
        for name, values in _cases(codec).items():
            with using("torch"):
                expected = _bits(codec, values, _CPU)
            for way in ways:
                with using(way):
                    got = _bits(codec, values, device)
                for what, one, other in zip(("bytes", "values", "sums"), got, expected, strict=True):
                    if one != other:
                        wrong.append(f"{codec.name} by {way}: other {what} for {name}")
            found.update(b"".join(expected))
            count += 1
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise AssertionError("; ".join(wrong[:3]) + more)
    return f"{' and '.join(ways)} agree{'s' * (len(ways) == 1)} on {count} cases", found.hexdigest()


def _cases(codec: Codec) -> dict[str, torch.Tensor]:
    size = 3 * codec.block + 5
    normal = torch.randn(size, generator=torch.Generator().manual_seed(0))
    bad = normal.clone()
    bad[codec.block + 1], bad[1] = math.nan, -math.inf
    return {
        "nothing": normal[:0],
        "one value": normal[:1],
        "normal values": normal,
        "values of many magnitudes": normal * 10.0 ** torch.linspace(-30, 30, size),
        "values near the end of fp32": (1e38 * normal).clamp(-3e38, 3e38),
        "subnormal values": normal * 2.0**-130,
        "equal values": torch.full((size,), -0.75),
        "zeros of both signs": torch.where(normal > 0, normal, torch.zeros(size).copysign(normal.roll(1))),
        "values that are not finite": bad,
    }


def _bits(codec: Codec, values: torch.Tensor, device: torch.device) -> tuple[bytes, bytes, bytes]:
    """Return what the values are encoded as, what that is decoded to, and what it adds to a ramp."""
    here = values.to(device)
    data = torch.empty(codec.encoded_bytes(values.numel()) + 1, dtype=torch.uint8, device=device)[1:]
    out, total = torch.empty_like(here), torch.linspace(-1, 1, values.numel()).to(device)
    codec.encode(here, data)
    codec.decode(data, out)
    codec.decode_add(data, total, 0.3)
    return _bytes(data), _bytes(out), _bytes(total)


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's memory; of NaNs, which have many bits, those of one."""
    plain = tensor.cpu()
    if plain.is_floating_point():
        plain = torch.where(plain.isnan(), torch.tensor(math.nan), plain)
    return bytes(plain.contiguous().view(torch.uint8).tolist())
