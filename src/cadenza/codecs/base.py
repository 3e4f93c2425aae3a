"""What every codec promises; tests/contract/test_codecs.py holds each of them to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from cadenza.common.later import torch

__all__ = ["Codec", "CombiningCodec", "ShapedCodec"]


@runtime_checkable
class Codec(Protocol):
    """A way to write fp32 values as bytes.

    Encoded bytes may lie anywhere in a larger buffer, at odd addresses too. Nothing waits for a device, and scratch
    memory has a constant bound. Equal bytes give equal values on every rank, and equal values equal bytes on machines
    of one kind. A zero comes back as zero, and −x as the negative of what x comes back as.

    >>> from cadenza.codecs import int8
    >>> codec, values = int8(), torch.tensor([0.5, -1.0, 0.0])
    >>> data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    >>> codec.encode(values, data)
    >>> total = torch.ones(3)
    >>> codec.decode_add(data, total, weight=2.0); total
    tensor([ 2.0079, -1.0000,  1.0000])
    """

    @property
    def name(self) -> str:
        """A short name for reports; `repr` tells all."""
        ...

    @property
    def exact(self) -> bool:
        """Whether the values travel as they are."""
        ...

    @property
    def sparse(self) -> bool:
        """Whether most values come back as zero, so that gathering beats reducing."""
        ...

    @property
    def block(self) -> int:
        """How many values are written as one: cut at its multiples, and the parts are encoded as the whole would be."""
        ...

    @property
    def aligned(self) -> bool:
        """Whether no block should hold values of two tensors: every tensor starts at a multiple of `block` then.

        Small neighbours share blocks where rounds would become much longer.
        """
        ...

    @property
    def shaped(self) -> bool:
        """Whether it must know the tensors' shapes, as transforms in two dimensions do: see `ShapedCodec`."""
        ...

    @property
    def feedback(self) -> float | None:
        """The decay of the residual that is fed back into the next round, or None."""
        ...

    @property
    def back(self) -> Codec:
        """How the owners of shares write the mean on its way back to all: itself, or a codec that loses less.

        Codecs that are `sparse` are gathered whole and have no way back.
        """
        ...

    def encoded_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` values take, whatever they are."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write `values` (1-D, fp32, contiguous) into `out` (uint8, exactly `encoded_bytes` of them)."""
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite `out` (1-D, fp32, contiguous) with the values that were encoded into `data`."""
        ...

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        """Add `weight` times the values that were encoded into `data` to `out`, rounded alike on every machine.

        So products are rounded before they are added: what torch adds with a factor is fused on some machines only.
        """
        ...


@runtime_checkable
class ShapedCodec(Codec, Protocol):
    """A sparse codec that must know the shapes of the tensors that lie in a flat run of values, one after the other.

    A transform may spread a value over its block: only whole blocks of zeros need come back as zeros.

    >>> from cadenza.codecs import int8
    >>> isinstance(int8(), ShapedCodec), int8().shaped
    (False, False)
    """

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        """Return the codec of one flat run that is made of tensors of these shapes; it has `split`."""
        ...

    def split(self, row_bytes: int) -> Sequence[tuple[int, Codec]]:
        """Cut the run of a codec that `for_shapes` gave into messages of at most so many bytes.

        Returns how many values each message has, in order, and the codec that writes it.
        """
        ...


@runtime_checkable
class CombiningCodec(Codec, Protocol):
    """A sparse codec whose mean is another than that of the decoded values, such as one over the senders of each value.

    >>> from cadenza.codecs import topk
    >>> isinstance(topk(), CombiningCodec), isinstance(topk(mean_of="senders"), CombiningCodec)
    (False, True)
    """

    def combine(self, contributions: Sequence[torch.Tensor], out: torch.Tensor, weights: Sequence[float]) -> None:
        """Overwrite `out` with the weighted mean of what the members have encoded; the same bits on every machine."""
        ...
