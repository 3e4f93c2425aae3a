"""Chaos from a seed: workers and their store are struck at random moments, and the training goes on.

    python lab/chaos.py --minutes 60 --seed 1 --out lab/results/chaos.json

Workers train a small GPT by DiLoCo under `shrink`, each on a host of an emulated network with the store on one more (or
as plain processes with ``--network none``). First nothing happens; then the same run is disturbed: workers are killed,
stopped, cut off and poisoned, the store is killed, and whatever was killed starts again some seconds later. At the end
no process may hang, all workers must agree to the bit, and the held-out loss must be near that of the quiet run. Every
event is in the file, beside what the workers reported of it.

With ``--sites 2`` the workers are at two sites with rounds of their own between those of all, and with ``--whole-sites
0.2`` a kill or a stop sometimes befalls a whole site.

With ``--ranks 2`` a worker is a replica of two ranks, by FSDP2 or DDP: kills, stops and poison befall one of them. The
mate of a rank that was killed must end by itself; then the replica is started again whole. Ranks are compared with
those that have the same place in other replicas.

The quiet run does not pause between steps and so takes minutes; ``--only`` runs one of the two and adds it to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from chaos_verdict import judge, match, read, summary, troubles

PORT = 29400
SHARES = {"stop": 0.28, "kill": 0.24, "cut": 0.24, "poison": 0.2, "store": 0.04}
LAST_STEPS = 200  # before the end nothing happens, so that whoever starts again finds the others
STORE = "store"
HUNG_S = 30.0  # a rank that has not ended so long after its mate was killed, and started again, hangs


class Process:
    """A process that a host has forked."""

    def __init__(self, number: int) -> None:
        self._handle = None
        with suppress(ProcessLookupError):  # it is over already
            self._handle = os.pidfd_open(number)

    def send(self, number: int) -> None:
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def is_over(self, within_s: float = 0.0) -> bool:
        return self._handle is None or bool(select.select([self._handle], [], [], within_s)[0])

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.is_over(10.0)


@dataclass
class Place:
    """Where a rank of a worker, or the store, is: its host, the process that is there now, and what befalls it."""

    name: str
    worker: int
    host: subprocess.Popen[str]
    told: dict[str, Any]
    logs: Path
    process: Process | None = None
    busy_until: float = 0.0
    undo: str = ""
    starts: int = 0

    def start(self) -> None:
        self.starts += 1
        files = {"out": str(self.log("out")), "err": str(self.log("err"))}
        self.log("out").touch()
        assert self.host.stdin is not None
        assert self.host.stdout is not None
        meeting = {"meeting": str(self.logs.resolve() / f"mates-{self.worker}-{self.starts}")}
        self.host.stdin.write(json.dumps(self.told | files | meeting) + "\n")
        self.host.stdin.flush()
        self.process = Process(int(self.host.stdout.readline()))

    def log(self, kind: str) -> Path:
        return self.logs / f"{self.name}-{self.starts}.{kind}"

    @property
    def is_there(self) -> bool:
        """Whether the process that is here now has found the others, or serves."""
        return self.process is not None and self.log("out").stat().st_size > 0

    def last(self) -> dict[str, Any]:
        """Return what the present process said last."""
        with self.log("out").open("rb") as file:
            file.seek(max(0, self.log("out").stat().st_size - 1000))
            lines = [line for line in file.read().decode().split("\n")[:-1] if line.startswith("{")]
        return json.loads(lines[-1]) if lines else {}


@dataclass
class Run:
    """Workers, the store, and the network they are on."""

    workers: int
    arguments: dict[str, Any]
    logs: Path
    network: Any
    sites: int = 1
    ranks: int = 1
    places: list[Place] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    _hosts: dict[int, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, stack: ExitStack) -> None:
        port = PORT if self.network is not None else 0
        self.store = self._place(stack, self.workers, STORE, {"what": "store", "port": port, "environment": {}})
        self.store.start()
        _until(lambda: self.store.is_there)
        port = int(self.store.log("out").read_text())
        host = "127.0.0.1" if self.network is None else self.network.hosts[self.workers].address
        if self.network is None:
            self.store.told["port"] = port
        for number in range(self.workers):
            environment = {
                "CADENZA_STORE": f"{host}:{port}",
                "CADENZA_WORKER": str(number),
                "CADENZA_WORKERS": str(self.workers),
                "WORLD_SIZE": str(self.ranks),
            }
            if self.sites > 1:
                environment["CADENZA_SITE"] = f"site-{number % self.sites}"
            for rank in range(self.ranks):
                told = {"what": "worker", "environment": environment | {"RANK": str(rank)}, "arguments": self.arguments}
                name = f"worker-{number}.{rank}" if self.ranks > 1 else f"worker-{number}"
                self.places.append(self._place(stack, number, name, told))
        for place in self.places:
            place.start()

    def _place(self, stack: ExitStack, worker: int, name: str, told: dict[str, Any]) -> Place:
        if worker not in self._hosts:
            self._hosts[worker] = self._start_host(worker)
            stack.callback(_end_host, self._hosts[worker])
        place = Place(name, worker, self._hosts[worker], told, self.logs)
        stack.callback(_end, place)
        return place

    def _start_host(self, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(Path(__file__).resolve().with_name("chaos_worker.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        if self.network is not None:
            environment |= self.network.environment(number)
            command = self.network.hosts[number].command(command)
        return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def strike(self, place: Place, what: str, seconds: float) -> None:
        """Let something happen to a place, to be undone later."""
        process = place.process
        assert process is not None
        self._note(place, what, seconds)
        place.busy_until, place.undo = time.monotonic() + seconds, what
        if what in ("kill", STORE):
            process.kill()
        elif what == "stop":
            process.send(signal.SIGSTOP)
        elif what == "cut":
            self.network.cut(self.network.hosts[place.worker])
        else:
            process.send(signal.SIGUSR1)

    def mend(self, place: Place) -> None:
        """Undo what has happened to a place."""
        if place.undo == "kill":
            self._start_replica(place)
        elif place.undo == STORE:
            place.start()
        elif place.undo == "stop":
            assert place.process is not None
            place.process.send(signal.SIGCONT)
        elif place.undo == "cut":
            self.network.heal(self.network.hosts[place.worker])
        place.undo = ""

    def _start_replica(self, place: Place) -> None:
        """Start all ranks of a replica again that has lost one, once the others have ended; by then they must have."""
        for mate in self.mates(place):
            assert mate.process is not None
            if not mate.process.is_over(HUNG_S):
                self._note(mate, "hung")
                mate.process.kill()
        for mate in self.mates(place):
            mate.undo = ""
            mate.start()

    def _note(self, place: Place, what: str, seconds: float = 0.0) -> None:
        self.events.append({"at": round(time.time(), 3), "who": place.name, "what": what, "seconds": round(seconds, 2)})

    def mates(self, place: Place) -> list[Place]:
        """Return the ranks of a place's replica, itself among them."""
        return [other for other in self.places if other.worker == place.worker]

    def neighbours(self, place: Place) -> list[Place]:
        """Return all ranks at a place's site."""
        return [other for other in self.places if other.worker % self.sites == place.worker % self.sites]

    def step(self) -> int:
        """Return at which step somebody was, a moment ago."""
        return max(int(place.last().get("step", 0)) for place in self.places)

    def is_over(self) -> bool:
        """Whether a worker has come to its end; who has ended before it is started again, and that is an event."""
        for place in self.places:
            if any(mate.undo for mate in self.mates(place)) or place.process is None or not place.process.is_over():
                continue
            if place.last().get("kind") == "end":
                return True
            self._note(place, "crash")
            self._start_replica(place)
        return False


