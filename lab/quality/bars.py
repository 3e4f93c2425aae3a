"""The bounds that the project has set itself, and whether they hold: never more than what three seeds can tell."""

from __future__ import annotations

from dataclasses import dataclass

from lab.quality.figures import baseline_of, change_of, excesses, final_of, mean_and_error, told
from lab.quality.records import Records
from lab.quality.studies import SEEDS, Study, Variant, find

__all__ = ["BARS", "Bar", "CodecBar", "NearerBar"]


@dataclass(frozen=True)
class Bar:
    """A bound on the mean excess of an entry over its baseline, in percent."""

    name: str
    entry: str
    most: float

    @property
    def bound(self) -> str:
        return f"at most {self.most:+.1f} % against DDP"

    def verdict(self, records: Records) -> str:
        found = _excesses_of(self.entry, records)
        if found is None:
            return _first_look(self.entry, records)
        return f"{told(found)}: {_held(mean_and_error(found)[0] <= self.most)}"


@dataclass(frozen=True)
class CodecBar:
    """How much a codec may cost, in percent of what its method ends with in fp32: missed beyond one standard error."""

    name: str
    entry: str
    most: float

    @property
    def bound(self) -> str:
        return f"at most {self.most:+.1f} % against fp32 beyond one standard error"

    def verdict(self, records: Records) -> str:
        variant = find(self.entry)
        assert isinstance(variant, Variant)
        found = change_of(variant, records)
        if len(found) < len(SEEDS):
            return "not measured yet"
        mean, error = mean_and_error(found)
        return f"{told(found)}: {_held(mean - (error or 0) <= self.most)}"


@dataclass(frozen=True)
class NearerBar:
    """One entry is to be nearer its own baseline than another one is its; judged seed by seed, by the difference."""

    name: str
    entry: str
    other: str

    @property
    def bound(self) -> str:
        return f"nearer its DDP than {self.other}"

    def verdict(self, records: Records) -> str:
        ours, theirs = _excesses_of(self.entry, records), _excesses_of(self.other, records)
        if ours is None or theirs is None:
            return "not measured yet"
        further = [a - b for a, b in zip(ours, theirs, strict=True)]
        mean, error = mean_and_error(further)
        verdict = "not told apart" if abs(mean) <= (error or 0) else _held(mean < 0)
        return f"{told(further)} further ({told(ours)}, the other {told(theirs)}): {verdict}"


def _excesses_of(name: str, records: Records) -> list[float] | None:
    entry = find(name)
    ours, theirs = final_of(entry, records), final_of(baseline_of(entry), records)
    return None if ours is None or theirs is None else excesses(ours.losses, theirs.losses)


def _first_look(name: str, records: Records) -> str:
    """Say what the tuning itself shows of a study whose final runs are missing."""
    study = find(name)
    assert isinstance(study, Study)
    best = []
    for one in (study, baseline_of(study)):
        point = one.found(records).best
        run = None if point is None else records.get(one.setting(point))
        if run is None:
            return "not measured yet"
        best.append((run["validation"], one.tuned(records) is not None))
    (ours, tuned), (theirs, tuned_too) = best
    goes_on = "" if tuned and tuned_too else ", and not all neighbours of the best settings tried"
    return f"not decided; {100 * (ours / theirs - 1):+.2f} % with the tuning's one seed, on its text{goes_on}"


def _held(held: bool) -> str:
    return "held" if held else "missed"


BARS = (
    Bar("one replica with an outer step", "diloco 1 workers period 30", 0.0),
    Bar("two workers", "diloco 2 workers period 30", 1.5),
    Bar("four workers", "diloco 4 workers period 30", 4.0),
    Bar("four workers, 3.3 M parameters", "diloco 4 workers period 30 3.3M", 2.8),
    NearerBar("Muon inside, four workers", "muloco 4 workers period 30", "diloco 4 workers period 30"),
    CodecBar("int8 with feedback", "int8 with feedback", 0.5),
    CodecBar("4 bits with feedback", "4 bits with feedback", 0.5),
    NearerBar("Muon inside, 35 k parameters", "muloco 4 workers period 30 35k", "diloco 4 workers period 30 35k"),
    CodecBar("int8 with feedback, 35 k parameters", "int8 with feedback 35k", 0.5),
    CodecBar("4 bits with feedback, 35 k parameters", "4 bits with feedback 35k", 0.5),
)
