"""Chaos from a seed: workers are killed, stopped, cut off and poisoned at random moments, and the training goes on.

    python lab/chaos.py --minutes 60 --seed 1 --out lab/results/chaos.json

Workers train a small GPT by DiLoCo under `shrink`, each on a host of an emulated network with the store on one more (or
as plain processes with ``--network none``). First nothing happens; then the same run is disturbed: whoever is killed
starts again some seconds later. At the end no process may hang, all workers must agree to the bit, and the held-out
loss must be near that of the quiet run. Every event, and what the workers reported, is in the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PORT = 29400
EVENTS = ("kill", "stop", "cut", "poison")
PERIOD = 10


# ---- a worker --------------------------------------------------------------------------------------------------------


def work(steps: int, step_s: float, grace_s: float) -> None:
    """Train to the end as one worker, and print what became of it."""
    import torch
    from gpt import GPT, Corpus, Shape, batches, held_out_loss

    import cadenza

    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    torch.set_num_threads(1)
    poisoned: list[int] = []
    signal.signal(signal.SIGUSR1, lambda *_: poisoned.append(1))
    worker = int(os.environ["RANK"])
    torch.manual_seed(1)
    shape = Shape(layers=2, width=32, heads=2, context=32)
    model, corpus = GPT(shape), Corpus.standard_library()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    reports: list[cadenza.RoundReport] = []
    faults = cadenza.shrink(grace_s=grace_s, first_s=max(60.0, 4 * grace_s))
    strategy = cadenza.diloco(PERIOD, outer_lr=0.5, codec=cadenza.codecs.int8(), faults=faults)
    sync = cadenza.attach(model, optimizer, strategy, observers=[reports.append], membership=cadenza.join())
    print(json.dumps({"joined": sync.clock, "at": time.time()}), flush=True)
    data = batches(corpus.training, batch=8, context=shape.context, seed=1000 * worker + sync.clock)
    taken = 0
    while sync.clock < steps:
        given, wanted = next(data)
        optimizer.zero_grad()
        model(given, wanted).backward()
        optimizer.step()
        if poisoned:
            poisoned.clear()
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        time.sleep(step_s)
        sync.step()
        taken += 1
    sync.finish()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    loss = held_out_loss(model, corpus.held_out, windows=256, context=shape.context, part=0, parts=1) / 256
    kinds = Counter(report.kind for report in reports)
    print(
        json.dumps(
            {
                "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16],
                "loss": loss,
                "taken": taken,
                "rounds": kinds["round"],
                "failed": [[report.step, report.reason] for report in reports if report.kind == "failed"],
                "left_out": [
                    [report.step, report.reason] for report in reports if report.kind == "round" and report.reason
                ],
                "longest_stall_s": max(report.stall_s for report in reports),
            }
        ),
        flush=True,
    )


# ---- where they run --------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A worker's place: the process that is in it now, and what befalls it."""

    number: int
    process: subprocess.Popen[str]
    busy_until: float = 0.0
    undo: str = ""
    starts: int = 1


@dataclass
class Run:
    """Workers, the store, and the network they are on."""

    workers: int
    command: list[str]
    logs: Path
    network: Any
    places: list[Place] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def start(self, stack: ExitStack) -> None:
        store = [sys.executable, "-m", "cadenza.membership", "--port", str(PORT if self.network else 0)]
        if self.network is None:
            self.store = subprocess.Popen([*store, "--host", "127.0.0.1"], stdout=subprocess.PIPE, text=True)
        else:
            self.store = self.network.start(self.workers, store, stdout=subprocess.PIPE, text=True)
        stack.callback(_end, self.store)
        port = int(self.store.stdout.readline())
        host = "127.0.0.1" if self.network is None else self.network.hosts[self.workers].address
        self.address = f"{host}:{port}"
        for number in range(self.workers):
            self.places.append(Place(number, self._spawn(number, 1)))
            stack.callback(lambda place=self.places[-1]: _end(place.process))

    def _spawn(self, number: int, count: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "CADENZA_STORE": self.address,
            "RANK": str(number),
            "WORLD_SIZE": str(self.workers),
            "OMP_NUM_THREADS": "1",
        }
        name = f"worker-{number}-{count}"
        with (self.logs / f"{name}.out").open("w") as out, (self.logs / f"{name}.err").open("w") as err:
            if self.network is None:
                environment["GLOO_SOCKET_IFNAME"] = "lo"
                return subprocess.Popen(self.command, env=environment, stdout=out, stderr=err, text=True)
            environment = {**environment, **self.network.environment(number), "WORLD_SIZE": str(self.workers)}
            command = self.network.hosts[number].command(self.command)
            return subprocess.Popen(command, env=environment, stdout=out, stderr=err, text=True)

    def strike(self, place: Place, what: str, seconds: float) -> None:
        """Let something happen to a worker, to be undone later."""
        self.events.append({"at": time.time(), "worker": place.number, "what": what, "seconds": round(seconds, 2)})
        place.busy_until, place.undo = time.monotonic() + seconds, what
        if what == "kill":
            place.process.kill()
            place.process.wait()
        elif what == "stop":
            place.process.send_signal(signal.SIGSTOP)
        elif what == "cut":
            self.network.cut(self.network.hosts[place.number])
        else:
            place.process.send_signal(signal.SIGUSR1)

    def mend(self, place: Place) -> None:
        """Undo what has happened to a worker."""
        if place.undo == "kill":
            place.starts += 1
            place.process = self._spawn(place.number, place.starts)
        elif place.undo == "stop":
            place.process.send_signal(signal.SIGCONT)
        elif place.undo == "cut":
            self.network.heal(self.network.hosts[place.number])
        place.undo = ""

    def has_joined(self, place: Place) -> bool:
        """Whether the process that is in a place now has found the others."""
        return (self.logs / f"worker-{place.number}-{place.starts}.out").stat().st_size > 0

    def outputs(self) -> list[dict[str, Any]]:
        """What each worker said at its end."""
        found = []
        for place in self.places:
            text = (self.logs / f"worker-{place.number}-{place.starts}.out").read_text()
            lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            found.append(lines[-1] if lines and "digest" in lines[-1] else {})
        return found


