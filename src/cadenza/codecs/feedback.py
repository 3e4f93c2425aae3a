"""Error feedback: what a codec lost in one round is added to what is sent in the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from cadenza.codecs.auto import ChoosingCodec
from cadenza.codecs.base import Codec, CombiningCodec, ShapedCodec
from cadenza.common.checks import check_share
from cadenza.common.later import torch

__all__ = ["error_feedback"]


def error_feedback(codec: Codec, *, decay: float = 1.0) -> Codec:
    """Ask rounds to keep what `codec` loses, and to send it later.

    A round encodes c = difference + residual, and keeps residual = decay · (c − what c comes back as). The owner of a
    share does the same with its mean, by what `codec.back` loses. The residuals live with the round, not here: this
    only says that there are some.

    Args:
        codec: Any codec that loses something.
        decay: How much of the loss is kept, above 0 and up to 1. SparseLoCo's is 0.95; at 1 nothing is ever lost.

    >>> from cadenza.codecs import topk
    >>> codec = error_feedback(topk(), decay=0.95)
    >>> codec.name, codec.feedback, codec.sparse
    ('error_feedback(topk(0.02))', 0.95, True)
    """
    _check_codec(codec)
    if codec.exact:
        raise ValueError(f"error_feedback({codec.name}): {codec.name} loses nothing to feed back; use it alone.")
    if codec.feedback is not None:
        raise ValueError(f"error_feedback({codec.name}): its loss is fed back already; wrap a codec once.")
    if isinstance(codec, ChoosingCodec):
        raise ValueError(
            f"error_feedback({codec.name}): what one codec lost would be lost with the next choice; use it alone."
        )
    check_share("decay", decay, of="the loss to keep")
    kind = CombiningErrorFeedback if isinstance(codec, CombiningCodec) else ErrorFeedback
    return kind(codec, float(decay))


@dataclass(frozen=True)
class ErrorFeedback:
    """A codec that writes what the one inside it writes, and asks for a residual."""

    codec: Codec
    feedback: float

    @property
    def name(self) -> str:
        return f"error_feedback({self.codec.name})"

    @property
    def exact(self) -> bool:
        return self.codec.exact

    @property
    def sparse(self) -> bool:
        return self.codec.sparse

    @property
    def block(self) -> int:
        return self.codec.block

    @property
    def aligned(self) -> bool:
        return self.codec.aligned

    @property
    def shaped(self) -> bool:
        return self.codec.shaped

    @property
    def back(self) -> Codec:
        return self.codec.back

    def for_shapes(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        return replace(self, codec=_shaped(self.codec).for_shapes(shapes))

    def split(self, row_bytes: int) -> Sequence[tuple[int, Codec]]:
        return _shaped(self.codec).split(row_bytes)

    def encoded_bytes(self, numel: int) -> int:
        return self.codec.encoded_bytes(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.codec.decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        self.codec.decode_add(data, out, weight)


@dataclass(frozen=True)
class CombiningErrorFeedback(ErrorFeedback):
    """The same around a codec that has a mean of its own."""

    def combine(self, contributions: Sequence[torch.Tensor], out: torch.Tensor, weights: Sequence[float]) -> None:
        cast(CombiningCodec, self.codec).combine(contributions, out, weights)


def _shaped(codec: Codec) -> ShapedCodec:
    if not isinstance(codec, ShapedCodec):
        raise TypeError(f"{codec.name} takes values of any shape: ask it for shapes only where `shaped` is True.")
    return codec


def _check_codec(given: object) -> None:
    if not isinstance(given, Codec):
        called = f"{given.__name__}()" if callable(given) and hasattr(given, "__name__") else "int8()"
        raise TypeError(f"error_feedback takes a codec, not {given!r}; write error_feedback({called}).")
