"""The least lossy codec that the link allows: chosen among several from what rounds were seen to take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from cadenza.codecs.base import Codec
from cadenza.codecs.exponents import e3m0
from cadenza.codecs.floats import bf16
from cadenza.codecs.integers import int8
from cadenza.common.checks import as_number
from cadenza.common.later import torch

__all__ = ["AutoCodec", "ChoosingCodec", "auto"]

_SAMPLE = 1 << 20  # values by which sizes are compared


@runtime_checkable
class ChoosingCodec(Codec, Protocol):
    """A codec that stands for several: levels write in the one that was chosen last.

    >>> isinstance(auto(), ChoosingCodec), isinstance(int8(), ChoosingCodec)
    (True, False)
    """

    @property
    def choices(self) -> tuple[Codec, ...]:
        """What is chosen among, from the least lossy."""
        ...

    def choose(self, current: int, step_s: float, stall_s: float, period: int) -> int:
        """Return the number of the codec to go on with, from times that are the same on all ranks."""
        ...

    def stall_with(self, choice: int, current: int, stall_s: float) -> float:
        """Return for how long rounds will hold training up in another codec, from what they do in the present one."""
        ...

    def explain(self, before: int, after: int, step_s: float, stall_s: float, period: int) -> str:
        """Return in words what `choose` has decided, and why; nothing if it has decided nothing."""
        ...


def auto(choices: Sequence[Codec] | None = None, *, target: float = 0.95, change: float = 1.25) -> ChoosingCodec:
    """Write in the least lossy of several codecs with which rounds are short enough.

    It begins with the first, and goes to the next where a round leaves less than `target` of a period's time to
    compute, by as much as its bytes are fewer; back, where the one before would do with room to spare. All ranks choose
    alike.

    Args:
        choices: From the least lossy to the smallest; bf16, int8 and e3m0 without this. None may be sparse or have
            error feedback: what they keep is theirs.
        target: The share of the time that is to be compute.
        change: How many times too long rounds may look before a less lossy codec is taken back.

    >>> codec = auto()
    >>> codec.name, codec.choose(0, step_s=0.1, stall_s=2.0, period=100)
    ('auto(bf16, int8, e3m0)', 2)
    """
    chosen = (bf16(), int8(), e3m0()) if choices is None else tuple(choices)
    if not chosen or not all(isinstance(codec, Codec) for codec in chosen):
        raise TypeError(f"choices are codecs, such as [bf16(), int8()]; got {choices!r}.")
    for codec in chosen:
        if codec.sparse or codec.shaped or codec.feedback is not None:
            raise ValueError(
                f"auto() cannot choose {codec.name}: what it keeps for later rounds would be lost with the next "
                "choice. Give codecs that write every value, without error feedback."
            )
    if not 0 < as_number("target", target) < 1:
        raise ValueError(f"target is a share of the time, above 0 and below 1, such as 0.95; got {target!r}.")
    if not 1 <= as_number("change", change) < math.inf:
        raise ValueError(f"change must be 1 or more; got {change!r}.")
    return AutoCodec(chosen, float(target), float(change))


@dataclass(frozen=True)
class AutoCodec:
    """Stands for several codecs; alone it writes as the first of them does."""

    choices: tuple[Codec, ...]
    target: float
    change: float
    exact: ClassVar[bool] = False
    sparse: ClassVar[bool] = False
    feedback: ClassVar[float | None] = None
    aligned: ClassVar[bool] = True
    shaped: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"auto({', '.join(codec.name for codec in self.choices)})"

    @property
    def block(self) -> int:
        return math.lcm(*(math.lcm(codec.block, codec.back.block) for codec in self.choices))

    @property
    def back(self) -> Codec:
        return self.choices[0].back

    def choose(self, current: int, step_s: float, stall_s: float, period: int) -> int:
        room = (1 - self.target) / self.target * period * step_s  # for how long a round may hold a period up
        for number in range(len(self.choices)):
            margin = self.change if number < current else 1.0
            if margin * self.stall_with(number, current, stall_s) <= room:
                return number
        return len(self.choices) - 1

    def stall_with(self, choice: int, current: int, stall_s: float) -> float:
        return stall_s * _size(self.choices[choice]) / _size(self.choices[current])

    def explain(self, before: int, after: int, step_s: float, stall_s: float, period: int) -> str:
        if before == after:
            return ""
        return (
            f"codec {self.choices[before].name} → {self.choices[after].name}: a round holds {period} steps of "
            f"{1000 * step_s:.3g} ms up for {1000 * stall_s:.3g} ms; about "
            f"{1000 * self.stall_with(after, before, stall_s):.3g} ms are expected now"
        )

    def encoded_bytes(self, numel: int) -> int:
        return self.choices[0].encoded_bytes(numel)

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        self.choices[0].encode(values, out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.choices[0].decode(data, out)

    def decode_add(self, data: torch.Tensor, out: torch.Tensor, weight: float) -> None:
        self.choices[0].decode_add(data, out, weight)


def _size(codec: Codec) -> int:
    return codec.encoded_bytes(_SAMPLE) + codec.back.encoded_bytes(_SAMPLE)
