"""What a plan begins with: the model, the machines, the links, and what the work of a round takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cadenza.errors import UsageError

__all__ = ["Cluster", "Faults", "Link", "Model", "Work", "estimated_layers"]


def _positive(what: str, value: float, *, zero: bool = False, such_as: str) -> None:
    fine = math.isfinite(value) and (value >= 0 if zero else value > 0)
    if not fine:
        raise UsageError(
            f"{what} must be a number {'of 0 or more' if zero else 'above 0'}, such as {such_as}; got {value!r}."
        )


def estimated_layers(parameters: float) -> int:
    """Return how many layers a transformer of this size usually has: 24 of 1 B parameters, 48 of 10 B, 108 of 100 B.

    >>> [estimated_layers(n) for n in (1e9, 1e10, 1e11)]
    [24, 51, 108]
    """
    return max(1, round(24 * math.pow(parameters / 1e9, 0.3266)))


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        parameters: How many values travel.
        layers: How many layers it has, of which fragments are made; 0: as many as a transformer of its size usually
            has.
        value_bytes: What a parameter takes: 4 in fp32, 2 in bf16.
        optimizer_values: How many values the inner optimizer keeps for each parameter, in fp32: 2 for Adam.

    >>> Model(1_000_000_000).layer_count
    24
    """

    parameters: int
    layers: int = 0
    value_bytes: int = 4
    optimizer_values: float = 2.0

    def __post_init__(self) -> None:
        _positive("parameters", self.parameters, such_as="1.3B")
        if self.layers < 0:
            raise UsageError(f"layers must be 0 (estimated) or more; got {self.layers}.")

    @property
    def layer_count(self) -> int:
        """The layers, given or estimated."""
        return self.layers or estimated_layers(self.parameters)


@dataclass(frozen=True)
class Link:
    """What carries values from a worker, or from a site, to the others.

    Attributes:
        up: Bits a second that leave it.
        down: Bits a second that come to it; 0: as many.
        latency_s: How long a small message takes, one way.
        efficiency: The share of the bits that are values: frames, headers and acknowledgements take the rest. 0.93 is
            what emulated links gave (docs/planning-accuracy.md).

    >>> Link(200e6).transfer_s(25_000_000)
    1.075...
    """

    up: float
    down: float = 0.0
    latency_s: float = 0.0
    efficiency: float = 0.93

    def __post_init__(self) -> None:
        _positive("bandwidth", self.up, such_as="200mbit")
        _positive("bandwidth down", self.down, zero=True, such_as="200mbit")
        _positive("latency", self.latency_s, zero=True, such_as="40ms")
        _positive("efficiency", self.efficiency, such_as="0.93")

    @property
    def slower(self) -> float:
        """Bits of values a second in the slower direction, in which as many go as in the other."""
        return min(self.up, self.down or self.up) * self.efficiency

    def transfer_s(self, size: float) -> float:
        """Return how long so many bytes take, each way at once."""
        return 8 * size / self.slower


@dataclass(frozen=True)
class Faults:
    """How often workers fail, and what it takes to go on.

    Attributes:
        mean_time_s: Between two failures of one worker; 0: they do not fail.
        restart_s: Until a failed worker is back.
        checkpoint_s: Between two checkpoints, from which all go on under `raise_error`.

    >>> Faults(mean_time_s=86400).rate(24) * 3600
    1.0
    """

    mean_time_s: float = 0.0
    restart_s: float = 120.0
    checkpoint_s: float = 900.0

    def __post_init__(self) -> None:
        _positive("mean time between failures", self.mean_time_s, zero=True, such_as="72h")
        _positive("restart", self.restart_s, zero=True, such_as="2min")
        _positive("checkpoint interval", self.checkpoint_s, zero=True, such_as="15min")

    def rate(self, workers: int) -> float:
        """Return the failures a second of so many workers."""
        return workers / self.mean_time_s if self.mean_time_s else 0.0


@dataclass(frozen=True)
class Cluster:
    """Who trains, and over what they meet.

    Attributes:
        workers: How many.
        link: Each worker's own link.
        step_s: A local step of a usual worker.
        sites: Into how many sites the workers are cut, in order; each has a link to the others that its workers share.
        uplink: That link, where there are several sites.
        host_workers: Workers of one host, for levels of the "host".
        slowest: How many times a usual step the slowest worker takes.
        jitter: The standard deviation of a step, as a share of it.
        straggle: How often a step is a straggler's, from 0 to 1.
        straggle_s: For how long one holds up its step.
        faults: How often workers fail.

    >>> Cluster(8, Link(1e9), 0.8, sites=2, uplink=Link(1e8)).site_workers
    4
    """

    workers: int
    link: Link
    step_s: float
    sites: int = 1
    uplink: Link | None = None
    host_workers: int = 1
    slowest: float = 1.0
    jitter: float = 0.0
    straggle: float = 0.0
    straggle_s: float = 0.0
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"workers must be a whole number of 1 or more; got {self.workers!r}.")
        _positive("step", self.step_s, such_as="0.8s")
        if self.sites < 1 or self.workers % self.sites:
            raise UsageError(
                f"sites must divide the workers into equal parts; got {self.sites} sites of {self.workers} workers."
            )
        if self.sites > 1 and self.uplink is None:
            raise UsageError(f"{self.sites} sites need the link between them: give its bandwidth, such as 100mbit.")
        if self.slowest < 1 or not math.isfinite(self.slowest):
            raise UsageError(
                f"slowest is how many times a usual step the slowest worker takes, 1 or more; got {self.slowest}."
            )
        _positive("jitter", self.jitter, zero=True, such_as="0.05")
        if not 0 <= self.straggle <= 1:
            raise UsageError(f"straggle is a share of the steps, from 0 to 1; got {self.straggle}.")
        _positive("straggle time", self.straggle_s, zero=True, such_as="2s")

    @property
    def site_workers(self) -> int:
        """How many workers each site has."""
        return self.workers // self.sites


# Seconds a value, of one thread on the machine of lab/results (docs/planning-accuracy.md).
_CODEC_S = {"fp32": 0.0, "bf16": 1.5e-9, "fp16": 1.5e-9, "int8": 2.5e-9, "e3m0": 4.5e-9, "topk": 25e-9}


@dataclass(frozen=True)
class Work:
    """What a value costs a worker's processor in a round, in seconds.

    Attributes:
        pack_s: To be copied out at the launch.
        land_s: To be copied in at the landing.
        outer_s: To be made a difference and, from the mean, a new anchor.
        codec_s: To be encoded, or decoded, by codec; "*" for others.
        contention: How much background work slows training down: 1 where both share a processor, 0 on a GPU.
        scale: By what all of it is multiplied: what calibration found.

    >>> Work().of("error_feedback(int8)") == Work().of("int8")
    True
    """

    pack_s: float = 1.5e-9
    land_s: float = 1.5e-9
    outer_s: float = 6e-9
    codec_s: Mapping[str, float] = field(default_factory=lambda: dict(_CODEC_S))
    contention: float = 0.5
    scale: float = 1.0

    def of(self, codec: str) -> float:
        """Return the seconds that a value takes to be encoded, or decoded."""
        for name, seconds in self.codec_s.items():
            if codec.removeprefix("error_feedback(").startswith(name):
                return seconds
        return self.codec_s.get("*", 5e-9)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {**self.__dict__, "codec_s": dict(self.codec_s)}
