"""Where a plan's figures come from, if not from flags: a run, doctor's or bench's JSON, a task that is tried here."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.errors import UsageError

if TYPE_CHECKING:
    from cadenza.cli.report.data import Round

__all__ = ["Found", "from_path", "from_task"]

_STEPS, _SECONDS = 12, 20.0  # of a task that is measured, at most


@dataclass
class Found:
    """What was measured; None where it was not.

    Attributes:
        bandwidth: Bits of values a second, each way; all that frames take is out of it.
        codec_s: Seconds a value takes to be encoded, or decoded, by codec.
        seen: A strategy's configuration that ran, and its utilisation.
        samples: What a worker takes in a step, in `unit`s.
        where: A sentence that says what was taken from where.
    """

    where: str
    parameters: int | None = None
    step_s: float | None = None
    workers: int | None = None
    bandwidth: float | None = None
    latency_s: float | None = None
    codec_s: dict[str, float] = field(default_factory=dict)
    seen: tuple[dict[str, Any], float] | None = None
    samples: float | None = None
    unit: str = "samples"


def from_path(path: Path) -> Found:
    """Return what a run's folder, or the JSON of `cadenza doctor` or `cadenza bench`, tells."""
    if path.is_dir():
        return _from_run(path)
    try:
        told = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--from {path}: it cannot be read: {error.strerror}.") from None
    except ValueError:
        raise UsageError(f"--from {path}: a run's folder, or the JSON of doctor or bench, is required.") from None
    if isinstance(told, dict) and "links" in told:
        return _from_doctor(path, told)
    if isinstance(told, dict) and "results" in told and "case" in told:
        return _from_bench(path, told)
    raise UsageError(
        f"--from {path}: this is not what `cadenza doctor --json` or `cadenza bench --json` prints, nor a run's folder."
    )


def _from_doctor(path: Path, told: dict[str, Any]) -> Found:
    together = told.get("all_at_once")
    if not together:
        raise UsageError(
            f"--from {path}: the doctor measured no links there; start it on the ranks, torchrun … -m "
            "cadenza.cli.doctor."
        )
    plan = told.get("plan") or {}
    latencies = [link["latency_s"] for link in told["links"]]
    return Found(
        f"links and workers as {path} has them",
        parameters=plan.get("parameters"),
        step_s=plan.get("step_s"),
        workers=len(told["ranks"]),
        bandwidth=8 * float(together["bytes_per_s"]),
        latency_s=statistics.median(latencies) if latencies else 0.0,
    )


def _from_bench(path: Path, told: dict[str, Any]) -> Found:
    speeds = told.get("codec_s") or {}
    raw = told["results"][0]
    return Found(
        f"codecs and the all-reduce's rate as {path} has them",
        parameters=int(told["case"]["parameters"]),
        workers=int(told["ranks"]),
        bandwidth=8 * raw["bytes_sent"] / raw["seconds"],
        codec_s={name: float(seconds) for name, seconds in speeds.items()},
    )


def _from_run(folder: Path) -> Found:
    from cadenza.cli.report.data import read_runs

    [run] = read_runs([folder])
    if run.steps < 4:
        raise UsageError(f"--from {folder}: the run has taken {run.steps} steps; at least 4 are required to plan from.")
    steps = []
    for worker in run.workers:
        lines = worker.steps
        times = [float(line["elapsed"]) for line in lines]
        stalls = [float(line.get("stall_s", 0.0)) for line in lines]
        own = [b - a - (d - c) for a, b, c, d in zip(times, times[1:], stalls, stalls[1:], strict=False)]
        steps.append(statistics.median(own[1:] or own))
    reference = run.reference
    rates = [
        8 * round_.bytes_sent / round_.wire_s
        for worker in run.workers
        for round_ in worker.rounds[1:] or worker.rounds
        if round_.wire_s > 0
    ]
    settings = dict(run.settings)
    seen = None
    if settings.get("name") not in (None, "ddp") and reference.end_s > 0 and len(reference.rounds) > 1:
        lines = reference.steps
        span = float(lines[-1]["elapsed"]) - float(lines[0]["elapsed"])
        whole_s = span / (len(lines) - 1)
        seen = _as_it_ran(settings, reference.rounds), min(1.0, statistics.median(steps) / whole_s)
    return Found(
        f"step, link and workers as {folder} has them",
        parameters=run.parameters,
        step_s=max(1e-9, statistics.median(steps)),
        workers=run.worker_count,
        bandwidth=statistics.median(rates) if rates else None,
        latency_s=0.0,
        seen=seen,
        samples=reference.samples / max(1, run.steps),
        unit=run.unit,
    )


def _as_it_ran(settings: dict[str, Any], rounds: Sequence[Round]) -> dict[str, Any]:
    """Return a strategy's settings with what was decided on the way in place of "auto"."""
    found = dict(settings)
    if found.get("period") == "auto":
        turns = sorted({round_.step for round_ in rounds if round_.fragment == rounds[0].fragment})
        found["period"] = round(statistics.median(b - a for a, b in pairwise(turns))) if len(turns) > 1 else turns[0]
    if found.get("codec") == "auto":
        found["codec"] = rounds[-1].codec
    return found


def from_task(name: str) -> Found:
    """Return the size and the step of a task, by taking some steps of it here, alone."""
    import torch

    from cadenza.cli.codec_speed import seconds_a_value
    from cadenza.training.config import Config
    from cadenza.training.data import count_samples, to_device
    from cadenza.training.task import check_task, load_build

    task = check_task(load_build(name)(Config(task=name)), source=name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = task.model.to(device)
    batches = iter(task.batches(0, 1))
    times: list[float] = []
    samples = 0.0
    while len(times) < _STEPS and sum(times) < _SECONDS:
        started = time.perf_counter()
        taken = [to_device(batch, device) for batch in islice(batches, task.accumulate)]
        if not taken:
            break
        for optimizer in task.optimizers:
            optimizer.zero_grad()
        for batch in taken:
            task.loss_alone(model, batch).backward()
        for optimizer in task.optimizers:
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        samples = sum(map(task.samples or count_samples, taken))
    if not times:
        raise UsageError(f"The task {name} has no batches for worker 0 of 1, so its step cannot be measured.")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Found(
        f"the step and the codecs as measured here with {name}",
        parameters=sum(parameter.numel() for parameter in trained),
        step_s=statistics.median(times[1:] or times),
        codec_s=seconds_a_value(),
        samples=samples,
        unit=task.unit,
    )
