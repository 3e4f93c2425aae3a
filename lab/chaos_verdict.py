"""What the workers of `lab/chaos.py` said, held against what was done to them.

>>> said = {"worker-0": [{"kind": "round", "at": 11.0, "step": 6, "members": [0], "stall_s": 0.9, "reason": ""}]}
>>> match({"at": 10.0, "who": "worker-1", "what": "kill", "seconds": 1.0}, said)
{'seen': 'left out', 'step': 6, 'stall_s': 0.9, 'back_s': None}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["judge", "match", "read", "summary", "troubles"]

Line = dict[str, Any]
Troubles = dict[str, list[tuple[float, float]]]
WINDOW_S = 2.0  # after an event's end, in which the others may still report of it
RECOVERY_S = 10.0  # after its end, in which a worker's own waiting is its own trouble's
SLOW_S = 0.3  # a round that took longer was waited for


def read(logs: Path, name: str) -> list[Line]:
    """Return all that the processes in a place have said, one after the other."""
    files = sorted(logs.glob(f"{name}-*.out"), key=lambda path: int(path.stem.rpartition("-")[2]))
    texts = [line for file in files for line in file.read_text().split("\n")]
    return [json.loads(text) for text in texts if text.startswith("{") and text.endswith("}")]


def match(event: Line, said: dict[str, list[Line]], troubled: Troubles | None = None) -> Line:
    """Return how an event was seen by those whom it did not befall, and what it cost them.

    Args:
        event: What happened to whom, when, and for how many seconds.
        said: All that the workers have said.
        troubled: When something else befell them; what they say then is not the cost of this event.
    """
    at, until = event["at"], event["at"] + event["seconds"] + WINDOW_S
    who, troubled = event["who"], troubled or {}
    others = [
        line
        for name, lines in said.items()
        for line in lines
        if replica(name) != replica(who)
        and at <= line["at"] <= until
        and not _in_trouble(line["at"], troubled.get(replica(name), ()))
    ]
    rounds = sorted((line for line in others if line["kind"] in ("round", "failed")), key=lambda line: line["at"])
    stall_s = max((line["stall_s"] for line in rounds), default=0.0)
    if event["what"] == "store":
        return _first(rounds, _by_store, "rounds skipped") | {"stall_s": stall_s}
    number = int(replica(who).rpartition("-")[2])
    own = [line for line in said.get(who, []) if line["at"] >= at]
    if event["what"] == "poison":
        return _poison(number, own, rounds) | {"stall_s": stall_s}
    if event["what"] in ("kill", "crash"):
        joined = next((line["at"] for line in own if line["kind"] == "joined"), None)
        back_s = None if joined is None else round(joined - at - event["seconds"], 2)
    else:
        back = next((x for x in own if x["kind"] == "round" and x["at"] >= at + event["seconds"]), None)
        back_s = None if back is None else round(back["at"] - at - event["seconds"], 2)
    seen = _first(rounds, lambda line: _without(number, line), "left out")
    if not seen["step"]:
        seen = _first(rounds, lambda line: line["kind"] == "failed", "a round failed")
    if not seen["step"]:
        seen = _first(rounds, lambda line: line["stall_s"] > SLOW_S, "waited for")
    return seen | {"stall_s": stall_s, "back_s": back_s}


def troubles(events: Sequence[Line]) -> Troubles:
    """Return from when to when something was the matter with each worker, or a rank of it."""
    found: Troubles = {}
    for event in events:
        found.setdefault(replica(event["who"]), []).append((event["at"], event["at"] + event["seconds"]))
    return found


def replica(name: str) -> str:
    """Return of which worker somebody is a rank.

    >>> replica("worker-3.1"), replica("worker-3")
    ('worker-3', 'worker-3')
    """
    return name.partition(".")[0]


def column(name: str) -> str:
    """Return which place somebody has in its replica: those with one place in all of them hold the same.

    >>> column("worker-3.1"), column("worker-3")
    ('1', '')
    """
    return name.partition(".")[2]


def _in_trouble(at: float, times: Sequence[tuple[float, float]]) -> bool:
    return any(begin <= at <= end + RECOVERY_S for begin, end in times)


def _first(rounds: list[Line], fits: Any, name: str) -> Line:
    found = next((line for line in rounds if fits(line)), None)
    return {"seen": name, "step": found["step"]} if found else {"seen": "between rounds", "step": 0}


def _without(number: int, line: Line) -> bool:
    return number in line.get("absent", ()) or (line["kind"] == "round" and number not in line["members"])


def _by_store(line: Line) -> bool:
    return line["kind"] == "failed"


def _poison(number: int, own: list[Line], rounds: list[Line]) -> Line:
    """Say whether values that are not finite were left out, or thrown away before any round had them."""
    done = next((line for line in own if line["kind"] == "poisoned"), None)
    if done is None:
        return {"seen": "died before it", "step": 0}
    named = [line for line in rounds if "contribution" in line["reason"] and str(number) in line["reason"]]
    if named:
        return {"seen": "contribution left out", "step": named[0]["step"]}
    return {"seen": "thrown away", "step": done["step"]}


def summary(said: dict[str, list[Line]]) -> Line:
    """Return what a run came to: ends, rounds, and rounds after which not all held the same bits."""
    ends = {name: lines[-1] if lines and lines[-1]["kind"] == "end" else {} for name, lines in said.items()}
    landed: dict[tuple[int, str, str], set[str]] = {}  # by step, by the site if it is a round of one, and by column
    sizes: dict[tuple[int, str], int] = {}
    last = max((line["step"] for lines in said.values() for line in lines if "step" in line), default=0)
    for name, lines in said.items():
        for line in lines:
            if line["kind"] == "round" and line["step"] != last:  # there may be several at the end
                place = line["step"], line.get("circle", "")
                landed.setdefault((*place, column(name)), set()).add(line["digest"])
                sizes[place] = len(line["members"])
    failed = [line for lines in said.values() for line in lines if line["kind"] == "failed"]
    return {
        "workers": {name: {key: end.get(key) for key in ("digest", "loss", "taken")} for name, end in ends.items()},
        "rounds": len(sizes),
        "rounds_by_members": dict(sorted(Counter(sizes.values()).items())),
        "disagreeing_steps": sorted({step for (step, *_), digests in landed.items() if len(digests) > 1}),
        "failed": dict(Counter(_kind(line["reason"]) for line in failed)),
        "joined": sum(line["kind"] == "joined" for lines in said.values() for line in lines),
        "stall_s": _spread([line["stall_s"] for lines in said.values() for line in lines if "stall_s" in line]),
    }


def _kind(reason: str) -> str:
    """Return a reason without the numbers in it, so that equal ones can be counted."""
    short = reason.split(":")[0].split(";")[0]
    return " ".join("N" if any(sign.isdigit() for sign in word) else word for word in short.split())[:100]


def _spread(values: list[float]) -> Line:
    if not values:
        return {}
    values = sorted(values)
    return {"median": median(values), "99 %": values[int(0.99 * (len(values) - 1))], "worst": values[-1]}


def judge(quiet: Line, disturbed: Line) -> Line:
    """Say whether the disturbed run was as good as the quiet one."""
    ends = list(disturbed["workers"].values())
    last = {(column(name), end["digest"]) for name, end in disturbed["workers"].items()}
    columns = {column(name) for name in disturbed["workers"]}
    losses = [end["loss"] for end in ends if end["loss"] is not None]
    before = next(iter(quiet["workers"].values()))["loss"]
    verdict: Line = {
        "all_ended": disturbed["all_ended"],
        "agree_to_the_bit": len(last) == len(columns) and not disturbed["disagreeing_steps"],
        "loss": max(losses, default=None),
        "quiet_loss": before,
        "loss_ratio": max(losses, default=float("nan")) / before,
        "events": dict(Counter(event["what"] for event in disturbed["events"])),
        "seen": {what: _seen(what, disturbed["events"]) for what in sorted({e["what"] for e in disturbed["events"]})},
    }
    right = verdict["all_ended"] and verdict["agree_to_the_bit"] and not {"crash", "hung"} & verdict["events"].keys()
    verdict["good"] = right and verdict["loss_ratio"] < 1.02
    return verdict


def _seen(what: str, events: list[Line]) -> Line:
    mine = [event for event in events if event["what"] == what]
    back = [event["back_s"] for event in mine if event.get("back_s") is not None]
    return {
        **Counter(event["seen"] for event in mine),
        "stall_s": _spread([event["stall_s"] for event in mine]),
        **({"back_s": _spread(back)} if back else {}),
    }
