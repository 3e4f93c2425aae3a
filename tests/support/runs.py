"""Made-up runs: folders in the format of `cadenza.training.runs`, written without training anything."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cadenza.reports import RoundReport

BEGAN = 1_790_000_000.0  # when every made-up run began, in seconds since 1970


@dataclass(frozen=True, kw_only=True)
class MadeUpRun:
    """What a made-up run looks like; `write` makes its folder.

    Attributes:
        period: Steps between rounds; None: no rounds, as under DDP.
        outer_every: Every how many rounds the outer level comes together; None: there is one level.
        delay: Steps from a round's launch to its landing.
        evaluate_every: Steps between evaluations; None: never.
        stopped_at: The step after which the run ends, though more were planned.
        status: How the "end" lines say that it ended; None: there are none, as after kill -9.
        resumed_at: The step at which a second "start" line goes on, after ten steps that it makes stale.
        nan_from: The first step of ten with a loss that is not a number.
    """

    strategy: str = "diloco"
    workers: int = 4
    steps: int = 200
    period: int | None = 10
    outer_every: int | None = None
    fragments: int = 1
    delay: int = 0
    codec: str = "int8"
    step_s: float = 0.12
    stall_s: float = 0.05
    wire_s: float = 0.04
    parameters: int = 800_000
    final_loss: float = 1.9
    evaluate_every: int | None = 20
    checkpoint_every: int | None = 50
    stopped_at: int | None = None
    status: str | None = "finished"
    error: str | None = None
    resumed_at: int | None = None
    nan_from: int | None = None
    drift: bool = True
    summary: bool = True
    events: tuple[tuple[int, str, str], ...] = ()  # step, level, text

    def write(self, folder: Path) -> Path:
        """Write the run's folder and return it."""
        (folder / "metrics").mkdir(parents=True)
        (folder / "config.toml").write_text(self._config())
        (folder / "environment.json").write_text(json.dumps({"python": "3.11.2", "torch": "2.13.0", "hosts": ["ada"]}))
        for worker in range(self.workers):
            lines = list(self._lines(worker))
            path = folder / "metrics" / f"worker-{worker:05d}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            if worker == 0 and self.summary and self.status is not None:
                (folder / "summary.json").write_text(json.dumps(self._summary(lines)))
        return folder

    @property
    def gradient_bytes(self) -> int:
        return int(2 * (self.workers - 1) / self.workers * 4 * self.parameters)

    def _config(self) -> str:
        period = f"\nperiod = {self.period}" if self.period else ""
        return (
            f'task = "cadenza.training.standard_library_gpt:build"\nsteps = {self.steps}\nseed = 1\n\n[strategy]\n'
            f'name = "{self.strategy}"\ncodec = "{self.codec}"{period}\n\n[launch]\nworkers = {self.workers}\n'
        )

    def _lines(self, worker: int) -> Iterator[dict[str, Any]]:
        clock = _Clock(self, worker)
        last = self.steps if self.stopped_at is None else self.stopped_at
        yield clock.line("start", 0, **self._start(worker, resumed=False))
        if self.resumed_at is not None:
            kept = clock.copy()
            for step in range(1, self.resumed_at + 11):
                yield from clock.step(step)
                if step == self.resumed_at:
                    kept = clock.copy()
            clock = kept
            yield clock.line("start", self.resumed_at, **self._start(worker, resumed=True))
            yield clock.line("event", self.resumed_at, text="a damaged checkpoint was skipped", level="warning")
        for step in range((self.resumed_at or 0) + 1, last + 1):
            yield from clock.step(step)
        if self.status is not None:
            yield clock.line("end", last, status=self.status, error=self.error)

    def _start(self, worker: int, resumed: bool) -> dict[str, Any]:
        return {
            "worker": worker, "workers": self.workers, "host": "ada", "strategy": self.strategy,
            "parameters": self.parameters, "gradient_bytes": self.gradient_bytes, "steps": self.steps,
            "unit": "tokens", "period": self.period, "resumed": resumed,
        }  # fmt: skip

    def _summary(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        steps = [line for line in lines if line["kind"] == "step"]
        held_out = [line["loss"] for line in lines if line["kind"] == "evaluation"]
        losses = [float(line["loss"]) for line in steps[-max(1, len(steps) // 20) :]]
        last = steps[-1] if steps else {"samples": 0, "bytes_sent": 0, "stall_s": 0.0, "elapsed": 0.0}
        return {
            "status": self.status, "strategy": self.strategy, "codec": self.codec, "workers": self.workers,
            "steps": len(steps), "seconds": last["elapsed"], "held_out": held_out[-1] if held_out else None,
            "training_loss": _plain(sum(losses) / len(losses)) if losses else None, "bytes_sent": last["bytes_sent"],
            "ddp_bytes": self.gradient_bytes * len(steps), "stall_s": last["stall_s"],
            "rounds": sum(line["kind"] == "round" for line in lines), "parameters": self.parameters,
            "samples_per_s": last["samples"] * self.workers / max(last["elapsed"], 1e-9),
        }  # fmt: skip


class _Clock:
    """One worker of a made-up run: its time, its bytes, its stall."""

    def __init__(self, run: MadeUpRun, worker: int) -> None:
        self.run, self.worker = run, worker
        self.random = random.Random(worker)
        self.elapsed, self.bytes_sent, self.stall_s, self.rounds = 0.0, 0, 0.0, 0
        self.in_flight: list[tuple[int, float, int]] = []  # the step of the launch, when it was, which round

    def copy(self) -> _Clock:
        other = _Clock(self.run, self.worker)
        other.__dict__.update(self.__dict__, in_flight=list(self.in_flight))
        other.random = random.Random(self.worker + 1000)
        return other

    def line(self, kind: str, step: int, **figures: Any) -> dict[str, Any]:
        figures = {name: _plain(value) for name, value in figures.items()}
        time, elapsed = round(BEGAN + self.elapsed, 3), round(self.elapsed, 4)
        return {"kind": kind, "time": time, "elapsed": elapsed, "step": step, **figures}

    def step(self, step: int) -> Iterator[dict[str, Any]]:
        run = self.run
        self.elapsed += run.step_s * self.random.uniform(0.9, 1.15) * (1 + 0.02 * self.worker)
        if run.period is None:
            self.bytes_sent += run.gradient_bytes
        elif step % run.period == 0:
            self.in_flight.append((step, self.elapsed, self.rounds))
            self.rounds += 1
        while self.in_flight and step >= self.in_flight[0][0] + run.delay:
            yield self._land(step, *self.in_flight.pop(0))
        due = None if run.period is None else (step // run.period + 1) * run.period
        yield self.line(
            "step", step, loss=self._loss(step) + self.random.gauss(0, 0.08), samples=step * 1024,
            bytes_sent=self.bytes_sent, stall_s=round(self.stall_s, 5), lr=0.001, next_sync=due,
        )  # fmt: skip
        if self.worker == 0 and run.evaluate_every and step % run.evaluate_every == 0:
            yield self.line("evaluation", step, loss=self._loss(step) + 0.05)
        if run.checkpoint_every and step % run.checkpoint_every == 0:
            yield self.line("checkpoint", step, path=f"checkpoints/step-{step:08d}", bytes=9_700_000)
        for at, level, text in run.events:
            if at == step:
                yield self.line("event", step, text=text, level=level)

    def _land(self, step: int, launch: int, launched: float, number: int) -> dict[str, Any]:
        run = self.run
        stall_s = run.stall_s * self.random.uniform(0.7, 1.8)
        wire_s = run.wire_s * self.random.uniform(0.7, 1.5)
        self.elapsed += stall_s
        self.stall_s += stall_s
        outer = run.outer_every is not None and (number + 1) % run.outer_every == 0
        raw = 4 * run.parameters // run.fragments
        encoded = raw // 4 + 64
        part = number % run.fragments
        sent = int(2 * (run.workers - 1) / run.workers * encoded)
        self.bytes_sent += sent
        report = RoundReport.example(
            step=launch, level=int(outer), level_name=("sites" if outer else "site") if run.outer_every else "world",
            fragment=part, fragment_name=f"layers {part}" if run.fragments > 1 else "all",
            bytes_sent=sent, encoded_bytes=encoded, raw_bytes=raw, stall_s=round(stall_s, 5), wire_s=round(wire_s, 5),
            drift=0.02 / math.sqrt(1 + launch / run.steps * 8) if run.drift else None, delay=step - launch,
            codec=run.codec, codec_error=0.0065, weights=(1.0,) * run.workers, participants=tuple(range(run.workers)),
        )  # fmt: skip
        figures = {name: value for name, value in asdict(report).items() if name not in ("kind", "step")}
        return self.line("round", launch, **figures, launched=round(launched, 4), landed=round(self.elapsed, 4))

    def _loss(self, step: int) -> float:
        run = self.run
        if run.nan_from is not None and run.nan_from <= step < run.nan_from + 10:
            return math.nan
        return run.final_loss + (5.5 - run.final_loss) * math.exp(-5 * step / run.steps)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
