"""What a run remembers, in one place: clock, levels, rounds in flight, counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from cadenza.engine.balance import Balance
from cadenza.engine.level_state import LevelState
from cadenza.engine.pacing import Pace
from cadenza.engine.pending import PendingRound
from cadenza.engine.round_result import RoundResult

__all__ = ["Counts", "RunState"]


@dataclass
class Counts:
    """What a worker counts.

    Attributes:
        samples: How many samples it has used.
        counted: How many of them each level had seen of each fragment ("level/fragment") at its last round.
        launched_at: At which step each of these rounds was launched.
        met_at: At which step all workers last held equal values of each fragment.
        exhausted: Whether this worker has run out of data.
        stopped_at: After which step it did.
        all_exhausted: Whether all have.
    """

    samples: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)
    launched_at: dict[str, int] = field(default_factory=dict)
    met_at: dict[int, int] = field(default_factory=dict)
    exhausted: bool = False
    stopped_at: int = 0
    all_exhausted: bool = False

    def since_last_round(self, level: int, fragment: int) -> float:
        """Return the samples used since a level's last round of a fragment."""
        return self.samples - self.counted.get(f"{level}/{fragment}", 0.0)

    def has_news(self, level: int, fragment: int, *, start: int) -> bool:
        """Say whether a level's next round of a fragment finds local steps of this worker that none has seen.

        `start` is the step after which local steps began.
        """
        return not self.exhausted or self.launched_at.get(f"{level}/{fragment}", start) < self.stopped_at

    def note_round(self, level: int, fragment: int, *, samples: float, step: int) -> None:
        """Remember that a level, and all inside it, have seen a fragment after so many samples and steps."""
        for inner in range(level + 1):
            self.counted[f"{inner}/{fragment}"] = samples
            self.launched_at[f"{inner}/{fragment}"] = step

    def stop(self, step: int) -> None:
        """Note that this worker has run out of data after a step."""
        if not self.exhausted:
            self.exhausted, self.stopped_at = True, step

    def facts(self) -> dict[str, Any]:
        """Return everything, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Counts:
        """Return what `facts` told; JSON has made texts of the fragments' numbers."""
        return cls(**{**facts, "met_at": {int(fragment): step for fragment, step in facts["met_at"].items()}})


@dataclass
class RunState:
    """Everything that a synchronizer remembers from step to step.

    Attributes:
        balance: How many local steps this worker takes in a period.
        pace: What it has measured of its steps and rounds, where something follows that.
        clock: How many steps were counted, warm-up included.
        levels: What each level remembers of each fragment.
        pending: The round in flight of each fragment.
        fragments: The fragment of each parameter that was ever seen to take part; it keeps it for good.
        known: Those of them that have one history on all ranks.
        fragment_count: How many fragments there are.
        counts: Samples, and when all last met.
        gradients_averaged: Whether the gradients of the coming step were averaged.
        phase: Which attempt at the last round is under way; 0 before that.
    """

    balance: Balance
    pace: Pace
    clock: int = 0
    levels: dict[tuple[int, int], LevelState] = field(default_factory=dict)
    pending: dict[int, PendingRound] = field(default_factory=dict)
    fragments: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    fragment_count: int = 0
    counts: Counts = field(default_factory=Counts)
    gradients_averaged: bool = False
    phase: int = 0

    @property
    def moment(self) -> int:
        """What ranks call the present: the clock or, where they take unequal numbers of steps, the period."""
        return self.balance.periods if self.balance.on else self.clock

    def wait_for_pending(self) -> None:
        """Wait until no round is under way: collectives are issued in one order on every rank."""
        for pending in self.pending.values():
            pending.wait()

    def results(self) -> dict[int, tuple[PendingRound, RoundResult]]:
        """Wait for the rounds in flight, and return those that have a result, by fragment."""
        found = {fragment: (pending, pending.result()) for fragment, pending in self.pending.items()}
        return {f: (pending, result) for f, (pending, result) in found.items() if isinstance(result, RoundResult)}

    def facts(self) -> dict[str, Any]:
        """Return what is this worker's own besides tensors and rounds in flight, as JSON can hold it."""
        return {
            "clock": self.clock,
            "counts": self.counts.facts(),
            "balance": self.balance.facts(),
            "pace": self.pace.facts(),
        }

    def set_facts(self, facts: Mapping[str, Any], *, own: bool) -> None:
        """Take what `facts` told; `own` says whether it was this worker's, whose data ran out or did not."""
        self.clock = facts["clock"]
        self.counts = Counts.from_facts(facts["counts"])
        if not own:  # another number of workers shares the data out anew
            self.counts.exhausted = self.counts.all_exhausted = False
        self.gradients_averaged = False
        self.balance.set_facts(facts["balance"])
        self.pace.set_facts(facts.get("pace", {}) if own else {})
