"""What is tried where, in which order, as the command and its workers both know it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from cadenza.cli.selftest.parts import PARTS
from cadenza.cli.selftest.setups import Setup

__all__ = ["Plan", "Trial", "result_key"]


@dataclass(frozen=True)
class Trial:
    """One cell of the table: a part in a setup."""

    part: str
    setup: Setup

    @property
    def dies(self) -> int | None:
        """The worker that is to die in it."""
        return self.setup.workers - 1 if PARTS[self.part].elastic else None


@dataclass(frozen=True)
class Plan:
    """All trials, in their order, and what a worker needs to take part.

    Attributes:
        workers: How many processes there are.
        address: Where the store is.
        timeout_s: How long a worker waits for the others in a trial.
        trials: What is tried.
    """

    workers: int
    address: str
    timeout_s: float
    trials: tuple[Trial, ...]

    @classmethod
    def make(cls, parts: Sequence[str], setups: Sequence[Setup], *, address: str, timeout_s: float) -> Plan:
        """Return the trials of these parts in all setups that are here.

        A worker dies in the last one: that part is tried in one setup, in which workers meet over Gloo.
        """
        here = [setup for setup in setups if not setup.missing]
        usual = [Trial(part, setup) for setup in here for part in parts if not PARTS[part].elastic]
        last = [Trial(part, setup) for setup in here for part in parts if PARTS[part].elastic and setup.way == "gloo"]
        return cls(max(setup.workers for setup in here), address, timeout_s, (*usual, *last[:1]))

    def to_json(self) -> str:
        """Return the plan as a worker gets it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that was written."""
        fields = json.loads(text)
        trials = tuple(Trial(trial["part"], Setup(**trial["setup"])) for trial in fields.pop("trials"))
        return cls(**fields, trials=trials)


def result_key(trial: int, rank: int) -> str:
    """Return where a worker writes what came of a trial."""
    return f"result/{trial}/{rank}"
