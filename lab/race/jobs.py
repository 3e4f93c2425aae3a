"""What a worker is to do: one method at its settings, for some steps, on one model; the same on every host."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

__all__ = ["LARGE", "MIDDLE", "SMALL", "Job", "Size"]


@dataclass(frozen=True)
class Size:
    """How large the GPT is, and the steps that a worker takes on it."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 128
    batch: int = 4


SMALL = Size(layers=2, width=64, heads=2, context=32, batch=2)
MIDDLE = Size(layers=2, width=128, heads=4, context=64, batch=8)
LARGE = Size()


@dataclass(frozen=True)
class Job:
    """One run of one method.

    Attributes:
        method: A name of `lab.race.rivals.METHODS`.
        period: Steps from one synchronisation to the next; 1 for a method that sends gradients.
        settings: The method's own, such as its outer learning rate.
        steps: Steps that are measured.
        horizon: Steps that the learning rate's schedule is made for; `steps` if 0.
        warm: Steps before the clock starts: connections are made and the first round has landed.
        floor_every: Steps between two blocks of compute alone, which a twin of the model takes in the same processes;
            0: none. The machine's own speed changes by the minute, and less from one block to the next.
        evaluate_every: Steps between two held-out losses; 0: none. Time and bytes do not include them.
        millions: If not 0, the model is no GPT but so many million values in square matrices, with next to no
            compute: the cost of one synchronisation is what remains.
    """

    method: str
    period: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    horizon: int = 0
    warm: int = 2
    floor_every: int = 0
    evaluate_every: int = 0
    windows: int = 256
    millions: float = 0
    size: Size = LARGE
    lr: float = 1e-3
    lr_warmup: int = 20
    seed: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        figures = json.loads(text)
        return cls(**{**figures, "size": Size(**figures["size"])})

    def but(self, **changes: Any) -> Self:
        return replace(self, **changes)
