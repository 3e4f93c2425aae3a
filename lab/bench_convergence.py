"""Train one small GPT by every method on the same tokens, and compare the held-out losses.

    python lab/bench_convergence.py                     # everything of docs/convergence.md: sweep, runs, table, curves
    python lab/bench_convergence.py --only ddp diloco   # some methods
    python lab/bench_convergence.py --report            # table and curves again, from lab/results/convergence.json

Four workers under torchrun on this machine, a byte-level GPT (lab/gpt.py) on the standard library's sources. A worker's
batches depend on its rank alone, so every method sees the same tokens. The inner optimizer, its schedule and the
initial values are the same for all. Methods with an outer learning rate get the same sweep over it, at a shorter run;
the best value of each is then used at full length. The held-out loss is that of the workers' average, also between
rounds. Curves need matplotlib.
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
OUTER_LRS = (0.1, 0.2, 0.4, 0.7, 1.0)


@dataclass(frozen=True)
class Settings:
    """What is the same for all methods."""

    steps: int = 640
    batch: int = 4  # a worker, a step
    lr: float = 3e-3
    warmup: int = 64
    weight_decay: float = 0.1
    evaluations: int = 10
    windows: int = 256  # of held-out text, in mid-run; four times as many at the end
    seed: int = 1


Factory = Callable[[float], cadenza.Strategy]

# Without an outer learning rate, the factory ignores it. None: DistributedDataParallel, gradients averaged every step.
METHODS: dict[str, Factory | None] = {
    "ddp": None,
    "local_sgd": lambda _: cadenza.local_sgd(PERIOD),
    "local_sgd_h1": lambda _: cadenza.local_sgd(1),
    "hierarchical": lambda _: cadenza.hierarchical({4: 2, PERIOD: "all"}),
    "diloco": lambda lr: cadenza.diloco(PERIOD, outer_lr=lr),
    "diloco_warmup": lambda lr: cadenza.diloco(PERIOD, outer_lr=lr, warmup_steps=10 * PERIOD),
    "diloco_int8": lambda lr: cadenza.diloco(PERIOD, outer_lr=lr, codec=codecs.int8()),
    "diloco_int8_ef": lambda lr: cadenza.diloco(PERIOD, outer_lr=lr, codec=codecs.error_feedback(codecs.int8())),
    "diloco_e3m0": lambda lr: cadenza.diloco(PERIOD, outer_lr=lr, codec=codecs.e3m0()),
    "diloco_e3m0_ef": lambda lr: cadenza.diloco(PERIOD, outer_lr=lr, codec=codecs.error_feedback(codecs.e3m0())),
    "streaming_fp32": lambda lr: streaming(lr, codecs.fp32()),
    "streaming": lambda lr: streaming(lr, codecs.e3m0()),
    "slowmo": lambda lr: cadenza.slowmo(PERIOD, alpha=lr),
    "sparse_loco": lambda lr: cadenza.sparse_loco(PERIOD, outer_lr=lr),
}
# Whose sweep chooses a method's outer learning rate: codecs are compared with fp32 at the same one.
TUNED_BY = {
    "diloco": "diloco",
    "diloco_warmup": "diloco",
    "diloco_int8": "diloco",
    "diloco_int8_ef": "diloco",
    "diloco_e3m0": "diloco",
    "diloco_e3m0_ef": "diloco",
    "streaming_fp32": "streaming",
    "streaming": "streaming",
    "slowmo": "slowmo",
    "sparse_loco": "sparse_loco",
}


def streaming(lr: float, codec: codecs.Codec) -> cadenza.Strategy:
    return cadenza.streaming_diloco(PERIOD, outer_lr=lr, layers=1, delay=2, codec=codec)


# ---- one run, on one rank -------------------------------------------------------------------------------------------


class Trainer:
    """One method's run on this rank."""

    def __init__(self, method: str, outer_lr: float, settings: Settings, corpus: Corpus) -> None:
        self.settings, self.corpus = settings, corpus
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(settings.seed)
        self.model: torch.nn.Module = GPT()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
        )
        self.rounds: list[cadenza.RoundReport] = []
        self.sync: cadenza.Synchronizer | None = None
        factory = METHODS[method]
        if factory is None:
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        else:
            strategy = factory(outer_lr)
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


def run_on_this_rank(method: str, outer_lr: float, settings: Settings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = Trainer(method, outer_lr, settings, Corpus.standard_library()).run()
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


# ---- all runs -------------------------------------------------------------------------------------------------------


def train(method: str, outer_lr: float, settings: Settings) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    command += [__file__, "--job", json.dumps([method, outer_lr, asdict(settings)])]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{method} failed:\n{done.stderr[-4000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    return {"method": method, "outer_lr": outer_lr, "settings": asdict(settings), **result}


class Results:
    """The runs done so far, kept in a file, so that an interrupted benchmark goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []

    def get(self, method: str, outer_lr: float, settings: Settings) -> dict[str, Any]:
        known = {"method": method, "outer_lr": outer_lr, "settings": asdict(settings)}
        for run in self.runs:
            if all(run[key] == value for key, value in known.items()):
                return run
        run = train(method, outer_lr, settings)
        print(f"{method:16} outer lr {outer_lr:<4} {run['held_out']:.4f} nats, {run['seconds']:.0f} s", flush=True)
        self.runs.append(run)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        note = f"torch {torch.__version__}, {os.cpu_count()} cores"
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        self._path.write_text(f'{{"environment": {json.dumps(note)}, "runs": [\n{lines}\n]}}\n')
        return run


def best_outer_lr(method: str, results: Results, settings: Settings) -> float:
    """Return the outer learning rate whose shorter run ended lowest; 0 for a method that has none."""
    if method not in TUNED_BY:
        return 0.0
    short = replace(settings, steps=settings.steps // 2 // PERIOD * PERIOD, evaluations=1)
    runs = {lr: results.get(TUNED_BY[method], lr, short)["held_out"] for lr in OUTER_LRS}
    return min(runs, key=lambda lr: runs[lr])


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return the comparison with DDP, and of each codec with its own fp32, in Markdown."""
    lines = [
        "| method | outer lr | held-out, nats | bits a byte | against DDP | against its own fp32 | MB sent | × less |"
    ]
    lines.append("| --- |" + " ---: |" * 7)
    for method, run in runs.items():
        loss, sent = run["held_out"], run["bytes_sent"]
        own = {"streaming": "streaming_fp32"}.get(
            method, "diloco" if method.startswith(("diloco_int8", "diloco_e3m0")) else None
        )
        cells = [
            method,
            f"{run['outer_lr']:g}" if method in TUNED_BY else "",
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
        method, outer_lr, settings = arguments.job
        run_on_this_rank(method, outer_lr, Settings(**settings))
        return
    settings, results = Settings(steps=arguments.steps), Results(arguments.results)
    if arguments.report:
        done = {run["method"]: run for run in results.runs if run["settings"] == asdict(settings)}
        runs = {method: done[method] for method in arguments.only if method in done}
    else:
        runs = {m: results.get(m, best_outer_lr(m, results, settings), settings) for m in arguments.only}
    print(table(runs))
    draw(runs, arguments.picture)


if __name__ == "__main__":
    main()
