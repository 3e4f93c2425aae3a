"""The contract of codecs: what comes back, which bytes are written, and how much memory it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza.codecs import Codec, CombiningCodec, ShapedCodec
from cadenza.testing.contracts.promises import Contract

__all__ = ["check_codec"]

_LARGE = 300_001  # values: several pieces, and a last block that is not full
_SCRATCH_BYTES = 2 << 20
_LARGEST = torch.finfo(torch.float32).max


def check_codec(codec: Codec) -> None:
    """Raise AssertionError if a codec breaks a promise of `cadenza.codecs.Codec`.

    A shaped codec is tried on runs of tensors with one and two dimensions.

    >>> from cadenza.codecs import int8
    >>> check_codec(int8())
    """
    contract = Contract(codec, Codec)
    contract.is_whole()
    with _one_thread():
        _check_members(contract, codec)
        for numel in _numels(codec):
            _check_bytes(contract, _for(codec, numel), numel)
        for numel in (5, 1000, _LARGE):
            _check_addresses(contract, _for(codec, numel), numel)
        for name, values in _samples(codec).items():
            _check_values(contract, _for(codec, values.numel()), name, values)
        _check_threads(contract, _for(codec, _LARGE))
        if codec.shaped:
            _check_split(contract, codec)
        else:
            _check_blocks(contract, codec)
        _check_combine(contract, _for(codec, _LARGE))
        _check_feedback(contract, codec)
    _check_scratch(contract, codec)


def _check_members(contract: Contract, codec: Codec) -> None:
    contract.holds(codec.block >= 1, f"block is at least 1; it is {codec.block}")
    fed_back = codec.feedback
    contract.holds(fed_back is None or 0 < fed_back <= 1, f"feedback is None or a share up to 1; it is {fed_back!r}")
    contract.holds(bool(codec.name), "it has a name for reports")
    if codec.shaped:
        able = isinstance(codec, ShapedCodec) and codec.sparse
        contract.holds(able, "a shaped codec is sparse and has for_shapes() and split()")
    back = codec.back
    whole = back is codec or codec.sparse or not (back.sparse or back.shaped or back.feedback is not None)
    contract.holds(whole, f"back writes every value, and has no feedback of its own; it is {back!r}")
    contract.holds(_for(codec, 0).encoded_bytes(0) == 0, "no values take no bytes")


def _check_bytes(contract: Contract, codec: Codec, numel: int) -> None:
    """Check that exactly `encoded_bytes` are written, whatever was there, and how they are added up."""
    size, values, start = codec.encoded_bytes(numel), _normal(numel), _normal(numel, seed=1)
    buffers = [torch.full((size + 2,), filling, dtype=torch.uint8) for filling in (0, 255)]
    for buffer in buffers:
        codec.encode(values, buffer[1:-1])
        contract.holds(torch.equal(values, _normal(numel)), "encoding leaves the values alone")
    same = torch.equal(buffers[0][1:-1], buffers[1][1:-1])
    contract.holds(same, f"every one of encoded_bytes({numel}) is written; some kept what was there")
    edges = [buffer[[0, -1]].tolist() for buffer in buffers]
    contract.holds(edges == [[0, 0], [255, 255]], f"nothing is written outside of encoded_bytes({numel})")
    data, total = buffers[0][1:-1].clone(), start.clone()
    codec.decode_add(data, total, 0.3)
    expected = start + 0.3 * _decoded(codec, data, numel)
    close = torch.allclose(total, expected, rtol=1e-6, atol=1e-6)
    contract.holds(close, f"decode_add adds weight times what decode gives; not for {numel} values")


def _check_addresses(contract: Contract, codec: Codec, numel: int) -> None:
    values, start = _normal(numel), _normal(numel, seed=1)
    plain = _encoded(codec, values)
    expected = start.clone()
    codec.decode_add(plain, expected, 2.0)
    for offset in (1, 2, 4, 7):
        place = torch.empty(plain.numel() + 16, dtype=torch.uint8)[offset : offset + plain.numel()]
        codec.encode(values, place)
        total = start.clone()
        codec.decode_add(place, total, 2.0)
        same = torch.equal(place, plain) and torch.equal(total, expected)
        same = same and torch.equal(_decoded(codec, place, numel), _decoded(codec, plain, numel))
        contract.holds(same, f"bytes may lie at any address; {numel} values at offset {offset} were something else")


def _check_values(contract: Contract, codec: Codec, name: str, values: torch.Tensor) -> None:
    back = _returned(codec, values)
    total = torch.zeros_like(values)
    codec.decode_add(_encoded(codec, values), total, 1.0)
    finite = bool(back.isfinite().all()) and bool(total.isfinite().all())
    contract.holds(finite, f"finite values stay finite; not {name}")
    contract.holds(torch.equal(_returned(codec, -values), -back), f"−x comes back as the negative of x; not {name}")
    if codec.exact:
        contract.holds(torch.equal(back, values), f"an exact codec returns the values as they are; not {name}")
    zeros = bool((_returned(codec, torch.zeros_like(values)) == 0).all())
    if not codec.shaped:
        zeros = zeros and bool((back[values == 0] == 0).all())
    contract.holds(zeros, f"a zero comes back as zero; not in {name}")
    lost, there = (back - values).double().norm(), values.double().norm()
    kept = bool(lost <= 1.01 * there + 1e-7) or bool(there > 1e15)
    contract.holds(kept, f"no more is lost than was there, or error feedback would run away; not so of {name}")


def _check_threads(contract: Contract, codec: Codec) -> None:
    values = _normal(_LARGE)
    alone = _encoded(codec, values)
    torch.set_num_threads(2)
    same = torch.equal(alone, _encoded(codec, values.clone()))
    torch.set_num_threads(1)
    contract.holds(same, "equal values give equal bytes, with any number of threads")


def _check_blocks(contract: Contract, codec: Codec) -> None:
    block, values = codec.block, _normal(_LARGE)
    cuts = sorted({0, min(block, _LARGE), min(7 * block, _LARGE), _LARGE // block // 2 * block, _LARGE})
    parts = [_returned(codec, values[a:b]) for a, b in pairwise(cuts)]
    same = torch.equal(torch.cat(parts), _returned(codec, values))
    contract.holds(same, "parts that are cut at multiples of block come back as the whole does")
    wide = 64 * block if block < 64 else block
    good = _returned(codec, _normal(3 * wide + 3))
    for bad in (math.nan, math.inf, -math.inf):
        values = _normal(3 * wide + 3)
        values[wide + 1] = bad
        back = _returned(codec, values)
        same = torch.equal(back[:wide], good[:wide]) and torch.equal(back[2 * wide :], good[2 * wide :])
        contract.holds(same, f"{bad} does no harm to other blocks")


def _check_split(contract: Contract, codec: Codec) -> None:
    whole, values = _for(codec, _LARGE), _normal(_LARGE)
    for row_bytes in (1 << 16, 1 << 20):
        parts = list(cast(ShapedCodec, whole).split(row_bytes))
        counts = [count for count, _ in parts]
        contract.holds(sum(counts) == _LARGE, f"the messages of split({row_bytes}) have all values")
        fits = all(part.encoded_bytes(count) <= row_bytes for count, part in parts)
        contract.holds(fits, f"no message of split({row_bytes}) is longer than {row_bytes} bytes")
        cut = zip(values.split(counts), parts, strict=True)
        back = torch.cat([_returned(part, piece) for piece, (_, part) in cut])
        same = torch.equal(back, _returned(whole, values))
        contract.holds(same, f"the messages of split({row_bytes}) come back as the whole does")


def _check_combine(contract: Contract, codec: Codec) -> None:
    """Check the mean of a codec that has its own: members that send the same get it back, with any weights."""
    if not isinstance(codec, CombiningCodec):
        return
    data, out = _encoded(codec, _normal(_LARGE)), torch.full((_LARGE,), math.nan)
    codec.combine([data, data], out, [0.75, 0.25])
    same = torch.equal(out, _decoded(codec, data, _LARGE))
    contract.holds(same, "the mean of equal contributions is what each comes back as")


def _check_feedback(contract: Contract, codec: Codec) -> None:
    """Check that a lossy codec with error feedback sends in the end what it lost at first."""
    if codec.exact:
        return
    values = _normal(2 * codec.block + 50)
    sized = _for(codec, values.numel())
    residual, total, off = torch.zeros_like(values), torch.zeros_like(values), {}
    for n in range(1, 401):
        wanted = values + residual
        sent = _returned(sized, wanted)
        residual = wanted - sent
        total += sent
        off[n] = ((total / n - values).norm() / values.norm()).item()
    nearer = (off[400] <= 0.02 or off[400] <= 0.4 * off[100]) and off[400] <= 0.15 * off[1] + 1e-6
    contract.holds(
        nearer, f"error feedback makes up for what is lost; after 400 rounds {off[400]:.0%} are still missing"
    )


def _check_scratch(contract: Contract, codec: Codec) -> None:
    for offset in (0, 1):
        largest = []
        for numel in (1_100_003, 2_200_003):
            sized, values, out = _for(codec, numel), torch.ones(numel), torch.zeros(numel)
            data = torch.empty(sized.encoded_bytes(numel) + offset, dtype=torch.uint8)[offset:]
            with _Watch() as watch:
                sized.encode(values, data)
                sized.decode(data, out)
                sized.decode_add(data, out, 0.5)
            contract.holds(not watch.waiting, f"nothing waits for a device; {watch.waiting[:1]} does")
            largest.append(watch.largest)
        bounded = largest[0] == largest[1] <= _SCRATCH_BYTES
        contract.holds(bounded, f"scratch memory is at most {_SCRATCH_BYTES} bytes at any size; it is {largest}")


class _Watch(TorchDispatchMode):
    """Notes the largest memory that any operation allocates, and operations that would wait for a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal.default", "unique")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0
        self.waiting: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        self.waiting += [str(func)] if any(name in str(func) for name in self.WAITING) else []
        return result


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        yield from _tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from _tensors(part)


