"""What a round tells about itself: plain figures, written as one line of JSON.

>>> report = RoundReport.example(drift=0.02)
>>> RoundReport.from_json(report.to_json()) == report
True
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

__all__ = ["RoundReport"]


@dataclass(frozen=True, kw_only=True)
class RoundReport:
    """One round as one rank saw it, after it landed.

    Sizes are bytes, times are seconds, and each figure belongs to this rank unless it says otherwise.

    Attributes:
        step: The clock's step (calls of `sync.step()`, warm-up included, from 1) at which the round was launched.
        level: The level that came together, counted from 0, the innermost.
        level_name: That level's name.
        fragment: The fragment that was averaged, counted from 0.
        fragment_name: That fragment's name.
        bytes_sent: Bytes that this rank handed to the transport for this round, all stages and the header together.
        encoded_bytes: Size of this rank's contribution as the codec wrote it, before any of it is cut or repeated. At a
            level that is staged (reduced inside the inner groups first) it is this rank's part of its group's mean.
        raw_bytes: Size of the same contribution in the dtype in which it was packed; encoded_bytes / raw_bytes is what
            the codec saves.
        stall_s: Time for which the training loop stood still for this round: in launching and in landing it.
        wire_s: Time from handing the first byte to the transport until the last one of the result was in. With a delay
            most of it passes while training goes on, and stall_s is less.
        delay: Local steps from launch to landing; 0 if the round landed in the step that launched it.
        drift: How far the workers had spread, sqrt(mean‖δ_i‖² − ‖mean δ‖²) / ‖mean‖; the same number on all ranks. None
            if it was not measured. Under a lossy codec, and where 16-bit values are averaged in place, the spread is
            estimated from random projections of the values: the standard error of the drift is 1.6 % of it for two
            workers and 0.9 % for four (8 KiB to each of the others); it is 0 where all have done the same.
        codec: The codec's own description of itself.
        codec_error: ‖decoded − δ‖ / ‖δ‖ of the same contribution; None if the codec is exact or the difference 0.
        weights: The weight of each participant in the mean, in the order of `participants`.
        participants: The global ranks whose contributions the mean is made of, ascending.
        reason: Why the round failed; empty if it did not.
        decision: What the round has changed of period and codec, where these follow measured times, and why.
        absent: Workers that were expected and did not take part, ascending.
        kind: What sort of event is reported: "round", or "failed" for a round that changed nothing.

    >>> def compression(report: RoundReport) -> float:
    ...     return report.raw_bytes / report.encoded_bytes
    >>> compression(RoundReport.example(encoded_bytes=1_000_000, raw_bytes=4_000_000))
    4.0
    """

    step: int
    level: int
    level_name: str
    fragment: int
    fragment_name: str
    bytes_sent: int
    encoded_bytes: int
    raw_bytes: int
    stall_s: float
    wire_s: float
    delay: int
    drift: float | None
    codec: str
    codec_error: float | None
    weights: tuple[float, ...]
    participants: tuple[int, ...]
    reason: str = ""
    absent: tuple[int, ...] = ()
    kind: str = "round"
    decision: str = ""

    @classmethod
    def example(cls, **figures: Any) -> RoundReport:
        """Return a made-up report, to try an observer out before a run; `figures` replace some of it.

        >>> RoundReport.example(step=16).step
        16
        """
        return replace(
            cls(
                step=500,
                level=0,
                level_name="world",
                fragment=0,
                fragment_name="all",
                bytes_sent=3_000_064,
                encoded_bytes=2_000_000,
                raw_bytes=2_000_000,
                stall_s=0.01,
                wire_s=0.25,
                delay=0,
                drift=None,
                codec="fp32",
                codec_error=None,
                weights=(1.0, 1.0, 1.0, 1.0),
                participants=(0, 1, 2, 3),
            ),
            **figures,
        )

    @property
    def landed_at(self) -> int:
        """The clock's step at which the round landed: loggers want steps that never go back.

        >>> RoundReport.example(step=16, delay=2).landed_at
        18
        """
        return self.step + self.delay

    def figures(self, *, prefix: str = "") -> dict[str, float]:
        """Return what can be drawn as a curve, by name; what was not measured is left out.

        With a prefix every name begins with it and with the level and the fragment that it is of. Of a round that
        failed there are `failed`, which is 1, and what it cost.

        >>> RoundReport.example(drift=0.02).figures()
        {'bytes_sent': 3000064, 'encoded_bytes': 2000000, 'stall_s': 0.01, 'wire_s': 0.25, 'participants': 4,
        'drift': 0.02}
        >>> RoundReport.example(kind="failed").figures(prefix="cadenza")
        {'cadenza/world/all/failed': 1, 'cadenza/world/all/bytes_sent': 3000064, 'cadenza/world/all/stall_s': 0.01}
        """
        found: dict[str, float | None]
        if self.kind == "failed":
            found = {"failed": 1, "bytes_sent": self.bytes_sent, "stall_s": self.stall_s}
        else:
            found = {
                "bytes_sent": self.bytes_sent,
                "encoded_bytes": self.encoded_bytes,
                "stall_s": self.stall_s,
                "wire_s": self.wire_s,
                "participants": len(self.participants),
                "drift": self.drift,
                "codec_error": self.codec_error,
            }
        place = f"{prefix}/{self.level_name or self.level}/{self.fragment_name or self.fragment}/" if prefix else ""
        return {place + name: value for name, value in found.items() if value is not None}

    def to_json(self) -> str:
        """Return the report as one line of strict JSON.

        JSON has no infinity and no NaN; they are written as the strings "inf", "-inf" and "nan".

        >>> RoundReport.example(drift=float("inf")).to_json()
        '{"step": 500, ..., "drift": "inf", ..., "kind": "round", "decision": ""}'
        """
        return json.dumps({name: _plain(value) for name, value in asdict(self).items()}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RoundReport:
        """Return the report that `to_json` wrote; what a later version may have added is left out.

        >>> text = RoundReport.example().to_json()
        >>> RoundReport.from_json(text.replace("{", '{"added_later": true, ')) == RoundReport.example()
        True
        """
        figures = json.loads(text)
        if not isinstance(figures, dict):
            raise ValueError(f"A report is a JSON object; got {text[:80]!r}.")
        known = {field.name: field for field in fields(cls)}
        if missing := [name for name, field in known.items() if field.default is MISSING and name not in figures]:
            raise ValueError(f"A report names its {', '.join(missing)}; got {text[:80]!r}.")
        return cls(**{name: _restored(name, str(known[name].type), figures[name]) for name in known if name in figures})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _restored(name: str, kind: str, value: Any) -> Any:
    """Return a field's value of the type that it is annotated with; infinity and NaN are texts in JSON."""
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix(" | None")
    try:
        if kind.startswith("tuple["):
            of = kind.removeprefix("tuple[").removesuffix(", ...]")
            return tuple(_restored(name, of, item) for item in [*value])
        if kind == "float" and not isinstance(value, bool):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    else:
        if type(value).__name__ == kind:
            return value
    raise ValueError(f"The {name} of a report is of type {kind}; got {value!r}.")