def disturb(run: Run, dice: random.Random, given: argparse.Namespace, *, kinds: list[str], most: int) -> None:
    """Let things happen until the time is up or a worker has come to its end; then undo all."""
    while not all(run.has_joined(place) for place in run.places):
        time.sleep(0.1)
    until = time.monotonic() + given.minutes * 60
    next_at = time.monotonic() + given.gap_s
    while not any(place.process.poll() == 0 for place in run.places):
        now = time.monotonic()
        for place in run.places:
            if place.undo and place.busy_until <= now:
                run.mend(place)
        quiet = [place for place in run.places if not place.undo and run.has_joined(place)]
        if now >= next_at and now < until and len(run.places) - len(quiet) < most:
            run.strike(dice.choice(quiet), dice.choice(kinds), dice.uniform(0.5, 4.0))
            next_at = now + dice.expovariate(1 / given.gap_s)
        if now >= until and not any(place.undo for place in run.places):
            return
        time.sleep(0.02)
    for place in run.places:
        if place.undo:
            run.mend(place)


def train(arguments: argparse.Namespace, *, seed: int | None, logs: Path, network: Any) -> dict[str, Any]:
    """Run once, quietly without a seed; return what came of it."""
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--work", "--steps", str(arguments.steps)]
    command += ["--step-s", str(arguments.step_s), "--grace-s", str(arguments.grace_s)]
    started = time.monotonic()
    with ExitStack() as stack:
        run = Run(arguments.workers, command, logs, network)
        run.start(stack)
        if seed is not None:
            kinds = [kind for kind in EVENTS if kind != "cut" or network is not None]
            most = max(1, (arguments.workers - 1) // 2)
            disturb(run, random.Random(seed), arguments, kinds=kinds, most=most)
        patience_s = arguments.patience_s + 4 * arguments.steps * arguments.step_s
        codes = [place.process.wait(patience_s) for place in run.places]
        ends = run.outputs()
    return {
        "seconds": time.monotonic() - started,
        "exit_codes": codes,
        "events": run.events,
        "count": Counter(event["what"] for event in run.events),
        "workers": ends,
    }


def judge(quiet: dict[str, Any], disturbed: dict[str, Any]) -> dict[str, Any]:
    """Say whether the disturbed run was as good as the quiet one."""
    ends = disturbed["workers"]
    losses = [end["loss"] for end in ends if end]
    return {
        "all_ended": not any(disturbed["exit_codes"]) and all(ends),
        "agree_to_the_bit": len({end.get("digest") for end in ends}) == 1,
        "loss": max(losses, default=None),
        "quiet_loss": quiet["workers"][0]["loss"],
        "loss_ratio": max(losses, default=float("nan")) / quiet["workers"][0]["loss"],
    }


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--step-s", type=float, default=0.02, help="a pause after each step, so that a run has its time"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long things happen")
    parser.add_argument("--gap-s", type=float, default=4.0, help="the mean time between two events")
    parser.add_argument("--grace-s", type=float, default=3.0)
    parser.add_argument("--patience-s", type=float, default=300.0, help="beyond four times its steps' time: it hangs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--network", choices=["emulated", "none"], default="emulated")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--out", type=Path, default=Path("lab/results/chaos.json"))
    given = parser.parse_args()
    if given.work:
        work(given.steps, given.step_s, given.grace_s)
        return 0
    logs = given.out.with_suffix("")
    results: list[dict[str, Any]] = []
    for name, seed in (("quiet", None), ("disturbed", given.seed)):
        with ExitStack() as stack:
            network = None
            if given.network == "emulated":
                from cadenza.emulation import Network

                network = stack.enter_context(Network(given.workers + 1, rate=given.rate))
            results.append(train(given, seed=seed, logs=logs / name, network=network))
    verdict = judge(*results)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    told = {"arguments": vars(given) | {"out": str(given.out)}, "verdict": verdict, "runs": results}
    given.out.write_text(json.dumps(told, indent=1, default=str))
    print(json.dumps({**verdict, "events": results[1]["count"], "seconds": results[1]["seconds"]}))
    good = verdict["all_ended"] and verdict["agree_to_the_bit"] and verdict["loss_ratio"] < 1.02
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
