"""What the verdicts of `lab/soak.py` and `lab/hostile.py` say of runs that were not right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lab import hostile, soak
from lab.crew_worker import Log, disagreeing


def held(path: Path, *rounds: tuple[int, str, list[int]]) -> Log:
    lines = [{"kind": "round", "step": step, "digest": digest, "members": who} for step, digest, who in rounds]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "rou')
    return Log(path)


def test_a_log_is_read_as_it_grows_and_counts_other_members(tmp_path: Path) -> None:
    log = held(tmp_path / "0", (2, "a", [0, 1]), (4, "b", [0, 1])).grow()
    assert (len(log.rounds), log.changes) == (2, 0)
    with (tmp_path / "0").open("a") as file:
        file.write('nd", "step": 6, "digest": "c", "members": [0]}\n')
    assert (len(log.grow().rounds), log.changes, log.members) == (3, 1, [0])


def test_other_bits_after_a_round_are_found(tmp_path: Path) -> None:
    both = [0, 1]
    first = held(tmp_path / "0", (2, "a", both), (4, "b", both), (6, "c", both))
    second = held(tmp_path / "1", (2, "a", both), (4, "x", both), (6, "c", both))
    assert disagreeing([first, second]) == [4]


@pytest.mark.parametrize(("grown", "flat"), [(0.0, True), (0.5, False)])
def test_what_grows_in_the_second_half_is_not_flat(grown: float, flat: bool) -> None:
    samples = [{"rounds": 10 * i, "keys": 20 + min(i, 20) + grown * max(0, i - 50)} for i in range(100)]
    assert soak.judged(samples, "rounds", 1000)["keys"]["flat"] is flat


def attacked(**more: Any) -> dict[str, Any]:
    return {
        "ended_early": {},
        "store_ended": None,
        "exit_codes": {"0": [0], "1": [0]},
        "equal_at_the_end": True,
        "disagreeing_steps": [],
        "rounds_a_minute": 100.0,
        "grown_kB": {"worker": 100, "store": 100},
        "bits": {2: "a", 4: "b"},
        "turns": [{"back_after_s": 0.1}],
    } | more


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        ({"exit_codes": {"0": [0], "1": [1]}}, "right"),
        ({"ended_early": {"1": [0]}}, "right"),
        ({"store_ended": -6}, "right"),
        ({"disagreeing_steps": [4]}, "right"),
        ({"bits": {2: "a", 4: "x"}}, "right"),
        ({"turns": [{"back_after_s": 60.0}]}, "goes_on"),
        ({"grown_kB": {"worker": 1 << 30, "store": 0}}, "memory_bounded"),
    ],
)
def test_a_run_that_was_disturbed_is_told_from_one_that_was_not(wrong: dict[str, Any], verdict: str) -> None:
    quiet = attacked()
    good = {"right": True, "goes_on": True, "memory_bounded": True}
    assert hostile.judged(quiet, attacked()).items() >= good.items()
    assert hostile.judged(quiet, attacked(**wrong)).items() >= (good | {verdict: False}).items()
