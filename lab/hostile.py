"""Ten minutes of a hostile client at the store's port, and at the workers', while four workers train with a secret.

    python -m lab.hostile --minutes 10
    python -m lab.hostile --minutes 10 --open-store    # the store itself was started without the secret

First nobody disturbs them; then a stranger who does not know the secret does everything that
`lab/hostile_attacks.py` can think of, one thing after another and all at once. Nobody may end, no two workers may ever
hold other bits after a round, rounds before the first one that failed must have the bits of the quiet run, memory must
stay bounded, and rounds must be held. Needs root, for a network of its own: strangers try every port that they find.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.crew import Crew, start_store, until, usage
from lab.crew_worker import Log, disagreeing, work
from lab.hostile_attacks import ATTACKS

RESULTS = Path(__file__).parent / "results"
WORKERS, PERIOD, STEP_S = 4, 2, 0.02
LAST_STEPS = 50  # after the attacks, and told to all: nobody may end before
PATIENCE_S = 300.0
MOST_KB = {"worker": 64 << 10, "store": 256 << 10}  # by which memory may grow: 4 MB under each of some 20 keys
OWN_NETWORK = ("unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run(
    minutes: float,
    folder: Path,
    *,
    secret: str | None,
    store_secret: str | None,
    attacks: list[str] | None = None,
) -> dict[str, Any]:
    """Train for a while, with a stranger who does these things or without one; return what came of it."""
    folder.mkdir()
    store, port = start_store(secret=store_secret)
    told = {"address": f"127.0.0.1:{port}", "workers": WORKERS, "logs": str(folder), "period": PERIOD}
    crew = Crew(work, {**told, "step_s": STEP_S, "grace_s": 3.0, "secret": secret})
    logs = [Log(folder / f"{worker}.jsonl") for worker in range(WORKERS)]
    samples: list[dict[str, int]] = []
    stranger = None
    try:
        for worker in range(WORKERS):
            crew.start(worker)
        until(lambda: all(len(log.grow().rounds) >= 20 for log in logs), PATIENCE_S, "the first rounds")
        began = time.time()
        if attacks:
            complaints = (folder / "complaints").open("w")
            command = [sys.executable, "-m", "lab.hostile_attacks", f"--port={port}", f"--seconds={60 * minutes}"]
            command += ["--kinds", *attacks]
            stranger = subprocess.Popen(command, stdout=(folder / "attacks").open("w"), stderr=complaints)
        while time.time() < began + 60 * minutes and not crew.ended():
            workers = [crew.usage(worker).get("kB", 0) for worker in range(WORKERS)]
            samples.append({"worker": max(workers), "store": usage(store.pid).get("kB", 0)})
            time.sleep(2.0)
        ended = crew.ended()  # nobody may have
        over = time.time()
        last = max(line["step"] for log in logs for line in log.grow().lines if "step" in line) + LAST_STEPS
        (folder / "next").write_text(str(last))
        (folder / "next").rename(folder / "last_step")
        codes = {worker: crew.join(worker, PATIENCE_S) for worker in range(WORKERS)}
    finally:
        if stranger is not None:
            stranger.kill()
            stranger.wait()
        crew.close()
        store_ended = store.poll()
        store.kill()
        store.wait()
    ends = [log.grow().lines[-1] for log in logs]
    grown = {who: max(s[who] for s in samples) - samples[0][who] for who in MOST_KB}
    return {
        "ended_early": {str(worker): code for worker, code in ended.items()},
        "exit_codes": {str(worker): code for worker, code in codes.items()},
        "store_ended": store_ended,
        "equal_at_the_end": len({end.get("digest") for end in ends if end["kind"] == "end"}) == 1
        and all(end["kind"] == "end" for end in ends),
        "disagreeing_steps": disagreeing(logs),
        "rounds_a_minute": _rate(_held(logs), began, over),
        "longest_apart_s": max(_longest([line["at"] for line in log.rounds], began, over) for log in logs),
        "grown_kB": grown,
        "bits": _bits(logs),
        "turns": [_turn(logs, line, over) for line in _attacks(folder)],
    }


def _held(logs: list[Log]) -> list[float]:
    """Return when each round was held, whoever held it."""
    times = {line["step"]: line["at"] for log in logs for line in log.rounds}
    return sorted(times.values())


def _rate(times: list[float], began: float, over: float) -> float:
    return round(60 * sum(began <= at < over for at in times) / max(1e-9, over - began), 1)


def _longest(times: list[float], began: float, over: float) -> float:
    """Return the longest time without a round."""
    within = [at for at in times if began <= at < over]
    return round(max(b - a for a, b in pairwise([began, *within, over])), 2)


def _bits(logs: list[Log]) -> dict[int, str]:
    """Return the bits after each round, up to the first that was not held by all."""
    found: dict[int, str] = {}
    failed = {line["step"] for log in logs for line in log.lines if line["kind"] == "failed"}
    for line in logs[0].rounds:
        step = line["step"]
        if len(line["members"]) < WORKERS or step in failed or step != (len(found) + 1) * PERIOD:
            return found
        found[step] = line["digest"]
    return found


def _attacks(folder: Path) -> list[dict[str, Any]]:
    path = folder / "attacks"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _turn(logs: list[Log], line: dict[str, Any], over: float) -> dict[str, Any]:
    """Return what an attack did, and how many rounds were held in its turn and in the pause after it."""
    began, ended = line["from"], line["until"]
    held = _held(logs)
    failed = sum(one["kind"] == "failed" and began <= one["at"] < ended for log in logs for one in log.lines)
    after = next((at for at in held if at >= ended), over)
    return {
        **{"kind": line["kind"], "done": line["done"], "failed": failed},
        "rounds_a_minute": _rate(held, began, ended),
        "longest_s": _longest(held, began, ended),
        "back_after_s": round(after - ended, 2),
    }


def judged(quiet: dict[str, Any], attacked: dict[str, Any]) -> dict[str, Any]:
    """Say whether the training was right, and went on."""
    bits = [(step, bits == attacked["bits"].get(step)) for step, bits in quiet["bits"].items()]
    compared = [same for step, same in bits if step in attacked["bits"]]
    right = (
        not attacked["ended_early"]
        and attacked["store_ended"] is None
        and all(code == [0] for code in attacked["exit_codes"].values())
        and attacked["equal_at_the_end"]
        and not attacked["disagreeing_steps"]
        and all(compared)
    )
    return {
        "right": right,
        "goes_on": all(turn["back_after_s"] < 5.0 for turn in attacked["turns"]),
        "memory_bounded": all(grown < MOST_KB[who] for who, grown in attacked["grown_kB"].items()),
        "rounds_with_the_bits_of_the_quiet_run": sum(compared),
        "rounds_a_minute_with_and_without": [attacked["rounds_a_minute"], quiet["rounds_a_minute"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--quiet-minutes", type=float, default=1.0)
    parser.add_argument("--no-secret", action="store_true", help="to see what anybody can do then")
    parser.add_argument("--open-store", action="store_true", help="a store that asks nobody for the secret")
    parser.add_argument("--kinds", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.inside:
        command = [*OWN_NETWORK, sys.executable, "-m", "lab.hostile", *sys.argv[1:], "--inside"]
        return subprocess.run(command, check=False).returncode
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    secret = None if given.no_secret else "known to the workers alone"
    secrets = {"secret": secret, "store_secret": None if given.open_store else secret}
    out = given.out or RESULTS / ("hostile_open_store.json" if given.open_store else "hostile.json")
    with tempfile.TemporaryDirectory(prefix="hostile-") as temporary:
        folder = given.logs or Path(temporary)
        quiet = run(given.quiet_minutes, folder / "quiet", **secrets)
        attacked = run(given.minutes, folder / "attacked", **secrets, attacks=given.kinds)
    verdict = judged(quiet, attacked)
    for one in (quiet, attacked):
        one["bits"] = len(one["bits"])
    for turn in attacked["turns"]:
        print(json.dumps(turn))
    print(json.dumps({**verdict, **{key: value for key, value in attacked.items() if key != "turns"}}, indent=1))
    out.write_text(json.dumps({"verdict": verdict, "quiet": quiet, "attacked": attacked}, indent=1) + "\n")
    return 0 if verdict["right"] and verdict["goes_on"] and verdict["memory_bounded"] else 1


if __name__ == "__main__":
    sys.exit(main())
