"""A simulated run as a folder, in the form of a real one's, and its report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cadenza.cli.plan.candidates import as_toml, build
from cadenza.cli.plan.wishes import Wishes
from cadenza.common.wording import count_workers
from cadenza.errors import UsageError
from cadenza.planning.simulator import SimulatedRound, Simulation, simulate
from cadenza.training.metrics import metrics_file
from cadenza.version import __version__

__all__ = ["simulate_into"]


def simulate_into(folder: Path, wishes: Wishes, told: dict[str, Any], *, rounds: int, seed: int) -> dict[str, Any]:
    """Play the recommended strategy into a folder, with a report; return what came of it."""
    from cadenza.cli.report.page import write_report

    if "recommendation" not in told:
        raise UsageError("--simulate plays a strategy of ours; the idealised model has none.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--simulate {folder}: it is there already, and is not an empty folder; give another one.")
    chosen, cluster = told["recommendation"], wishes.place.cluster
    words = chosen["strategy"], chosen["codec"], chosen["delay"], chosen["period"]
    strategy = build(*words, groups=cluster.site_workers, policy=wishes.policy)
    run = simulate(strategy, cluster, wishes.place.model, wishes.place.work, rounds=rounds, seed=seed)
    try:
        _write(folder, run, wishes, as_toml(*words, cluster.site_workers), words, seed)
    except OSError as error:
        raise UsageError(f"--simulate {folder}: it cannot be written: {error.strerror}.") from None
    report = write_report([folder], folder / "report.html")
    failed = sum(one.failed for one in run.rounds)
    text = (
        f"Simulated {len(run.rounds):,} rounds of {run.workers:,} workers (seed {seed}): {run.utilisation:.1%} of "
        f"the time is compute, {failed:,} rounds failed, {len(run.events):,} events. Report: {report}"
    )
    return {
        "utilisation": run.utilisation,
        "seconds": run.seconds,
        "steps": run.steps,
        "rounds": len(run.rounds),
        "failed_rounds": failed,
        "report": str(report),
        "text": text,
    }


def _write(
    folder: Path, run: Simulation, wishes: Wishes, toml: str, words: tuple[str, str, int, int], seed: int
) -> None:
    (folder / "metrics").mkdir(parents=True, exist_ok=True)
    head = f"steps = {max(1, run.steps)}\nseed = {seed}\n\n"
    (folder / "config.toml").write_text(f"{head}{toml}\n[launch]\nworkers = {run.workers}\n")
    simulated = {"seed": seed, "workers": run.workers, "watched": list(run.watched)}
    (folder / "environment.json").write_text(json.dumps({"cadenza": __version__, "simulated": simulated}))
    for position, worker in enumerate(run.watched):
        lines = _lines(run, wishes, words, position, worker)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics" / metrics_file(worker)).write_text(text)


def _lines(
    run: Simulation, wishes: Wishes, words: tuple[str, str, int, int], position: int, worker: int
) -> Iterator[dict[str, Any]]:
    """Yield what a worker would have written."""
    name, codec, _, period = words
    size = 4 * wishes.place.model.parameters
    start = {"worker": worker, "workers": run.workers, "host": f"simulated-{worker}", "strategy": name}
    more = {"parameters": wishes.place.model.parameters, "gradient_bytes": 2 * size * (run.workers - 1) // run.workers}
    yield _line("start", 0, 0.0, **start, **more, steps=run.steps, unit="tokens", period=period, resumed=False)
    sent, stall, samples = 0, 0.0, wishes.tokens_per_step or 1.0
    events = iter([event for event in run.events if position == 0])
    event = next(events, None)
    for round_ in run.rounds:
        while event is not None and event.step <= round_.step:
            level = "warning" if "failed" in event.text else "info"
            yield _line("event", event.step, event.seconds, text=event.text, level=level)
            event = next(events, None)
        sent, stall = sent + round_.sent, stall + round_.waits_s[position]
        yield _round(round_, codec, size, round_.waits_s[position])
        yield _line(
            "step",
            round_.step,
            round_.landed_s,
            samples=round(samples * round_.step),
            bytes_sent=sent,
            stall_s=round(stall, 6),
            lr=0.0,
        )
    yield _line("end", run.steps, run.seconds, status="finished", error=None)


def _round(round_: SimulatedRound, codec: str, size: int, stall_s: float) -> dict[str, Any]:
    if round_.failed:
        reason = f"{count_workers(round_.absent)} {'was' if round_.absent == 1 else 'were'} gone"
        return _line("failed", round_.step, round_.landed_s, fragment=round_.fragment, reason=reason, absent=[])
    return _line(
        "round",
        round_.step,
        round_.landed_s,
        level=round_.level,
        level_name=f"level {round_.level}",
        fragment=round_.fragment,
        bytes_sent=round_.sent,
        encoded_bytes=round_.sent,
        raw_bytes=size,
        stall_s=round(stall_s, 6),
        wire_s=round(round_.landed_s - round_.launched_s, 6),
        codec=codec,
        launched=round(round_.landed_s - stall_s, 6),
        landed=round(round_.landed_s, 6),
    )


def _line(kind: str, step: int, elapsed: float, **figures: Any) -> dict[str, Any]:
    return {"kind": kind, "time": round(elapsed, 3), "elapsed": round(elapsed, 6), "step": step, **figures}