def disturb(run: Run, dice: random.Random, given: argparse.Namespace, *, shares: dict[str, float], most: int) -> None:
    """Let things happen until the time is up or the end is near; then undo all."""
    _until(lambda: all(place.is_there for place in run.places))
    until = time.monotonic() + given.minutes * 60
    next_at = time.monotonic() + given.gap_s
    everything = [*run.places, run.store]
    while not run.is_over():
        now = time.monotonic()
        for place in everything:
            if place.undo and place.busy_until <= now:
                run.mend(place)
        if now >= until and not any(place.undo for place in everything):
            break
        quiet = [one for one in run.places if all(mate.is_there and not mate.undo for mate in run.mates(one))]
        if next_at <= now < until and len(run.places) - len(quiet) < most * run.ranks:
            if run.step() >= given.steps - LAST_STEPS:
                until = now
                continue
            what = dice.choices(list(shares), weights=list(shares.values()))[0]
            seconds, gap_s = dice.uniform(0.5, 4.0), dice.expovariate(1 / given.gap_s)
            place = run.store if what == STORE else dice.choice(quiet)
            whole = run.neighbours(place) if what in ("kill", "stop") and dice.random() < given.whole_sites else [place]
            for one in whole:
                if not one.undo and (one is place or one in quiet):
                    run.strike(one, what, seconds)
            next_at = now + gap_s
        time.sleep(0.05)
    for place in everything:
        if place.undo:
            run.mend(place)
    _until(lambda: run.is_over() or all(place.is_there for place in run.places))


