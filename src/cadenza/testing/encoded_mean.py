"""The mean of encoded values, as all members together make it: a plain reference for the exchange of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cadenza.codecs import Codec, CombiningCodec

__all__ = ["EncodedMean", "encoded", "round_trip", "row_of"]


def row_of(numel: int, members: int, block: int) -> int:
    """How many values each member owns: whole blocks, as many for each, enough for all."""
    return math.ceil(math.ceil(numel / members) / block) * block


def round_trip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """What is left of values that were encoded and decoded."""
    out = torch.empty_like(values)
    codec.decode(encoded(codec, values), out)
    return out


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return the bytes that values become."""
    data = torch.empty(codec.encoded_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode(values.contiguous(), data)
    return data


@dataclass
class EncodedMean:
    """The mean of encoded values: members encode what they have, owners decode, sum, and encode the sum once more.

    What either encoding loses is kept by whoever encoded, times the codec's decay, and is added the next time. Owners
    hold different parts, so that all their residuals together are as long as the values.
    """

    codec: Codec
    members: int
    numel: int
    device: torch.device | str = "cpu"
    residuals: list[torch.Tensor] = field(init=False)
    owners_residual: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.residuals = [torch.zeros(self.numel, device=self.device) for _ in range(self.members)]
        self.owners_residual = torch.zeros(self.numel, device=self.device)

    def __call__(self, contributions: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> torch.Tensor:
        decay = self.codec.feedback or 0.0
        weights = weights or [1 / self.members] * self.members
        total = torch.zeros(self.numel, device=self.device)
        of_senders, sent = torch.zeros(2, self.numel, dtype=torch.float64, device=self.device)
        for rank, (values, weight) in enumerate(zip(contributions, weights, strict=True)):
            wanted = values + self.residuals[rank]
            self.codec.decode_add(encoded(self.codec, wanted), total, weight)
            of_senders += weight * round_trip(self.codec, wanted).double()
            sent += weight * (round_trip(self.codec, wanted) != 0).double()
            self.residuals[rank] = decay * (wanted - round_trip(self.codec, wanted))
        if isinstance(self.codec, CombiningCodec):  # the mean of those who have sent a value
            return torch.where(sent > 0, of_senders / sent * sum(weights), 0.0).float()
        if self.codec.sparse:  # everyone sums; nobody encodes the sum
            return total
        total = total + self.owners_residual
        result = round_trip(self.codec.back, total)
        self.owners_residual = decay * (total - result)
        return result
