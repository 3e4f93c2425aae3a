"""Whether anything grows: keys in the store, file descriptors, threads and memory over rounds and over generations.

    python -m lab.soak --rounds 10000 --generations 500

Four tiny workers hold rounds without a pause. Then two of them are killed, or leave, in turn, and come back, so that a
process group is made anew each time; the other two are there from the first round to the last. What the store and
these two hold is written down once in a while; a line fitted to the second half of each part says what grows.

Memory is what the kernel says, so it has in it what Python's collector and the allocator have not given back yet:
``--collect`` lets workers collect every few seconds, and ``--arenas 1`` lets all threads share one arena.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lab.crew import Crew, slope, start_store, until, usage
from lab.crew_worker import Log, disagreeing, work

RESULTS = Path(__file__).parent / "results" / "soak.json"
WORKERS, LIVING = 4, (0, 1)
SETTLED = 8  # rounds, after which nothing is left of the making of a group
PATIENCE_S = 300.0  # beside others this machine may stand still for minutes
BOUNDS = {"keys": 4.0, "descriptors": 4.0, "threads": 2.0, "kB": 2048.0}  # of growth in a whole part
Sample = dict[str, Any]


class Soak:
    """A job that is watched."""

    def __init__(self, folder: Path, *, collect: bool = False) -> None:
        self.store, port = start_store()
        address = f"127.0.0.1:{port}"
        told = {"address": address, "workers": WORKERS, "logs": str(folder), "period": 1}
        self.crew = Crew(work, {**told, "grace_s": 20.0, "collect": collect})
        self.logs = [Log(folder / f"{worker}.jsonl") for worker in range(WORKERS)]
        self._client = dist.TCPStore("127.0.0.1", port, None, False)
        for worker in range(WORKERS):
            self.crew.start(worker)

    @property
    def held(self) -> int:
        return len(self.logs[0].grow().rounds)

    @property
    def changes(self) -> int:
        return self.logs[0].grow().changes

    def sample(self) -> Sample:
        """Return what is held now; of the workers, what the one with most holds."""
        workers = [self.crew.usage(worker) for worker in LIVING]
        if lost := {worker: codes for worker, codes in self.crew.ended().items() if worker in LIVING}:
            raise RuntimeError(f"workers ended: {lost}")
        return {
            "rounds": self.held,
            "generations": self.changes,
            "keys": self._client.num_keys(),
            **{f"worker_{key}": max(one[key] for one in workers) for key in workers[0]},
            **{f"store_{key}": value for key, value in usage(self.store.pid).items()},
        }

    def hold(self, rounds: int, every: int) -> list[Sample]:
        """Let rounds be held, and return samples."""
        until(lambda: self.held > 0, PATIENCE_S, "the first round")
        samples = [self.sample()]
        while (at := samples[-1]["rounds"]) < rounds:
            until(lambda at=at: self.held >= at + every, PATIENCE_S, f"round {at + every}")
            samples.append(self.sample())
        return samples

    def churn(self, generations: int, every: int) -> list[Sample]:
        """Let workers die or leave, and come back, and return samples."""
        began, samples = self.changes, [self.sample()]
        while (at := self.changes) < began + generations:
            victim, leaves = 2 + at // 2 % 2, at // 4 % 2
            self.crew.send(victim, signal.SIGTERM if leaves else signal.SIGKILL)
            code = self.crew.join(victim, PATIENCE_S)
            if leaves and code != [0]:
                raise RuntimeError(f"worker {victim} was to leave, and ended with {code}")
            self._until_members(lambda members, victim=victim: victim not in members)
            self.crew.start(victim)
            self._until_members(lambda members: len(members) == WORKERS)
            if self.changes - samples[-1]["generations"] >= every:
                settled = self.held + SETTLED
                until(lambda settled=settled: self.held >= settled, PATIENCE_S, "a settled group")
                samples.append(self.sample())
                print(samples[-1], flush=True)
        return samples

    def _until_members(self, fits: Callable[[list[int]], bool]) -> None:
        until(lambda: fits(self.logs[0].grow().members), PATIENCE_S, "a round with other members")

    def close(self) -> None:
        self.crew.close()
        self.store.kill()
        self.store.wait()


def judged(samples: list[Sample], along: str, per: int) -> dict[str, dict[str, float]]:
    """Return how much of each kind is held at the end, by how much it grows, and whether that is nothing."""
    half = samples[len(samples) // 2 :]
    span = samples[-1][along] - samples[0][along]
    found = {}
    for name in samples[0]:
        if name in ("rounds", "generations"):
            continue
        each = slope((sample[along], sample[name]) for sample in half)
        flat = each * span <= BOUNDS[name.rpartition("_")[2]]
        found[name] = {"last": samples[-1][name], f"per_{per}_{along}": round(each * per, 3), "flat": flat}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--collect", action="store_true", help="let workers run Python's garbage collector")
    parser.add_argument("--arenas", type=int, help="of glibc's malloc; its default is eight for each core")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if given.arenas:
        os.environ["MALLOC_ARENA_MAX"] = str(given.arenas)  # for the processes that are started from now on
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), collect=given.collect)
        try:
            rounds = soak.hold(given.rounds, max(1, given.rounds // 100))
            print(json.dumps(judged(rounds, "rounds", 1000), indent=1), flush=True)
            generations = soak.churn(given.generations, max(2, given.generations // 50))
        finally:
            soak.close()
        failed = sum(line["kind"] == "failed" for log in soak.logs for line in log.grow().lines)
        differ = disagreeing(soak.logs)
        for path in Path(folder).glob("*.err"):
            print(path.name, path.read_text()[-600:], file=sys.stderr)
    found = {
        "arenas": given.arenas,
        "collect": given.collect,
        "rounds": judged(rounds, "rounds", 1000),
        "generations": judged(generations, "generations", 100),
        "rounds_held": generations[-1]["rounds"],
        "generations_made": generations[-1]["generations"],
        "failed_rounds": failed,
        "disagreeing_steps": differ,
        "seconds": round(time.monotonic() - began),
    }
    found["flat"] = all(one["flat"] for part in ("rounds", "generations") for one in found[part].values())
    print(json.dumps(found, indent=1))
    found["samples"] = {"rounds": rounds[::5], "generations": generations}
    earlier = json.loads(given.out.read_text()) if given.out.exists() else []
    given.out.write_text(json.dumps([*earlier, found]) + "\n")
    return 0 if found["flat"] and not differ else 1


if __name__ == "__main__":
    sys.exit(main())