def _for(codec: Codec, numel: int) -> Codec:
    """Return the codec of a run of values: itself, or for a shaped one that of a matrix and a vector."""
    if not (codec.shaped and isinstance(codec, ShapedCodec)):
        return codec
    rows = numel // 16
    return codec.for_shapes([shape for shape in ((rows, 8), (numel - 8 * rows,)) if math.prod(shape)])


def _numels(codec: Codec) -> list[int]:
    block = codec.block
    return sorted({0, 1, 2, 3, 7, 8, block - 1, block, block + 1, 3 * block, 3 * block + 5, 5000, _LARGE})


def _samples(codec: Codec) -> dict[str, torch.Tensor]:
    scales = 10.0 ** torch.linspace(-6, 6, 3 * codec.block + 5)
    wild = _normal(600, seed=3) * 2.0 ** (90 * torch.rand(600, generator=torch.Generator().manual_seed(4)) - 45)
    return {
        "normal values": _normal(_LARGE),
        "values of many magnitudes": _normal(scales.numel(), seed=2) * scales,
        "huge and tiny values": wild,
        "values near fp32's end": (1e38 * _normal(600)).clamp(-_LARGEST, _LARGEST),
        "fp32's largest number": torch.full((600,), _LARGEST),
        "values with zeros": torch.where(_normal(600) > 0, _normal(600, seed=5), 0.0),
        "equal values": torch.full((600,), -0.75),
        "few kinds of values": torch.tensor([0.0, -0.0, 1.0, -1.0, 0.75, 1e-3, -1e6] * 60),
        "one value": torch.tensor([-3.5]),
        "nothing but zeros": torch.zeros(600),
    }


def _normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, data)
    return data


def _decoded(codec: Codec, data: torch.Tensor, numel: int) -> torch.Tensor:
    out = torch.full((numel,), math.nan)
    codec.decode(data, out)
    return out


def _returned(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    return _decoded(codec, _encoded(codec, values), values.numel())


@contextmanager
def _one_thread() -> Iterator[None]:
    """Many small operations on two threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
