"""Train one small GPT by every method on the same tokens, and compare the held-out losses.

    python lab/bench_convergence.py                     # everything of docs/convergence.md: sweep, runs, table, curves
    python lab/bench_convergence.py --only ddp diloco   # some methods
    python lab/bench_convergence.py --report            # table and curves again, from lab/results/convergence.json

Four workers under torchrun on this machine, a byte-level GPT (lab/gpt.py) on the standard library's sources. A worker's
batches depend on its rank alone, so every method sees the same tokens. The inner optimizer, its schedule and the
initial values are the same for all. DiLoCo's outer learning rate and momentum are swept; a second table shows what
other inner learning rates make of it. The held-out loss is that of the workers' average, also between rounds. Curves
need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Corpus, Shape, batches, held_out_loss, rate_at

import cadenza
from cadenza import codecs

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "convergence.json"
PICTURE = HERE.parent / "docs" / "img" / "convergence.svg"
PERIOD = 16
WORKERS = 4
SHAPE = Shape(layers=3, width=64, heads=4)
# The outer learning rate and momentum are chosen for DiLoCo in fp32; the codecs and the streaming kind take the same.
OUTER = ((0.7, 0.9), (1.0, 0.5), (0.8, 0.8), (1.0, 0.8))
# For the question how much depends on the inner learning rate.
INNER_LRS = (3e-3, 1e-2)


@dataclass(frozen=True)
class Settings:
    """What is the same for all methods."""

    steps: int = 1024
    batch: int = 8  # a worker, a step
    lr: float = 1e-3
    warmup: int = 64
    weight_decay: float = 0.1
    evaluations: int = 8
    windows: int = 256  # of held-out text, in mid-run; four times as many at the end
    seed: int = 1


Outer = tuple[float, float]
Factory = Callable[[Outer], cadenza.Strategy]

# None: DistributedDataParallel, gradients averaged in every step.
METHODS: dict[str, Factory | None] = {
    "ddp": None,
    "local_sgd": lambda _: cadenza.local_sgd(PERIOD),
    "hierarchical": lambda _: cadenza.hierarchical({4: 2, PERIOD: "all"}),
    "diloco": lambda outer: diloco(outer, codecs.fp32()),
    "diloco_int8": lambda outer: diloco(outer, codecs.int8()),
    "diloco_int8_ef": lambda outer: diloco(outer, codecs.error_feedback(codecs.int8())),
    "diloco_e3m0": lambda outer: diloco(outer, codecs.e3m0()),
    "diloco_e3m0_ef": lambda outer: diloco(outer, codecs.error_feedback(codecs.e3m0())),
    "streaming_fp32": lambda outer: streaming(outer, codecs.fp32()),
    "streaming": lambda outer: streaming(outer, codecs.e3m0()),
    "slowmo": lambda _: cadenza.slowmo(PERIOD, beta=0.6),
    "sparse_loco": lambda _: cadenza.sparse_loco(PERIOD),
}
TUNED = ("diloco", "streaming")  # how the names of methods begin that take the outer settings that were chosen


def diloco(outer: Outer, codec: codecs.Codec) -> cadenza.Strategy:
    lr, momentum = outer
    return cadenza.diloco(PERIOD, outer_lr=lr, outer_momentum=momentum, codec=codec)


def streaming(outer: Outer, codec: codecs.Codec) -> cadenza.Strategy:
    lr, momentum = outer
    return cadenza.streaming_diloco(PERIOD, outer_lr=lr, outer_momentum=momentum, layers=1, delay=2, codec=codec)


# ---- one run, on one rank -------------------------------------------------------------------------------------------


class Trainer:
    """One method's run on this rank."""

    def __init__(self, method: str, outer: Outer, settings: Settings, corpus: Corpus) -> None:
        self.settings, self.corpus = settings, corpus
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        self.model: torch.nn.Module = GPT(SHAPE)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
        )
        self.rounds: list[cadenza.RoundReport] = []
        self.sync: cadenza.Synchronizer | None = None
        factory = METHODS[method]
        if factory is None:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        else:
            strategy = factory(outer)
            self.sync = cadenza.attach(self.model, self.optimizer, strategy, observers=[self.rounds.append])

    def run(self) -> dict[str, Any]:
        settings = self.settings
        data = batches(self.corpus.training, batch=settings.batch, context=Shape.context, seed=1000 + self.rank)
        curve, losses = [], []
        started = time.perf_counter()
        for step in range(1, settings.steps + 1):
            for group in self.optimizer.param_groups:
                group["lr"] = rate_at(step - 1, settings.steps, peak=settings.lr, warmup=settings.warmup)
            loss = self.model(*next(data))
            loss.backward()
            if self.sync is not None:
                self.sync.average_gradients()  # during a warm-up; nothing otherwise
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.sync is not None:
                self.sync.step()
            losses.append(loss.item())
            if step % (settings.steps // settings.evaluations) == 0 and step < settings.steps:
                with self.averaged():
                    curve.append((step, self.evaluate(settings.windows)))
        if self.sync is not None:
            self.sync.finish()
        curve.append((settings.steps, self.evaluate(4 * settings.windows)))
        return {
            "curve": curve,
            "held_out": curve[-1][1],
            "seconds": time.perf_counter() - started,
            "last_training_loss": statistics.fmean(losses[-settings.steps // 8 :]),
            "rounds": len(self.rounds),
            "bytes_sent": self.bytes_sent(),
            "stall_s": sum(report.stall_s for report in self.rounds),
            "codec_error": mean([report.codec_error for report in self.rounds]),
            "drift": mean([report.drift for report in self.rounds]),
        }

    def evaluate(self, windows: int) -> float:
        model = self.model.module if isinstance(self.model, torch.nn.parallel.DistributedDataParallel) else self.model
        mine = held_out_loss(
            model, self.corpus.held_out, windows=windows, context=Shape.context, part=self.rank, parts=self.workers
        )
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / windows

    def averaged(self) -> Any:
        return nothing() if self.sync is None else self.sync.averaged()

    def bytes_sent(self) -> int:
        """Return what this worker handed to the transport; gradients take what a ring all-reduce does."""
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        gradients = 2 * (self.workers - 1) * size // self.workers
        if self.sync is None:
            return self.settings.steps * gradients
        warmup = self.sync.strategy.warmup_steps * gradients
        return warmup + sum(report.bytes_sent for report in self.rounds)


@contextmanager
def nothing() -> Iterator[None]:
    yield


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def run_on_this_rank(method: str, outer: Outer, settings: Settings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = Trainer(method, outer, settings, Corpus.standard_library()).run()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


# ---- all runs -------------------------------------------------------------------------------------------------------


def train(known: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    command += [__file__, "--job", json.dumps(known)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{known['method']} failed:\n{done.stderr[-4000:]}")
    return {**known, **json.loads(done.stdout.splitlines()[-1])}


class Results:
    """The runs done so far, kept in a file, so that an interrupted benchmark goes on where it was."""

    def __init__(self, path: Path, *, frozen: bool = False) -> None:
        self._path, self._frozen = path, frozen
        self.runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def get(self, method: str, outer: Outer, settings: Settings) -> dict[str, Any] | None:
        """Return a run, done now if it is not known yet; None if it is not and nothing new is to be done."""
        known = {
            "method": method,
            "outer": list(outer) if method.startswith(TUNED) else None,
            "settings": asdict(settings),
        }
        for run in self.runs:
            if all(run[key] == value for key, value in known.items()):
                return run
        if self._frozen:
            return None
        run = train(known)
        facts = f"{method:16} {known['outer']} lr {settings.lr:g}"
        print(f"{facts}: {run['held_out']:.4f} nats, {run['seconds']:.0f} s", flush=True)
        self.runs.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        note = f"torch {torch.__version__}, {os.cpu_count()} cores"
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        self._path.write_text(f'{{"environment": {json.dumps(note)}, "runs": [\n{lines}\n]}}\n')
        return run


def best_outer(results: Results, settings: Settings) -> Outer:
    """Return the outer settings with which DiLoCo in fp32 ended lowest."""
    runs = {outer: results.get("diloco", outer, settings) for outer in OUTER}
    return min((outer for outer, run in runs.items() if run), key=lambda outer: runs[outer]["held_out"])


def sweeps(results: Results, settings: Settings) -> str:
    """Return what DiLoCo's outer settings and the inner learning rate make of the result, in Markdown."""
    lines = ["| inner lr | DDP, nats | " + " | ".join(f"DiLoCo {lr:g}, {mu:g}" for lr, mu in OUTER) + " |"]
    lines.append("| ---: |" + " ---: |" * (1 + len(OUTER)))
    for rate in (settings.lr, *INNER_LRS):
        there = replace(settings, lr=rate)
        runs = [results.get("ddp", OUTER[0], there), *(results.get("diloco", outer, there) for outer in OUTER)]
        lines.append(f"| {rate:g} | " + " | ".join(f"{run['held_out']:.4f}" if run else "" for run in runs) + " |")
    return "\n".join(lines)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return the comparison with DDP, and of each codec with its own fp32, in Markdown."""
    lines = [
        "| method | outer lr, momentum | held-out, nats | bits a byte | against DDP "
        "| against its own fp32 | MB sent | × less |"
    ]
    lines.append("| --- |" + " ---: |" * 7)
    for method, run in runs.items():
        loss, sent = run["held_out"], run["bytes_sent"]
        own = {"streaming": "streaming_fp32"}.get(
            method, "diloco" if method.startswith(("diloco_int8", "diloco_e3m0")) else None
        )
        cells = [
            method,
            ", ".join(f"{number:g}" for number in run["outer"] or ()),
            f"{loss:.4f}",
            f"{loss / 0.6931472:.3f}",
            percent(loss, runs.get("ddp")),
            percent(loss, runs.get(own or "")),
            f"{sent / 1e6:.1f}",
            f"{runs['ddp']['bytes_sent'] / sent:.0f}" if "ddp" in runs else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def percent(loss: float, other: dict[str, Any] | None) -> str:
    return "" if other is None else f"{100 * (loss / other['held_out'] - 1):+.2f} %"


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "cadenza", "font.size": 9})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    colours, markers = pyplot.get_cmap("tab10").colors, "osD^"
    for i, (method, run) in enumerate(runs.items()):
        steps, losses = zip(*run["curve"], strict=True)
        look = {"color": colours[i % 10], "label": method}
        left.plot(steps, losses, linewidth=1.3, linestyle="-" if i < 10 else "--", **look)
        right.plot(run["bytes_sent"] / 1e6, losses[-1], markers[i % 4], alpha=0.8, linestyle="none", **look)
    left.set(xlabel="step", ylabel="held-out loss, nats a byte", title="The same tokens for all")
    left.legend(fontsize=7, ncols=2)
    right.legend(fontsize=7)
    right.set(xlabel="MB sent by a worker", title="The loss at the end, and what it cost to send", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--report", action="store_true", help="train nothing that is not in the results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job = arguments.job
        run_on_this_rank(job["method"], tuple(job["outer"] or OUTER[0]), Settings(**job["settings"]))
        return
    settings, results = Settings(steps=arguments.steps), Results(arguments.results, frozen=arguments.report)
    outer = best_outer(results, settings)
    done = {method: results.get(method, outer, settings) for method in arguments.only}
    runs = {method: run for method, run in done.items() if run}
    print(table(runs))
    print(sweeps(Results(arguments.results, frozen=arguments.report or "ddp" not in arguments.only), settings))
    draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
