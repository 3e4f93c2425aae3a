"""Kill workers at random phases of rounds, many times, and count what must not happen.

    python lab/kills.py --kills 1000 --out lab/results/kills.json

Each run has six workers. Four are killed by SIGKILL, two rounds apart, each at a phase drawn from a seed; two live. The
ranks are those of the test suite's pool, which replaces a dead one in milliseconds. A *wrong commit* is a round after
which the survivors do not hold the same bits, or one that failed and changed something on one of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "multiprocess")]

PERIOD = 5


def main() -> int:
    import torch
    from test_faults_phases import die_in_turn

    from cadenza.membership.names import ask_nobody
    from cadenza.membership.store import serve
    from support.faults import PHASES
    from support.ranks import RankFailure, RankPool

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("lab/results/kills.json"))
    given = parser.parse_args()
    ask_nobody()
    dice = random.Random(given.seed)
    pool = RankPool()
    kills: Counter[str] = Counter()
    wrong: list[Any] = []
    unclear: list[Any] = []  # runs that did not end as they should have, without anything wrong being seen
    lost_steps = left_out = 0
    stalls: dict[str, list[float]] = {phase: [] for phase in PHASES}
    usual: list[float] = []
    started = time.monotonic()
    while kills.total() < given.kills:
        phases = [dice.choice(PHASES) for _ in range(4)]
        codec = dice.choice(("fp32", "int8"))
        store = serve(host="127.0.0.1")
        try:
            results = pool.run(
                6, die_in_turn, store.port, phases, codec, init=False, expect_dead={1, 2, 3, 4}, timeout_s=120
            )
        except RankFailure as failure:
            changed = "a failed round changed" in str(failure)
            (wrong if changed else unclear).append([phases, codec, str(failure)[:2000]])
            print("changed" if changed else "unclear", phases, codec, str(failure)[:2000], flush=True)
            continue
        finally:
            kills.update(phases)
        first, last = results[0], results[-1]
        if not torch.equal(first["values"], last["values"]):
            wrong.append([phases, codec, first["rounds"], last["rounds"]])
            print("differ", wrong[-1], first["reasons"], last["reasons"], flush=True)
        elif first["rounds"] != last["rounds"]:  # a lease ran out on a worker that was alive, and it came back
            left_out += 1
        lost_steps += 2 * first["clock"] - first["taken"] - last["taken"]
        for worker, phase in enumerate(phases, start=1):
            # What a death costs: the time that the round of that moment, and the next one, stood still.
            step = 2 * PERIOD * worker
            stalls[phase].append(
                max(sum(one["stalls"].get(s, 0.0) for s in (step, step + PERIOD)) for one in (first, last))
            )
        usual += [first["stalls"][PERIOD], last["stalls"][PERIOD]]
        print(
            f"{kills.total()} kills, {len(wrong)} wrong, {len(unclear)} unclear, {time.monotonic() - started:.0f} s",
            flush=True,
        )
    pool.close()
    told = {
        "kills": dict(kills),
        "wrong_commits": wrong,
        "unclear": unclear,
        "left_out_though_alive": left_out,
        "lost_steps": lost_steps,
        "usual_stall_s": statistics.median(usual),
        "stall_s": {p: {"median": statistics.median(v), "worst": max(v)} for p, v in stalls.items() if v},
        "seconds": time.monotonic() - started,
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(told, indent=1))
    print(json.dumps({key: told[key] for key in ("lost_steps", "usual_stall_s", "stall_s")}, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
