"""Kill workers at random phases of rounds, many times, and count what must not happen.

    python lab/kills.py --kills 1000 --out lab/results/kills.json

Each run has six workers. Four are killed by SIGKILL, two rounds apart, each at a phase drawn from a seed; two live. The
ranks are those of the test suite's pool, which replaces a dead one in milliseconds. A *wrong commit* is a round after
which the survivors do not hold the same bits, or one that failed and changed something on one of them.

A run that is stopped, or ended by ``--minutes``, goes on from what is in the file.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "multiprocess")]

PERIOD = 5
FRESH: dict[str, Any] = {
    "kills": {},
    "wrong_commits": [],
    "unclear": [],  # runs that did not end as they should have, without anything wrong being seen
    "left_out_though_alive": 0,
    "seconds": 0.0,
    "stalls": {},
    "usual": [],
}


def main() -> int:
    return kill_on(strike, Path("lab/results/kills.json"), __doc__)


def kill_on(strike: Callable[[Any, random.Random, dict[str, Any]], None], out: Path, about: str) -> int:
    """Strike until there were kills enough, and go on from what stands in a file; return the exit code."""
    from cadenza.participants.name_lookup import use_hosts_file_only
    from support.ranks import RankPool

    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="to be gone on with later")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args()
    use_hosts_file_only()
    pool = RankPool()
    told = json.loads(given.out.read_text()) if given.out.exists() else FRESH
    started, before = time.monotonic(), told["seconds"]
    while (done := sum(told["kills"].values())) < given.kills and time.monotonic() - started < given.minutes * 60:
        strike(pool, random.Random(f"{given.seed} {done}"), told)
        told["seconds"] = round(before + time.monotonic() - started, 1)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(summed_up(told)) + "\n")
    pool.close()
    shown = {key: value for key, value in summed_up(told).items() if key not in ("stalls", "usual")}
    print(json.dumps(shown, indent=1))
    return 1 if told["wrong_commits"] else 0


def strike(pool: Any, dice: random.Random, told: dict[str, Any]) -> None:
    """Kill four workers of a run, one after the other, and count what came of it."""
    import torch
    from test_faults_phases import die_in_turn

    from cadenza.participants.store import serve
    from support.faults import PHASES
    from support.ranks import RankFailure

    phases, codec = [dice.choice(PHASES) for _ in range(4)], dice.choice(("fp32", "int8"))
    told["kills"] = dict(Counter(told["kills"]) + Counter(phases))
    store = serve(host="127.0.0.1")
    try:
        results = pool.run(
            6, die_in_turn, store.port, phases, codec, init=False, expect_dead={1, 2, 3, 4}, timeout_s=120
        )
    except RankFailure as failure:
        changed = "a failed round changed" in str(failure)
        told["wrong_commits" if changed else "unclear"].append([phases, codec, str(failure)[:2000]])
        return
    first, last = results[0], results[-1]
    if not torch.equal(first["values"], last["values"]):
        told["wrong_commits"].append([phases, codec, first["rounds"], last["rounds"]])
    elif first["rounds"] != last["rounds"]:  # a lease ran out on a worker that was alive, and it came back
        told["left_out_though_alive"] += 1
    told["lost_steps"] = told.get("lost_steps", 0) + 2 * first["clock"] - first["taken"] - last["taken"]
    for worker, phase in enumerate(phases, start=1):
        # What a death costs: the time that the round of that moment, and the next one, stood still.
        step = 2 * PERIOD * worker
        stall_s = max(sum(one["stalls"].get(s, 0.0) for s in (step, step + PERIOD)) for one in (first, last))
        told["stalls"].setdefault(phase, []).append(round(stall_s, 4))
    told["usual"] += [round(one["stalls"][PERIOD], 4) for one in (first, last)]


def summed_up(told: dict[str, Any]) -> dict[str, Any]:
    """Add what all kills come to."""
    every = [stall for stalls in told["stalls"].values() for stall in stalls]
    figures = {"all": every, **told["stalls"]}
    return {
        "usual_round_s": statistics.median(told["usual"] or [0.0]),
        "stall_s": {phase: _spread(stalls) for phase, stalls in figures.items() if stalls},
        **{key: value for key, value in told.items() if key not in ("usual_round_s", "stall_s")},
    }


def _spread(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {"median": statistics.median(values), "99 %": values[int(0.99 * (len(values) - 1))], "worst": values[-1]}


if __name__ == "__main__":
    sys.exit(main())