def train(given: argparse.Namespace, *, seed: int | None, logs: Path, network: Any) -> dict[str, Any]:
    """Run once, quietly without a seed; return what came of it."""
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.iterdir():
        old.unlink()
    step_s = 0.0 if seed is None else given.step_s
    arguments = {"step_s": step_s, **{key: vars(given)[key] for key in ("kind", "steps", "period", "grace_s")}}
    started = time.monotonic()
    with ExitStack() as stack:
        run = Run(given.workers, arguments, logs, network, given.sites, given.ranks)
        run.start(stack)
        if seed is not None:
            shares = {what: share for what, share in SHARES.items() if what != "cut" or network is not None}
            most = max(1, (given.workers - 1) // 2)
            disturb(run, random.Random(seed), given, shares=shares, most=most)
            for place in run.places:
                assert place.process is not None
                place.process.send(signal.SIGUSR2)  # what is left goes without pauses
        deadline = time.monotonic() + given.patience_s
        over = [place.process.is_over(max(0.0, deadline - time.monotonic())) for place in run.places if place.process]
    said = {place.name: read(logs, place.name) for place in run.places}
    return {
        "seconds": round(time.monotonic() - started, 1),
        "all_ended": all(over) and all(lines and lines[-1]["kind"] == "end" for lines in said.values()),
        "events": [event | match(event, said, troubles(run.events)) for event in run.events],
        **summary(said),
    }


def _until(true: Callable[[], bool], patience_s: float = 300.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing has come of it")
        time.sleep(0.05)


def _end(place: Place) -> None:
    if place.process is not None:
        place.process.kill()


def _end_host(host: subprocess.Popen[str]) -> None:
    assert host.stdin is not None
    host.stdin.close()
    host.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, help="of a worker, which is a replica of several of them")
    parser.add_argument("--kind", choices=["fsdp", "ddp"], default="fsdp", help="how the ranks of a replica train")
    parser.add_argument("--sites", type=int, default=1, help="more than one: a site has rounds of its own")
    parser.add_argument("--whole-sites", type=float, default=0.0, help="the share of kills and stops of a whole site")
    parser.add_argument("--steps", type=int, default=13_000)
    parser.add_argument("--period", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.25, help="a pause after each step of the disturbed run")
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long things happen")
    parser.add_argument("--gap-s", type=float, default=4.0, help="the mean time between two events")
    parser.add_argument("--grace-s", type=float, default=3.0)
    parser.add_argument("--patience-s", type=float, default=900.0, help="who has not ended so long after that hangs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--network", choices=["emulated", "none"], default="emulated")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--only", choices=["quiet", "disturbed"])
    parser.add_argument("--out", type=Path, default=Path("lab/results/chaos.json"))
    parser.add_argument("--logs", type=Path, default=Path("build/chaos"), help="where all is that workers say")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end all that was started
    told: dict[str, Any] = json.loads(given.out.read_text()) if given.only and given.out.exists() else {}
    for name, seed in (("quiet", None), ("disturbed", given.seed)):
        if given.only not in (None, name):
            continue
        with ExitStack() as stack:
            network = None
            if given.network == "emulated":
                from cadenza.emulation import Network

                network = stack.enter_context(Network(given.workers + 1, rate=given.rate))
            told[name] = train(given, seed=seed, logs=given.logs / name, network=network)
    plain = {key: value for key, value in vars(given).items() if isinstance(value, int | float | str)}
    told["arguments"] = told.get("arguments", {}) | plain
    told["verdict"] = judge(told["quiet"], told["disturbed"]) if {"quiet", "disturbed"} <= told.keys() else None
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(_lines(told))
    print(json.dumps(told["verdict"]))
    return 0 if told["verdict"] is None or told["verdict"]["good"] else 1


def _lines(told: dict[str, Any]) -> str:
    """Return JSON with an event on each line."""
    text = json.dumps(told, indent=1)
    for name in ("quiet", "disturbed"):
        events = told.get(name, {}).get("events")
        if events:
            short = ",\n   ".join(json.dumps(event) for event in events)
            text = text.replace(json.dumps(events, indent=1).replace("\n", "\n  "), f"[\n   {short}\n  ]")
    return text + "\n"


if __name__ == "__main__":
    sys.exit(main())
