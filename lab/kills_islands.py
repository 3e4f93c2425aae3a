"""Kill ranks of replicas of two ranks at random phases of rounds, many times, and count what must not happen.

    python lab/kills_islands.py --kills 1000 --out lab/results/kills_islands.json

Each run has four replicas, by FSDP2 or DDP. One rank of two of them is killed by SIGKILL, two rounds apart, at a phase
drawn from a seed; two replicas live. A *wrong commit* is a round after which the ranks that have one place in the
surviving replicas do not hold the same bits, or one that failed and changed something on one of them. The mate of a
killed rank must end with an error; one that trains on is wrong too.

A run that is stopped, or ended by ``--minutes``, goes on from what is in the file.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kills import kill_on

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "multiprocess")]

PERIOD = 4
KILLS = 2  # in a run


def strike(pool: Any, dice: random.Random, told: dict[str, Any]) -> None:
    """Kill a rank of two replicas of a run, one after the other, and count what came of it."""
    from test_faults_islands import die_in_turn

    from cadenza.participants.store import serve
    from support.faults import PHASES
    from support.ranks import RankFailure

    phases = [dice.choice(("between", *PHASES)) for _ in range(KILLS)]
    # Only the first rank of a replica signs.
    places = [0 if phase == "signed" else dice.randrange(2) for phase in phases]
    victims = [2 * replica + place for replica, place in enumerate(places, start=1)]
    kind, name = dice.choice(("fsdp", "ddp")), dice.choice(("diloco", "feedback"))
    told["kills"] = dict(Counter(told["kills"]) + Counter(phases))
    store, case = serve(host="127.0.0.1"), [kind, name, phases, victims]
    try:
        results = pool.run(
            2 * (KILLS + 2),
            die_in_turn,
            store.port,
            kind,
            name,
            phases,
            victims,
            init=False,
            expect_dead=set(victims),
            timeout_s=120,
        )
    except RankFailure as failure:
        told["unclear"].append([*case, str(failure)[:2000]])
        return
    judge(results, case, told)


def judge(results: list[Any], case: list[Any], told: dict[str, Any]) -> None:
    """Count what a run has shown."""
    import torch

    _, _, phases, victims = case
    living = [0, 1, len(results) - 2, len(results) - 1]
    wrong = [results[one] for one in living if results[one][0] != "ok"]
    if wrong:
        changed = any("a failed round changed" in str(one) for one in wrong)
        told["wrong_commits" if changed else "unclear"].append([*case, str(wrong[0])[:2000]])
        return
    if any(results[victim ^ 1][0] == "ok" for victim in victims):
        told["wrong_commits"].append([*case, "the mate of a killed rank trained on"])
    here = [results[one][1] for one in living]
    for first, last in ((here[0], here[2]), (here[1], here[3])):
        if not torch.equal(first["values"], last["values"]):
            told["wrong_commits"].append([*case, first["rounds"], last["rounds"]])
    if any(one["rounds"] != here[0]["rounds"] for one in here):  # a lease ran out on a replica that was alive
        told["left_out_though_alive"] += 1
    for replica, phase in enumerate(phases, start=1):
        # What a death costs: the time that the round of that moment, and the next one, stood still.
        step = 2 * PERIOD * replica
        stall_s = max(sum(one["stalls"].get(s, 0.0) for s in (step, step + PERIOD)) for one in here)
        told["stalls"].setdefault(phase, []).append(round(stall_s, 4))
    told["usual"] += [round(one["stalls"][PERIOD], 4) for one in here]


if __name__ == "__main__":
    sys.exit(kill_on(strike, Path("lab/results/kills_islands.json"), __doc__))
