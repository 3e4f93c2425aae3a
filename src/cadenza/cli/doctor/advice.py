"""From what the ranks carry to what a strategy would cost: which period and codec keep the syncs short."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from cadenza import codecs
from cadenza.cli.codec_speed import handling_s as measured_handling_s

__all__ = ["Cost", "Plan", "cost_of", "plan"]

# In the order in which they lose more: the first whose period is short enough is the one to take.
_CODECS = (codecs.fp32(), codecs.bf16(), codecs.int8(), codecs.e3m0())
_COMFORTABLE = {"fp32": 32, "bf16": 32, "int8": 500, "e3m0": 500}


@dataclass(frozen=True)
class Cost:
    """What a sync in one codec costs a rank, and how seldom it must be to stay within its share of the time.

    Attributes:
        codec: The codec's name.
        bytes_sent: Bytes that a rank sends in a round.
        seconds: How long the round takes, encoding and decoding included.
        period: The smallest number of local steps between rounds that keeps within the share.
    """

    codec: str
    bytes_sent: int
    seconds: float
    period: int


@dataclass(frozen=True)
class Plan:
    """Costs by codec, and the one to begin with.

    Attributes:
        parameters: The size of the model.
        step_s: What a local step takes.
        share: The part of the time that syncs may take.
        ddp_s: What an all-reduce of the gradients takes in every step of DDP, in fp32 and without overlap.
        costs: A line a codec.
        choice: The codec to begin with, or None if none is comfortable.
    """

    parameters: int
    step_s: float
    share: float
    ddp_s: float
    costs: tuple[Cost, ...]
    choice: str | None

    @property
    def chosen(self) -> Cost:
        """The cost of the choice, or of the codec that comes nearest."""
        return next((cost for cost in self.costs if cost.codec == self.choice), self.costs[-1])


def plan(
    parameters: int,
    step_s: float,
    share: float,
    *,
    ranks: int,
    rate: float,
    latency_s: float,
    handling_s: Callable[[codecs.Codec, int], float] | None = None,
) -> Plan:
    """Return what syncs would cost if each rank sends `rate` bytes a second while all send at once.

    Args:
        parameters: The size of the model.
        step_s: What a local step takes.
        share: The part of the time that syncs may take.
        ranks: How many take part.
        rate: Bytes a second.
        latency_s: What a small message takes.
        handling_s: The seconds that a value takes in a codec among so many ranks; by default it is measured here.
    """
    handling_s = handling_s or measured_handling_s
    costs = tuple(
        cost_of(codec.name, sent, seconds, step_s, share)
        for codec in _CODECS
        for sent in [sent_by_a_rank(codec, parameters, ranks)]
        for seconds in [sent / rate + 4 * latency_s + handling_s(codec, ranks) * parameters]
    )
    choice = next((cost.codec for cost in costs if cost.period <= _COMFORTABLE[cost.codec]), None)
    return Plan(parameters, step_s, share, 8 * (ranks - 1) / ranks * parameters / rate, costs, choice)


def cost_of(codec: str, sent: int, seconds: float, step_s: float, share: float) -> Cost:
    """Return a cost with its period: a round may take `share` of the steps it follows and itself together.

    >>> cost_of("int8", 1_000_000, seconds=1.0, step_s=0.5, share=0.05).period
    38
    """
    return Cost(codec, sent, seconds, max(1, math.ceil(seconds * (1 - share) / (share * step_s))))


def sent_by_a_rank(codec: codecs.Codec, parameters: int, ranks: int) -> int:
    """Return the bytes that a rank sends in a round: a share of the values to each owner, and its mean to all."""
    there_and_back = codec.encoded_bytes(parameters) + codec.back.encoded_bytes(parameters)
    return round((ranks - 1) / ranks * there_and_back)
